"""A job's optimizer over given parameters, and its scheduler."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from phalanx.comm import is_dtensor, local
from phalanx.config import Job
from phalanx.device_kinds import kind_of
from phalanx.errors import GradientError, Problem, SpecError
from phalanx.parallel import Layout
from phalanx.train.elementwise import Parameters, note_slices
from phalanx.train.torch_scheduler import MadeOptimizer


def build_optimizer(job: Job, layout: Layout, whole: Iterable[str] | None = None) -> MadeOptimizer:
    """Return the job's optimizer and its scheduler, if any. It must hold exactly the given parameters.

    ``whole`` are the names of the whole model's, if the layout has only some of them.
    """
    note_slices(layout.holdings)
    # A stage of frozen parameters alone has none to step, and no optimizer is built over nothing.
    made = optimizer_over(job, layout.parameters or {"nothing_to_step": nn.Parameter(torch.empty(0))}, whole)
    if not layout.parameters:
        for group in made.optimizer.param_groups:
            group["params"] = []
    return made


def use_fused(optimizer: torch.optim.Optimizer) -> None:
    """Switch torch's Adam, AdamW and SGD to their fused kernel on devices with streams, at the first gradients.

    Not if the job has chosen an implementation or has a tensor as learning rate, and not if the fused kernels would
    raise: for sparse gradients, for gradients laid out unlike their parameters, and, with momentum of SGD, for
    parameters without a gradient yet.
    """
    held = [tensor for group in optimizer.param_groups for tensor in group["params"]]
    if type(optimizer) not in _FUSED or any(map(_chosen, optimizer.param_groups)) or not all(map(_fusible, held)):
        return
    if type(optimizer) is torch.optim.SGD and any(is_dtensor(one) or one.grad is None for one in held):
        return  # DTensor has rules for the fused Adam alone
    for group in optimizer.param_groups:
        group["fused"] = True
        for tensor in group["params"]:
            state = optimizer.state.get(tensor, {})  # of a checkpoint
            if isinstance(count := state.get("step"), Tensor):
                state["step"] = count.to(tensor.device, torch.float32)


def skips_on_device(optimizer: torch.optim.Optimizer) -> bool:
    """Return True if ``optimizer`` skips its update when its device tensor ``found_inf`` is not 0."""
    return type(optimizer) in _FUSED and all(group.get("fused") for group in optimizer.param_groups)


_FUSED = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD)  # whose fused kernels can skip their update


def _fusible(parameter: Tensor) -> bool:
    if not kind_of(parameter.device).streams or not parameter.is_floating_point():
        return False
    if parameter.grad is None:
        return True
    here, grad = local(parameter), local(parameter.grad)
    return not grad.is_sparse and (grad.dtype, grad.stride()) == (here.dtype, here.stride())


def _chosen(group: Mapping[str, Any]) -> bool:
    named = any(group.get(key) is not None for key in ("foreach", "fused"))
    return named or any(group.get(key) for key in ("capturable", "differentiable")) or isinstance(group["lr"], Tensor)


def optimizer_over(
    job: Job, parameters: Mapping[str, torch.Tensor], whole: Iterable[str] | None = None
) -> MadeOptimizer:
    """Return the job's optimizer over these parameters, and its scheduler, if any.

    ``whole`` are the names of the whole model's, if these are some of them.

    Raises:
        SpecError: if it makes none, or one that a loop over batches cannot step.
        GradientError: if it holds other parameters.
    """
    given = Parameters(parameters, parameters if whole is None else whole)
    made = MadeOptimizer.of(job.optimizer(given))
    optimizer = made.optimizer
    if not isinstance(optimizer, torch.optim.Optimizer):
        given = f"a function that gives {type(optimizer).__name__}"
        allowed = "a function that gives a torch.optim.Optimizer"
        fix = "optimizer=lambda params: torch.optim.AdamW(params, lr=3e-4)"
        raise SpecError([Problem(where="job.optimizer", given=given, allowed=allowed, fix=fix)])
    held = {id(tensor) for group in optimizer.param_groups for tensor in group["params"]}
    known = {id(tensor) for tensor in given}
    missing = [name for name, tensor in given.named() if id(tensor) not in held]
    if held - known or missing:
        what = f"{len(held - known)} tensors it was not given" if held - known else ""
        left_out = f"not {', '.join(missing[:5])}{' and more' if len(missing) > 5 else ''}" if missing else ""
        raise GradientError(
            f"the optimizer holds {' and '.join(filter(None, (what, left_out)))}.\n"
            "    Under a plan the parameters may be shards: an optimizer over the original model would step tensors "
            "that nobody reads.\n    try: optimizer=lambda params: torch.optim.AdamW(params, lr=3e-4), over exactly "
            "the `params` it is called with; for parameters that shall not train: requires_grad=False in the model"
        )
    return made
