"""Sweeps of this machine in workers like those that train: one alone, as many as there are cores, and groups."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from statistics import mean
from typing import Any

from phalanx.comm import Place, default_process_group, device_for
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
        import torch

        torch.set_num_threads(1)
        with default_process_group(place, device_for(place, "cpu")):
            rows = exchanges(WHOLE, **few)
            return_freed_memory()  # as plans have it that shard or split, whose exchanges the others are
            rows += exchanges(tuple(kind for kind in KINDS if kind not in WHOLE), **few)
        return [asdict(row) for row in rows]

    few: dict[str, Any] = {"rounds": 2, "sizes": SIZES[:2]} if quick else {}
    return tuple(MeasuredExchange(**row) for row in launch(work, ranks)[0])
