"""What a model costs, as laws of the samples and the length of one forward: the nouns that forecasts are made of.

A model is a row of parts (embedding, blocks, head); alike parts stand once, with a count. Nothing here says how fast
a device is or how a plan splits the work: ``share`` only says what tensor parallelism *can* divide.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

EVERY = 2**30
"""Ranks: however many there are."""

Share = Literal["whole", "tokens", "inner", "column", "row"]
"""What ranks of ``tp`` can divide.

``whole`` nothing; ``tokens`` the tokens, under sequence parallelism only (the stream between blocks); ``inner`` all of
it, it lies between a column- and a row-parallel product; ``column`` a product whose weight is cut along its outputs;
``row`` one whose weight is cut along its inputs, so that its results are added up over the ranks.
"""


@dataclass(frozen=True, slots=True)
class SizeLaw:
    """A count that grows as ``factor * samples**by_samples * length**by_length``."""

    factor: float  # the count for one sample of one token (or of a model without tokens: for one sample)
    by_samples: float = 0.0  # power of the samples in one forward
    by_length: float = 0.0  # power of the tokens in one sample

    def at(self, samples: Any, length: Any = 1.0) -> Any:
        """The count for numbers, or for arrays of them that broadcast together."""
        value: Any = self.factor
        if self.by_samples:
            value = value * samples**self.by_samples
        if self.by_length:
            value = value * length**self.by_length
        return value


@dataclass(frozen=True, kw_only=True, slots=True)
class Operation:
    """One kernel's work, for one micro-batch of one part."""

    # what bounds it: ``matmul`` and ``convolution`` (as the product it amounts to), ``attention`` (fused scores,
    # softmax and values), ``memory`` (elementwise, norms, reductions, copies, lookups)
    kind: Literal["matmul", "convolution", "attention", "memory"]
    name: str  # as the framework calls it, for tables: ``mm``, ``native_layer_norm``
    # of ``matmul``/``convolution`` (batch, m, n, k): ``batch`` products of m x k by k x n. Of ``attention`` (samples,
    # heads, heads of keys, queries, keys, width of a head). Of ``memory`` none.
    dims: tuple[SizeLaw, ...] = ()
    traffic: SizeLaw = SizeLaw(0.0)  # elements read and written where it runs as a kernel of its own
    # elements that it still reads and writes where a compiler joins it with its neighbours; never above ``traffic``
    fused: SizeLaw = SizeLaw(0.0)
    share: Share = "whole"  # what ``tp`` can divide
    most: int = EVERY  # ranks of ``tp`` that it is divided over at most; with more it is whole
    weights: bool = False  # it yields gradients of parameters only, so that nothing waits for it before the optimizer
    causal: bool = False  # of ``attention``: queries see earlier keys only, half of the work
    expert: bool = False  # it belongs to experts, of which each token meets some: ``ep`` divides it
    again: bool = False  # the model computes it a second time, by a checkpoint of its own; it stands in the backward


@dataclass(frozen=True, kw_only=True, slots=True)
class Saved:
    """Memory that lives from a part's forward to its backward."""

    elements: SizeLaw  # how many
    itemsize: int = 0  # bytes of an element; 0 where it is that of the precision computed in
    share: Share = "whole"  # what ``tp`` can divide: ``whole``, ``tokens`` or ``inner``
    most: int = EVERY  # ranks of ``tp`` that it is divided over at most; with more it is whole
    cheap: bool = False  # selective recompute drops it (it is neither of a product nor of an attention)
    expert: bool = False  # it belongs to experts


