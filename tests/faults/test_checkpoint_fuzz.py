"""A mutated checkpoint loads what was saved, or is named as damaged: never other values, never a raw traceback."""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from law_rows import longer
from phalanx import checkpoint
from phalanx.checkpoint.format import seal
from phalanx.checkpoint.tensor_part import PartTensor, TensorPart
from phalanx.errors import CheckpointError

HUGE: list[Any] = [2**31, 2**63, 2**64, 10**30, -1, 1.5, float("inf"), float("nan"), None, True, "7", [], {}, "é" * 40]
NAMES = [
    *("../secret", "/etc/passwd", "..", ".", "", "a/b", "state.json", "manifest.json"),
    *("rank-00009.safetensors", "\0"),
]


def values(folder: Path) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    return {
        "model.weight": torch.randn(64, 8, generator=generator),
        "model.other": torch.randn(64, 8, generator=generator),
        "model.half": torch.randn(33, generator=generator).bfloat16(),
        "model.count": torch.tensor(7),
        "model.empty": torch.zeros(0, 3),
        "optimizer.weight.exp_avg": torch.randn(64, 8, generator=generator),
    }


STATE = {"step": 3, "samples": 96, "nested": {"deep": [1, 2.5, "x"]}}


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("original")
    from phalanx.checkpoint import writing
    from phalanx.checkpoint.format import Manifest
    from phalanx.checkpoint.shard_file import write_file

    path = folder / "step-00000003"
    path.mkdir()
    held = []
    for rank in range(2):
        rows = slice(32 * rank, 32 * rank + 32)
        part = TensorPart(shape=(64, 8), ranges={0: ((32 * rank, 32 * rank + 32),)})
        whole = values(folder)
        held.append(
            {name: PartTensor(value[rows], part) if value.shape == (64, 8) else value for name, value in whole.items()}
        )
    described = [writing.describe(one) for one in held]
    stored, writers = writing.assign_writers([said for said, _ in described], [0, 1])
    files = [write_file(path / "state.json", [json.dumps(STATE).encode()])]
    for rank, (_, memory) in enumerate(described):
        content = writing.FileContent.of(rank, stored, writers, memory, ())
        file = content.write(path / writing.file_of(rank))
        assert file is not None
        files.append(file)
    manifest = Manifest(step=3, tensors=stored, files={file.name: file for file in files})
    write_file(path / "manifest.json", [manifest.to_bytes()])
    assert checkpoint.verify(path) == []
    return path


