"""What torch loads at first use, got over with before workers are forked, or left out where nothing needs it.

torch's optimizers, DistributedDataParallel and DTensor load ``torch._dynamo``, the front end of ``torch.compile``, when
they are first used: to keep it out of some of their methods, to break its graphs there, to read one of its options. In
torch 2.13 that takes each process about half as long as ``import torch`` did, and each of those calls passes a guard
ever after. A run that compiles nothing needs none of it.

What is replaced is taken out only in the torch versions known here; elsewhere torch does as it always did, only slower
to start. And only in workers: the process that calls ``phalanx.fit`` is its user's, and keeps torch as it is.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import torch
import torch._compile
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from phalanx.config import Plan

_KNOWN = (2, 11), (2, 14)  # from the first, before the second


def make_ready(plan: Plan) -> None:
    """Load what training under ``plan`` needs, in the launcher: once for all workers to be forked.

    Sharded and fake tensors and compiled plans need the compiler's front end; for the others it is left alone.
    """
    importlib.import_module("phalanx.train.parameter_server" if plan.server else "phalanx.train.mesh_stepper")
    if plan.compile or plan.kind in ("shard", "split"):
        importlib.import_module("torch._dynamo")
        importlib.import_module("phalanx.parallel.zero")
        importlib.import_module("phalanx.parallel.fsdp")
        importlib.import_module("phalanx.checkpoint.store")


def leave_compiler_out() -> None:
    """Have torch load its compiler only where something really asks for it: to be called in a worker.

    Nothing changes where it is loaded already, or where torch is of another version than those known here. A job that
    itself calls ``torch.compile`` still gets it.
    """
    if "torch._dynamo" in sys.modules or not _KNOWN[0] <= _version(torch.__version__) < _KNOWN[1]:
        return
    owners: list[type] = [Optimizer, DistributedDataParallel]
    if "torch.distributed.tensor" in sys.modules:
        owners.append(sys.modules["torch.distributed.tensor"].DTensor)
    for owner in owners:
        for method in vars(owner).values():
            _leave_alone(method)
    for optimizer in _subclasses(Optimizer):
        step = vars(optimizer).get("step")
        if step is not None and getattr(getattr(step, "__code__", None), "co_name", "") == "_use_grad":
            optimizer.step = _step_with_its_own_grad_mode(step.__wrapped__)
    if "_dynamo" not in vars(torch):
        utils = _Absent("torch._dynamo.utils", get_optimize_ddp_mode=lambda: "ddp_optimizer")
        torch._dynamo = _Absent("torch._dynamo", utils=utils)  # pyright: ignore[reportAttributeAccessIssue]


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(".")[:2])


def _leave_alone(method: Any) -> None:
    """Call a method that torch hides from the compiler as it is.

    torch keeps the hidden form, made with the compiler at the first call, as an attribute of the method.
    """
    while (inner := getattr(method, "__wrapped__", None)) is not None:
        code = getattr(method, "__code__", None)
        if code is not None and code.co_filename == torch._compile.__file__:
            inner.__dynamo_disable = inner
        method = inner


def _subclasses(owner: type) -> Iterator[type]:
    for inner in owner.__subclasses__():
        yield inner
        yield from _subclasses(inner)


def _step_with_its_own_grad_mode(step: Callable[..., Any]) -> Callable[..., Any]:
    """``torch.optim.optimizer._use_grad_for_differentiable`` without its graph breaks."""

    @functools.wraps(step)
    def stepped(self: Optimizer, *args: Any, **kwargs: Any) -> Any:
        with torch.set_grad_enabled(self.defaults["differentiable"]):
            return step(self, *args, **kwargs)

    return stepped


class _Absent(ModuleType):
    """Stands for a module until more is asked of it than it holds; that loads the module, which takes its place."""

    def __init__(self, name: str, **attributes: Any) -> None:
        super().__init__(name)
        vars(self).update(attributes)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(importlib.import_module(self.__name__), name)
