"""Kernels of one GPU, timed: the constants that forecasts otherwise take from the GPU's family."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

from phalanx.config import Cluster
from phalanx.device_kinds import DeviceKind
from phalanx.forecast.rates import rates

_ROUNDS = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelSizes:
    """Sizes of what is timed.

    Attributes:
        product: rows and columns of the matrices that are multiplied.
        stream: elements of the tensors that are added.
        tokens: of each of 64 attention heads.
        calls: of a small operation.
    """

    product: int = 8192
    stream: int = 2**28
    tokens: int = 2048
    calls: int = 2000


QUICK = KernelSizes(product=256, stream=2**20, tokens=64, calls=50)


def with_measured_kernels(machine: Cluster, kind: DeviceKind, sizes: KernelSizes | None = None) -> Cluster:
    """Return ``machine`` with its first group's devices measured, by the first of them.

    Measured are the shares of the data sheet's peak (bf16 products, causal attention with heads of 128) and bandwidth
    (fp32 additions), and the host's seconds for an operation, by the names of ``Kernels``.
    """
    group, timed = machine.groups[0], _Timer(kind)
    device, sizes = group.device, sizes or KernelSizes()
    peak = device.peak["bf16"]
    # products of infinite depth are that much faster, by the law of ``Kernels.depth``
    filled = 1 + rates(device).kernels.depth / sizes.product
    forward, backward = timed.attention(sizes.tokens)
    found = {
        "product": min(1.0, filled * timed.product(sizes.product) / peak),
        "stream": min(1.0, timed.stream(sizes.stream) / device.bandwidth),
        "attention": min(1.0, forward / peak),
        "attention_backward": min(1.0, backward / peak),
        "host": timed.call(sizes.calls),
    }
    measured = replace(device, name=f"{device.name}-measured", measured=dict(sorted(found.items())))
    return replace(machine, groups=(replace(group, device=measured), *machine.groups[1:]))


class _Timer:
    def __init__(self, kind: DeviceKind) -> None:
        self._kind, self._device = kind, kind.device(0)

    def product(self, size: int) -> float:
        """Return FLOP/s of products of square bf16 matrices."""
        a, b = (torch.randn(size, size, device=self._device, dtype=torch.bfloat16) for _ in range(2))
        return 2 * size**3 / self._seconds(lambda: a @ b)

    def stream(self, size: int) -> float:
        """Return bytes/s, read and written, of sums of two fp32 tensors."""
        a, b = (torch.zeros(size, device=self._device) for _ in range(2))
        return 12 * size / self._seconds(lambda: torch.add(a, b, out=a))

    def attention(self, tokens: int) -> tuple[float, float]:
        """Return FLOP/s forward and backward; causal attention computes half of the products, backward 2.5 times."""
        shape = (4, 16, tokens, 128)
        q, k, v, grad = (torch.randn(shape, device=self._device, dtype=torch.bfloat16) for _ in range(4))
        inputs = (q.requires_grad_(), k.requires_grad_(), v.requires_grad_())

        def forward() -> torch.Tensor:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)

        flops = 4 * 4 * 16 * tokens**2 * 128 / 2
        once = self._seconds(forward)
        both = self._seconds(lambda: torch.autograd.grad(forward(), inputs, grad))
        return flops / once, 2.5 * flops / max(both - once, 0.1 * once)

    def call(self, count: int) -> float:
        """Return seconds that the host needs for an eager operation."""
        small = torch.zeros(16, device=self._device)
        return self._seconds(lambda: small.add_(1), count)

    def _seconds(self, work: Callable[[], object], count: int = 10) -> float:
        """Return seconds of one of ``count`` calls, the median of some rounds, after one to warm up."""
        work()
        rounds: list[float] = []
        for _ in range(_ROUNDS):
            self._kind.synchronize()
            begun = time.perf_counter()
            for _ in range(count):
                work()
            self._kind.synchronize()
            rounds.append((time.perf_counter() - begun) / count)
        return statistics.median(rounds)
