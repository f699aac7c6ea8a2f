"""A trace at one size as parts with numbers: costs of operations, saved bytes, and bytes alive at once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from torch import nn

from phalanx.config.model_costs import EVERY, Share, Weights
from phalanx.placement.limits import is_large_table, most_for_classes
from phalanx.trace.operations import KernelWork, Kind, fusible, works
from phalanx.trace.tp_shares import Division, Shares, Surroundings, experts_in, of_experts, shares
from phalanx.trace.tracer import Trace, Traced

Role = Literal["before", "block", "after"]


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
    again: bool = False
    most: int = EVERY


@dataclass(frozen=True, kw_only=True, slots=True)
class SavedBytes:
    """Saved memory at one size."""

    elements: float
    itemsize: int
    share: Share
    cheap: bool
    expert: bool
    most: int = EVERY


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredPart:
    """A part at one size; fields as those of ``ModelPart``."""

    name: str
    role: Role
    forward: tuple[Op, ...]
    backward: tuple[Op, ...]
    weights: tuple[Weights, ...]
    saved: tuple[SavedBytes, ...]
    entry: float
    working: float
    modules: int
    heads: int
    experts: int


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredModel:
    """A model at one size: distinct blocks, their turns, and the parts around them."""

    blocks: dict[int, MeasuredPart]
    turns: list[tuple[str, int, bool]]
    around: list[MeasuredPart]
    tied: int
    recomputes: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Units:
    """The units of a trace: bytes of a number in the computing precision, and samples."""

    itemsize: int
    samples: int


def measured(run: Traced, module: nn.Module, units: Units) -> MeasuredModel:
    """Return the numbers of a trace of ``module``."""
    known = ParameterFacts(module)
    order = {like: index for index, like in enumerate(run.blocks)}
    names = {visit.like: visit.name for visit in reversed(run.visits)}
    outer = _AroundBlocks(run, known, units)
    blocks = {order[like]: _block(names[like], trace, outer, units) for like, trace in run.blocks.items()}
    turns = [(visit.name, order[visit.like], visit.again) for visit in run.visits]
    return MeasuredModel(blocks=blocks, turns=turns, around=outer.pieces(), tied=outer.tied, recomputes=run.recomputes)


class ParameterFacts:
    """Facts about a model's parameters: elements, whether they learn, their experts, and their first names."""

    def __init__(self, module: nn.Module) -> None:
        self.elements = {name: one.numel() for name, one in module.named_parameters()}
        self.learns = {name: one.requires_grad for name, one in module.named_parameters()}
        first = {id(one): name for name, one in module.named_parameters()}
        self.first = {name: first[id(one)] for name, one in module.named_parameters(remove_duplicate=False)}

    def weights(self, names: Iterable[str], cut: Mapping[str, int], experts: Mapping[str, int]) -> tuple[Weights, ...]:
        """Return these parameters summed by their division: ``cut`` over at most so many ranks, or experts."""
        groups: dict[tuple[int, bool, bool], list[int]] = {}
        for name in names:
            key = (experts.get(name, cut.get(name, 0)), name in experts, self.learns[name])
            groups.setdefault(key, []).append(self.elements[name])
        return tuple(
            Weights(
                elements=sum(each) if learns else 0,
                frozen=0 if learns else sum(each),
                share="inner" if most else "whole",
                expert=expert,
                tensors=len(each),
                largest=max(each),
                most=most or EVERY,
            )
            for (most, expert, learns), each in groups.items()
        )


def _around(trace: Trace, units: Units, *, to_loss: bool) -> Surroundings:
    return Surroundings(
        stream=frozenset(one.memory for one in trace.entries),
        parameters=trace.parameters,
        leaving=trace.leaving,
        gradients=trace.gradients,
        samples=units.samples,
        to_loss=to_loss,
    )


def _block(name: str, trace: Trace, outer: _AroundBlocks, units: Units) -> MeasuredPart:
    made = [work for step in trace.tape.steps for work in works(step)]
    found = shares(made, _around(trace, units, to_loss=False))
    experts = experts_in(made, trace.parameters)
    ops = _ops(made, found, trace, experts)
    first = {one: outer.known.first[f"{name}.{one}" if name else one] for one in trace.parameters.values()}
    own = {whole for whole in first.values() if whole.startswith(f"{name}.") and whole not in outer.names}
    outer.tied += sum(outer.known.elements[whole] for whole in first.values() if whole not in own)
    cut = {first[one]: most for one, most in found.cut.items()}
    dealt = {first[one]: count for one, count in experts.items()}
    saved = [number for number in trace.tape.saved if number not in trace.leaving]
    return MeasuredPart(
        name=name,
        role="block",
        forward=tuple(op for op, work in zip(ops, made, strict=True) if not work.step.backward),
        backward=tuple(op for op, work in zip(ops, made, strict=True) if work.step.backward),
        weights=outer.known.weights((whole for whole in first.values() if whole in own), cut, dealt),
        saved=_kept(saved, trace, made, found, units.itemsize),
        entry=float(trace.entries[0].elements) if trace.entries else 0.0,
        working=_working(trace, {0}, saved, units.itemsize),
        modules=sum(trace.modules.values()),
        heads=found.heads,
        experts=min(experts.values(), default=0),
    )


