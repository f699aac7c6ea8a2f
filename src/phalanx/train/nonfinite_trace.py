"""Where numbers first were not finite: a step's forwards and backwards run again, with an eye on every module.

Random streams begin as they did, so that the same numbers come out. All ranks run them together, under every plan; each
tells what it saw, and the first place of all is the one that is named.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_leaves

from phalanx.comm import from_every_rank, is_dtensor, local
from phalanx.data import MicroBatch, StepBatch
from phalanx.parallel.local_shards.tensor import is_sliced
from phalanx.train.grad_accumulation import GradAccumulation

if TYPE_CHECKING:
    from phalanx.train.step import Step

_FORWARD, _BACKWARD, _AFTER, _LARGEST = range(4)


@dataclass(frozen=True, kw_only=True, slots=True)
class Sighting:
    """The first place where one rank saw a number that is not finite, or where its loss was largest.

    Attributes:
        order: what comes before what; comparable between ranks.
        where: the place, in words.
        part, micro: of which micro-batch.
        rows: which of its samples; none where that cannot be told.
        parameter: the one that was not finite before the step began; empty where all were.
        rank: who saw it.
    """

    order: tuple[float, ...]
    where: str
    part: int
    micro: int
    rows: tuple[int, ...] = ()
    parameter: str = ""
    rank: int = 0


def bad_parameters(parameters: Mapping[str, Tensor]) -> list[str]:
    """Names of those that are not finite, as far as they are here."""
    return [name for name, tensor in parameters.items() if not _finite(tensor.detach())]


def first_sighting(step: Step, batch: StepBatch) -> Sighting:
    """The first place of all ranks, the same on each. Collective.

    Where all is finite this time, it is of the micro-batch with the largest loss, and says no place.

    Gradients are left as they come out; running statistics take the batch in once more.
    """
    spoilt = from_every_rank(bad_parameters(step.layout.parameters)[:1])
    for rank, names in enumerate(spoilt):
        for name in names:
            return Sighting(order=(), where=f"the parameter {name}", part=0, micro=0, parameter=name, rank=rank)
    here = min(_run_again(step, batch), key=lambda one: one.order)
    told = [
        Sighting(**{**one, "order": tuple(one["order"]), "rows": tuple(one["rows"])})
        for one in from_every_rank(asdict(here))
    ]
    rank = min(range(len(told)), key=lambda rank: (*told[rank].order, rank))
    return replace(told[rank], rank=rank)


def _run_again(step: Step, batch: StepBatch) -> Iterator[Sighting]:
    trace = _TracedAccumulation(step, batch)
    with trace.watching():
        step.layout.begin()
        step.layout.accumulate(batch.parts, trace)
        step.layout.finish()
        trace.totals()
    yield from trace.found.values()
    bad = [
        name for name, tensor in step.layout.parameters.items() if tensor.grad is not None and not _finite(tensor.grad)
    ]
    if bad:
        order = (_AFTER, 0.0, 0.0)
        yield Sighting(order=order, where=f"the gradient of the parameter {bad[0]}", part=0, micro=0)
    yield trace.largest()


class _TracedAccumulation(GradAccumulation):
    """The work of a step once more; notes in which forward or backward of its micro-batches numbers go wrong first."""

    def __init__(self, owner: Step, batch: StepBatch) -> None:
        super().__init__(owner, batch)
        self.found: dict[tuple[int, int], Sighting] = {}  # by micro-batch
        self._layout = owner.layout
        self._now: dict[int, tuple[int, int]] = {}  # thread → its micro-batch
        self._passed: dict[int, tuple[str, Tensor]] = {}  # thread → the module that gradients last came to, finite
        self._weak: dict[tuple[int, int], tuple[float, str]] = {}  # where minus infinity was first seen

    def forward(self, module: nn.Module, device: torch.device, micro: MicroBatch) -> Any:
        self._now[threading.get_ident()] = self._places[id(micro)]
        return super().forward(module, device, micro)

    def loss(self, output: Any, device: torch.device, micro: MicroBatch, last: bool) -> Tensor:
        place = self._now[threading.get_ident()] = self._places[id(micro)]
        self._passed.pop(threading.get_ident(), None)
        loss = super().loss(output, device, micro, last)
        if micro.samples and not _finite(loss.detach()):
            at, name = self._weak.get(place, (1e9, ""))
            self._note(place, (_FORWARD, at), f"the output of {name}" if name else "the loss that job.loss gives")
        return loss

    def largest(self) -> Sighting:
        """The micro-batch with the largest mean loss; the first on a rank that computes no losses."""
        means = {place: self._mean(place) for place in self._read if self._read[place].samples}
        part, micro = place = max(means, key=lambda one: means[one], default=(0, 0))
        return Sighting(order=(_LARGEST, -means.get(place, -math.inf), 0.0), where="", part=part, micro=micro)

    def _mean(self, place: tuple[int, int]) -> float:
        read = self._read[place]
        return float(read.value) * read.weight / (float(read.count) or 1.0)

    @contextmanager
    def watching(self) -> Generator[None]:
        """Within, modules of every copy of the model are looked at, also those that are compiled."""
        handles: list[Any] = []
        try:
            for module in self._layout.modules:
                for index, (name, child) in enumerate(module.named_modules()):
                    handles.append(child.register_forward_hook(partial(self._forward_done, float(index), name)))
                for index, (name, one) in enumerate(module.named_parameters()):
                    if one.requires_grad and one.is_leaf and not is_dtensor(one):
                        hook = partial(self._gradient_of_parameter, float(index), name)
                        handles.append(one.register_hook(hook))
            with torch.compiler.set_stance("force_eager"):
                yield
        finally:
            for handle in handles:
                handle.remove()

    def _note(self, place: tuple[int, int], order: tuple[int, float], where: str, tensor: Tensor | None = None) -> None:
        part, micro = place
        (phase, at), samples = order, self._batch.parts[part][micro].samples
        rows: tuple[int, ...] = ()
        if tensor is not None and tensor.dim() and tensor.shape[0] == samples:
            bad = _wrong(tensor.detach().reshape(samples, -1)).any(dim=1)
            rows = tuple(bad.nonzero()[:, 0].tolist())
        seen = Sighting(order=(phase, micro, at), where=where, part=part, micro=micro, rows=rows)
        self.found.setdefault(place, seen)

    def _forward_done(self, at: float, name: str, module: nn.Module, args: Any, output: Any) -> None:
        place = self._now.get(threading.get_ident())
        if place is None or place in self.found or not self._batch.parts[place[0]][place[1]].samples:
            return
        for tensor in _tensors(output):
            if not _finite(tensor.detach(), above=True):
                self._note(place, (_FORWARD, at), f"the output of {_called(name)}", tensor)
                return
            if not _finite(tensor.detach()):  # of a mask, perhaps
                self._weak.setdefault(place, (at, _called(name)))
        for tensor in _tensors(output):
            if tensor.requires_grad:
                tensor.register_hook(partial(self._gradient_of_output, at, name, place, threading.get_ident()))

    def _gradient_of_output(self, at: float, name: str, place: tuple[int, int], thread: int, gradient: Tensor) -> None:
        if place in self.found:
            return
        through = self._passed.get(thread)
        if _finite(gradient):
            if through is None or through[1] is not gradient:  # one that is a module's and its parent's: the module's
                self._passed[thread] = _called(name), gradient
        else:
            where = f"the backward of {through[0]}" if through else "the gradient of the loss that job.loss gives"
            self._note(place, (_BACKWARD, -at), where, gradient)

    def _gradient_of_parameter(self, at: float, name: str, gradient: Tensor) -> None:
        place = self._now.get(threading.get_ident()) or next(iter(self._now.values()), None)
        if place is not None and place not in self.found and not _finite(gradient):
            self._note(place, (_BACKWARD, -at), f"the gradient of the parameter {name}")


def _called(name: str) -> str:
    return name or "the model"


def _tensors(value: Any) -> Iterator[Tensor]:
    """What this rank computed of the tensors in ``value``; those of other stages of a pipeline are not here."""
    for leaf in tree_leaves(
        dict(value) if isinstance(value, Mapping) else value
    ):  # outputs of transformers are mappings
        tensor = leaf.local if is_sliced(leaf) else leaf
        if isinstance(tensor, Tensor) and not isinstance(tensor, FakeTensor):
            yield tensor


def _finite(tensor: Tensor, *, above: bool = False) -> bool:
    """Whether all of it is finite, or with ``above`` minus infinity."""
    tensor = local(tensor)
    if tensor.is_sparse:
        tensor = tensor.coalesce().values()
    if not (tensor.is_floating_point() or tensor.is_complex()) or not tensor.numel() or tensor.is_meta:
        return True
    return not bool(_wrong(tensor, above=above).any())


def _wrong(tensor: Tensor, *, above: bool = False) -> Tensor:
    return tensor.isnan() | tensor.isposinf() if above and not tensor.is_complex() else ~tensor.isfinite()
