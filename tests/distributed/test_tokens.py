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
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from law_rows import longer
from phalanx.comm import Place, default_process_group
from phalanx.config.plan import Attention
from phalanx.launch.local import launch
from phalanx.parallel.context.attention import positions
from phalanx.parallel.context.ring import meetings
from phalanx.parallel.local_shards import Axis, Cut, Placed, is_sliced, sliced
from phalanx.parallel.local_shards.axis import concatenated as join
from phalanx.parallel.local_shards.axis import piece

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


@pytest.mark.parametrize("ranks", [3, *longer(2, 4)])
def test_every_way_equals_one_device(ranks: int) -> None:
    def work(place: Place, report: Callable[[int], None]) -> list[str]:
        with default_process_group(place, torch.device("cpu")):
            pairs = [(way, case) for way in WAYS for case in CASES]
            found = [(way, _difference(case, axis_of(place, way))) for way, case in pairs]
            return [f"{way}: {wrong}" for way, wrong in found if wrong]

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
            assert tensor.grad is not None
            assert local.grad.dtype == local.dtype
            off[name] = _off(local.grad, mine(tensor.grad))
        if mask is not None and mask.requires_grad:
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


@pytest.mark.parametrize("way", ["ring", *longer("alltoall", "gather")])
def test_dropout_drops_and_gradients_know_what(way: Attention) -> None:
    ranks, tokens, share = 2, 24, 0.3

    def work(place: Place, report: Callable[[int], None]) -> list[Any]:
        torch.manual_seed(5)
        with default_process_group(place, torch.device("cpu")):
            axis = axis_of(place, way)
            cut = Cut.zigzag(tokens, place.world_size)
            q, k, v = (piece(one, 2, cut, place.rank).clone().requires_grad_() for one in _to_drop(tokens))
            given = (sliced(tensor, [Placed(axis, 2, cut)]) for tensor in (q, k, v))
            out = attention(*given, dropout_p=share, is_causal=True)
            out.local.square().sum().backward()
            tensors = [out.local, *(tensor.grad for tensor in (q, k, v)), torch.get_rng_state()]
            return [tensor.tolist() for tensor in tensors if tensor is not None]

    cut = Cut.zigzag(tokens, ranks)
    *parts, states = zip(*launch(work, ranks), strict=True)
    out, *grads = (join([torch.tensor(one) for one in part], 2, cut) for part in parts)
    assert states[0] == states[1], "ranks leave the generator in different states"
    wholes = [tensor.requires_grad_() for tensor in _to_drop(tokens)]
    q, k, v = wholes
    seen = torch.ones(tokens, tokens, dtype=torch.bool).tril()
    weights = (q @ k.transpose(-1, -2) * 8**-0.5).masked_fill(~seen, -torch.inf).softmax(-1)
    kept = out.abs() > 0  # values are the unit matrix: what comes out is the weights
    expected = weights * kept / (1 - share) @ v
    assert _off(out, expected) < 1e-5
    assert abs(1 - kept.sum() / seen.sum() / 4 - share) < 0.05
    expected.square().sum().backward()
    for grad, tensor in zip(grads, wholes, strict=True):
        assert tensor.grad is not None
        assert _off(grad, tensor.grad) < 2e-5
    same_rows = torch.equal(kept[:, :, 12:18, :6], kept[:, :, 18:, :6])
    same_heads = torch.equal(kept[:, :2], kept[:, 2:])
    assert not same_rows, "ranks draw the same"
    assert not same_heads, "ranks draw the same"