class _AroundBlocks:
    """The part of a model before its blocks and the part after them."""

    def __init__(self, run: Traced, known: ParameterFacts, units: Units) -> None:
        self.run, self.trace, self.known, self.units = run, run.around, known, units
        self.turns = len(run.visits)
        self.made = [work for step in self.trace.tape.steps for work in works(step)]
        self.found = shares(self.made, _around(self.trace, units, to_loss=True))
        self.experts = experts_in(self.made, self.trace.parameters)
        prefixes = tuple(f"{visit.name}." for visit in run.visits)
        self.names = {name for name in known.elements if not name.startswith(prefixes)} | self._used(self.made)
        self.tied = 0

    def pieces(self) -> list[MeasuredPart]:
        ops = _ops(self.made, self.found, self.trace, self.experts)
        if not self.turns:
            return [self._piece("block", range(1), ops, self.names)]
        half = self.turns // 2
        late = self._used([work for work in self.made if work.step.segment > half])
        early = self._used([work for work in self.made if work.step.segment <= half])
        self.tied += sum(self.known.elements[name] for name in early & late)
        before = self._piece("before", range(half + 1), ops, self.names - (late - early))
        after = self._piece("after", range(half + 1, self.turns + 1), ops, late - early)
        return [before, after]

    def _used(self, made: Iterable[KernelWork]) -> set[str]:
        held = self.trace.parameters
        return {held[one.memory] for work in made for one in work.step.inputs if one.memory in held}

    def _piece(self, role: Role, segments: range, ops: list[Op], names: set[str]) -> MeasuredPart:
        trace, known = self.trace, self.known
        saved = [one for one, at in (trace.tape.saved | trace.saved).items() if at in segments]
        here = [(op, work) for op, work in zip(ops, self.made, strict=True) if work.step.segment in segments]
        cut = self._tables() | self.found.cut
        entry = trace.entries[-1:] if role == "after" else trace.entries[: 0 if self.turns else 1]
        return MeasuredPart(
            name="(model)" if role == "block" else f"({role})",
            role=role,
            forward=tuple(op for op, work in here if not work.step.backward),
            backward=tuple(op for op, work in here if work.step.backward),
            weights=known.weights((name for name in known.elements if name in names), cut, self.experts),
            saved=_kept(saved, trace, self.made, self.found, self.units.itemsize),
            entry=float(sum(one.elements for one in entry)),
            working=_working(trace, set(segments), saved, self.units.itemsize),
            modules=sum(trace.modules.get(segment, 0) for segment in segments),
            heads=self.found.heads,
            experts=min(self.experts.values(), default=0),
        )

    def _tables(self) -> dict[str, int]:
        held = self.trace.parameters
        rows = {
            held[one.memory]: one.shape[0]
            for work in self.made
            if work.name == "embedding"
            for one in work.step.inputs
            if one.memory in held
        }
        cut = {name for name, count in rows.items() if is_large_table(count) or count in self.found.widths}
        return {name: most_for_classes(rows[name]) for name in cut}


def _ops(made: Sequence[KernelWork], found: Shares, trace: Trace, experts: Mapping[str, int]) -> list[Op]:
    weights = _for_weights(made, trace)
    region = of_experts(made, trace, experts)
    fused = _fused(made, trace)
    return [
        Op(
            kind=work.kind,
            name=work.name,
            share=division.share,
            most=division.most,
            weights=work.step.backward and only,
            causal=work.step.causal,
            expert=dealt,
            numbers=(*work.dims, work.traffic, min(less, work.traffic)),
            again=work.step.again,
        )
        for work, division, only, less, dealt in zip(made, found.works, weights, fused, region, strict=True)
    ]


def _for_weights(made: Sequence[KernelWork], trace: Trace) -> list[bool]:
    of_weights, waited = set(trace.gradients), set(trace.leaving)
    only: list[bool] = []
    read: set[int] = set()
    for work in reversed(made):
        outputs = {one.memory for one in work.outputs}
        mine = work.step.backward and not work.step.again
        mine = mine and not outputs & waited and bool(outputs & (of_weights | read))
        inputs = {one.memory for one in work.step.inputs}
        if mine:
            read |= inputs
        else:
            waited |= inputs
        only.append(mine)
    return only[::-1]


def _fused(made: Sequence[KernelWork], trace: Trace) -> list[float]:
    counts = [work.traffic for work in made]
    last_read: dict[int, int] = {}
    for index, work in enumerate(made):
        for one in work.step.inputs:
            last_read[one.memory] = index
    held = set(trace.tape.saved) | set(trace.leaving) | set(trace.gradients) | set(trace.saved)
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


def _same_stretch(one: KernelWork, other: KernelWork) -> bool:
    return (one.step.segment, one.step.backward) == (other.step.segment, other.step.backward)


def _share_out(
    made: Sequence[KernelWork], counts: list[float], run: range, last_read: Mapping[int, int], held: set[int]
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


def _kept(
    numbers: Iterable[int], trace: Trace, made: Sequence[KernelWork], found: Shares, itemsize: int
) -> tuple[SavedBytes, ...]:
    makers = {one.memory: index for index, work in enumerate(made) if not work.step.backward for one in work.outputs}
    region = of_experts(made, trace, experts_in(made, trace.parameters))
    kept: list[SavedBytes] = []
    for number in numbers:
        if number in trace.parameters or number in trace.others:
            continue
        memory = trace.tape.memories[number]
        maker, division = makers.get(number), found.memories.get(number, Division("whole"))
        kept.append(
            SavedBytes(
                elements=memory.bytes / memory.itemsize,
                itemsize=0 if memory.floating and memory.itemsize == itemsize else memory.itemsize,
                share=division.share,
                most=division.most,
                cheap=maker is None or made[maker].kind == "memory",
                expert=maker is not None and region[maker],
            )
        )
    return tuple(kept)


def _working(trace: Trace, segments: set[int], saved: Iterable[int], itemsize: int) -> float:
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
