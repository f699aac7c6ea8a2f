"""CUDA's fused attention, tile by tile and merged, against the same written out."""

from __future__ import annotations

import pytest
import torch

from phalanx.parallel.context.flash_block import Efficient, Flash, Kernel, SdpaArgs, Tile, UnfusedAttention, kernel_for
from phalanx.parallel.context.ring import attend
from phalanx.parallel.local_shards import Axis, Cut

pytestmark = pytest.mark.gpu

KERNELS: list[tuple[Kernel, torch.dtype, bool, float]] = [
    (Flash(0.3), torch.bfloat16, False, 2e-2),
    (Flash(0.3), torch.float16, False, 3e-3),
    (Efficient(0.3), torch.float32, False, 1e-4),
    (Efficient(0.3), torch.float32, True, 1e-4),
    (Efficient(0.3), torch.bfloat16, True, 2e-2),
]


@pytest.mark.parametrize("key_heads", [4, 2])
@pytest.mark.parametrize(("rows", "keys", "causal"), [(40, 40, True), (40, 24, False), (7, 51, False)])
@pytest.mark.parametrize(("kernel", "dtype", "masked", "off"), KERNELS)
def test_a_tile_is_what_is_written_out(
    kernel: Kernel, dtype: torch.dtype, masked: bool, off: float, rows: int, keys: int, causal: bool, key_heads: int
) -> None:
    torch.manual_seed(0)
    q, grad = (torch.randn(2, 4, rows, 16, device="cuda", dtype=dtype) for _ in range(2))
    k, v = (torch.randn(2, key_heads, keys, 16, device="cuda", dtype=dtype) for _ in range(2))
    bias = None
    if masked:
        bias = torch.rand(2, 1, rows, keys, device="cuda") > 0.5
        bias[:, :, 0], bias[:, :, 1:, 0] = False, True
    tile = Tile(q, k, v, bias, causal)
    plain = UnfusedAttention(0.3)
    out, lse = kernel.forward(tile)
    expected, expected_lse = plain.forward(tile)
    assert torch.allclose(out.float(), expected.float(), atol=off)
    assert torch.allclose(lse, expected_lse, atol=off)
    # As part of a softmax over more keys than these.
    over_all = torch.logaddexp(expected_lse, torch.randn_like(expected_lse))
    for found, wanted in zip(
        kernel.backward(tile, grad, out, over_all)[:3], plain.backward(tile, grad, out, over_all)[:3], strict=True
    ):
        assert torch.allclose(found.float(), wanted.float(), atol=4 * off)


@pytest.mark.parametrize(("dtype", "kernel"), [(torch.bfloat16, Flash), (torch.float32, Efficient)])
def test_the_fast_kernel_is_chosen(dtype: torch.dtype, kernel: type) -> None:
    q, k, v = (torch.randn(2, 4, 16, 32, device="cuda", dtype=dtype) for _ in range(3))
    assert type(kernel_for(q, k, v, None, scale=None, dropout=0.0)) is kernel
    assert type(kernel_for(q, k, v, None, scale=None, dropout=0.1)) is UnfusedAttention


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_ring_runs_through(dtype: torch.dtype) -> None:
    """All of its steps on one device, with nothing sent: what is tested is shapes and types."""
    axis = Axis("cp", size=3, rank=1, group=None, sums=True)
    cut = Cut.zigzag(48, 3)
    given = [torch.randn(2, 4, 16, 32, device="cuda", dtype=dtype).requires_grad_() for _ in range(3)]
    q, k, v = given
    out = attend(axis, cut, q, k, v, SdpaArgs(None, 0.0, True, None, False))
    out.sum().backward()
    assert [tensor.grad.dtype for tensor in given if tensor.grad is not None] == [dtype] * 3
