"""The first place of non-finite numbers: a step's forwards and backwards run again with hooks on every module.

Random streams begin in their old states, so that the same numbers come out. All ranks run them together, under every
plan, and the first place over all ranks is reported.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, final

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_leaves

from phalanx.comm import from_every_rank, is_dtensor, local
from phalanx.data import MicroBatch, StepBatch
from phalanx.parallel.local_shards.tensor import is_sliced
from phalanx.train.coupled_loss import CoupledLoss
from phalanx.train.grad_accumulation import GradAccumulation

if TYPE_CHECKING:
    from phalanx.train.step import Step

_DATA, _FORWARD, _BACKWARD, _AFTER, _LARGEST = range(5)

Means = Mapping[tuple[int, int], float]
"""(part, index) of micro-batches → their mean loss."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sighting:
    """The first place of a non-finite number on one rank, or the place of its largest loss.

    Attributes:
        order: the order of places; comparable between ranks.
        where: the place, in words.
        part, micro: the micro-batch; ``micro`` is -1 for a whole piece of a server's worker.
        rows: its samples; empty if unknown.
        parameter: the one that was not finite before the step began; empty if all were finite.
        rank: of the observing process.
    """

    order: tuple[float, ...]
    where: str
    part: int
    micro: int
    rows: tuple[int, ...] = ()
    parameter: str = ""
    rank: int = 0

    @property
    def of_data(self) -> bool:
        """Return True if the samples themselves are not finite."""
        return self.where.endswith(_THE_BATCH)


_THE_BATCH = "the batch"


def bad_parameters(parameters: Mapping[str, Tensor]) -> list[str]:
    """Return names of parameters whose local part is not finite."""
    return [name for name, tensor in parameters.items() if not _finite(tensor.detach())]


def first_sighting(step: Step, batch: StepBatch) -> Sighting:
    """Return the first place over all ranks, the same on each. Collective.

    If all is finite this time, it is the micro-batch with the largest loss, without a place.

    Gradients are left as they come out; running statistics count the batch once more.
    """
    spoilt = from_every_rank(bad_parameters(step.layout.parameters)[:1])
    for rank, names in enumerate(spoilt):
        for name in names:
            return _of_parameter(name, rank)
    here = _run_again(step, batch)
    told = [
        Sighting(**{**one, "order": tuple(one["order"]), "rows": tuple(one["rows"])})  # pyrefly: ignore[bad-argument-type]
        for one in from_every_rank(asdict(here))
    ]
    rank = min(range(len(told)), key=lambda rank: (*told[rank].order, rank))
    return replace(told[rank], rank=rank)


def _of_parameter(name: str, rank: int) -> Sighting:
    return Sighting(order=(), where=f"the parameter {name}", part=0, micro=0, parameter=name, rank=rank)


def _run_again(step: Step, batch: StepBatch) -> Sighting:
    watch = ModuleWatch(
        {(part, at): micro.samples for part, micros in enumerate(batch.parts) for at, micro in enumerate(micros)}
    )
    work = (_WatchedAccumulation if step.job.loss_over == "samples" else _WatchedCoupledLoss)(step, batch, watch)
    with watch.watching(step.layout.modules):
        step.layout.begin()
        work.prepare()
        step.layout.accumulate(batch.parts, work)
        step.layout.finish()
        work.totals()
    return _or_of_data(watch.first(step.layout.parameters, work.means()), batch.parts)


def _or_of_data(seen: Sighting, parts: Sequence[Sequence[MicroBatch]]) -> Sighting:
    """Return ``seen``, or the non-finite input that came before it.

    If ``seen`` names samples, others are not blamed: a job may mark missing values by NaN and leave them out. Minus
    infinity is usual in masks, and counts only in named samples.
    """
    if seen.order[0] not in (_FORWARD, _BACKWARD):
        return seen
    micro = parts[seen.part][seen.micro]
    for name, tensor in _columns(micro.batch):
        if tensor.shape[:1] != (micro.samples,) or _finite(tensor, above=not seen.rows):
            continue
        bad = _wrong(tensor.reshape(micro.samples, -1), above=not seen.rows).any(dim=1)
        rows = tuple(row for row in bad.nonzero()[:, 0].tolist() if row in (seen.rows or range(micro.samples)))
        if rows:
            where = f"{name} of {_THE_BATCH}" if name else _THE_BATCH
            return replace(seen, order=(_DATA, seen.micro, 0.0), where=where, rows=rows)
    return seen