def changed(path: Path, pick: random.Random) -> None:
    """Flip bits, cut, lengthen, insert, overwrite, swap two runs of bytes, or write others in their place."""
    file = any_file(path, pick)
    data = bytearray(file.read_bytes())
    at, count = pick.randrange(len(data)), pick.randrange(1, 64)
    match pick.randrange(7):
        case 0:
            for _ in range(pick.choice((1, 1, 1, 3))):
                data[pick.randrange(len(data))] ^= 1 << pick.randrange(8)
        case 1:
            del data[at:]
        case 2:
            data += pick.randbytes(count)
        case 3:
            data[at:at] = pick.randbytes(count)
        case 4:
            data[at : at + count] = pick.choice((pick.randbytes(count), bytes(count)))
        case 5:
            size = pick.randrange(1, len(data) // 2)
            one, two = pick.randrange(len(data) - size), pick.randrange(len(data) - size)
            data[one : one + size], data[two : two + size] = data[two : two + size], data[one : one + size]
        case _:
            data = bytearray(pick.randbytes(pick.choice((0, 1, 7, 8, 9, 1000))))
    file.write_bytes(data)


def swap(path: Path, pick: random.Random) -> None:
    one, two = pick.sample(sorted(path.iterdir()), 2)
    contents = one.read_bytes(), two.read_bytes()
    one.write_bytes(contents[1])
    two.write_bytes(contents[0])


def remove(path: Path, pick: random.Random) -> None:
    any_file(path, pick).unlink()


def replace(path: Path, pick: random.Random) -> None:
    file = any_file(path, pick)
    outside = path.parent / "outside"
    content = file.read_bytes()
    file.unlink()
    match pick.randrange(5):
        case 0:
            file.mkdir()
        case 1:
            outside.write_bytes(content)
            file.symlink_to(outside)
        case 2:
            os.mkfifo(file)
        case 3:
            file.symlink_to("/dev/zero")
        case _:
            file.symlink_to(file.name)


def deep(path: Path, pick: random.Random) -> None:
    depth = pick.choice((10, 100_000))
    text = "[" * depth + "]" * depth if pick.random() < 0.5 else '{"a":' * depth + "1" + "}" * depth
    (path / pick.choice(("manifest.json", "state.json"))).write_bytes(seal(text.encode()))


def header(path: Path, pick: random.Random) -> None:
    file = path / f"rank-0000{pick.randrange(2)}.safetensors"
    data = file.read_bytes()
    length = int.from_bytes(data[:8], "little")
    given = json.loads(data[8 : 8 + length])
    edit(given, pick)
    text = json.dumps(given).encode().ljust(length)
    file.write_bytes(pick.choice((len(text), length, 2**63, 0)).to_bytes(8, "little") + text + data[8 + length :])


def manifest(path: Path, pick: random.Random, *, sealed: bool = False) -> None:
    given = json.loads((path / "manifest.json").read_text())
    checksum = given.pop("checksum")
    for _ in range(pick.choice((1, 1, 2))):
        edit(given, pick)
    text = json.dumps(given)
    if pick.random() < 0.2:
        text = text.replace("64", "1e999", 1)
    body = text.encode()
    (path / "manifest.json").write_bytes(
        seal(body) if sealed else body[:-1] + f',\n"checksum": "{checksum}"}}\n'.encode()
    )


def forged(path: Path, pick: random.Random) -> None:
    manifest(path, pick, sealed=True)


def aimed(path: Path, pick: random.Random) -> None:
    given = json.loads((path / "manifest.json").read_text())
    del given["checksum"]
    tensors = given["tensors"]
    name, other = pick.sample(["model.weight", "model.other", "optimizer.weight.exp_avg"], 2)
    tensor, chunks = tensors[name], tensors[name]["chunks"]
    one, two = chunks
    match pick.randrange(11):
        case 0:
            one["offsets"], two["offsets"] = two["offsets"], one["offsets"]
        case 1:
            one["key"], two["key"] = two["key"], one["key"]
        case 2:
            one["file"], two["file"] = two["file"], one["file"]
        case 3:
            one["offsets"], one["key"] = [4, 0], f"{name}@4,0"
        case 4:
            chunks.remove(pick.choice((one, two)))
        case 5:
            chunks.remove(two)
            chunks.append(dict(one))
        case 6:
            tensors[name], tensors[other] = tensors[other], tensors[name]
        case 7:
            tensor["shape"] = [32, 16]
        case 8:
            tensor["dtype"] = pick.choice(("int32", "bfloat16", "float64"))
        case 9:
            two.update(offsets=[28, 0], key=f"{name}@28,0")
        case _:
            one["sizes"], two["sizes"] = [32, 4], [32, 12]
    (path / "manifest.json").write_bytes(seal(json.dumps(given).encode()))


def edit(given: Any, pick: random.Random) -> None:
    places: list[tuple[Any, Any]] = []

    def walk(value: Any) -> None:
        for key in list(value) if isinstance(value, dict) else range(len(value)):
            places.append((value, key))
            if isinstance(value[key], dict | list):
                walk(value[key])

    walk(given)
    holder, key = pick.choice(places)
    match pick.randrange(6):
        case 0:
            holder[key] = pick.choice([*HUGE, *NAMES, 0, 1, 32, 64])
        case 1 if isinstance(holder, dict):
            holder[pick.choice([*NAMES, "model.new", "model.weight"])] = holder.pop(key)
        case 2:
            del holder[key]
        case 3 if isinstance(holder[key], int):
            holder[key] += pick.choice((-8, -1, 1, 8, 32))
        case 4:
            other, there = pick.choice(places)
            with_both = other.get(there) if isinstance(other, dict) else None
            if with_both is not None:
                holder[key] = json.loads(json.dumps(with_both))
        case _ if isinstance(holder, list):
            holder.append(pick.choice([0, 1, holder[key]]))
        case _:
            holder[key] = pick.choice(HUGE)


def renamed(path: Path, pick: random.Random) -> None:
    path.rename(path.with_name("step-00000009"))


MUTATIONS: list[Callable[[Path, random.Random], None]] = [
    *(changed, changed, changed, changed, changed, changed, changed, swap, remove),
    *(replace, deep, header, manifest, forged, aimed, aimed, renamed),
]


def any_file(path: Path, pick: random.Random) -> Path:
    return pick.choice(sorted(path.iterdir()))


def refused(action: Callable[[], Any]) -> bool:
    try:
        action()
    except CheckpointError:
        return True
    return False


def outcome(original: Path, folder: Path, seed: int) -> str:
    """``refused`` or ``whole``; fails if a mutated copy gives anything but the original values or an error."""
    pick = random.Random(seed)
    checkpoints = folder / "checkpoints"
    shutil.copytree(original, checkpoints / original.name)
    mutation = pick.choice(MUTATIONS)
    mutation(checkpoints / original.name, pick)
    path = next(iter(checkpoints.glob("step-*")))
    before = sorted(str(found) for found in folder.rglob("*"))
    expected, said = values(folder), f"seed {seed}, {mutation.__name__}"
    loaded = {name: torch.full_like(value, 1) for name, value in expected.items()}
    wrong = refused(lambda: checkpoint.load(path, loaded))
    if not wrong:
        assert all(torch.equal(loaded[name], expected[name]) for name in expected), said
    rows = torch.full((10, 8), 1.0)
    part = PartTensor(rows, TensorPart(shape=(64, 8), ranges={0: ((25, 35),)}))
    names = {name: value for name, value in loaded.items() if name != "model.weight"}
    if not refused(lambda: checkpoint.load(path, {**names, "model.weight": part})):
        assert torch.equal(rows, expected["model.weight"][25:35]), said
    state: list[Any] = []
    lost = refused(lambda: state.append(checkpoint.read_state(path)))
    assert lost or state == [STATE], said
    problems = checkpoint.verify(path)
    assert not (problems == [] and (wrong or lost)) or mutation is forged, said
    checkpoint.latest(checkpoints)
    checkpoint.checkpoints(checkpoints)
    assert sorted(str(found) for found in folder.rglob("*")) == before, said
    return "refused" if wrong or lost else "whole"


@pytest.mark.parametrize(("first", "count"), [(0, 120), *longer(*((first, 200) for first in range(1_000, 3_000, 200)))])
def test_mutated_checkpoints(first: int, count: int, original: Path, tmp_path: Path) -> None:
    found = [outcome(original, tmp_path / str(seed), seed) for seed in range(first, first + count)]
    assert found.count("refused") > 0.8 * count
    assert checkpoint.verify(original) == []
