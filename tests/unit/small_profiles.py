"""Profiles written by hand, so that tests of forecasts and plans need no tracing."""

from __future__ import annotations

from phalanx.trace import ModelPart, Operation, Profile, Saved, SizeLaw, Weights


def transformer(
    *, layers: int = 8, width: int = 256, heads: int = 8, vocabulary: int = 1000, length: int = 512
) -> Profile:
    """A decoder with fused attention."""
    tokens, inner = SizeLaw(1, 1, 1), 4 * width

    def linear(given: int, made: int, share: str) -> tuple[Operation, list[Operation]]:
        def product(m: SizeLaw, n: SizeLaw, k: SizeLaw, weights: bool = False) -> Operation:
            dims = (SizeLaw(1), m, n, k)
            return Operation(kind="matmul", name="mm", dims=dims, share=share, weights=weights)

        one, two = SizeLaw(given), SizeLaw(made)
        return product(tokens, two, one), [product(tokens, one, two), product(two, one, tokens, True)]

    def moving(elements: float, share: str) -> Operation:
        return Operation(kind="memory", name="norm", traffic=SizeLaw(elements, 1, 1), share=share)

    mixed = (SizeLaw(1, 1), SizeLaw(heads), SizeLaw(heads), SizeLaw(1, 0, 1), SizeLaw(1, 0, 1), SizeLaw(width // heads))
    pairs = [
        linear(width, 3 * width, "column"),
        linear(width, width, "row"),
        linear(width, inner, "column"),
        linear(inner, width, "row"),
    ]
    forward = [moving(4 * width, "tokens"), *(one for one, _ in pairs)]
    forward.append(Operation(kind="attention", name="sdpa", dims=mixed, share="inner", causal=True))
    backward = [moving(6 * width, "tokens"), *(each for _, two in pairs for each in two)]
    backward.append(Operation(kind="attention", name="sdpa_backward", dims=mixed, share="inner", causal=True))
    block = ModelPart(
        name="blocks.0",
        role="block",
        count=layers,
        forward=tuple(forward),
        backward=tuple(backward),
        weights=(
            Weights(elements=12 * width * width, share="inner", tensors=4),
            Weights(elements=4 * width, tensors=4),
        ),
        saved=(
            Saved(elements=SizeLaw(4.0 * width, 1, 1), share="tokens", cheap=True),
            Saved(elements=SizeLaw(8.0 * width, 1, 1), share="inner"),
        ),
        entry=SizeLaw(width, 1, 1),
        working=SizeLaw(4.0 * width, 1, 1),
    )
    head, back = linear(width, vocabulary, "column")
    before = ModelPart(name="(before)", role="before", weights=(Weights(elements=vocabulary * width, share="inner"),))
    after = ModelPart(
        name="(after)",
        role="after",
        forward=(head,),
        backward=tuple(back),
        weights=(Weights(elements=vocabulary * width, share="inner"),),
        saved=(Saved(elements=SizeLaw(vocabulary, 1, 1), itemsize=4, share="inner"),),
        entry=SizeLaw(width, 1, 1),
    )
    return Profile(parts=(before, block, after), length=length, heads=heads)


LARGE = {"layers": 48, "width": 8192, "heads": 64, "vocabulary": 32000, "length": 4096}
"""Of a model of 39 billion parameters."""
