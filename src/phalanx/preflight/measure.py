"""Sweeps of this machine in workers like those that train: one alone, as many as there are cores, and groups.

Beside them the kernels of one GPU, timed: the constants that forecasts otherwise take from the GPU's family.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import mean, median
from typing import Any

import torch
import torch.nn.functional as F

from phalanx.comm import Place, default_process_group, device_for
from phalanx.config import Cluster
from phalanx.device_kinds import DeviceKind
from phalanx.forecast.rates import rates
from phalanx.hardware import return_freed_memory
from phalanx.hardware.calibrate import Sweeps
from phalanx.hardware.sweeps import KINDS, QUICK, SIZES, WHOLE, MeasuredExchange, Measurement, Pace, exchanges, sweep
from phalanx.launch.local import launch


def measure(cores: int, counts: Sequence[int], *, quick: bool = False) -> Sweeps:
    """Every sweep of the CPU; ``rest`` and ``relay`` are left empty.

    Args:
        cores: that compute beside each other.
        counts: of ranks, 2 or more, to measure collectives of.
        quick: hardly measure at all, to see that it works.
    """
    pace = QUICK if quick else Pace()
    hasty = replace(pace, rounds=max(2, pace.rounds // 2))
    kept = [_sweep_in_workers(1, pace)[0]]
    returned = kept[0] if quick else _sweep_in_workers(1, hasty, returned=True)[0]
    beside = _sweep_in_workers(cores, hasty) if cores > 1 and not quick else ()
    groups: list[MeasuredExchange] = []
    for count in counts:
        groups += _exchange_in_workers(count, quick)
        if not quick:
            # a shared machine is faster in one quarter of a minute than in the next
            kept.append(_sweep_in_workers(1, pace)[0])
    whole = tuple(replace(each[0], seconds=mean(one.seconds for one in each)) for each in zip(*kept, strict=True))
    return Sweeps(kept=whole, returned=returned, beside=beside, exchanges=tuple(groups), rest={}, relay={})


def _sweep_in_workers(workers: int, pace: Pace, *, returned: bool = False) -> tuple[tuple[Measurement, ...], ...]:
    """The sweep of so many workers at once."""

    def work(place: Place, report: Callable[[int], None]) -> list[dict[str, Any]]:
        if returned:
            return_freed_memory()
        return [asdict(point) for point in sweep(pace)]

    swept = launch(work, workers)
    return tuple(tuple(Measurement(**{**row, "sizes": tuple(row["sizes"])}) for row in rows) for rows in swept)  # pyrefly: ignore[bad-argument-type]


def _exchange_in_workers(ranks: int, quick: bool) -> tuple[MeasuredExchange, ...]:
    def work(place: Place, report: Callable[[int], None]) -> list[dict[str, Any]]:
        torch.set_num_threads(1)
        with default_process_group(place, device_for(place, "cpu")):
            rows = exchanges(WHOLE, **few)
            return_freed_memory()  # as plans have it that shard or split, whose exchanges the others are
            rows += exchanges(tuple(kind for kind in KINDS if kind not in WHOLE), **few)
        return [asdict(row) for row in rows]

    few: dict[str, Any] = {"rounds": 2, "sizes": SIZES[:2]} if quick else {}
    return tuple(MeasuredExchange(**row) for row in launch(work, ranks)[0])


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


QUICK_KERNELS = KernelSizes(product=256, stream=2**20, tokens=64, calls=50)


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
        return median(rounds)
