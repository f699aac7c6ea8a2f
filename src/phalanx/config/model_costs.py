"""Costs of a model, as laws of the samples and the length of one forward, for any device and plan.

A model is a row of parts (embedding, blocks, head); equal parts are listed once, with a count.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

EVERY = 2**30
"""Any number of ranks."""

Share = Literal["whole", "tokens", "inner", "column", "row"]
"""Division by ranks of ``tp``.

``whole`` none; ``tokens`` by sequence parallelism only (the stream between blocks); ``inner`` between a column- and a
row-parallel product; ``column`` a weight cut along its outputs; ``row`` along its inputs, with sums over the ranks.
"""


@dataclass(frozen=True, slots=True)
class SizeLaw:
    """A count that grows as ``factor * samples**by_samples * length**by_length``."""

    factor: float  # the count for one sample of one token (or of a model without tokens: for one sample)
    by_samples: float = 0.0  # power of the samples in one forward
    by_length: float = 0.0  # power of the tokens in one sample

    def at(self, samples: Any, length: Any = 1.0) -> Any:
        """Return the count for numbers, or for arrays of them that broadcast together."""
        value = self.factor * samples**self.by_samples if self.by_samples else self.factor
        return value * length**self.by_length if self.by_length else value


@dataclass(frozen=True, kw_only=True, slots=True)
class Operation:
    """One kernel's work, for one micro-batch of one part."""

    # ``attention`` is fused; ``memory`` is elementwise, norms, reductions, copies, lookups
    kind: Literal["matmul", "convolution", "attention", "memory"]
    name: str  # as the framework calls it, for tables: ``mm``, ``native_layer_norm``
    # ``matmul``/``convolution``: batch, m, n, k; ``attention``: samples, heads, heads of keys, queries, keys, width
    dims: tuple[SizeLaw, ...] = ()
    traffic: SizeLaw = SizeLaw(0.0)  # elements read and written by a kernel of its own
    fused: SizeLaw = SizeLaw(0.0)  # elements read and written if compiled with its neighbours; at most ``traffic``
    share: Share = "whole"
    most: int = EVERY  # most ranks of ``tp`` that divide it; with more it is whole
    weights: bool = False  # yields gradients of parameters only, for which only the optimizer waits
    causal: bool = False  # attention to earlier keys only, half of the work
    expert: bool = False  # of experts, so ``ep`` divides it
    again: bool = False  # recomputed in the backward by a checkpoint of the model's own


@dataclass(frozen=True, kw_only=True, slots=True)
class Saved:
    """Memory that lives from a part's forward to its backward."""

    elements: SizeLaw
    itemsize: int = 0  # bytes of an element; 0: that of the precision of the computation
    share: Share = "whole"  # ``whole``, ``tokens`` or ``inner``
    most: int = EVERY  # most ranks of ``tp`` that divide it; with more it is whole
    cheap: bool = False  # dropped by selective recompute (neither of a product nor of an attention)
    expert: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Weights:
    """Parameters of a part."""

    elements: int  # that are trained
    frozen: int = 0
    share: Share = "whole"  # ``inner`` if ``tp`` cuts them, else ``whole``
    most: int = (
        EVERY  # most ranks of ``tp`` (of ``ep`` times ``tp`` for experts) that divide them; with more they are whole
    )
    expert: bool = False  # divided by ``ep``
    tensors: int = 1
    largest: int = 0  # elements of the largest tensor; 0 if not known


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelPart:
    """A block of the model, or the modules before or after the blocks."""

    name: str  # of its first module, such as ``model.layers.0``; ``(before)`` and ``(after)`` for modules in no block
    role: Literal["before", "block", "after"]  # ``before`` (embedding), ``block`` or ``after`` (last norm, head, loss)
    count: int = 1  # equal parts in a row
    forward: tuple[Operation, ...] = ()
    backward: tuple[Operation, ...] = ()  # with operations that the model itself recomputes
    weights: tuple[Weights, ...] = ()
    saved: tuple[Saved, ...] = ()
    entry: SizeLaw = SizeLaw(0.0)  # elements of its input: kept under full recompute, sent between pipeline stages
    working: SizeLaw = SizeLaw(0.0)  # elements alive at once inside its backward beyond the saved ones
    modules: int = 0  # calls of modules by the host, which bound the speed of an eager framework

    @property
    def parameters(self) -> int:
        """Trained elements of one such part."""
        return sum(one.elements for one in self.weights)


@dataclass(frozen=True, kw_only=True, slots=True)
class ComparedTensors:
    """Tensors gathered together for a loss over the global batch: a model's output, or an entry of the batch."""

    rows: int  # bytes for each sample, in fp32
    others: int = 0  # bytes of tensors without rows, which every rank sends too


@dataclass(frozen=True, kw_only=True, slots=True)
class Profile:
    """A model's costs."""

    parts: tuple[ModelPart, ...]  # in the order in which they run
    length: int = 1  # tokens in one sample of the job; 1 for a model without
    tied: int = 0  # elements that a later part shares with the first (a tied head), counted in ``before`` only
    heads: int = 0  # fewest heads of keys in an attention, the most that ``tp`` can divide; 0 without attention
    experts: int = 0  # fewest experts in a layer; 0 without
    lawful: bool = True  # ``by_length`` was found by tracing two lengths; else other lengths are a guess
    recomputes: bool = False  # the model recomputes activations by itself
    repeated: bool = True  # its blocks are repeated, and ``zero=3`` shards them one by one
    compared: tuple[ComparedTensors, ...] = ()  # gathered for a loss over the global batch, the output first
    notes: tuple[str, ...] = ()  # for the reader

    @property
    def parameters(self) -> int:
        """Trained elements, each counted once."""
        return sum(part.count * part.parameters for part in self.parts)

    @property
    def blocks(self) -> int:
        """Number of blocks."""
        return sum(part.count for part in self.parts if part.role == "block")

    def operations(self) -> Iterator[tuple[ModelPart, Operation]]:
        """Yield every operation, forward and backward, with its part."""
        for part in self.parts:
            for operation in (*part.forward, *part.backward):
                yield part, operation

    def flops(self, samples: float, length: float | None = None) -> float:
        """Return the FLOP of a forward and backward of ``samples``: products and attention, without recomputation."""
        tokens = self.length if length is None else length
        counted = ((part, one) for part, one in self.operations() if not one.again)
        return sum(part.count * flops(operation, samples, tokens) for part, operation in counted)


def flops(operation: Operation, samples: Any, length: Any) -> Any:
    """Return the FLOP of one operation; attention as in Dao et al., "FlashAttention-2", 2023, section 4.1."""
    sizes = [size.at(samples, length) for size in operation.dims]
    if operation.kind in ("matmul", "convolution"):
        return 2.0 * sizes[0] * sizes[1] * sizes[2] * sizes[3]
    if operation.kind == "attention":
        each = 10.0 if "backward" in operation.name else 4.0  # the backward computes the scores again
        share = 0.5 if operation.causal else 1.0
        return each * share * sizes[0] * sizes[1] * sizes[3] * sizes[4] * sizes[5]
    return 0.0 * samples