def _to_drop(tokens: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    q, k = (torch.randn(1, 4, tokens, 8, generator=generator) for _ in range(2))
    return [q, k, torch.eye(tokens).expand(1, 4, tokens, tokens).clone()]


def test_heads_and_tokens_are_cut_at_once() -> None:
    def work(place: Place, report: Callable[[int], None]) -> list[float]:
        with default_process_group(place, torch.device("cpu")):
            return [off for way in WAYS for off in away(way, place)]

    def away(way: Attention, place: Place) -> list[float]:
        rows: list[Any] = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        columns: list[Any] = [dist.new_group([0, 2]), dist.new_group([1, 3])]
        at = divmod(place.rank, 2)
        tp = Axis("tp", size=2, rank=at[1], group=rows[at[0]])
        cp = Axis("cp", size=2, rank=at[0], group=columns[at[1]], sums=True, attention=way)
        heads, tokens = Cut.even(5, 2), Cut.zigzag(10, 2)
        mine = lambda one: piece(piece(one, 1, heads, at[1]), 2, tokens, at[0])  # noqa: E731
        torch.manual_seed(2)
        wholes = [torch.randn(2, 5, 10, 8).requires_grad_() for _ in range(3)]
        expected = attention(*wholes, is_causal=True)
        expected.square().sum().backward()
        locals_ = [mine(one.detach()).clone().requires_grad_() for one in wholes]
        given = [sliced(one, [Placed(tp, 1, heads), Placed(cp, 2, tokens)]) for one in locals_]
        out = attention(*given, is_causal=True)
        out.local.square().sum().backward()
        pairs = [(out.local, expected), *((a.grad, b.grad) for a, b in zip(locals_, wholes, strict=True))]
        return [_off(local, mine(whole)) for local, whole in pairs]

    for off in launch(work, 4):
        assert max(off) < 5e-6


def test_keys_that_are_whole_are_read_where_they_are() -> None:
    def work(place: Place, report: Callable[[int], None]) -> list[tuple[list[float], list[str]]]:
        with default_process_group(place, torch.device("cpu")):
            return [off_and_sent(way, place) for way in WAYS]

    def off_and_sent(way: Attention, place: Place) -> tuple[list[float], list[str]]:
        sent: list[str] = []
        axis = axis_of(place, way, notice=lambda kind, _: sent.append(kind))
        cut = Cut.even(10, place.world_size)
        torch.manual_seed(2)
        q, k, v = (torch.randn(2, 4, size, 8) for size in (10, 7, 7))
        mask = torch.randn(10, 7)
        there = sliced(piece(q, 2, cut, place.rank), [Placed(axis, 2, cut)])
        out = attention(there, k, v, mask)
        off = [_off(out.local, piece(attention(q, k, v, mask), 2, cut, place.rank))]
        q, k, v = (torch.randn(2, 4, 10, 8) for _ in range(3))
        there = [sliced(piece(one, 2, cut, place.rank), [Placed(axis, 2, cut)]) for one in (q, k)]
        out = attention(*there, v)
        sends = list(sent)
        return [*off, _off(out.local, piece(attention(q, k, v), 2, cut, place.rank))], sends

    for off, sent in (one for rank in launch(work, 2) for one in rank):
        assert max(off) < 5e-6
        assert sent == ["all_gather"], "of the keys, where values are whole"


def test_memory_of_a_ring_does_not_grow_with_its_ranks() -> None:
    peaks = {(way, ranks): _peak(way, ranks) for way in ("ring", "gather") for ranks in (4, 8)}
    assert peaks["ring", 8] == peaks["ring", 4]
    assert peaks["gather", 8] > 1.5 * peaks["ring", 8]


def _peak(way: Attention, ranks: int) -> int:
    """The most bytes at once that attention of 32 tokens here takes, forward and backward; nothing is sent."""
    axis = Axis("cp", size=ranks, rank=0, group=None, sums=True, attention=way)
    cut = Cut.zigzag(32 * ranks, ranks)
    given = [torch.zeros(1, 2, 32, 64).requires_grad_() for _ in range(3)]
    with _Memory() as memory:
        out = attention(*(sliced(one, [Placed(axis, 2, cut)]) for one in given), is_causal=True)
        out.local.sum().backward()
    return memory.peak


class _Memory(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._live: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                storage = leaf.untyped_storage()
                self._live[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self._live = {key: one for key, one in self._live.items() if not one[0].expired()}
        self.peak = max(self.peak, sum(size for _, size in self._live.values()))
        return result


@pytest.mark.parametrize("tokens", [24, 25, 7, 2])
@pytest.mark.parametrize(("make", "ranks"), [(Cut.even, 3), (Cut.zigzag, 2), (Cut.zigzag, 4)])
def test_exactly_the_pairs_that_meet_are_computed(make: Callable[[int, int], Cut], ranks: int, tokens: int) -> None:
    cut = make(tokens, ranks)
    computed = torch.zeros(tokens, tokens, dtype=torch.int)
    for mine in range(ranks):
        for theirs in range(ranks):
            block = torch.zeros(cut.length(mine), cut.length(theirs), dtype=torch.int)
            for rows, keys, causal in meetings(cut, mine, theirs, causal=True):
                tile = torch.ones_like(block[rows, keys])
                block[rows, keys] += tile.tril() if causal else tile
            at = torch.meshgrid(*(positions(cut, rank, torch.device("cpu")) for rank in (mine, theirs)), indexing="ij")
            computed[at] += block
    assert torch.equal(computed, torch.ones_like(computed).tril())