@dataclass(frozen=True, kw_only=True, slots=True)
class Weights:
    """Parameters of a part."""

    elements: int  # how many learn
    frozen: int = 0  # how many do not
    share: Share = "whole"  # ``inner`` where ``tp`` cuts them, else ``whole``
    # ranks of ``tp`` that they are divided over at most, of experts ``ep`` times ``tp``; with more they are whole
    most: int = EVERY
    expert: bool = False  # ``ep`` deals them out
    tensors: int = 1  # how many tensors they are
    largest: int = 0  # elements of the largest of these; 0 where not known


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelPart:
    """A run of the model that is computed at one go: a block, or what comes before or after the blocks."""

    name: str  # of its first module, such as ``model.layers.0``; ``(before)`` and ``(after)`` for what no block holds
    role: Literal["before", "block", "after"]  # ``before`` (embedding), ``block`` or ``after`` (last norm, head, loss)
    count: int = 1  # how many alike follow one another in the model
    forward: tuple[Operation, ...] = ()  # its operations, in order
    # those of its backward, in order, with what the model itself recomputes, and nothing else
    backward: tuple[Operation, ...] = ()
    weights: tuple[Weights, ...] = ()  # its parameters, by how they can be cut
    saved: tuple[Saved, ...] = ()  # what lives from its forward to its backward
    # elements of the activation that enters it: kept under full recompute, sent between pipeline stages
    entry: SizeLaw = SizeLaw(0.0)
    # bytes-less count of elements alive at once inside its backward beyond what is saved
    working: SizeLaw = SizeLaw(0.0)
    modules: int = 0  # launches of module code by the host, for a bound on how fast an eager framework can go

    @property
    def parameters(self) -> int:
        """Elements that learn, of one such part."""
        return sum(one.elements for one in self.weights)


@dataclass(frozen=True, kw_only=True, slots=True)
class ComparedTensors:
    """What a loss over the whole global batch has gathered at one go: a model's output, or an entry of the batch."""

    rows: int  # bytes for each sample, as the model gives them in fp32
    others: int = 0  # bytes of what has no rows, which every rank sends all the same


@dataclass(frozen=True, kw_only=True, slots=True)
class Profile:
    """A model's costs."""

    parts: tuple[ModelPart, ...]  # in the order in which they run
    length: int = 1  # tokens in one sample of the job; 1 for a model without
    # elements of parameters that a later part shares with the first (a tied head), counted in ``before`` only
    tied: int = 0
    heads: int = 0  # fewest heads of keys in an attention: the most that ``tp`` can divide; 0 without attention
    experts: int = 0  # fewest experts in a layer; 0 without
    # whether ``by_length`` was found by tracing two lengths (else lengths other than ``length`` are a guess)
    lawful: bool = True
    recomputes: bool = False  # whether the model recomputes activations by itself
    # whether its blocks are repeated ones, which ``zero=3`` shards one by one; else it is sharded as one
    repeated: bool = True
    # what is gathered for a loss over the whole global batch, the output first; none for losses of samples
    compared: tuple[ComparedTensors, ...] = ()
    notes: tuple[str, ...] = ()  # what the reader should know

    @property
    def parameters(self) -> int:
        """Elements that learn, each counted once."""
        return sum(part.count * part.parameters for part in self.parts)

    @property
    def blocks(self) -> int:
        """Blocks, over which pipelines and recomputation deal."""
        return sum(part.count for part in self.parts if part.role == "block")

    def operations(self) -> Iterator[tuple[ModelPart, Operation]]:
        """Every operation, forward and backward, with its part."""
        for part in self.parts:
            for operation in (*part.forward, *part.backward):
                yield part, operation

    def flops(self, samples: float, length: float | None = None) -> float:
        """Model FLOP of one forward and backward of ``samples``: products and attention, without recomputation."""
        tokens = self.length if length is None else length
        counted = ((part, one) for part, one in self.operations() if not one.again)
        return sum(part.count * flops(operation, samples, tokens) for part, operation in counted)


def flops(operation: Operation, samples: Any, length: Any) -> Any:
    """FLOP of one operation: 2 m n k for a product, 4 (forward) or 10 (backward) queries x keys x width of attention.

    Attention: Dao et al., "FlashAttention-2", 2023, section 4.1: the backward computes the scores again.
    """
    sizes = [size.at(samples, length) for size in operation.dims]
    if operation.kind in ("matmul", "convolution"):
        return 2.0 * sizes[0] * sizes[1] * sizes[2] * sizes[3]
    if operation.kind == "attention":
        each = 10.0 if "backward" in operation.name else 4.0
        share = 0.5 if operation.causal else 1.0
        return each * share * sizes[0] * sizes[1] * sizes[3] * sizes[4] * sizes[5]
    return 0.0 * samples
