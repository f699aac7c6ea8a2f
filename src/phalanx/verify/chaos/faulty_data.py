"""Faults that strike inside a rank: a job whose data raise, hold NaN or set the clock back, once, when told to.

Whoever injects them puts a file into a folder, ``nan-rank00001``; the first sample that this rank reads from then on
takes the file away and is hit. What reads samples to look at them before a run, in another process, is not.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, final

import torch

from phalanx.config import Job
from phalanx.data.map_style import is_stream, takes_many
from phalanx.errors import SpecError
from phalanx.launch.worker_process import RANK_NAME

_BACK = 3600.0  # seconds that the clock is set back

JOB_FILE = '''"""Written by phalanx chaos: the job, with data in which faults can be put."""

from phalanx.launch import load_job
from phalanx.verify.chaos.faulty_data import faulty


def job():
    return faulty(load_job({job!r}), {folder!r})
'''
"""The file that ``phalanx train`` is given in place of the job."""


def arm(folder: Path, kind: str, rank: int) -> Path:
    """Have the next sample that ``rank`` reads be hit; the file that is gone once it was."""
    path = folder / f"{kind}-rank{rank:05d}"
    path.touch()
    return path


def faulty(job: Job, folder: str) -> Job:
    """``job`` with data that look into ``folder`` for what is to go wrong, each time a sample is read.

    Raises:
        SpecError: its data are a stream, in which no fault can be put.
    """

    def data() -> Any:
        dataset = job.data()
        if is_stream(dataset):
            allowed = "map-style data (__getitem__ and __len__) for exception, nan and clock"
            raise SpecError.of("chaos", "a stream", allowed, "--at 'SIGKILL rank 0 step 7'")
        return _FaultyDataset(dataset, Path(folder))

    return replace(job, data=data)


class _FaultyDataset(torch.utils.data.Dataset[Any]):
    """The dataset, with its own way to read many samples at once where it has one."""

    def __init__(self, dataset: Any, folder: Path) -> None:
        self._dataset, self._armed = dataset, _Armed(folder)
        if takes_many(dataset):
            self.__getitems__: Callable[[Sequence[int]], Any] = self._many

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> Any:
        return self._armed.through(self._dataset[index])

    def _many(self, ids: Sequence[int]) -> Any:
        return self._armed.through(self._dataset.__getitems__(ids))


@final
class _Armed:
    """What is to go wrong in this process."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def through(self, sample: Any) -> Any:
        """``sample`` as it is, or hit."""
        hit: dict[str, Callable[[Any], Any]] = {"exception": _raise, "nan": _not_a_number, "clock": _set_back}
        for path in self._folder.glob("*-rank*"):
            kind, _, rank = path.name.partition("-rank")
            if _rank_here() != int(rank):
                continue
            try:
                path.unlink()
            except FileNotFoundError:  # another process that loads data for this rank was the first
                continue
            sample = hit[kind](sample)
        return sample


def _rank_here() -> int | None:
    name = Path("/proc/self/comm").read_text().strip() if sys.platform == "linux" else ""
    return int(name.removeprefix(RANK_NAME)) if name.startswith(RANK_NAME) else None


def _raise(sample: Any) -> Any:
    raise OSError("the sample could not be read: a fault that phalanx chaos injected")


def _set_back(sample: Any) -> Any:
    clock = time.time
    time.time = lambda: clock() - _BACK
    return sample


def _not_a_number(sample: Any) -> Any:
    changed = _with_nan(sample)
    if changed is None:
        raise RuntimeError("the samples hold no floating numbers that could be NaN (phalanx chaos)")
    return changed


def _with_nan(sample: Any) -> Any:
    """A copy with NaN in the place of every floating number; ``None`` where there is none."""
    match sample:
        case torch.Tensor() if sample.is_floating_point():
            return torch.full_like(sample, float("nan"))
        case dict():
            return _rebuilt(sample.values(), lambda values: dict(zip(sample, values, strict=True)))
        case list() | tuple():
            return _rebuilt(sample, type(sample) if type(sample) in (list, tuple) else tuple)
        case float():
            return float("nan")
        case _ if getattr(getattr(sample, "dtype", None), "kind", "") == "f":
            return sample * float("nan")
        case _:
            return None


def _rebuilt(values: Any, make: Callable[[list[Any]], Any]) -> Any:
    held = list(values)
    changed = [_with_nan(one) for one in held]
    if all(one is None for one in changed):
        return None
    return make([old if new is None else new for old, new in zip(held, changed, strict=True)])