def _columns(batch: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    if isinstance(batch, Tensor):
        if batch.layout == torch.strided:
            yield name, batch
    elif isinstance(batch, Mapping):
        for key, value in batch.items():
            yield from _columns(value, f"{name}.{key}" if name else str(key))
    elif isinstance(batch, tuple | list):
        for index, value in enumerate(batch):
            yield from _columns(value, f"{name}[{index}]" if name else f"element {index}")


class _WatchedAccumulation(GradAccumulation):
    """A repeated accumulation of a step, watched for non-finite numbers."""

    def __init__(self, owner: Step, batch: StepBatch, watch: ModuleWatch) -> None:
        super().__init__(owner, batch)
        self._watch = watch

    def forward(self, module: nn.Module, device: torch.device, micro: MicroBatch) -> Any:
        self._watch.forward_begins(self._places[id(micro)])
        return super().forward(module, device, micro)

    def loss(self, output: Any, device: torch.device, micro: MicroBatch, last: bool) -> Tensor:
        place = self._places[id(micro)]
        self._watch.loss_begins(place)
        loss = super().loss(output, device, micro, last)
        self._watch.loss_done(place, loss)
        return loss

    def means(self) -> Means:
        read = {place: one for place, one in self._read.items() if one.samples}
        return {place: float(one.value) * one.weight / (float(one.count) or 1.0) for place, one in read.items()}


class _WatchedCoupledLoss(_WatchedAccumulation, CoupledLoss):
    """A repeated step with a loss of the whole batch, watched for non-finite numbers."""


@final
class ModuleWatch:
    """A recorder of the first forward or backward with non-finite numbers, by micro-batch.

    Each thread announces the micro-batch ``(part, index)`` it begins.
    """

    def __init__(self, samples: Mapping[tuple[int, int], int]) -> None:
        """Take ``samples`` of each micro-batch; those with 0 are fillers, and ignored."""
        self._samples = samples
        self._found: dict[tuple[int, int], Sighting] = {}  # by micro-batch
        self._now: dict[int, tuple[int, int]] = {}  # thread → its micro-batch
        self._passed: dict[int, tuple[str, Tensor]] = {}  # thread → the module that gradients last came to, finite
        self._weak: dict[tuple[int, int], tuple[float, str]] = {}  # where minus infinity was first seen

    @contextmanager
    def watching(self, modules: Iterable[nn.Module]) -> Generator[None]:
        """Watch ``modules``, the copies of the model, in the block, compiled ones included."""
        handles: list[Any] = []
        try:
            for module in modules:
                for index, (name, child) in enumerate(module.named_modules()):
                    handles.append(child.register_forward_hook(partial(self._forward_done, float(index), name)))
                for index, (name, one) in enumerate(module.named_parameters()):
                    if one.requires_grad and one.is_leaf and not is_dtensor(one):
                        handles.append(one.register_hook(partial(self._gradient_of_parameter, float(index), name)))
            with torch.compiler.set_stance("force_eager"):
                yield
        finally:
            for handle in handles:
                handle.remove()

    def forward_begins(self, place: tuple[int, int]) -> None:
        """Begin the forward of the micro-batch ``place`` in this thread."""
        self._now[threading.get_ident()] = place

    def loss_begins(self, place: tuple[int, int]) -> None:
        """Begin the loss in this thread, followed by its backward."""
        self._now[threading.get_ident()] = place
        self._passed.pop(threading.get_ident(), None)

    def loss_done(self, place: tuple[int, int], loss: Tensor) -> None:
        """Take ``loss`` before its backward."""
        if self._samples[place] and not _finite(loss.detach()):
            at, name = self._weak.get(place, (1e9, ""))
            self._note(place, (_FORWARD, at), f"the output of {name}" if name else "the loss that job.loss gives")

    def first(self, parameters: Mapping[str, Tensor], means: Means) -> Sighting:
        """Return the first recorded place; else a gradient of ``parameters``, shared by all micro-batches.

        If all is finite, it is the micro-batch with the largest of ``means``, or the first one without means.
        """
        found = [*self._found.values()]
        bad = [name for name, tensor in parameters.items() if tensor.grad is not None and not _finite(tensor.grad)]
        if bad:
            where = f"the gradient of the parameter {bad[0]}"
            found.append(Sighting(order=(_AFTER, 0.0, 0.0), where=where, part=0, micro=0))
        part, micro = place = max(means, key=lambda one: means[one], default=(0, 0))
        order = (_LARGEST, -means.get(place, -math.inf), 0.0)
        return min([*found, Sighting(order=order, where="", part=part, micro=micro)], key=lambda one: one.order)

    def _note(self, place: tuple[int, int], order: tuple[int, float], where: str, tensor: Tensor | None = None) -> None:
        part, micro = place
        (phase, at), samples = order, self._samples[place]
        rows: tuple[int, ...] = ()
        if tensor is not None and tensor.dim() and tensor.shape[0] == samples:
            bad = _wrong(tensor.detach().reshape(samples, -1)).any(dim=1)
            rows = tuple(bad.nonzero()[:, 0].tolist())
        seen = Sighting(order=(phase, micro, at), where=where, part=part, micro=micro, rows=rows)
        self._found.setdefault(place, seen)

    def _forward_done(self, at: float, name: str, module: nn.Module, args: Any, output: Any) -> None:
        place = self._now.get(threading.get_ident())
        if place is None or place in self._found or not self._samples[place]:
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
        if place in self._found:
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
        if place is not None and place not in self._found and not _finite(gradient):
            self._note(place, (_BACKWARD, -at), f"the gradient of the parameter {name}")


def _called(name: str) -> str:
    return name or "the model"


def _tensors(value: Any) -> Iterator[Tensor]:
    """Return the tensors in ``value`` computed on this rank; those of other pipeline stages are not here."""
    for leaf in tree_leaves(
        dict(value) if isinstance(value, Mapping) else value
    ):  # outputs of transformers are mappings
        tensor = leaf.local if is_sliced(leaf) else leaf
        if isinstance(tensor, Tensor) and not isinstance(tensor, FakeTensor):
            yield tensor


def _finite(tensor: Tensor, *, above: bool = False) -> bool:
    tensor = local(tensor)
    if tensor.is_sparse:
        tensor = tensor.coalesce().values()
    if not (tensor.is_floating_point() or tensor.is_complex()) or not tensor.numel() or tensor.is_meta:
        return True
    return not bool(_wrong(tensor, above=above).any())


def _wrong(tensor: Tensor, *, above: bool = False) -> Tensor:
    return tensor.isnan() | tensor.isposinf() if above and not tensor.is_complex() else ~tensor.isfinite()
