"""The law of sliced tensors: every operation gives what it gives on wholes, value and gradient, however it is cut."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from law_rows import longer
from phalanx.comm import Place, default_process_group
from phalanx.launch.local import launch
from phalanx.parallel.local_shards import Axis, Cut, Placed, is_sliced, sliced

torch.manual_seed(0)


@dataclass(frozen=True)
class Case:
    """An operation, the shapes of its inputs, and which of them are cut: input → (dimension, cut for n ranks).

    Those that ``parameters`` names are a layer's, and whole unless they are cut.
    """

    name: str
    run: Callable[..., Any]
    shapes: tuple[tuple[int, ...], ...]
    cuts: dict[int, tuple[int, Callable[[int], Cut]]]
    sends: tuple[str, ...] = ()
    scale: float = 1.0
    parameters: tuple[int, ...] = ()


def even(size: int, outer: int = 1, inner: int = 1) -> Callable[[int], Cut]:
    return lambda ranks: Cut.even(size, ranks, outer=outer, inner=inner)


def heads(x: Tensor, width: int = 4) -> Tensor:
    return x.view(x.shape[0], x.shape[1], -1, width).transpose(1, 2)


def attend(q: Tensor, k: Tensor, v: Tensor, causal: bool = False, **more: Any) -> Tensor:
    out = F.scaled_dot_product_attention(heads(q), heads(k), heads(v), is_causal=causal, **more)
    return out.transpose(1, 2).reshape(q.shape)


def by_hand(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = torch.matmul(heads(q), heads(k).transpose(-1, -2)) / 2
    return (scores.softmax(-1) @ heads(v)).transpose(1, 2).flatten(2)


def rope(x: Tensor, cos: Tensor) -> Tensor:
    h = heads(x)
    half = h.shape[-1] // 2
    turned = torch.cat((-h[..., half:], h[..., :half]), dim=-1)
    return h * cos + turned * (1 - cos)


TARGET = torch.tensor([0, 3, 5, -100, 9, 2, 7, 1])
CASES = [
    Case(
        "elementwise", lambda a, b: torch.tanh(a * b + 2) - b, ((3, 12), (3, 12)), {0: (1, even(12)), 1: (1, even(12))}
    ),
    Case("beside a whole", lambda a, b: a * b, ((3, 12), (3, 12)), {0: (1, even(12))}),
    Case("broadcast", lambda a, b: a * b + b, ((3, 12), (12,)), {0: (0, even(3))}),
    Case("broadcast ones", lambda a, b: a * b, ((3, 12), (3, 1)), {0: (1, even(12))}),
    Case("two dimensions meet", lambda a, b: a + b, ((6, 12), (6, 12)), {0: (1, even(12)), 1: (0, even(6))}),
    Case("where", lambda a, b: torch.where(a > 0, b, a.exp()), ((3, 12), (3, 12)), {1: (1, even(12))}),
    Case("column", F.linear, ((2, 5, 8), (12, 8), (12,)), {1: (0, even(12)), 2: (0, even(12))}),
    Case("row", F.linear, ((2, 5, 8), (12, 8), (12,)), {0: (2, even(8)), 1: (1, even(8))}, ("all_reduce",)),
    Case("row of a whole", F.linear, ((2, 5, 8), (12, 8), (12,)), {1: (1, even(8))}, ("all_reduce",)),
    Case(
        "cut features into a whole layer",
        F.linear,
        ((2, 5, 8), (12, 8), (12,)),
        {0: (2, even(8))},
        ("all_gather",),
        parameters=(1, 2),
    ),
    Case("cut tokens into a whole layer", F.linear, ((2, 6, 8), (12, 8), (12,)), {0: (1, even(6))}, parameters=(1, 2)),
    Case(
        "column then row",
        lambda x, a, b: F.linear(F.gelu(F.linear(x, a)), b),
        ((2, 5, 8), (12, 8), (8, 12)),
        {1: (0, even(12)), 2: (1, even(12))},
        ("all_reduce",),
    ),
    Case("conv1d", torch.addmm, ((12,), (6, 8), (8, 12)), {0: (0, even(12)), 2: (1, even(12))}),
    Case("einsum", lambda a, b: torch.einsum("bik,kn->bin", a, b), ((2, 5, 8), (8, 12)), {1: (1, even(12))}),
    Case("attention by heads", attend, ((2, 5, 16),) * 3, {i: (2, even(16, inner=4)) for i in range(3)}),
    Case("causal by heads", lambda *a: attend(*a, causal=True), ((2, 5, 16),) * 3, {0: (2, even(16, inner=4))}),
    Case(
        "grouped heads",
        lambda q, k, v: attend(q, k, v, enable_gqa=True),
        ((2, 5, 32), (2, 5, 16), (2, 5, 16)),
        {0: (2, even(32, inner=8)), 1: (2, even(16, inner=4)), 2: (2, even(16, inner=4))},
    ),
    Case(
        "few key heads",
        lambda q, k, v: attend(q, k.repeat_interleave(4, 2), v.repeat_interleave(4, 2)),
        ((2, 5, 16), (2, 5, 4), (2, 5, 4)),
        {0: (2, even(16, inner=4))},
    ),
    Case("attention by hand", by_hand, ((2, 5, 16),) * 3, {i: (2, even(16, inner=4)) for i in range(3)}),
    Case("rotary", rope, ((2, 5, 16), (5, 4)), {0: (2, even(16, inner=4))}),
    Case("fused", lambda x: x.chunk(3, -1)[1] * x.split(4, -1)[0], ((2, 12),), {0: (1, even(12, outer=3))}),
    Case("fused by heads", lambda x: x.view(2, 3, 4, 2).unbind(1)[2], ((2, 24),), {0: (1, even(24, outer=3, inner=2))}),
    Case("layer norm", lambda x, w, b: F.layer_norm(x, (6,), w, b), ((2, 8, 6), (6,), (6,)), {0: (1, even(8))}),
    Case(
        "layer norm over the cut", lambda x, w, b: F.layer_norm(x, (6,), w, b), ((2, 6), (6,), (6,)), {0: (1, even(6))}
    ),
    Case("rms norm", lambda x, w: F.rms_norm(x, (6,), w), ((2, 8, 6), (6,)), {0: (1, even(8))}),
    Case("variance", lambda x: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1), ((2, 8, 6),), {0: (1, even(8))}),
    Case("mean over the cut", lambda x: x.mean(1), ((2, 8, 6),), {0: (1, even(8))}, ("all_reduce",)),
    Case("sum of all", lambda x: (x * x).sum(), ((2, 8, 6),), {0: (1, even(8))}, ("all_reduce",)),
    Case("softmax", lambda x: x.softmax(-1), ((2, 8, 6),), {0: (1, even(8))}),
    Case("softmax over the cut", lambda x: x.softmax(1), ((2, 8, 6),), {0: (1, even(8))}, ("all_gather",)),
    Case("rows by tokens", lambda q, k, v: attend(q, k, v), ((2, 8, 16),) * 3, {i: (1, even(8)) for i in range(3)}),
    Case(
        "causal by tokens",
        lambda q, k, v: attend(q, k, v, causal=True),
        ((2, 8, 16),) * 3,
        {i: (1, lambda ranks: Cut.zigzag(8, ranks)) for i in range(3)},
    ),
    Case("by hand by tokens", by_hand, ((2, 8, 16),) * 3, {i: (1, even(8)) for i in range(3)}),
    Case("shift", lambda x: x[:, 1:] * x[:, :-1].sum(-1, keepdim=True)[:, :1], ((2, 9, 6),), {0: (1, even(9))}),
    Case("index", lambda x: x[:, None, ..., 2], ((2, 9, 6),), {0: (1, even(9))}),
    Case("cat", lambda a, b: torch.cat((a, b), 1), ((2, 4, 6), (2, 3, 6)), {0: (2, even(6))}),
    Case("stack", lambda a, b: torch.stack((a, b), 1), ((2, 6), (2, 6)), {0: (1, even(6)), 1: (1, even(6))}),
    Case("flatten tokens", lambda x: x.reshape(-1, 6) * 2, ((2, 8, 6),), {0: (1, even(8))}),
    Case("expand", lambda x: x[:, :, None].expand(2, 4, 3, 5).reshape(2, 12, 5), ((2, 4, 5),), {0: (1, even(4))}),
    Case(
        "classes",
        lambda x: F.cross_entropy(x, TARGET, reduction="sum", label_smoothing=0.1),
        ((8, 10),),
        {0: (1, even(10))},
        ("all_reduce",) * 4,
    ),
    Case("classes, mean", lambda x: F.cross_entropy(x, TARGET), ((8, 10),), {0: (1, even(10))}, ("all_reduce",) * 3),
    Case(
        "samples", lambda x: F.cross_entropy(x, TARGET, reduction="sum"), ((8, 10),), {0: (0, even(8))}, ("all_reduce",)
    ),
    Case(
        "tokens of samples",
        lambda x: F.cross_entropy(x.view(-1, 10), TARGET, reduction="sum"),
        ((2, 4, 10),),
        {0: (1, even(4))},
        ("all_reduce",),
    ),
    Case(
        "rows of a table",
        lambda w: F.embedding(TARGET.clamp(min=0), w, 3) ** 2,
        ((10, 4),),
        {0: (0, even(10))},
        ("all_reduce",),
    ),
    Case("columns of a table", lambda w: F.embedding(TARGET.clamp(min=0), w) ** 2, ((10, 4),), {0: (1, even(4))}),
    Case("unknown operation", lambda x: torch.fft.rfft(x, dim=-1).abs(), ((2, 8),), {0: (1, even(8))}, ("all_gather",)),
    Case("argmax", lambda x: x * x.argmax(-1, keepdim=True), ((4, 9),), {0: (1, even(9))}),
]


@pytest.mark.parametrize("ranks", [3, *longer(2)])
def test_every_operation_equals_the_one_on_wholes(ranks: int) -> None:
    def work(place: Place, report: Callable[[int], None]) -> list[str]:
        with default_process_group(place, torch.device("cpu")):
            rows = [(case, sums) for sums in (False, True) for case in CASES]  # same gradients, and summed ones
            return [wrong for case, sums in rows if (wrong := _difference(case, place, sums))]

    for rank, wrong in enumerate(launch(work, ranks)):
        assert not wrong, f"rank {rank}: " + "; ".join(wrong)


def _difference(case: Case, place: Place, sums: bool) -> str:
    sent: list[str] = []
    group = dist.group.WORLD
    axis = Axis(
        "tp", size=place.world_size, rank=place.rank, group=group, sums=sums, notice=lambda kind, _: sent.append(kind)
    )
    generator = torch.Generator().manual_seed(7)
    inputs = [torch.randn(shape, generator=generator).requires_grad_() for shape in case.shapes]
    expected = case.run(*inputs)
    weights = torch.randn(expected.shape, generator=generator)
    (expected * weights).sum().backward()

    given: list[Any] = []
    held: list[tuple[Tensor, tuple[int, Cut] | None]] = []
    for index, tensor in enumerate(inputs):
        if index in case.cuts:
            dim, make = case.cuts[index]
            cut = make(place.world_size)
            local = _part(tensor.detach(), dim, cut, place.rank).clone().requires_grad_()
            given.append(sliced(local, [Placed(axis, dim, cut)]))
            held.append((local, (dim, cut)))
        else:
            local = tensor.detach().clone().requires_grad_()
            local = torch.nn.Parameter(local) if index in case.parameters else local
            given.append(local)
            held.append((local, None))
    try:
        out = case.run(*given)
        forward = tuple(sent)
        found = out.whole() if is_sliced(out) else out
        if not torch.allclose(found, expected, atol=2e-6):
            return f"{case.name}: value off by {float((found - expected).abs().max()):.2g}"
        (found * weights).sum().backward()
    except Exception as error:
        return f"{case.name}: {type(error).__name__}: {error}"
    for index, ((local, where), tensor) in enumerate(zip(held, inputs, strict=True)):
        if local.grad is None or tensor.grad is None:
            if (local.grad is None) != (tensor.grad is None) and not sums:
                return f"{case.name}: gradient of input {index} on one side only"
            grad = local.grad if local.grad is not None else torch.zeros_like(local)
        else:
            grad = local.grad
        want = tensor.grad if tensor.grad is not None else torch.zeros_like(tensor)
        if where is not None:
            want = _part(want, *where, place.rank)
            grad = grad / place.world_size if sums else grad
        elif sums:
            grad = grad.clone()
            dist.all_reduce(grad)
            grad /= place.world_size
        if not torch.allclose(grad, want, atol=5e-6):
            return f"{case.name}: gradient of input {index} off by {float((grad - want).abs().max()):.2g}"
    if case.sends and forward != case.sends:
        return f"{case.name}: sent {forward}, expected {case.sends}"
    return ""


def _part(tensor: Tensor, dim: int, cut: Cut, rank: int) -> Tensor:
    return torch.cat([tensor.narrow(dim, a, b - a) for a, b in cut.expanded()[rank]] or [tensor.narrow(dim, 0, 0)], dim)
