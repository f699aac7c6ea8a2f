"""What a checkpoint never does: follow a link, publish what is not finite, read more than it needs, lose the last."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from itertools import product
from pathlib import Path

import pytest
import torch

from phalanx import checkpoint
from phalanx.checkpoint import PartTensor, TensorPart
from phalanx.checkpoint.folder import name_of
from phalanx.checkpoint.format import BLOCK, Manifest, not_filled
from phalanx.checkpoint.mirror import fetch_newest
from phalanx.errors import CheckpointError, DamagedError, RunError
from phalanx.files import release, take


@pytest.fixture(autouse=True)
def no_waiting_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.fsync", lambda handle: None)


def saved(folder: Path, step: int = 1, **how) -> Path:
    return checkpoint.save(folder, step=step, tensors={"model.x": torch.full((5,), float(step))}, state={}, **how)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


class TestLinks:
    def test_a_linked_file_is_not_read(self, tmp_path: Path) -> None:
        path = saved(tmp_path / "checkpoints")
        for name in names(path):
            (path / name).rename(tmp_path / name)
            (path / name).symlink_to(tmp_path / name)
            with pytest.raises(DamagedError, match=f"{name}.*(symbolic link|not a file)"):
                checkpoint.load(path, {"model.x": torch.zeros(5)})
            assert checkpoint.verify(path) != []
            assert checkpoint.latest(tmp_path / "checkpoints") is None
            (path / name).unlink()
            (tmp_path / name).rename(path / name)
        checkpoint.load(path, {"model.x": torch.zeros(5)})

    def test_saving_replaces_links_and_deletes_nothing_behind_them(self, tmp_path: Path) -> None:
        elsewhere = tmp_path / "elsewhere"
        elsewhere.mkdir()
        (elsewhere / "precious").write_text("mine")
        folder = tmp_path / "checkpoints"
        saved(folder, 1)
        for name in ("step-00000005", ".step-00000005.tmp", ".step-00000004.old", ".step-00000003.gone"):
            (folder / name).symlink_to(elsewhere)
        saved(folder, 5, keep=1)
        assert names(folder) == ["step-00000005"]
        assert checkpoint.verify(folder / "step-00000005") == []
        assert names(elsewhere) == ["precious"]

    def test_a_linked_folder_is_refused(self, tmp_path: Path) -> None:
        (tmp_path / "elsewhere").mkdir()
        (tmp_path / "checkpoints").symlink_to(tmp_path / "elsewhere")
        for action in (saved, checkpoint.latest, checkpoint.checkpoints, lambda it: checkpoint.prune(it, keep=1)):
            with pytest.raises(CheckpointError, match=r"a symbolic link[\s\S]*try: "):
                action(tmp_path / "checkpoints")
        assert names(tmp_path / "elsewhere") == []


NAN, INF = float("nan"), float("inf")


class TestFinite:
    @pytest.mark.parametrize(
        "dtype", [torch.float32, torch.bfloat16, torch.float64, torch.complex64, torch.float8_e4m3fn]
    )
    def test_is_refused_by_name_and_the_previous_stands(self, dtype: torch.dtype, tmp_path: Path) -> None:
        saved(tmp_path)
        for value in (NAN,) if dtype is torch.float8_e4m3fn else (NAN, INF, -INF):
            tensors = {"model.a": torch.zeros(9, dtype=dtype), "model.b": torch.zeros(3, 3, dtype=torch.float64)}
            tensors["model.b"][1, 2] = value
            tensors["model.b"] = tensors["model.b"].to(dtype)
            with pytest.raises(CheckpointError, match=r"model.b is not finite \(1 (NaN|infinite) of"):
                checkpoint.save(tmp_path, step=2, tensors=tensors, state={}, keep=1)
            assert names(tmp_path) == ["step-00000001"]

    def test_wherever_it_is(self, tmp_path: Path) -> None:
        """A large tensor is looked at in pieces: each of them counts."""
        for at, value in ((0, NAN), ((1 << 15) - 1, INF), (1 << 15, -INF), (100_000, NAN), (-1, INF)):
            large = torch.zeros(3 * (1 << 15) + 5_000)
            large[at] = value
            with pytest.raises(CheckpointError, match=r"model.x is not finite \(1 (NaN|infinite) of 103304 values\)"):
                checkpoint.save(tmp_path, step=1, tensors={"model.x": large}, state={})
            assert names(tmp_path) == []

    def test_masks_may_be_infinite_and_nothing_may_be_nan(self, tmp_path: Path) -> None:
        mask = torch.full((2, 2), -INF)
        path = checkpoint.save(tmp_path, step=1, tensors={"model.mask": mask}, state={}, infinite={"model.mask"})
        loaded = {"model.mask": torch.zeros(2, 2)}
        checkpoint.load(path, loaded)
        assert torch.equal(loaded["model.mask"], mask)
        mask[0, 0] = NAN
        with pytest.raises(CheckpointError, match=r"model.mask is not finite \(1 NaN and 3 infinite of 4 values\)"):
            checkpoint.save(tmp_path, step=2, tensors={"model.mask": mask}, state={}, infinite={"model.mask"})


class TestReading:
    def test_rows_are_read_alone_and_verified(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        whole = torch.arange(4096.0 * 1024).view(4096, 1024)  # 4 KiB a row, 16 MiB
        path = checkpoint.save(tmp_path, step=1, tensors={"model.embed": whole}, state={})
        read = list[int]()
        real = os.preadv
        monkeypatch.setattr(
            "os.preadv", lambda handle, parts, at: read.append(len(parts[0])) or real(handle, parts, at)
        )
        rows = torch.zeros(100, 1024)
        held = {"model.embed": PartTensor(rows, TensorPart(shape=(4096, 1024), ranges={0: ((100, 200),)}))}
        checkpoint.load(path, held)
        assert torch.equal(rows, whole[100:200])
        assert sum(read) <= 3 * BLOCK
        shard = path / "rank-00000.safetensors"
        data = bytearray(shard.read_bytes())
        data[9 << 20] ^= 1
        shard.write_bytes(data)
        checkpoint.load(path, held)  # what it does not need it does not read
        with pytest.raises(DamagedError, match=r"rank-00000\.safetensors has changed") as caught:
            checkpoint.load(path, {"model.embed": whole})
        assert (caught.value.file, caught.value.tensor) == ("rank-00000.safetensors", "model.embed")
        assert caught.value.checkpoint == str(path)

    @pytest.mark.parametrize("threads", [1, 3])
    def test_any_block_of_any_chunks(self, threads: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("torch.get_num_threads", lambda: threads)
        generator = torch.Generator().manual_seed(1)
        for number, shape in enumerate([(7,), (5, 6), (1, 9, 4), (3, 1, 5, 2), (2, 3, 4)]):
            whole = torch.randn(shape, generator=generator)
            path = checkpoint.save(tmp_path, step=number, tensors={"model.x": whole, "model.y": whole + 1}, state={})
            for _ in range(20):
                ranges = {}
                for dim, size in enumerate(shape):
                    ends = sorted(int(one) for one in torch.randint(size + 1, (4,), generator=generator))
                    runs = [(ends[0], ends[1]), (ends[2], ends[3])]
                    ranges[dim] = tuple(run for run in runs if run[0] < run[1]) or ((0, size),)
                part = TensorPart(shape=shape, ranges=ranges)
                expected = whole
                for dim, runs in ranges.items():
                    expected = torch.cat([expected.narrow(dim, low, high - low) for low, high in runs], dim)
                x, y = (
                    torch.zeros(part.local_shape),
                    torch.zeros(part.local_shape[::-1]).permute(*reversed(range(len(shape)))),
                )
                checkpoint.load(path, {"model.x": PartTensor(x, part), "model.y": PartTensor(y, part)})
                assert torch.equal(x, expected)
                assert torch.equal(y, expected + 1)

    def test_cover(self) -> None:
        """By hand: what fills a square of four by four, and what does not."""
        quarters = [((row, column), (2, 2)) for row in (0, 2) for column in (0, 2)]
        assert not_filled((4, 4), quarters) == ""
        assert "do not fill" in not_filled((4, 4), quarters[:3])
        assert "overlap" in not_filled((4, 4), [*quarters[:3], ((1, 1), (2, 2))])
        assert "overlap" in not_filled((3, 3), [((0, 1), (2, 2)), ((1, 0), (2, 2)), ((2, 2), (1, 1))])
        assert "not inside" in not_filled((4, 4), [*quarters[:3], ((3, 2), (2, 2))])
        assert not_filled((), [((), ())]) == ""
        assert not_filled((0, 3), []) == ""


class TestFormatOne:
    """As earlier versions wrote it: one checksum a file, and none of the manifest."""

    def old(self, folder: Path) -> Path:
        import json
        import zlib

        path = checkpoint.save(folder, step=1, tensors={"model.x": torch.ones(5), "model.y": torch.ones(2)}, state={})
        given = json.loads((path / "manifest.json").read_text())
        given["version"] = 1
        for name, file in given["files"].items():
            file["crc32"] = f"{zlib.crc32((path / name).read_bytes()):08x}"
        del given["checksum"], given["block"]
        (path / "manifest.json").write_text(json.dumps(given))
        return path

    def test_loads(self, tmp_path: Path) -> None:
        path, loaded = self.old(tmp_path), {"model.x": torch.zeros(5), "model.y": torch.zeros(2)}
        checkpoint.load(path, loaded)
        assert loaded["model.x"].tolist() == [1.0] * 5
        assert checkpoint.read_state(path) == {}
        assert checkpoint.verify(path) == []

    @pytest.mark.parametrize("name", ["rank-00000.safetensors", "state.json"])
    def test_is_verified_before_it_is_used(self, name: str, tmp_path: Path) -> None:
        path = self.old(tmp_path)
        data = bytearray((path / name).read_bytes())
        data[-2] ^= 1
        (path / name).write_bytes(data)
        loaded = {"model.x": torch.zeros(5), "model.y": torch.zeros(2)}
        with pytest.raises(DamagedError, match=f"{name} has changed"):
            checkpoint.load(path, loaded)
        assert loaded["model.x"].tolist() == [0.0] * 5
        assert checkpoint.verify(path) != []
        with pytest.raises(DamagedError, match=f"{name} has changed"):
            checkpoint.export(path, tmp_path / "out.safetensors")
        assert not (tmp_path / "out.safetensors").exists()


class TestWhichStay:
    def test_multiples_stay_for_ever(self, tmp_path: Path) -> None:
        for step in range(1, 9):
            saved(tmp_path, step, keep=1, keep_every=3)
        assert names(tmp_path) == [name_of(3), name_of(6), name_of(8)]
        assert [path.name for path in checkpoint.prune(tmp_path, keep=1, keep_every=6)] == [name_of(3)]
        assert names(tmp_path) == [name_of(6), name_of(8)]

    def test_the_only_whole_one_is_never_deleted(self, tmp_path: Path) -> None:
        for step in (1, 2, 3):
            saved(tmp_path, step, keep=9)
        for step in (2, 3):
            (tmp_path / name_of(step) / "state.json").unlink()
        assert [path.name for path in checkpoint.prune(tmp_path, keep=1)] == [name_of(2)]
        assert names(tmp_path) == [name_of(1), name_of(3)]


@pytest.mark.parametrize("folder", ["checkpoints", "servers/0"])
def test_nothing_is_published_or_pruned_in_a_run_that_another_has_taken(folder: str, tmp_path: Path) -> None:
    token = take(tmp_path)
    try:
        for step in (1, 2):
            saved(tmp_path / folder, step)
        (tmp_path / "writer.json").write_text('{"identity": "another"}')
        with pytest.raises(CheckpointError, match="taken over"):
            saved(tmp_path / folder, 3)
        with pytest.raises(RunError, match="taken over"):
            checkpoint.prune(tmp_path / folder, keep=1)
        assert names(tmp_path / folder) == [name_of(1), name_of(2)]
    finally:
        release(token)


class TestResumeNewest:
    def test_goes_on_from_the_one_before(self, tmp_path: Path) -> None:
        for step in (1, 2, 3):
            saved(tmp_path, step, keep=9)
        (tmp_path / name_of(3) / "manifest.json").write_bytes(b"\xff")
        os.truncate(tmp_path / name_of(2) / "rank-00000.safetensors", 5)
        loaded = {"model.x": torch.zeros(5)}
        path, _, skipped = checkpoint.resume_newest(tmp_path, lambda path: checkpoint.load(path, loaded))
        assert path == tmp_path / name_of(1)
        assert loaded["model.x"][0] == 1.0
        assert [text.partition(" ")[0] for text in skipped] == [name_of(3), name_of(2)]
        assert "manifest.json is damaged" in skipped[0]
        assert "rank-00000.safetensors has 5 bytes" in skipped[1]

    def test_another_model_is_no_damage(self, tmp_path: Path) -> None:
        for step in (1, 2):
            saved(tmp_path, step)
        with pytest.raises(CheckpointError, match="step-00000002 does not fit"):
            checkpoint.resume_newest(tmp_path, lambda path: checkpoint.load(path, {"model.x": torch.zeros(6)}))

    def test_a_checkpoint_under_another_name_is_damaged(self, tmp_path: Path) -> None:
        path = saved(tmp_path, 1)
        shutil.copytree(path, tmp_path / name_of(7))
        assert "it is of step 1" in checkpoint.verify(tmp_path / name_of(7))[0]
        assert Manifest.read(shutil.copytree(path, tmp_path / "best")).step == 1


def _flip(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1] + b"x")


DAMAGES: dict[str, Callable[[Path], object]] = {
    "none": lambda path: None,
    "a file is gone": lambda path: (path / "rank-00000.safetensors").unlink(),
    "a file is cut": lambda path: os.truncate(path / "rank-00000.safetensors", 5),
    "another bit": lambda path: _flip(path / "rank-00000.safetensors"),
    "no manifest to read": lambda path: (path / "manifest.json").write_text("{}"),
}


def test_the_newest_whole_copy_is_fetched_whatever_is_damaged(tmp_path: Path) -> None:
    for number, damages in enumerate(product(DAMAGES, repeat=2)):
        far, here = tmp_path / f"far-{number}", tmp_path / f"here-{number}"
        for step, damage in enumerate(("none", *damages)):
            DAMAGES[damage](saved(far, step, keep=9))
        whole = max(step for step, damage in enumerate(("none", *damages)) if damage == "none")
        assert fetch_newest(far.as_uri(), here) == here / name_of(whole)
        assert names(here) == [name_of(step) for step in range(whole, 3)]
