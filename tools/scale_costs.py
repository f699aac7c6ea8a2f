"""How what grows with ranks is counted, in worlds of ranks that are not there: the costs in ``scale_laws.LAWS``."""

from __future__ import annotations

import json
import os
import sys
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType
from typing import Any
from unittest.mock import patch

import torch.distributed as dist
from torch.distributed import HashStore, Store  # pyrefly: ignore
from torch.testing._internal.distributed.fake_pg import FakeStore

import phalanx
from phalanx.checkpoint.agreement import parts_of
from phalanx.checkpoint.all_ranks import StoreRendezvous, failed_of
from phalanx.checkpoint.format import Manifest, StoredFile
from phalanx.checkpoint.writing import Description, assign_writers, file_of
from phalanx.comm import Mesh, Place, data_mesh, roll_call
from phalanx.config import Plan
from phalanx.data import Ledger, MicroBatch, StepBatch, records
from phalanx.data.map_style import Fetcher, IndexedReader
from phalanx.data.sampler import GlobalBatchSampler
from phalanx.data.step_batch import BatchSplitter
from phalanx.launch.targets.launch_folder import attached_log
from phalanx.placement.batch_split import Lane
from phalanx.placement.batch_split import cuts as cuts_of
from phalanx.placement.ownership import Survey, Tensor
from phalanx.placement.step_traffic import peers as peers_of

_SOURCE = str(Path(phalanx.__file__).parent)
_MEMORY = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None  # where many files are quickly made


@dataclass(frozen=True, slots=True)
class Cost:
    """What something takes, each 0 where it is not what is counted."""

    operations: int = 0
    bytes: int = 0
    count: int = 0

    def to_dict(self) -> dict[str, int]:
        return {name: getattr(self, name) for name in ("operations", "bytes", "count") if getattr(self, name)}


