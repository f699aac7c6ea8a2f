"""The law of attention over tokens that are dealt out: each way gives what attention on one device gives."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from phalanx.comm import Place, joined
from phalanx.launch import launch
from phalanx.parallel.sliced import Axis, Cut, Placed, is_sliced, sliced
from phalanx.parallel.sliced.axis import piece
from phalanx.spec.plan import Attention

attention: Any = F.scaled_dot_product_attention
WAYS: tuple[Attention, ...] = ("ring", "alltoall", "gather")


@dataclass(frozen=True)
class Case:
    """Attention of tensors of these sizes: (batch and heads of queries, heads of keys, tokens, features)."""

    name: str
    lead: tuple[int, ...] = (2, 4)
    key_heads: int = 4
    tokens: int = 12
    features: tuple[int, int] = (8, 8)
    cut: Callable[[int, int], Cut] = Cut.even
    mask: Callable[[int], Tensor] | None = None
    dtype: torch.dtype = torch.float32
    off: float = 5e-6
    options: dict[str, Any] = field(default_factory=dict[str, Any])


def holes(*shape: int) -> Callable[[int], Tensor]:
    """Booleans; some queries meet nothing but themselves, and the first meets nothing."""

    def make(tokens: int) -> Tensor:
        generator = torch.Generator().manual_seed(3)
        mask = torch.rand(*shape[:-2], tokens, tokens, generator=generator) > 0.6
        mask[..., range(tokens), range(tokens)] = True
        mask[..., 0, :] = False
        return mask

    return make


def numbers(*shape: int) -> Callable[[int], Tensor]:
    """A bias with a gradient; sizes of 0 stand for the tokens."""

    def make(tokens: int) -> Tensor:
        generator = torch.Generator().manual_seed(3)
        return torch.randn([size or tokens for size in shape], generator=generator).requires_grad_()

    return make


CAUSAL = {"is_causal": True}
GROUPED = {"enable_gqa": True}
CASES = [
    Case("all meet all"),
    Case("uneven", tokens=13),
    Case("fewer tokens than ranks", tokens=2),
    Case("causal", options=CAUSAL),
    Case("causal, early and late", cut=Cut.zigzag, options=CAUSAL),
    Case("causal, uneven", cut=Cut.zigzag, tokens=17, options=CAUSAL),
    Case("causal, hardly any tokens", cut=Cut.zigzag, tokens=3, options=CAUSAL),
    Case("early and late", cut=Cut.zigzag, tokens=11),
    Case("scaled", options={"scale": 0.3}),
    Case("grouped", key_heads=2, options=GROUPED),
    Case("grouped, uneven, causal", (2, 9), 3, 11, cut=Cut.zigzag, options=GROUPED | CAUSAL),
    Case("one head of keys", (2, 5), 1, options=GROUPED),
    Case("groups across ranks", (1, 6), 2, options=GROUPED),
    Case("fewer heads than ranks", (2, 1), 1, options=CAUSAL),
    Case("values of other width", features=(8, 4)),
    Case("values of other width, causal", features=(4, 8), cut=Cut.zigzag, options=CAUSAL),
    Case("no batch", (4,)),
    Case("more dimensions", (2, 3, 4)),
    Case("booleans", mask=holes(0, 0)),
    Case("booleans for each sample", cut=Cut.zigzag, tokens=13, mask=holes(2, 1, 0, 0)),
    Case("booleans for each head", mask=holes(1, 4, 0, 0)),
    Case("bias", mask=numbers(0, 0)),
    Case("bias for each head", cut=Cut.zigzag, tokens=11, mask=numbers(1, 4, 0, 0)),
    Case("bias for each key", mask=numbers(2, 1, 1, 0)),
    Case("bias for each query", mask=numbers(1, 4, 0, 1)),
    Case("bias, grouped", key_heads=2, mask=numbers(2, 4, 0, 0), options=GROUPED),
    Case("bias without a gradient", mask=lambda tokens: numbers(4, 0, 0)(tokens).detach()),
    Case("bias, more dimensions", (2, 3, 4), mask=numbers(2, 1, 1, 0, 0)),
    Case("float64", cut=Cut.zigzag, dtype=torch.float64, off=1e-12, options=CAUSAL),
    Case("bfloat16", cut=Cut.zigzag, dtype=torch.bfloat16, off=3e-2, options=CAUSAL),
    Case("float16, masked", mask=holes(0, 0), dtype=torch.float16, off=4e-3),
    Case("more than one tile of the kernel", (1, 2), 2, 600, cut=Cut.zigzag, off=2e-5, options=CAUSAL),
]


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("way", WAYS)
def test_every_way_equals_one_device(way: Attention, ranks: int) -> None:
    def work(place: Place, report: Callable[[int], None]) -> list[str]:
        with joined(place, torch.device("cpu")):
            return [wrong for case in CASES if (wrong := _difference(case, axis_of(place, way)))]

    for rank, wrong in enumerate(launch(work, ranks)):
        assert not wrong, f"rank {rank}: " + "; ".join(wrong)


def axis_of(place: Place, way: Attention, **more: Any) -> Axis:
    group = dist.group.WORLD
    return Axis("cp", size=place.world_size, rank=place.rank, group=group, sums=True, attention=way, **more)


def _difference(case: Case, axis: Axis) -> str:
    generator = torch.Generator().manual_seed(7)
    *batch, heads = case.lead
    width, value_width = case.features
    wholes = [
        torch.randn(*batch, count, case.tokens, size, generator=generator).to(case.dtype).requires_grad_()
        for count, size in ((heads, width), (case.key_heads, width), (case.key_heads, value_width))
    ]
    mask = case.mask(case.tokens) if case.mask else None
    if mask is not None and mask.is_floating_point():
        mask = mask.detach().to(case.dtype).requires_grad_(mask.requires_grad)
    expected = attention(*wholes, mask, **case.options)
    weights = torch.randn(expected.shape, generator=generator).to(case.dtype)
    (expected * weights).sum().backward()

    cut = case.cut(case.tokens, axis.size)
    locals_ = [piece(tensor.detach(), tensor.dim() - 2, cut, axis.rank).clone().requires_grad_() for tensor in wholes]
    given = [sliced(tensor, [Placed(axis, tensor.dim() - 2, cut)]) for tensor in locals_]
    own_mask = None if mask is None else mask.detach().clone().requires_grad_(mask.requires_grad)
    try:
        out = attention(*given, own_mask, **case.options)
        assert is_sliced(out)
        mine = lambda tensor: piece(tensor, tensor.dim() - 2, cut, axis.rank)  # noqa: E731
        off = {"value": _off(out.local, mine(expected))}
        (out.local * mine(weights)).sum().backward()
        for name, local, tensor in zip("qkv", locals_, wholes, strict=True):
            assert local.grad is not None
            assert tensor.grad is not None
            assert local.grad.dtype == local.dtype
            off[name] = _off(local.grad, mine(tensor.grad))
        if mask is not None and mask.requires_grad:
            assert own_mask is not None
            assert own_mask.grad is not None
            assert mask.grad is not None
            dist.all_reduce(own_mask.grad)
            off["mask"] = _off(own_mask.grad, mask.grad)
    except Exception as error:
        return f"{case.name}: {type(error).__name__}: {error}"
    wrong = [f"{name} off by {by:.2g}" for name, by in off.items() if not by <= case.off]
    return f"{case.name}: {', '.join(wrong)}" if wrong else ""


def _off(found: Tensor, expected: Tensor) -> float:
    assert found.shape == expected.shape, f"{tuple(found.shape)} in place of {tuple(expected.shape)}"
    return float((found - expected).detach().abs().max()) if found.numel() else 0.0
