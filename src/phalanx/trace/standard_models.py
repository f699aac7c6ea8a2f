"""Well-known models as plain modules on the meta device, to forecast what has no code yet."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Literal

from phalanx.config.model_costs import Profile
from phalanx.trace.tracing import ModelCall

Family = Literal["gpt", "llama", "mpt", "bert", "resnet50"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """A well-known model in numbers.

    Attributes:
        family: ``gpt`` (learned positions, LayerNorm, GELU, biases), ``llama`` (rotary positions, RMSNorm, SwiGLU, no
            biases), ``mpt`` (as gpt, without biases, positions by ``positions``), ``bert`` (norms after, two heads),
            ``resnet50`` (version 1.5; ``image`` and ``vocabulary`` count, the rest does not).
        layers: blocks.
        hidden: width of the stream.
        heads: of attention.
        kv_heads: heads of keys and values; 0 for as many as ``heads``.
        ffn: width inside the feed-forward network; 0 for 4 times ``hidden``.
        vocabulary: tokens, or classes.
        length: tokens in a sample.
        places: rows of a table of learned positions; 0 for ``length``.
        head_width: of one head; 0 for ``hidden / heads``.
        tied: whether the head shares the embedding's weight.
        positions: ``learned``, ``alibi`` or ``rotary``; empty for the family's own.
        dropout: rate after attention and feed-forward network.
        biases: of llama's projections of queries, keys and values (as Qwen2 has).
        image: height and width of an image.
    """

    family: Family
    layers: int = 0
    hidden: int = 0
    heads: int = 0
    kv_heads: int = 0
    ffn: int = 0
    vocabulary: int = 0
    length: int = 1
    places: int = 0
    head_width: int = 0
    tied: bool = False
    positions: Literal["", "learned", "alibi", "rotary"] = ""
    dropout: float = 0.0
    biases: bool = False
    image: int = 224

    def profile(self) -> Profile:
        """The costs of the model; computed once for each shape."""
        return _profile(self)


def standard(shape: Shape) -> ModelCall:
    """The model on the meta device, with inputs of one sample and its loss: cross-entropy over all tokens.

    Raises:
        SpecError: if numbers of the shape are missing or do not go together.
    """
    from phalanx.trace.models import described

    return described(shape)


_ENOUGH = 2


@cache
def _profile(shape: Shape) -> Profile:
    if shape.layers <= _ENOUGH:
        return standard(shape).profile()
    found = _profile(replace(shape, layers=_ENOUGH))
    # all blocks of these models are alike: what is added to a few is a count
    parts = [replace(part, count=shape.layers) if part.role == "block" else part for part in found.parts]
    return replace(found, parts=tuple(parts))