def spent(action: Callable[[], object]) -> Cost:
    """What ``action`` takes: operations within Phalanx's files, and bytes at their peak.

    The lower peak of two runs: in one of them the interpreter may enlarge its table of interned strings (15 MB).
    """
    operations = 0

    def count(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal operations
        if event == "call":
            if not frame.f_code.co_filename.startswith(_SOURCE):
                return None
            frame.f_trace_opcodes, frame.f_trace_lines = True, False
        operations += event == "opcode"
        return count

    before = sys.gettrace()
    sys.settrace(count)
    try:
        action()
    finally:
        sys.settrace(before)
    return Cost(operations=operations, bytes=min(_peak(action), _peak(action)))


def _peak(action: Callable[[], object]) -> int:
    tracemalloc.start()
    try:
        begun = tracemalloc.get_traced_memory()[0]
        tracemalloc.reset_peak()
        action()
        return tracemalloc.get_traced_memory()[1] - begun
    finally:
        tracemalloc.stop()


def wide(world: int) -> Plan:
    """Slices of 8 in stages of 4, in as many copies as that makes."""
    return Plan(tp=8, pp=4, dp=world // 32)


def placement(world: int) -> Cost:
    """What a rank holds of the model, in shards of one to a rank."""
    weights = [
        Tensor(name=f"layer{at}", shape=(4 * world, 64), dtype="float32", itemsize=4, learns=True) for at in range(8)
    ]

    def held() -> object:
        return Survey(plan=Plan(fsdp=world), parameters=tuple(weights), buffers=()).shards_of(world // 2)

    return spent(held)


def peers(world: int) -> Cost:
    """Ranks that it shares a slice or a stage with."""
    plan = wide(world)
    return spent(lambda: (Mesh(plan, world // 2).peers("tp"), peers_of(plan, world // 2, ("tp", "pp"))))


@contextmanager
def fake_group(world: int, rank: int) -> Iterator[None]:
    """The default process group of one rank of a world that is not there."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    try:
        yield
    finally:
        dist.destroy_process_group()


def groups(world: int) -> Cost:
    """Process groups of ``tp=8 pp=4``, and of two stages."""
    with fake_group(world, world // 2):

        def made() -> None:
            mesh = Mesh(wide(world), world // 2)
            mesh.group("tp")
            mesh.group("pp")
            mesh.among("pp", (0, 3))

        return spent(made)


def device_mesh(world: int) -> Cost:
    """Torch's ``DeviceMesh`` of a hybrid (``dp`` × ``fsdp=64``)."""
    import torch

    with fake_group(world, world // 2):
        plan = Plan(dp=world // 64, fsdp=64)
        return spent(lambda: data_mesh(plan, torch.device("cpu")))


def cuts(world: int) -> Cost:
    """Its part of a global batch."""
    plan = Plan(dp=world // 8, fsdp=8)
    return spent(lambda: cuts_of(4 * world, Lane.of(plan, world // 2), 2))


def sampler(world: int) -> Cost:
    """Two steps of 16 samples a rank."""
    batch, data = 16 * world, 40 * world

    def asked() -> None:
        reader = IndexedReader(
            fetcher=Fetcher(range(data), None, 0),
            sampler=GlobalBatchSampler(length=data, batch=batch, seed=0),
            splitter=BatchSplitter(Lane.of(Plan(dp=world), world // 2), 4),
            first=0,
            stop=2,
            size=data,
        )
        assert sum(len(ids) for _, ids in reader.requests()) == 32

    return spent(asked)


def _ledger_of(folder: Path, world: int, rank: int, first_step: int = 0) -> Ledger:
    return Ledger(folder, rank=rank, first_step=first_step, world_size=world)


def _step(step: int, rank: int) -> StepBatch:
    micro = MicroBatch(batch=None, ids=(4 * rank, 4 * rank + 1, 4 * rank + 2, 4 * rank + 3), samples=4)
    return StepBatch(step=step, epoch=0, samples=4, parts=((micro,),))


@contextmanager
def _written(world: int) -> Iterator[Path]:
    """The ledger of one step of a whole world."""
    with TemporaryDirectory(dir=_MEMORY) as folder:
        for rank in range(world):
            with _ledger_of(Path(folder), world, rank) as ledger:
                ledger.record(_step(0, rank))
        yield Path(folder)


@lru_cache(maxsize=4)
def _ledger(world: int) -> tuple[int, int, Cost]:
    """Files and bytes of it, and what reading takes."""
    with _written(world) as folder:
        sizes = [path.stat().st_size for path in folder.iterdir()]
        return len(sizes), sum(sizes), spent(lambda: records(folder))


def ledger_files(world: int) -> Cost:
    """Files of the sample ledger."""
    return Cost(count=_ledger(world)[0])


def launch_logs(world: int) -> Cost:
    """Files of what ranks print, in the folder of a launch."""
    return Cost(count=len({attached_log(Path("run"), rank) for rank in range(world)}))


def ledger_bytes(world: int) -> Cost:
    """Bytes of the ledger in a step of 4 samples a rank."""
    return Cost(count=_ledger(world)[1])


def ledger_read(world: int) -> Cost:
    """The ledger of a step is read for an audit."""
    return _ledger(world)[2]


def ledger_begun(world: int) -> Cost:
    """A new segment, beside the files of one before it."""
    with TemporaryDirectory(dir=_MEMORY) as name:
        folder = Path(name)
        for rank in range(world):
            (folder / f"00000000-rank{rank:05d}.bin").write_bytes(b"")

        def begun() -> None:
            with _ledger_of(folder, world, world // 2, first_step=5) as ledger:
                ledger.record(_step(5, world // 2))

        return spent(begun)


def descriptions(world: int, shards: int) -> tuple[list[Description], list[int]]:
    """Of ranks with a weight in so many shards and a bias, in copies: the different ones, and which is whose."""
    rows = 4 * world
    each = rows // shards
    said: list[Description] = [
        {
            "model.weight": ["float32", [rows, 64], True, [[[at * each, 0], [each, 64]]]],
            "model.bias": ["float32", [64], True, [[[0], [64]]]],
        }
        for at in range(shards)
    ]
    return said, [rank % shards for rank in range(world)]


def agreed(world: int) -> Cost:
    """Who writes what of a checkpoint in shards of one to a rank."""
    said, of_rank = descriptions(world, world)
    return spent(lambda: parts_of(assign_writers(said, of_rank)[1], world))


def agreed_copies(world: int) -> Cost:
    """Who writes what of a checkpoint of 64 shards in copies."""
    said, of_rank = descriptions(world, 64)
    return spent(lambda: parts_of(assign_writers(said, of_rank)[1], world))


def heard(world: int) -> Cost:
    """Bytes that a rank hears of who writes what."""
    said, of_rank = descriptions(world, world)
    parts = parts_of(assign_writers(said, of_rank)[1], world)
    return Cost(count=max(len(json.dumps(part)) for part in parts))


def manifest_of(world: int, shards: int) -> Manifest:
    """Of a checkpoint of ``descriptions``."""
    stored, _ = assign_writers(*descriptions(world, shards))
    names = {chunk.file for tensor in stored.values() for chunk in tensor.chunks}
    names |= {file_of(0)}
    files = {name: StoredFile(name=name, size=1 << 20, checksums=(1,)) for name in sorted(names)}
    return Manifest(step=1, tensors=stored, files=files)


def manifest(world: int) -> Cost:
    """Bytes of a checkpoint's manifest, shards of one to a rank."""
    return Cost(count=len(manifest_of(world, world).to_bytes()))


def manifest_copies(world: int) -> Cost:
    """Bytes of the manifest of 64 shards in copies."""
    return Cost(count=len(manifest_of(world, 64).to_bytes()))


def manifest_read(world: int) -> Cost:
    """A manifest is read, shards of one to a rank."""
    given, path = json.loads(manifest_of(world, world).to_bytes()), Path("step-00000001")
    return spent(lambda: Manifest.from_json(given, path))


def verdict(world: int) -> Cost:
    """Bytes of what all ranks hear of a save that went well."""
    return Cost(count=len(json.dumps(failed_of([None] * world))))


class CountingStore:
    """A store of a meeting at which rank 0 waits for one rank more."""

    def __init__(self) -> None:
        self.calls, self._keys = 0, {roll_call._LED: b"word"}

    def get(self, key: str) -> bytes:
        self.calls += 1
        return self._keys[key]

    def add(self, key: str, amount: int) -> int:
        self.calls += 1
        self._keys[roll_call._ALL] = b"1"
        return amount

    def compare_set(self, key: str, expected: str, value: str) -> bytes:
        self.calls += 1
        return self._keys.setdefault(key, value.encode())

    def check(self, keys: Sequence[str]) -> bool:
        self.calls += 1
        return all(key in self._keys for key in keys)


def meeting(world: int) -> Cost:
    """Calls of the store until all are known to be there."""
    place, store = Place(rank=world // 2, world_size=world, store="env://", meeting="127.0.0.1:1"), CountingStore()
    with patch.object(roll_call, "_of_start", lambda reached, _: reached):
        roll_call._follow(place, store, roll_call._RollCall(place))  # pyrefly: ignore
    return Cost(count=store.calls)


def save_meets(world: int) -> Cost:
    """Rank 0 hears that all have written."""
    import threading

    store = HashStore()
    meeting = StoreRendezvous(store, "save", 0, world, patience=60, given_up=threading.Event())
    for rank in range(1, world):
        store.set(f"save/1/{rank}", "null")
    return spent(lambda: _decide_again(meeting, store, world))


def _decide_again(meeting: StoreRendezvous, store: Store, world: int) -> None:
    for rank in range(1, world):
        store.set(f"save/{meeting._rounds + 1}/{rank}", "null")
    meeting.decide(None, failed_of)


def search(world: int) -> Cost:
    """Plans that the planner prices, a sample a device."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "unit"))
    from small_profiles import transformer  # pyrefly: ignore

    from phalanx.forecast import Work
    from phalanx.hardware import cluster
    from phalanx.planner import Question
    from phalanx.planner.question import precision_for
    from phalanx.planner.search import space

    there = cluster(f"{world // 8}x8xH100")
    work = Work(profile=transformer(layers=32, width=1024), batch=world)
    question = Question(work=work, cluster=there, precision=precision_for(there), steps=0)
    return Cost(count=len(space(question)))
