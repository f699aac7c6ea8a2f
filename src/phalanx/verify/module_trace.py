"""Fingerprints of each module's output in the first step, and of the gradients that come back to it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load, save_file
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves

from phalanx.config import Plan
from phalanx.data import StepBatch
from phalanx.parallel.expert.find_experts import expert_count, experts_call
from phalanx.train.metrics import Totals
from phalanx.train.observer import AssemblyScene, Observer, Scene
from phalanx.train.step import Step
from phalanx.verify.fingerprints import Fingerprint
from phalanx.witness.reference_step import Piece


@dataclass(slots=True)
class Passed:
    """The traffic of one module on one rank, added up over calls and samples.

    Attributes:
        rows: vectors of the output, along its last dimension; for a cut output, the local share.
        cut: axes along which the rank has a part of the output.
        output: its fingerprint.
        grad: that of the gradient that came back, or ``None``.
    """

    rows: float = 0.0
    cut: list[str] = field(default_factory=list[str])
    output: Fingerprint | None = None
    grad: Fingerprint | None = None


def traceable(plan: Plan) -> bool:
    """Return True if modules run as the user wrote them, each call for samples of this rank alone."""
    return plan.kind in ("single", "split") and not plan.compile


@contextmanager
def traced(module: nn.Module) -> Iterator[dict[str, Passed]]:
    """Record the traffic of modules in the block, by name, in order of their end."""
    found: dict[str, Passed] = {}
    hooks = [
        child.register_forward_hook(_noting(name, found))
        for name, child in module.named_modules()
        if name and not _in_experts(module, name)
    ]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


def _in_experts(module: nn.Module, name: str) -> bool:
    parts = name.split(".")
    above = (module.get_submodule(".".join(parts[:at])) for at in range(1, len(parts)))
    return any(one is not None and one.dim() == 3 for child in above for one in child._parameters.values())


def _noting(name: str, found: dict[str, Passed]) -> Any:
    def note(_: nn.Module, __: Any, output: Any) -> None:
        if torch._C._current_graph_task_id() != -1:
            return  # computed once more for backward
        # Nor may what recomputes blocks see fingerprints being made: they are made in one of two forwards only.
        with torch._C.DisableTorchFunction(), _disable_current_modes(), torch.no_grad():
            tensor = next((one for one in tree_leaves(output) if isinstance(one, Tensor)), None)
            if tensor is None or isinstance(tensor, FakeTensor) or not tensor.is_floating_point() or tensor.dim() < 2:
                return
            placed = getattr(tensor, "placed", ())
            here = tensor._local if placed else tensor  # pyrefly: ignore
            last = next((one for one in placed if one.dim == tensor.dim() - 1), None)
            features: Piece = ((0, last.cut.expanded()[last.axis.rank]),) if last is not None else ()
            width = tensor.shape[-1]
            passed = found.setdefault(name, Passed())
            passed.rows += here.numel() / max(width, 1)
            passed.cut = [one.axis.name for one in placed]
            passed.output = _added(passed.output, Fingerprint.of(here, features, width))
            if here.requires_grad:

                def came(grad: Tensor | None) -> None:
                    if grad is None:
                        return  # the half of a backward that does not reach it
                    with torch._C.DisableTorchFunction():
                        passed.grad = _added(passed.grad, Fingerprint.of(grad, features, width))

                here.register_hook(came)

    return note


def _added(known: Fingerprint | None, more: Fingerprint) -> Fingerprint:
    return more if known is None else Fingerprint.total((known, more))


_AUXILIARY = "auxiliary.safetensors"


class Tracing(Observer):
    """One process's trace of the first step; ``answer`` is its JSON."""

    def __init__(self, folder: Path, plan: Plan) -> None:
        self._folder, self._plan = folder, plan
        self._scene: AssemblyScene | None = None
        self._inside = ExitStack()
        self._passed: Mapping[str, Passed] = {}
        self.answer: dict[str, Any] = {"trace": {}}

    def built(self, scene: Scene) -> None:
        if isinstance(scene, AssemblyScene) and traceable(self._plan):
            self._scene = scene

    def begins(self, batch: StepBatch) -> None:
        if self._scene is None or batch.step:
            return
        if self._plan.kind == "single" and (alone := auxiliary_gradients(self._scene.step, batch)):
            save_file(alone, self._folder / _AUXILIARY)
        self._passed = self._inside.enter_context(traced(self._scene.modules[0]))

    def gradients(self, batch: StepBatch, totals: Totals) -> None:
        self._inside.close()
        if self._passed:
            self.answer["trace"] = {name: asdict(one) for name, one in self._passed.items() if one.output}


def traces_of(answers: list[dict[str, Any]], folder: Path) -> tuple[list[dict[str, Passed]], dict[str, Tensor]]:
    """Return each process's trace, and the gradients of an auxiliary loss alone, by parameter."""
    file = folder / _AUXILIARY
    alone = load(file.read_bytes()) if file.exists() else {}
    return [{name: _passed(**one) for name, one in answer["trace"].items()} for answer in answers], alone


def _passed(rows: float, cut: list[str], output: Any, grad: Any) -> Passed:
    both = (one and Fingerprint(tuple(one["products"]), one["square"]) for one in (output, grad))
    return Passed(rows, cut, *both)


def auxiliary_gradients(step: Step, batch: StepBatch) -> dict[str, Tensor]:
    """Map name to the gradient of an auxiliary loss alone, for each matrix that chooses experts.

    It takes an extra backward on one device, without the gradients through the weights that experts are called with.
    Empty for other models.
    """
    if not (routers := _routers(step.layout.module)):
        return {}
    hooks = [child.register_forward_pre_hook(_close, with_kwargs=True) for child in _experts(step.layout.module)]
    try:
        step.backward(batch)
    finally:
        for hook in hooks:
            hook.remove()
    parameters = step.layout.parameters
    found = {name: parameters[name].grad for name in routers if name in parameters}
    for tensor in parameters.values():
        tensor.grad = None
    return {name: grad.detach().to("cpu", copy=True).contiguous() for name, grad in found.items() if grad is not None}


def _experts(module: nn.Module) -> dict[nn.Module, str]:
    return {child: name for name, child in module.named_modules() if expert_count(child) > 1}


def _routers(module: nn.Module) -> list[str]:
    found: dict[str, None] = {}
    for child, name in _experts(module).items():
        beside = name.rpartition(".")[0]
        for inner, tensor in module.get_submodule(beside).named_parameters(prefix=beside):
            if tensor.dim() == 2 and expert_count(child) in tensor.shape and not inner.startswith(f"{name}."):
                found[inner] = None
    return list(found)


def _close(_: nn.Module, args: Any, kwargs: Any) -> None:
    call = experts_call(args, kwargs)
    if call is None:
        return
    weight = tree_leaves((args, kwargs))[call.leaves[2]]
    if weight.requires_grad:
        weight.register_hook(torch.zeros_like)
