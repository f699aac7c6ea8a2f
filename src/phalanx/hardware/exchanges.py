"""How long collectives take on this machine: all ranks of the default group take part."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "send")
WHOLE = ("all-reduce",)
"""What replicas that hold the whole model need."""

CACHED = 8_388_608  # bytes of a tensor up to which those of all ranks fit their cache
SIZES = (4_096, 65_536, 1_048_576, CACHED, 4 * CACHED)  # bytes of the whole tensor on one rank
_SIDE = 512  # of the square product before each call: some milliseconds of a CPU core
_CALLS = 4  # of a round


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredExchange:
    """One measurement.

    Attributes:
        kind: ``all-reduce``, ``all-gather``, ``reduce-scatter``, ``all-to-all`` or ``send``.
        size: bytes of the whole tensor on one rank.
    """

    kind: str
    ranks: int
    size: float
    seconds: float


def exchanges(
    kinds: tuple[str, ...] = KINDS, *, device: str = "cpu", rounds: int = 7, sizes: tuple[int, ...] = SIZES
) -> list[MeasuredExchange]:
    """Collectives of ``kinds`` at every size. Collective; every rank gets its own times, which differ little."""
    import torch
    import torch.distributed as dist

    ranks, found = dist.get_world_size(), list[MeasuredExchange]()
    for size in sizes:
        count = max(1, size // 4 // ranks) * ranks
        whole, part = torch.ones(count, device=device), torch.ones(count // ranks, device=device)
        works = _works(whole, part)
        for kind in kinds:
            work = works[kind]
            fewer = 1 if size < CACHED else 2 if size == CACHED else 5
            seconds = _together(work, device, max(2, rounds // fewer))
            seconds /= 2 if kind == "send" else 1
            found.append(MeasuredExchange(kind=kind, ranks=ranks, size=4.0 * count, seconds=seconds))
    return found


def _works(whole: Any, part: Any) -> dict[str, Callable[[], Any]]:
    import torch.distributed as dist

    rank, ranks = dist.get_rank(), dist.get_world_size()
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    other = whole.clone()

    def hand_on() -> None:
        # stage by stage, as pipelines do: the even ranks send to the next, and get back
        peer = rank ^ 1
        if peer >= ranks:
            return
        for sender in (0, 1):
            (dist.send if rank % 2 == sender else dist.recv)(whole, peer)

    return {
        "all-reduce": lambda: dist.all_reduce(whole, op=dist.ReduceOp.MAX),
        "all-gather": lambda: gather(whole, part),
        "reduce-scatter": lambda: scatter(part, whole, op=dist.ReduceOp.MAX),
        "all-to-all": lambda: dist.all_to_all_single(other, whole),
        "send": hand_on,
    }


def _together(work: Callable[[], Any], device: str, rounds: int) -> float:
    """Seconds that a call adds to ranks that compute before each, as they do in a step: what one waits for another
    is part of it. The middle one of the rounds, and no less than the fastest of calls that ranks begin together."""
    import torch
    import torch.distributed as dist

    matrix = torch.ones(_SIDE, _SIDE, device=device)

    def compute() -> None:
        torch.mm(matrix, matrix)

    def seconds(*calls: Callable[[], Any]) -> float:
        dist.barrier()
        begun = time.perf_counter()
        for _ in range(_CALLS):
            for call in calls:
                call()
        if device.startswith("cuda"):
            torch.cuda.synchronize()
        return (time.perf_counter() - begun) / _CALLS

    seconds(compute, work)
    added = median(seconds(compute, work) - seconds(compute) for _ in range(rounds))
    return max(added, min(seconds(work) for _ in range(_CALLS)))
