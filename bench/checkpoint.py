"""How long training stands still for a checkpoint, and how fast checkpoints are written and read, beside torch's own.

Standstill, one process, fp32 tensors of 64 MB each: seconds until the call returns.

- ``here, at once``: ``checkpoint.save``: written, with checksums, synced to disk and published when it returns.
- ``here, background``: what ``phalanx train`` does between steps; the copy's memory is used again.
- ``torch.save``: into one file; not synced to disk, as people do it.
- ``DCP async_save``: torch's own; staged anew each time, as it comes.

Write and read, two processes with half of each tensor's rows each (DTensor, ``Shard(0)``), gloo: seconds from when both
begin to when both are done. Both write synced files; only here are there checksums, made and compared. Files are read
from the page cache, and old ones deleted between the turns.

Contestants take turns, the first round is not counted, medians are compared.

    python bench/checkpoint.py [--rounds 5] [--megabytes 1024] [--folder .] [--json]
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import shutil
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

MP = multiprocessing.get_context("fork")
PIECE = 64 << 20
BARS = {
    "background / torch.save": 0.25,
    "background / DCP async_save": 1.0,
    "DCP write / here": 1.0,
    "DCP read / here": 1.0,
}


def tensors_of(megabytes: int) -> dict[str, torch.Tensor]:
    """So many megabytes in fp32, by name."""
    count = max(1, (megabytes << 20) // PIECE)
    return {f"model.{index}": torch.randn(PIECE // 4 // 1024, 1024) for index in range(count)}


def meet(rank: int, world_size: int, folder: Path) -> None:
    """Join a gloo group of this machine."""
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    address = f"file://{folder / 'store'}"
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=world_size)


def timed(action: Callable[[], Any]) -> tuple[float, Any]:
    """Seconds that ``action`` takes, and its result."""
    begun = time.perf_counter()
    result = action()
    return time.perf_counter() - begun, result


def standstill(folder: Path, megabytes: int, rounds: int) -> dict[str, list[float]]:
    """Seconds of each contestant's call in each round."""
    from phalanx import checkpoint

    dcp: Any = import_module("torch.distributed.checkpoint")
    meet(0, 1, folder)
    tensors, saver = tensors_of(megabytes), checkpoint.BackgroundSaver()
    found: dict[str, list[float]] = {}

    def at_once(step: int) -> None:
        seconds, _ = timed(lambda: checkpoint.save(folder / "sync", step=step, tensors=tensors, state={}))
        found.setdefault("here, at once", []).append(seconds)
        shutil.rmtree(folder / "sync")

    def background(step: int) -> None:
        asked = checkpoint.SaveRequest(folder / "background", step, tensors, {})
        seconds, _ = timed(lambda: saver.save(asked))
        found.setdefault("here, background", []).append(seconds)
        saver.wait()
        shutil.rmtree(folder / "background")

    def plain(step: int) -> None:
        seconds, _ = timed(lambda: torch.save(tensors, folder / "plain.pt"))
        found.setdefault("torch.save", []).append(seconds)

    def theirs(step: int) -> None:
        shutil.rmtree(folder / "dcp", ignore_errors=True)
        seconds, done = timed(lambda: dcp.async_save(dict(tensors), checkpoint_id=folder / "dcp"))
        found.setdefault("DCP async_save", []).append(seconds)
        done.result()

    for step in range(rounds + 1):
        for contestant in (at_once, background, plain, theirs):
            contestant(step)
            os.sync()
    saver.close()
    return {name: values[1:] for name, values in found.items()}


def write_and_read(folder: Path, megabytes: int, rounds: int, rank: int) -> dict[str, list[float]]:
    """Seconds of each contestant in each round, as this rank of two sees them."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    from phalanx import checkpoint

    dcp: Any = import_module("torch.distributed.checkpoint")
    meet(rank, 2, folder)
    mesh = init_device_mesh("cpu", (2,))

    def halves(fill: bool) -> dict[str, Any]:
        return {
            name: DTensor.from_local(half if fill else torch.zeros_like(half), mesh, [Shard(0)], run_check=False)
            for name, half in tensors_of(megabytes // 2).items()
        }

    tensors, targets = halves(True), halves(False)
    found: dict[str, list[float]] = {}

    def measure(name: str, action: Callable[[], Any]) -> None:
        dist.barrier()

        def both() -> None:
            action()
            dist.barrier()

        found.setdefault(name, []).append(timed(both)[0])
        if rank == 0:
            os.sync()
        dist.barrier()

    for step in range(rounds + 1):
        here, theirs = folder / f"here-{step}", folder / f"dcp-{step}"
        measure("write here", lambda: checkpoint.save(here, step=step, tensors=tensors, state={}))  # noqa: B023
        measure("write DCP", lambda: dcp.save(dict(tensors), checkpoint_id=theirs))  # noqa: B023
        path = here / f"step-{step:08d}"
        measure("read here", lambda: checkpoint.load(path, targets))  # noqa: B023
        measure("read DCP", lambda: dcp.load(dict(targets), checkpoint_id=theirs))  # noqa: B023
        assert all(torch.equal(targets[name].to_local(), tensors[name].to_local()) for name in tensors)
        dist.barrier()
        if rank == 0:
            shutil.rmtree(theirs)
            shutil.rmtree(here)
            os.sync()
    return {name: values[1:] for name, values in found.items()}


def in_process(target: Callable[..., dict[str, list[float]]], *given: Any) -> Any:
    """A process that runs ``target``, and where its answer comes."""
    answer = MP.SimpleQueue()
    process = MP.Process(target=lambda: answer.put(target(*given)))
    process.start()
    return process, answer


def main() -> None:
    """Measure, compare, print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--megabytes", type=int, default=1024)
    parser.add_argument("--folder", type=Path, default=Path())
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    seconds: dict[str, list[float]] = {}
    load = os.getloadavg()[0]
    for target, ranks in ((standstill, [()]), (write_and_read, [(0,), (1,)])):
        with tempfile.TemporaryDirectory(dir=given.folder, prefix=".checkpoint-") as folder:
            common = (Path(folder).resolve(), given.megabytes, given.rounds)
            processes = [in_process(target, *common, *rank) for rank in ranks]
            seconds |= next(answer.get() for _, answer in processes)
            for process, _ in processes:
                process.join()
    median = {name: statistics.median(values) for name, values in seconds.items()}
    ratios = {
        "background / torch.save": median["here, background"] / median["torch.save"],
        "background / DCP async_save": median["here, background"] / median["DCP async_save"],
        "DCP write / here": median["write DCP"] / median["write here"],
        "DCP read / here": median["read DCP"] / median["read here"],
    }
    if given.json:
        print(json.dumps({"seconds": seconds, "ratios": ratios, "load": load}))
        return
    print(f"{given.megabytes} MB, {given.rounds} rounds, load {load:.1f} at the begin")
    for name, values in seconds.items():
        print(f"{name:18} {median[name]:7.3f} s   {min(values):.3f} to {max(values):.3f}")
    for name, ratio in ratios.items():
        least = name.startswith("DCP")
        met = ratio >= BARS[name] if least else ratio <= BARS[name]
        print(f"{name:28} {ratio:6.2f}   bar {'>=' if least else '<='} {BARS[name]:g}   {'met' if met else 'missed'}")


if __name__ == "__main__":
    main()
