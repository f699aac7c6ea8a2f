"""What is saved comes back bit for bit, what does not fit is said all at once, what is damaged is found."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from phalanx import checkpoint
from phalanx.checkpoint.format import DTYPES, seal
from phalanx.errors import CheckpointError


@pytest.fixture(autouse=True)
def no_waiting_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.fsync", lambda handle: None)


def some_tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return {
        "model.weight": torch.randn(5, 3, generator=generator),
        "model.half": torch.randn(7, generator=generator).bfloat16(),
        "model.count": torch.tensor(2**62 + 1),
        "model.empty": torch.zeros(0, 4),
        "model.transposed": torch.randn(4, 6, generator=generator).t(),
        "model.flags": torch.tensor([True, False, True]),
        "model.parameter": nn.Parameter(torch.randn(3, generator=generator)),
        "optimizer.weight.step": torch.tensor(3.0),
    }


def zeros_like(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}


def saved(folder: Path, step: int = 1, **options) -> Path:
    return checkpoint.save(folder, step=step, tensors=some_tensors(), state={"step": step}, **options)


def resealed(path: Path, change: Callable[[dict], object]) -> None:
    """Change the manifest, and its checksum with it."""
    given = json.loads((path / "manifest.json").read_text())
    del given["checksum"]
    change(given)
    (path / "manifest.json").write_bytes(seal(json.dumps(given).encode()))


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


class TestRoundTrip:
    def test_tensors_come_back_bit_for_bit(self, tmp_path: Path) -> None:
        path = saved(tmp_path / "deep" / "checkpoints", step=100)
        assert path == tmp_path / "deep" / "checkpoints" / "step-00000100"
        assert names(path) == ["manifest.json", "rank-00000.safetensors", "state.json"]
        loaded = zeros_like(some_tensors())
        checkpoint.load(path, loaded)
        for name, tensor in some_tensors().items():
            assert loaded[name].dtype == tensor.dtype
            assert torch.equal(loaded[name], tensor), name
        assert checkpoint.verify(path) == []

    def test_every_dtype(self, tmp_path: Path) -> None:
        for name, dtype in DTYPES.items():
            # The odd byte before it would leave a wider dtype misaligned in the file.
            bits = torch.arange(48, dtype=torch.uint8) % 2 if name == "bool" else torch.arange(48, dtype=torch.uint8)
            tensors = {"model.odd": torch.ones(1, dtype=torch.uint8), "model.x": bits.view(dtype)}
            path = checkpoint.save(tmp_path, step=1, tensors=tensors, state={})
            loaded = zeros_like(tensors)
            checkpoint.load(path, loaded)
            assert torch.equal(loaded["model.x"].view(torch.uint8), bits), name

    def test_files_are_plain_safetensors(self, tmp_path: Path) -> None:
        stored = load_file(saved(tmp_path) / "rank-00000.safetensors")
        assert torch.equal(stored["model.transposed"], some_tensors()["model.transposed"])

    def test_non_contiguous_and_tied_targets(self, tmp_path: Path) -> None:
        path = checkpoint.save(tmp_path, step=1, tensors={"model.x": torch.arange(6.0).view(2, 3)}, state={})
        target = torch.zeros(3, 2)
        checkpoint.load(path, {"model.x": target.t()})
        assert target.tolist() == [[0, 3], [1, 4], [2, 5]]
        both = torch.arange(3.0)
        path = checkpoint.save(tmp_path, step=2, tensors={"model.a": both, "model.b": both}, state={})
        tied = torch.zeros(3)
        checkpoint.load(path, {"model.a": tied, "model.b": tied})
        assert torch.equal(tied, both)

    def test_state_is_exact(self, tmp_path: Path) -> None:
        state = {"lr": 0.1 + 0.2, "low": 5e-324, "top": math.inf, "no": None, "on": True, "big": 2**80, "l": [1, "é"]}
        path = checkpoint.save(tmp_path, step=1, tensors={}, state=state)
        assert checkpoint.read_state(path) == state
        assert checkpoint.verify(path) == []


class TestRefusals:
    @pytest.mark.parametrize(
        ("tensors", "said"),
        [
            ({"model.name": "adam", "model.ok": torch.ones(1)}, "not tensors.*model.name$"),
            ({"model.m": torch.ones(2, device="meta")}, "meta device.*model.m$"),
            ({"model.c": torch.ones(2, dtype=torch.complex128)}, "dtype that a checkpoint cannot hold.*model.c$"),
            ({"model.s": torch.ones(2).to_sparse()}, "not dense: model.s$"),
        ],
    )
    def test_what_is_not_a_plain_tensor(self, tensors, said: str, tmp_path: Path) -> None:
        with pytest.raises(CheckpointError, match=said):
            checkpoint.save(tmp_path, step=1, tensors=tensors, state={})
        assert names(tmp_path) == []

    def test_what_is_not_json(self, tmp_path: Path) -> None:
        state = {"ok": [1, {"t": torch.ones(1)}], 3: "x", "path": Path("a")}
        with pytest.raises(
            CheckpointError, match=r"Tensor at ok\[1\].t, a key of type int at \[3\], PosixPath at path"
        ):
            checkpoint.save(tmp_path, step=1, tensors={}, state=state)

    def test_everything_that_does_not_fit_is_said_at_once(self, tmp_path: Path) -> None:
        path = saved(tmp_path)
        other = some_tensors() | {f"model.new{i:02}": torch.ones(1) for i in range(12)}
        del other["model.half"], other["model.flags"], other["optimizer.weight.step"]
        other["model.weight"] = torch.full((5, 4), 9.0)
        other["model.count"] = torch.tensor(1, dtype=torch.int32)
        before = {name: tensor.clone() for name, tensor in other.items()}
        with pytest.raises(CheckpointError) as caught:
            checkpoint.load(path, other)
        text = str(caught.value)
        assert "missing from the checkpoint (12): model.new00, " in text
        assert "model.new09 and 2 more" in text
        assert "model.new10" not in text
        assert "only in the checkpoint (2): model.flags, model.half" in text
        assert "optimizer.weight.step" not in text
        assert "model.weight float32[5, 4] here, float32[5, 3] there" in text
        assert "model.count int32[] here, int64[] there" in text
        assert all(torch.equal(tensor, before[name]) for name, tensor in other.items())

    @pytest.mark.parametrize(
        ("change", "words"),
        [
            (lambda given: given["files"].update({"../rank-00000.safetensors": {}}), r"rank-00000.safetensors"),
            (lambda given: given["tensors"]["model.weight"]["chunks"][0].update(sizes=[4, 3]), "do not fill"),
            (lambda given: given.update(version=3), "checkpoint format 3"),
        ],
        ids=["points outside", "a gap", "another format"],
    )
    def test_a_manifest_that_is_wrong(self, change: Callable[[dict], object], words: str, tmp_path: Path) -> None:
        path = saved(tmp_path)
        resealed(path, change)
        with pytest.raises(CheckpointError, match=words):
            checkpoint.load(path, some_tensors())

    def test_nothing_there(self, tmp_path: Path) -> None:
        with pytest.raises(CheckpointError, match="there is no checkpoint"):
            checkpoint.load(tmp_path / "step-00000001", {})
        with pytest.raises(CheckpointError, match=r"no manifest.json"):
            checkpoint.read_state(tmp_path)
        with pytest.raises(CheckpointError, match=r"model.weight"):
            checkpoint.load(saved(tmp_path), some_tensors() | {"model.weight": torch.ones(5, 3, device="meta")})
        for options in ({"step": -1}, {"step": 1, "keep": 0}):
            with pytest.raises(CheckpointError, match="allowed"):
                checkpoint.save(tmp_path, tensors={}, state={}, **options)


class TestDamage:
    def test_missing_and_cut_files(self, tmp_path: Path) -> None:
        path = saved(tmp_path)
        shard = path / "rank-00000.safetensors"
        shard.write_bytes(shard.read_bytes()[:-1])
        assert "bytes" in "".join(checkpoint.verify(path))
        assert checkpoint.latest(tmp_path) is None
        with pytest.raises(CheckpointError, match=r"not a complete checkpoint: rank-00000.safetensors has \d+ bytes"):
            checkpoint.load(path, some_tensors())
        shard.unlink()
        (path / "state.json").unlink()
        assert checkpoint.verify(path) == ["rank-00000.safetensors is missing", "state.json is missing"]

    @pytest.mark.parametrize("name", ["rank-00000.safetensors", "state.json"])
    def test_one_flipped_bit(self, name: str, tmp_path: Path) -> None:
        path = saved(tmp_path)
        data = bytearray((path / name).read_bytes())
        data[-2] ^= 1
        (path / name).write_bytes(data)
        (problem,) = checkpoint.verify(path)
        assert problem.startswith(f"{name} has changed since it was written")

    def test_a_state_that_cannot_be_read(self, tmp_path: Path) -> None:
        path = saved(tmp_path)
        (path / "state.json").write_bytes(b"[]")
        resealed(path, lambda given: given["files"]["state.json"].update(size=2, crc32="0d4cbb29"))
        assert checkpoint.verify(path) == [f"{path}/state.json is damaged: it holds no JSON object"]

    def test_damaged_manifest(self, tmp_path: Path) -> None:
        path = saved(tmp_path)
        for text in ("", "[]", '{"format": "phalanx-checkpoint", "version": 1}', None):
            (path / "manifest.json").unlink()
            if text is not None:
                (path / "manifest.json").write_text(text)
            (problem,) = checkpoint.verify(path)
            assert "manifest.json" in problem
            assert checkpoint.latest(tmp_path) is None

    def test_chunks_elsewhere_than_listed(self, tmp_path: Path) -> None:
        path = saved(tmp_path)
        resealed(
            path,
            lambda given: (
                given["tensors"]["model.weight"].update(shape=[3, 5])
                or given["tensors"]["model.weight"]["chunks"][0].update(sizes=[3, 5])
            ),
        )
        assert checkpoint.verify(path) == ["rank-00000.safetensors does not hold model.weight of shape [3, 5]"]
        resealed(path, lambda given: given["tensors"]["model.weight"]["chunks"][0].update(key="model.half"))
        (problem,) = checkpoint.verify(path)
        assert problem.endswith("model.weight: the chunk at [0, 0] has the key 'model.half'")


class TestFolder:
    def test_keeps_the_newest(self, tmp_path: Path) -> None:
        for step in (1, 2, 3, 10):
            saved(tmp_path, step=step, keep=2)
        assert names(tmp_path) == ["step-00000003", "step-00000010"]
        assert checkpoint.latest(tmp_path) == tmp_path / "step-00000010"

    def test_steps_beyond_eight_digits_are_newer(self, tmp_path: Path) -> None:
        saved(tmp_path, step=99_999_999, keep=1)
        saved(tmp_path, step=100_000_000, keep=1)
        assert names(tmp_path) == ["step-100000000"]
        assert checkpoint.latest(tmp_path) == tmp_path / "step-100000000"

    def test_latest_passes_over_the_incomplete(self, tmp_path: Path) -> None:
        first, second = saved(tmp_path, step=1), saved(tmp_path, step=2)
        (second / "manifest.json").unlink()
        (tmp_path / "step-00000003").mkdir()
        (tmp_path / "step-00000004").write_text("not a folder")
        shutil.copytree(first, tmp_path / ".step-00000005.tmp")
        assert checkpoint.latest(tmp_path) == first
        assert checkpoint.latest(tmp_path / "nowhere") is None

    def test_leftovers_of_crashed_saves_are_cleaned(self, tmp_path: Path) -> None:
        saved(tmp_path, step=1)
        (tmp_path / ".step-00000002.tmp").mkdir()
        (tmp_path / ".step-00000002.tmp" / "rank-00000.safetensors").write_text("half")
        (tmp_path / "notes.txt").write_text("mine")
        (tmp_path / ".step-00000001.old").mkdir()
        saved(tmp_path, step=3)
        assert names(tmp_path) == ["notes.txt", "step-00000001", "step-00000003"]

    def test_what_a_crash_moved_aside_comes_back(self, tmp_path: Path) -> None:
        path = saved(tmp_path, step=1)
        path.rename(tmp_path / ".step-00000001.old")
        saved(tmp_path, step=2)
        assert names(tmp_path) == ["step-00000001", "step-00000002"]
        assert checkpoint.verify(path) == []

    def test_later_steps_are_left_alone(self, tmp_path: Path) -> None:
        for step in (10, 20, 5, 6):
            saved(tmp_path, step=step, keep=1)
        assert names(tmp_path) == ["step-00000006", "step-00000020"]
