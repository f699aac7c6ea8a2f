"""Divisions by tensor parallelism, followed through a part's operations by the memory they read and write.

A product whose result reaches a later, summing product only through operations on slices makes a pair with it (Shoeybi
et al. 2019, section 3): the first weight is cut by columns, the second by rows, and the operations between are divided.
If a divided result leaves the part, or is summed over the divided dimension, its product stays whole. In the part with
the loss, classes may stay divided up to the loss (the same paper, section 3).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from phalanx.config.model_costs import EVERY, Share
from phalanx.placement.limits import most_for_classes
from phalanx.trace.operation_recorder import TensorUse
from phalanx.trace.operations import KernelWork
from phalanx.trace.tracer import Trace


@dataclass(frozen=True, slots=True)
class Division:
    """A division by ``tp``, and its largest number of ranks."""

    share: Share
    most: int = EVERY


@dataclass(frozen=True, kw_only=True, slots=True)
class Surroundings:
    """The surroundings of a run of operations."""

    stream: frozenset[int]  # memories of the activations that enter
    parameters: Mapping[int, str]  # memory → name of parameters
    leaving: frozenset[int]  # memories that other parts read
    gradients: Mapping[int, str]  # memory → name of the parameter whose gradient it is
    samples: int  # in the run
    to_loss: bool = False  # whether divided classes may end in the loss


@dataclass(slots=True)
class Shares:
    """The possible divisions."""

    works: list[Division]  # for each operation
    memories: dict[int, Division]  # memory → ``inner`` or ``tokens``; others are whole
    # names of weights that are divided, and of biases that are cut as the column they are added to → over how many
    # ranks at most
    cut: dict[str, int]
    heads: int  # fewest heads of keys in an attention; 0 without
    widths: frozenset[int]  # of the columns


def shares(works: Sequence[KernelWork], around: Surroundings) -> Shares:
    """Return the divisions of a part's forward and backward."""
    whole: set[str] = set()
    forward = [work for work in works if not work.step.backward]
    while True:
        run = _ShareWalk(around, whole)
        for work in forward:
            run.forward(work)
        run.leave()
        if not run.spoilt:
            break
        whole |= run.spoilt
    return run.finished(works)


