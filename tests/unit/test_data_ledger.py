"""The ledger shows what was seen, survives crashes and changes of world size, and the audit finds what is wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_events import FullDisk

from chaos.run_equality import read_ledger
from phalanx.data import GlobalBatchSampler, Ledger, MicroBatch, StepBatch, audit, records
from phalanx.data import ledger as ledger_module
from phalanx.errors import SpecError
from phalanx.placement.batch_split import share

LENGTH, BATCH = 22, 6
SAMPLER = GlobalBatchSampler(length=LENGTH, batch=BATCH, seed=1)


def a_step(step: int, ids: list[int], epoch: int = 0) -> StepBatch:
    micro = MicroBatch(batch=None, ids=tuple(ids), samples=len(ids))
    filler = MicroBatch(batch=None, ids=(), samples=0)
    return StepBatch(step=step, epoch=epoch, samples=BATCH, parts=((micro, filler),))


def run(folder: Path, world_size: int, first: int, stop: int, *, told: bool = True, **changes: list[int]) -> None:
    """Records steps first..stop-1 as ``world_size`` ranks would. ``changes``: rank<r>step<s>=ids."""
    for rank in range(world_size):
        with Ledger(folder, rank=rank, first_step=first, world_size=world_size if told else 0) as ledger:
            for step in range(first, stop):
                start, end = share(SAMPLER.samples(step), rank, world_size)
                ids = changes.get(f"rank{rank}step{step}", SAMPLER.ids(step)[start:end].tolist())
                ledger.record(a_step(step, ids, SAMPLER.epoch_of(step)))


def audited(folder: Path, **options: Any) -> list[str]:
    return audit(folder, **{"length": LENGTH, "batch": BATCH, "drop_last": False, **options})


class TestReading:
    @pytest.mark.parametrize(("before", "after", "again"), [(2, 3, 3), (3, 1, 3), (4, 4, 3), (4, 2, 0)])
    def test_a_crash_and_a_resume_on_another_world_size(
        self, tmp_path: Path, before: int, after: int, again: int
    ) -> None:
        run(tmp_path, before, 0, 5)
        run(tmp_path, after, again, 8)
        assert audited(tmp_path) == []
        assert len(list(tmp_path.iterdir())) == before + (after if again else 0)

    def test_going_back_behind_a_segment_takes_its_place(self, tmp_path: Path) -> None:
        run(tmp_path, 2, 0, 5)
        run(tmp_path, 2, 4, 6)
        run(tmp_path, 3, 2, 8)
        assert audited(tmp_path) == []
        assert {path.name[:8] for path in tmp_path.iterdir()} == {"00000000", "00000002"}

    @settings(max_examples=30, deadline=None)
    @given(cut=st.integers(0, 300))
    def test_a_torn_file_gives_its_whole_records(self, tmp_path_factory: pytest.TempPathFactory, cut: int) -> None:
        folder = tmp_path_factory.mktemp("ledger")
        run(folder, 1, 0, 4)
        (path,) = folder.iterdir()
        content = path.read_bytes()
        path.write_bytes(content[: min(cut, len(content))])
        found = read_ledger(folder)
        assert list(found) == list(range(len(found)))
        assert all(ids.tolist() == sorted(SAMPLER.ids(step).tolist()) for step, (_, ids) in found.items())
        size = 24 + 4 * BATCH
        assert len(found) == (max(0, min(cut, 16 + 3 * size) - 16) // size if cut < len(content) else 4)

    def test_ids_beyond_32_bits(self, tmp_path: Path) -> None:
        ids = [2**40, 3, 2**32]
        with Ledger(tmp_path, rank=0, first_step=0) as ledger:
            ledger.record(a_step(0, ids))
            ledger.record(a_step(1, [5]))
        found = read_ledger(tmp_path)
        assert found[0][1].tolist() == sorted(ids)
        assert found[1][1].dtype == np.int64

    def test_a_run_that_has_lost_the_folder_writes_into_nobodys_file(self, tmp_path: Path) -> None:
        earlier = Ledger(tmp_path, rank=0, first_step=0)
        with Ledger(tmp_path, rank=0, first_step=0) as ledger:
            ledger.record(a_step(0, [7]))
            ledger.flush()
            for step in range(3):
                earlier.record(a_step(step, [1, 2, 3, 4]))
            earlier.close()
        assert {step: ids.tolist() for step, (_, ids) in read_ledger(tmp_path).items()} == {0: [7]}

    def test_what_ends_a_run_is_not_hidden_by_its_ledger(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        disk = FullDisk(monkeypatch)

        def fails() -> None:
            with Ledger(tmp_path, rank=0, first_step=0) as ledger:
                disk.room = 0
                ledger.record(a_step(0, [1]))
                raise KeyError("cause")

        with pytest.raises(KeyError, match="cause"):
            fails()
        assert read_ledger(tmp_path) == {}

    @pytest.mark.parametrize("place", ["file", "folder"])
    def test_no_link_is_followed(self, tmp_path: Path, place: str) -> None:
        victim, folder = tmp_path / "victim", tmp_path / "run" / "ledger"
        victim.mkdir()
        (victim / "00000009-rank00000.bin").write_bytes(b"mine")
        if place == "folder":
            folder.parent.mkdir()
            folder.symlink_to(victim)
        else:
            folder.mkdir(parents=True)
            (folder / "00000000-rank00000.bin").symlink_to(victim / "00000009-rank00000.bin")
        with pytest.raises(SpecError, match="a symbolic link"):
            Ledger(folder, rank=0, first_step=0)
        with pytest.raises(SpecError, match="a symbolic link"):
            read_ledger(folder)
        assert [path.read_bytes() for path in victim.iterdir()] == [b"mine"]

    def test_a_tail_of_zeros_is_no_record(self, tmp_path: Path) -> None:
        run(tmp_path, 1, 0, 2)
        (path,) = tmp_path.iterdir()
        path.write_bytes(path.read_bytes() + bytes(100))
        assert list(read_ledger(tmp_path)) == [0, 1]


def test_of_many_ranks_no_file_stays_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each mapped file is an open one, and the system allows only so many."""
    monkeypatch.setattr(ledger_module, "_MAPPED", 3)
    run(tmp_path, 4, 0, 2)
    before = len(list(Path("/proc/self/fd").iterdir()))
    found = records(tmp_path)
    assert len(list(Path("/proc/self/fd").iterdir())) == before
    assert [one.rank for one in found[1]] == [0, 1, 2, 3]
    assert {step: ids.tolist() for step, (_, ids) in read_ledger(tmp_path).items()} == {
        step: sorted(SAMPLER.ids(step).tolist()) for step in (0, 1)
    }


