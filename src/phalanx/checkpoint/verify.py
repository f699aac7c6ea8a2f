"""Whether a checkpoint on disk still is what was written."""

from __future__ import annotations

from pathlib import Path

from safetensors import SafetensorError, safe_open

from phalanx.checkpoint.manifest import STATE, Manifest
from phalanx.checkpoint.shardfile import checksum
from phalanx.errors import CheckpointError


def verify(path: Path) -> list[str]:
    """Everything that is wrong with the checkpoint in folder ``path``; empty if it is whole.

    Reads every file once: missing and cut files, changed bytes (CRC-32), and chunks that are not where the manifest
    says. Works alone, in any process.
    """
    path = Path(path)
    try:
        manifest = Manifest.read(path)
    except CheckpointError as error:
        return [str(error)]
    problems = manifest.misfits(path)
    if problems:
        return problems
    if STATE not in manifest.files:
        problems.append(f"{STATE} is not listed in the manifest")
    problems += [
        f"{file.name} has changed since it was written: checksum {now}, was {file.crc32}"
        for file in manifest.files.values()
        if (now := checksum(path / file.name)) != file.crc32
    ]
    if problems:
        return problems
    from phalanx.checkpoint.store import read_state  # loads torch's checkpoint package

    try:
        read_state(path)
    except CheckpointError as error:
        problems.append(str(error))
    return problems + _misplaced(path, manifest)


def _misplaced(path: Path, manifest: Manifest) -> list[str]:
    wanted: dict[str, list[tuple[str, list[int]]]] = {}
    for tensor in manifest.tensors.values():
        for chunk in tensor.chunks:
            wanted.setdefault(chunk.file, []).append((chunk.key, list(chunk.sizes)))
    problems = []
    for name, chunks in wanted.items():
        try:
            with safe_open(path / name, framework="pt") as file:
                there = set(file.keys())
                problems += [
                    f"{name} does not hold {key} of shape {sizes}"
                    for key, sizes in chunks
                    if key not in there or file.get_slice(key).get_shape() != sizes
                ]
        except SafetensorError as error:
            problems.append(f"{name} is not a safetensors file: {error}")
    return problems