@dataclass(slots=True)
class _ShareWalk:
    around: Surroundings
    whole: set[str]
    inner: dict[int, frozenset[str]] = field(default_factory=dict[int, "frozenset[str]"])
    stream: set[int] = field(default_factory=set[int])
    widths: dict[str, int] = field(default_factory=dict[str, int])
    spoilt: set[str] = field(default_factory=set[str])
    paired: set[str] = field(default_factory=set[str])
    roles: dict[str, Share] = field(default_factory=dict[str, Share])
    beside: dict[str, set[str]] = field(default_factory=dict[str, "set[str]"])  # bias → columns that it is added to
    most: dict[str, int] = field(default_factory=dict[str, int])
    kept: frozenset[int] = frozenset()
    heads: int = 0

    def __post_init__(self) -> None:
        self.stream |= self.around.stream

    def forward(self, work: KernelWork) -> None:
        weight = _weight_of(work, self.around.parameters)
        read = self._columns_in(work.step.inputs)
        if weight is not None and work.kind == "matmul":
            self._product(work, weight, read)
            return
        self._count_heads(work)
        if read and work.kind == "memory":
            read = self._through(work, read)
        self._made(work.outputs, read, work.step.inputs, stream=work.name == "embedding")

    def leave(self) -> None:
        for memory in self.around.leaving:
            self.spoilt |= self.inner.get(memory, frozenset())
        self.spoilt |= {name for name, role in self.roles.items() if role == "column" and name not in self.paired}

    def finished(self, works: Sequence[KernelWork]) -> Shares:
        self.kept = frozenset(self.inner)
        found = [self._share(work) for work in works]
        memories = dict.fromkeys(self.stream, Division("tokens"))
        memories.update({one: Division("inner", self._most(columns)) for one, columns in self.inner.items()})
        cut = {name: self._most((name,)) for name in self.roles}
        cut |= {name: self._most(columns) for name, columns in self.beside.items()}
        return Shares(found, memories, cut, self.heads, frozenset(self.widths.values()))

    def _most(self, columns: Iterable[str]) -> int:
        return max((self.most.get(name, EVERY) for name in columns), default=EVERY)

    def _limit(self, columns: Iterable[str], most: float) -> None:
        for name in columns:
            self.most[name] = min(int(most), self.most.get(name, EVERY))

    def _count_heads(self, work: KernelWork) -> None:
        if work.kind == "attention":
            heads, width = work.dims[2], work.dims[5]
        elif work.name in ("bmm", "baddbmm") and all(one.memory in self.inner for one in work.operands):
            heads = work.dims[0] / self.around.samples
            width = max(self.widths[name] for name in self._columns_in(work.operands)) / heads
        else:
            return
        keys = [self.widths[name] for name in self._columns_in(work.operands[1:2])]
        found = int(min([heads, *(size / width for size in keys)]))
        # A rank has a head or more: those of fewer keys stay whole sooner.
        self._limit(self._columns_in(work.operands[:1]), heads)
        for name in self._columns_in(work.operands[1:]):
            self._limit((name,), min(heads, self.widths[name] / width))
        self.heads = min(found, self.heads or found)

    def _product(self, work: KernelWork, weight: str, read: frozenset[str]) -> None:
        if read and self.around.to_loss:
            self.spoilt |= read  # pairs are looked for in blocks only
        elif read:
            self.roles[weight] = "row"
            self.paired |= read
            self._limit((weight,), self._most(read))
        if read:
            self._made(work.outputs, frozenset(), work.step.inputs, stream=True)
            return
        most = most_for_classes(int(work.dims[2])) if self.around.to_loss else EVERY
        wide = most > 1
        wide &= all(len(one.shape) < 3 for one in work.operands if one.memory in self.around.parameters)
        if weight in self.whole or not wide or self.roles.get(weight) == "row":
            self._made(work.outputs, frozenset(), work.step.inputs)
            return
        self.roles[weight] = "column"
        self.widths[weight] = int(work.dims[2])
        self._limit((weight,), most)
        self._add_biases(work.step.inputs, (weight,), besides=weight)
        self._made(work.outputs, frozenset((weight,)), ())

    def _through(self, work: KernelWork, read: frozenset[str]) -> frozenset[str]:
        widths = {self.widths[name] for name in read}
        self._add_biases(work.step.inputs, read)
        if self.around.to_loss and any(word in work.name for word in ("nll_loss", "softmax", "logsumexp")):
            if "nll_loss" in work.name:
                self.paired |= read
                self.stream |= {one.memory for one in work.outputs}
                return frozenset()
            return read
        divided = [one for one in work.step.inputs if self.inner.get(one.memory) and one.shape[-1:]]
        reduced = max((one.elements for one in work.outputs), default=0) < max(
            (one.elements for one in divided), default=0
        )
        normed = any(word in work.name for word in ("norm", "softmax"))
        if (normed or reduced) and any(one.shape[-1] in widths for one in divided):
            self.spoilt |= read
        return read

    def _add_biases(self, inputs: Iterable[TensorUse], columns: Iterable[str], besides: str = "") -> None:
        for one in inputs:
            name = self.around.parameters.get(one.memory)
            of = {column for column in columns if one.shape == (self.widths[column],)}
            if name is not None and name != besides and of:
                self.beside.setdefault(name, set()).update(of)

    def _columns_in(self, inputs: Iterable[TensorUse]) -> frozenset[str]:
        found: frozenset[str] = frozenset()
        for one in inputs:
            found |= self.inner.get(one.memory, frozenset())
        return found

    def _made(
        self, outputs: Iterable[TensorUse], columns: frozenset[str], inputs: Iterable[TensorUse], stream: bool = False
    ) -> None:
        flows = stream or any(one.memory in self.stream for one in inputs)
        for one in outputs:
            if columns:
                self.inner[one.memory] = columns
                self.stream.discard(one.memory)
            elif flows:
                self.stream.add(one.memory)

    def _share(self, work: KernelWork) -> Division:
        weight = _weight_of(work, self.around.parameters)
        if work.step.again:
            self.forward(work)
        elif work.step.backward:
            return self._backward(work, weight)
        if weight is not None and work.kind in ("matmul", "convolution"):
            return self._role(weight)
        if columns := self._columns_in((*work.outputs, *work.step.inputs)):
            return Division("inner", self._most(columns))
        return self._by_stream(work)

    def _role(self, weight: str) -> Division:
        return Division(self.roles.get(weight, "whole"), self._most((weight,)))

    def _backward(self, work: KernelWork, weight: str | None) -> Division:
        divided = self._columns_in(work.step.inputs)
        flows = any(one.memory in self.stream for one in work.step.inputs)
        if work.kind in ("matmul", "convolution"):
            if weight is not None:
                role = self._role(weight)
                self._made(work.outputs, frozenset((weight,)) if role.share == "row" else frozenset(), (), stream=True)
                return role
            of = next(
                (self.around.gradients[one.memory] for one in work.outputs if one.memory in self.around.gradients), ""
            )
            if of:
                return self._role(of)
            pair = [one for one in work.operands if one.memory in self.inner]
            if len(pair) == 1:
                # Of a gradient and a kept input one is divided: which of the two says how the weight is cut.
                return Division("row" if pair[0].memory in self.kept else "column", self._most(divided))
        if divided:
            self._made(work.outputs, divided, ())
            return Division("inner", self._most(divided))
        if flows:
            self._made(work.outputs, frozenset(), (), stream=True)
        return self._by_stream(work) if work.kind == "memory" else Division("whole")

    def _by_stream(self, work: KernelWork) -> Division:
        flows = any(one.memory in self.stream for one in (*work.step.inputs, *work.outputs))
        return Division("tokens" if flows else "whole")


def _weight_of(work: KernelWork, parameters: Mapping[int, str]) -> str | None:
    return next((parameters[one.memory] for one in work.operands if one.memory in parameters), None)


def experts_in(made: Sequence[KernelWork], parameters: Mapping[int, str]) -> dict[str, int]:
    """Map name to experts for weights with one matrix an expert."""
    operands = [one for work in made if work.kind == "matmul" for one in work.operands]
    return {
        parameters[one.memory]: one.shape[0] for one in operands if one.memory in parameters and len(one.shape) == 3
    }


def of_experts(made: Sequence[KernelWork], trace: Trace, experts: Mapping[str, int]) -> list[bool]:
    """Return True for each operation of experts: from their first product to their last, forward and backward."""
    found = [False] * len(made)
    for backward in (False, True):
        here = [
            index for index, work in enumerate(made) if work.step.backward == backward and _meets(work, trace, experts)
        ]
        if here:
            found[here[0] : here[-1] + 1] = [True] * (here[-1] + 1 - here[0])
    return found


def _meets(work: KernelWork, trace: Trace, experts: Mapping[str, int]) -> bool:
    names = {trace.parameters.get(one.memory) for one in work.operands}
    names |= {trace.gradients.get(one.memory) for one in work.outputs}
    return not names.isdisjoint(experts)