class TestAudit:
    def test_a_sample_twice_on_one_rank(self, tmp_path: Path) -> None:
        ids = SAMPLER.ids(1).tolist()
        run(tmp_path, 1, 0, 4, rank0step1=[ids[0], ids[0], *ids[2:]])
        twice, unseen = audited(tmp_path)
        assert f": {ids[0]} (by rank 0 in step 1 and rank 0 in step 1)" in twice
        assert unseen.endswith(f"never seen: {ids[1]}")

    def test_missing_steps(self, tmp_path: Path) -> None:
        run(tmp_path, 1, 0, 1)
        run(tmp_path, 1, 2, 3)
        run(tmp_path, 1, 5, 6)
        found = audited(tmp_path)
        assert found[:2] == ["step 1 is missing", "steps 3 to 4 are missing"]
        assert any(line.startswith("epoch 0: 10 samples never seen") for line in found)

    def test_an_unfinished_epoch_may_lack_samples_and_samples_may_be_dropped(self, tmp_path: Path) -> None:
        assert "no step was recorded" in audited(tmp_path)[0]
        run(tmp_path, 1, 0, 3)
        assert audited(tmp_path, drop_last=True) == []
        run(tmp_path, 2, 0, 6)
        assert audited(tmp_path) == []

    def test_ids_and_epochs_of_other_data(self, tmp_path: Path) -> None:
        ids = SAMPLER.ids(1).tolist()
        run(tmp_path, 1, 0, 2, rank0step1=[*ids[:5], 99])
        assert audited(tmp_path) == ["epoch 0: 1 id beyond the 22 samples of the data: 99"]
        with Ledger(tmp_path, rank=0, first_step=2) as ledger:
            ledger.record(a_step(2, SAMPLER.ids(2).tolist(), epoch=3))
        assert "step 2 is recorded in epoch 3, but belongs to epoch 0" in audited(tmp_path)

    def test_a_stream(self, tmp_path: Path) -> None:
        with Ledger(tmp_path, rank=0, first_step=0) as ledger:
            ledger.record(a_step(0, [0, 1]))
            ledger.record(a_step(1, [2, 0]))
            ledger.record(a_step(2, [0, 1], epoch=1))
        assert audited(tmp_path, length=None) == [
            "epoch 0: 1 sample seen more than once: 0 (by rank 0 in step 0 and rank 0 in step 1)"
        ]
