"""A trace at one size as parts with numbers: what each operation costs, what is saved, what is alive at once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from torch import nn

from phalanx.profile.costs import Share, Weights
from phalanx.profile.kinds import Kind, Work, fusible, works
from phalanx.profile.shares import Around, Shares, shares
from phalanx.profile.tracer import Trace, Traced

_MANY_ROWS = 1000  # rows from which an embedding is cut also where no head shares its vocabulary


@dataclass(frozen=True, kw_only=True, slots=True)
class Op:
    """An operation at one size; ``numbers`` are its dims, then traffic, then fused traffic."""

    kind: Kind
    name: str
    share: Share
    weights: bool
    causal: bool
    expert: bool
    numbers: tuple[float, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Kept:
    """Saved memory at one size."""

    elements: float
    itemsize: int
    share: Share
    cheap: bool
    expert: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """A part at one size; fields as those of ``Part``."""

    name: str
    role: Literal["before", "block", "after"]
    forward: tuple[Op, ...]
    backward: tuple[Op, ...]
    weights: tuple[Weights, ...]
    saved: tuple[Kept, ...]
    entry: float
    working: float
    modules: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """A model at one size: distinct blocks, their turns, and what is around them."""

    blocks: dict[int, Piece]
    turns: list[tuple[str, int, bool]]
    around: list[Piece]
    tied: int


def measured(run: Traced, module: nn.Module, itemsize: int) -> Measured:
    """Numbers of a trace; ``itemsize`` is that of the precision computed in."""
    learn = {name: (one.numel(), one.requires_grad) for name, one in module.named_parameters()}
    order = {like: index for index, like in enumerate(run.blocks)}
    names = {visit.like: visit.name for visit in reversed(run.visits)}
    blocks: dict[int, Piece] = {}
    outer = _Outer(run, learn, itemsize)
    for like, trace in run.blocks.items():
        blocks[order[like]] = _block(names[like], trace, learn, outer.names, itemsize)
    turns = [(visit.name, order[visit.like], visit.again) for visit in run.visits]
    return Measured(blocks=blocks, turns=turns, around=outer.pieces(), tied=outer.tied)


Learn = Mapping[str, tuple[int, bool]]


def _block(name: str, trace: Trace, learn: Learn, elsewhere: set[str], itemsize: int) -> Piece:
    made = [work for step in trace.tape.steps for work in works(step)]
    around = Around(
        stream=frozenset(one.memory for one in trace.entries),
        parameters=trace.parameters,
        leaving=trace.leaving,
        gradients=trace.gradients,
    )
    found = shares(made, around)
    experts = _experts(made, trace.parameters)
    ops = _ops(made, found, trace, experts)
    cut = {*found.roles, *found.beside}
    own = {one: f"{name}.{one}" if name else one for one in trace.parameters.values()}
    mine = [(learn[own[one]], one in cut, one in experts) for one in own if own[one] not in elsewhere]
    saved = [number for number in trace.tape.saved if number not in trace.leaving]
    kept = _kept(saved, trace, made, found, itemsize)
    return Piece(
        name=name,
        role="block",
        forward=tuple(op for op, work in zip(ops, made, strict=True) if not work.step.backward),
        backward=tuple(op for op, work in zip(ops, made, strict=True) if work.step.backward),
        weights=_weights(mine),
        saved=kept,
        entry=float(trace.entries[0].elements) if trace.entries else 0.0,
        working=_working(trace, {0}, saved, itemsize),
        modules=sum(trace.modules.values()),
    )


class _Outer:
    """What is around the blocks, as what comes before and what comes after."""

    def __init__(self, run: Traced, learn: Learn, itemsize: int) -> None:
        self.run, self.trace, self.learn, self.itemsize = run, run.rest, learn, itemsize
        self.turns = len(run.visits)
        self.made = [work for step in self.trace.tape.steps for work in works(step)]
        self.names, self.tied = self._names(), 0

    def _names(self) -> set[str]:
        """Parameters that are of no block, or used outside of it."""
        prefixes = tuple(f"{visit.name}." for visit in self.run.visits)
        used = {self.trace.parameters.get(one.memory, "") for work in self.made for one in work.step.inputs}
        return {name for name in self.learn if not name.startswith(prefixes) or name in used}

    def pieces(self) -> list[Piece]:
        """Before and after; one piece if there are no blocks."""
        around = Around(
            stream=frozenset(one.memory for one in self.trace.entries),
            parameters=self.trace.parameters,
            leaving=self.trace.leaving,
            gradients=self.trace.gradients,
            to_loss=True,
        )
        found = shares(self.made, around)
        experts = _experts(self.made, self.trace.parameters)
        ops = _ops(self.made, found, self.trace, experts)
        if not self.turns:
            return [self._piece("block", range(1), ops, found, experts)]
        half = self.turns // 2
        before = self._piece("before", range(half + 1), ops, found, experts)
        after = self._piece("after", range(half + 1, self.turns + 1), ops, found, experts)
        return [before, after]

    def _piece(
        self,
        role: Literal["before", "block", "after"],
        segments: range,
        ops: list[Op],
        found: Shares,
        experts: set[str],
    ) -> Piece:
        trace = self.trace
        saved = [one for one, at in (trace.tape.saved | trace.kept).items() if at in segments]
        here = [(op, work) for op, work in zip(ops, self.made, strict=True) if work.step.segment in segments]
        last = trace.entries[-1] if role == "after" and trace.entries else None
        first = [one for one in trace.entries if one.memory in trace.others][: 1 if role != "after" else 0]
        return Piece(
            name={"block": "(model)"}.get(role, f"({role})"),
            role=role,
            forward=tuple(op for op, work in here if not work.step.backward),
            backward=tuple(op for op, work in here if work.step.backward),
            weights=self._weights(role, here, found, experts),
            saved=_kept(saved, trace, self.made, found, self.itemsize),
            entry=float(last.elements) if last else float(sum(one.elements for one in first if self.turns == 0)),
            working=_working(trace, set(segments), saved, self.itemsize),
            modules=sum(trace.modules.get(segment, 0) for segment in segments),
        )

    def _weights(self, role: str, here: list[tuple[Op, Work]], found: Shares, experts: set[str]) -> tuple[Weights, ...]:
        parameters = self.trace.parameters
        used = {parameters[one.memory] for _, work in here for one in work.step.inputs if one.memory in parameters}
        rows = {
            parameters[one.memory]: one.shape[0]
            for _, work in here
            if work.name == "embedding"
            for one in work.step.inputs
            if one.memory in parameters
        }
        if role == "after":
            self.tied = sum(self.learn[name][0] for name in used & self.counted)
            used -= self.counted
        else:
            self.counted = set(used)
            late = {
                parameters[one.memory] for work in self.made for one in work.step.inputs if one.memory in parameters
            }
            used |= {name for name in self.names if name not in late}
        cut = {*found.roles, *found.beside, *(name for name, count in rows.items() if count >= _MANY_ROWS)}
        mine = [(self.learn[name], name in cut, name in experts) for name in self.learn if name in used & self.names]
        return _weights(mine)


def _ops(made: Sequence[Work], found: Shares, trace: Trace, experts: set[str]) -> list[Op]:
    weights = _for_weights(made, trace)
    fused = _fused(made, trace)
    return [
        Op(
            kind=work.kind,
            name=work.name,
            share=share,
            weights=work.step.backward and only,
            causal=work.step.causal,
            expert=_of_experts(work, trace, experts),
            numbers=(*work.dims, work.traffic, min(less, work.traffic)),
        )
        for work, share, only, less in zip(made, found.works, weights, fused, strict=True)
    ]


def _experts(made: Sequence[Work], parameters: Mapping[int, str]) -> set[str]:
    """Weights that hold one matrix an expert."""
    operands = [one for work in made if work.kind == "matmul" for one in work.operands]
    return {parameters[one.memory] for one in operands if one.memory in parameters and len(one.shape) == 3}


def _of_experts(work: Work, trace: Trace, experts: set[str]) -> bool:
    names = {trace.parameters.get(one.memory) for one in work.operands}
    names |= {trace.gradients.get(one.memory) for one in work.outputs}
    return bool(names & experts)


def _for_weights(made: Sequence[Work], trace: Trace) -> list[bool]:
    """Whether nothing but gradients of parameters comes of each operation of the backward."""
    of_weights, waited = set(trace.gradients), set(trace.leaving)
    only: list[bool] = []
    read: set[int] = set()
    for work in reversed(made):
        outputs = {one.memory for one in work.outputs}
        mine = work.step.backward and not outputs & waited and bool(outputs & (of_weights | read))
        inputs = {one.memory for one in work.step.inputs}
        if mine:
            read |= inputs
        else:
            waited |= inputs
        only.append(mine)
    return only[::-1]


def _fused(made: Sequence[Work], trace: Trace) -> list[float]:
    """Elements that each operation moves where runs of neighbours are one kernel."""
    counts = [work.traffic for work in made]
    last_read: dict[int, int] = {}
    for index, work in enumerate(made):
        for one in work.step.inputs:
            last_read[one.memory] = index
    held = set(trace.tape.saved) | set(trace.leaving) | set(trace.gradients) | set(trace.kept)
    start = 0
    while start < len(made):
        if not fusible(made[start]):
            start += 1
            continue
        stop = start
        while stop < len(made) and fusible(made[stop]) and _same_stretch(made[start], made[stop]):
            stop += 1
        _share_out(made, counts, range(start, stop), last_read, held)
        start = stop
    return counts


def _same_stretch(one: Work, other: Work) -> bool:
    return (one.step.segment, one.step.backward) == (other.step.segment, other.step.backward)


def _share_out(
    made: Sequence[Work], counts: list[float], run: range, last_read: Mapping[int, int], held: set[int]
) -> None:
    inside: set[int] = set()
    writers: dict[int, tuple[int, int]] = {}
    for index in run:
        counts[index] = 0.0
        for one in made[index].step.inputs:
            if one.memory not in inside:
                inside.add(one.memory)
                counts[index] += one.elements
        for one in made[index].outputs:
            inside.add(one.memory)
            writers[one.memory] = (index, one.elements)
    for memory, (index, elements) in writers.items():
        if last_read.get(memory, -1) >= run.stop or memory in held or memory not in last_read:
            counts[index] += elements


def _kept(numbers: Iterable[int], trace: Trace, made: Sequence[Work], found: Shares, itemsize: int) -> tuple[Kept, ...]:
    makers = {one.memory: work for work in made if not work.step.backward for one in work.outputs}
    kept: list[Kept] = []
    for number in numbers:
        if number in trace.parameters or number in trace.others:
            continue
        memory = trace.tape.memories[number]
        maker = makers.get(number)
        kept.append(
            Kept(
                elements=memory.bytes / memory.itemsize,
                itemsize=0 if memory.floating and memory.itemsize == itemsize else memory.itemsize,
                share=found.memories.get(number, "whole"),
                cheap=maker is None or maker.kind == "memory",
                expert=False,
            )
        )
    return tuple(kept)


def _working(trace: Trace, segments: set[int], saved: Iterable[int], itemsize: int) -> float:
    """Most elements alive at once, forward or backward, beyond what is saved."""
    apart = {*trace.parameters, *trace.others, *trace.gradients}
    held = sum(trace.tape.memories[one].bytes for one in saved if one not in apart)
    alive, most = 0, 0
    here: set[int] = set()
    turned = False
    for number, segment, backward in trace.tape.changes:
        if backward and not turned:
            turned = True
            alive -= sum(trace.tape.memories[one].bytes for one in here & trace.leaving)
            here -= trace.leaving
        if number > 0 and number not in apart and segment in segments:
            here.add(number)
            alive += trace.tape.memories[number].bytes
            most = max(most, alive)
        elif -number in here:
            here.discard(-number)
            alive -= trace.tape.memories[-number].bytes
    return max(0.0, (most - held) / itemsize)


def _weights(mine: Iterable[tuple[tuple[int, bool], bool, bool]]) -> tuple[Weights, ...]:
    groups: dict[tuple[Share, bool, bool], list[int]] = {}
    for (elements, learns), cut, expert in mine:
        groups.setdefault(("inner" if cut else "whole", expert, learns), []).append(elements)
    return tuple(
        Weights(
            elements=sum(each) if learns else 0,
            frozen=0 if learns else sum(each),
            share=share,
            expert=expert,
            tensors=len(each),
        )
        for (share, expert, learns), each in groups.items()
    )
