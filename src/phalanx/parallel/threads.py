"""Threads: one process, one replica and one thread a device (the idea of torch's DataParallel).

Each global batch is scattered over the replicas, every replica runs forward and backward in its own thread, and the
gradients are gathered and added on the first device, whose optimizer steps; the new values are copied back out. On a
CPU the replicas share the same parameter storage, so parameters are not copied and only gradients are added.

Unlike DataParallel, replicas are built once and not at every step, gradients are added in a fixed order so that a run
repeats exactly, and the model is moved to its devices here: it cannot be wrapped on the wrong one.

``dp`` is usually better: Python runs one thread at a time, so threads wait for each other between operations, the first
device carries the gathering and the optimizer for all, and nothing overlaps. With ``phalanx.build`` threads need no
launcher and no second process, which suits a notebook or a debugger.

Refuses random draws in recomputed code, if several threads draw from one stream. ``torch.utils.checkpoint`` resets the
random stream to draw the same dropout again in backward. After draws of other threads in between, it would draw other
masks than forward did and the gradient would be wrong; and the others would repeat draws after the reset.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from threading import BrokenBarrierError
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils import checkpoint as checkpointing

from phalanx.config import Plan
from phalanx.device_kinds import kind_named
from phalanx.errors import Problem, RefusedError
from phalanx.parallel.layout import Layout, MicroBatchWork, RankHoldings, drop_gradients, each_micro_batch, trainable
from phalanx.parallel.pipeline.value_flow import RANDOM
from phalanx.trace.replaced import each_checkpoint, replaced


def check(plan: Plan, kind: str) -> list[Problem]:
    """Return the problems of the plan's threads on devices of this ``kind``."""
    if plan.threads == 1:
        return []
    problems: list[Problem] = []
    processes = str(replace(plan, threads=1, dp=plan.threads))
    if plan.compile:
        allowed = "one of the two: torch.compile does not compile in several threads at once"
        problems.append(Problem(where="plan.compile", given="threads and compile", allowed=allowed, fix=processes))
    if plan.recompute != "none" and kind_named(kind).on_host:
        # Recompute sets the generator back to draw the same dropout again; the threads of a CPU share one generator.
        given = f"threads and recompute={plan.recompute} on a CPU"
        allowed = "one of the two: recompute would draw other random numbers in backward than in forward"
        problems.append(Problem(where="plan.recompute", given=given, allowed=allowed, fix=processes))
    return problems


class ThreadsLayout(Layout):
    """Replicas of a model, one on each device, run by one thread each."""

    def __init__(self, module: nn.Module, devices: Sequence[torch.device]) -> None:
        self._devices = list(devices)
        first = module.to(self._devices[0])
        self._replicas = [first, *(_replica(first, device) for device in self._devices[1:])]
        self.holdings = RankHoldings(module=first, parameters=trainable(first), whole=True)
        self._copies = [dict(replica.named_parameters()) for replica in self._replicas[1:]]
        cores = torch.get_num_threads()
        self._pool = ThreadPoolExecutor(
            len(self._replicas),
            thread_name_prefix="phalanx-replica",
            initializer=torch.set_num_threads,
            initargs=(max(1, cores // len(self._replicas)),),
        )

    @property
    def modules(self) -> list[nn.Module]:
        return self._replicas

    def begin(self) -> None:
        super().begin()
        for replica in self._copies:
            drop_gradients(replica.values())

    def accumulate(self, parts: Sequence[Sequence[Any]], work: MicroBatchWork) -> None:
        alike = len(set(self._devices)) < len(self._devices)
        with nothing_drawn_twice() if alike else nullcontext():
            waiting = [
                self._pool.submit(self._computed, module, device, micros, work)
                for module, device, micros in zip(self._replicas, self._devices, parts, strict=True)
            ]
            errors = [error for future in waiting if (error := future.exception())]  # all threads have ended then
        if errors:
            raise next((error for error in errors if not isinstance(error, BrokenBarrierError)), errors[0])

    def _computed(self, *given: Any) -> None:
        with self.statistics.together() if self.statistics else nullcontext():
            each_micro_batch(*given)

    def finish(self) -> None:
        for name, tensor in self.parameters.items():
            for replica in self._copies:
                grad = replica[name].grad
                if grad is None:
                    continue
                replica[name].grad = None
                grad = grad.to(tensor.device)
                tensor.grad = grad if tensor.grad is None else tensor.grad.add_(grad)

    def stepped(self) -> None:
        drop_gradients(self.parameters.values())
        with torch.no_grad():
            for replica, device in zip(self._replicas[1:], self._devices[1:], strict=True):
                if device != self._devices[0]:
                    for target, source in zip(replica.parameters(), self.module.parameters(), strict=True):
                        target.copy_(source)
                for target, source in zip(replica.buffers(), self.module.buffers(), strict=True):
                    target.copy_(source)


def _replica(module: nn.Module, device: torch.device) -> nn.Module:
    """Copy ``module`` to ``device``; on the same device its parameters share their storage with the original's."""
    shared: dict[int, Any] = {
        id(tensor): nn.Parameter(tensor.detach().to(device), requires_grad=tensor.requires_grad)
        for tensor in module.parameters()
    }
    return copy.deepcopy(module, shared).to(device)


@contextmanager
def nothing_drawn_twice() -> Iterator[None]:
    """Refuse random draws in checkpoints that reset the stream, in any thread.

    Raises:
        RefusedError: at such a draw.
    """
    function = checkpointing.CheckpointFunction
    forward = function.forward

    def checkpointed(generator: Any, run: Any, preserve: bool = True, *rest: Any, **kwargs: Any) -> Generator[None]:
        with _Draws() if preserve else nullcontext():
            yield from generator(run, preserve, *rest, **kwargs)

    def reentrant(ctx: Any, run: Callable[..., Any], preserve: bool, *args: Any) -> Any:
        def looked_at(*given: Any) -> Any:
            with _Draws():
                return run(*given)

        return forward(ctx, looked_at if preserve else run, preserve, *args)

    with each_checkpoint(checkpointed), replaced(function, forward=staticmethod(reentrant)):
        yield


class _Draws(TorchFunctionMode):
    """Detector of random draws, which it refuses."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if _draws(getattr(func, "__name__", ""), args, kwargs):
            raise RefusedError([_DRAWN_TWICE])
        return func(*args, **kwargs)


_DRAWN_TWICE = Problem(
    where="plan.threads",
    given="threads on a CPU, for a model that draws random numbers, such as dropout, in what torch.utils.checkpoint "
    "computes a second time: threads share one stream, and it would draw other numbers in backward than in forward",
    allowed="processes, each with a stream of its own; or no dropout inside what is recomputed",
    fix="dp=2",
)


def _draws(name: str, args: Any, kwargs: dict[str, Any]) -> bool:
    if name == "scaled_dot_product_attention":
        return (args[4] if len(args) > 4 else kwargs.get("dropout_p", 0.0)) > 0.0
    if "dropout" in name and ("training" in kwargs or "p" in kwargs):
        return bool(kwargs.get("training", True)) and kwargs.get("p", 0.5) > 0.0
    return name in RANDOM
