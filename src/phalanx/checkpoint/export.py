"""A checkpoint's model in forms that other libraries read: a folder for ``from_pretrained``, or one safetensors file.

One tensor at a time is in memory, verified as it is read, for any plan that saved it.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, Literal

import torch

from phalanx.checkpoint.format import Manifest, dtype_name
from phalanx.checkpoint.reading import fill, read_state, verify_first
from phalanx.checkpoint.safe_files import remove
from phalanx.checkpoint.sections import AVERAGE, FROZEN, MODEL, name_in, names_of, put_in, take_out
from phalanx.checkpoint.shard_file import TensorEntry, bytes_of, header_of, write_file
from phalanx.errors import CheckpointError, SpecError

Content = Literal["model", "adapter", "merged"]
SHARD = 5_000_000_000
"""Bytes of tensors in a file of a folder, at most; what ``save_pretrained`` takes, too."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportForm:
    """The content and the form of an exported checkpoint.

    Attributes:
        content: the ``model`` as it was trained; only the ``adapter``s of peft, for ``PeftModel.from_pretrained``; or
            the base model with these ``merged`` into it.
        averaged: export the averaged weights, and the buffers that belong to them.
        dtype: of floating point tensors; by default as saved.
        shard: most bytes of tensors in a file of a folder.
    """

    content: Content = "model"
    averaged: bool = False
    dtype: torch.dtype | None = None
    shard: int = SHARD


@dataclass(frozen=True, kw_only=True, slots=True)
class Exported:
    """The written files, their tensors and bytes, and whether the model's configuration was known."""

    files: tuple[Path, ...]
    tensors: int
    nbytes: int
    configured: bool


def export(
    path: Path, target: Path, form: ExportForm | None = None, *, left_out: Mapping[str, torch.Tensor] | None = None
) -> Exported:
    """Write the model in the checkpoint ``path`` to ``target``: a new folder, or a new file ``*.safetensors``.

    For a checkpoint of trained values only, ``left_out`` has the other values, by their names in the model.

    Parent folders of ``target`` are made. A folder has ``model.safetensors``, or shards of at most ``form.shard`` bytes
    with an index, and the ``config.json`` of a model of transformers. Tensors, buffers included, have their names in
    the model; tied parameters have the first name. This function writes the content ``model`` only. The others need
    peft: ``phalanx.train.adapters.export_model`` writes them.

    Raises:
        CheckpointError: the checkpoint is damaged, or the target cannot be written; then no target remains.
        SpecError: the target exists, a file is in the place of a folder, there is no average, or values are missing.
    """
    path, target = Path(path), Path(target)
    form, rest = form or ExportForm(), dict(left_out or {})
    manifest, state = _of_model(path, averaged=form.averaged), read_state(path)
    if names_of(MODEL, state.get(FROZEN) or {}).keys() - rest.keys():
        raise not_whole(path)
    config = state.get("model_config")
    entries = [
        TensorEntry(key=name, dtype=_converted(one.dtype, form.dtype), shape=tuple(one.shape))
        for name, one in {**take_out(MODEL, manifest.tensors), **rest}.items()
    ]
    refuse_target(target)
    chunks = (chunk for stored in manifest.tensors.values() for chunk in stored.chunks)
    verify_first(path, manifest, sorted({chunk.file for chunk in chunks}))
    pieces = partial(_pieces, path, manifest, rest)
    with written(target) as unfinished:
        if target.suffix == ".safetensors":
            write_file(unfinished, pieces(entries))
            files, config = [target], None
        else:
            files = [target / name for name in _write_folder(unfinished, pieces, entries, config, form.shard)]
    nbytes = sum(entry.nbytes for entry in entries)
    return Exported(files=tuple(files), tensors=len(entries), nbytes=nbytes, configured=config is not None)


def not_whole(path: Path) -> SpecError:
    """Return the error for a checkpoint ``path`` that holds trained values only, without the rest."""
    given = f"none for {path}, which holds what is trained alone (checkpoint='trainable')"
    return SpecError.of("job", given, "the job, which builds the rest", "px.load(folder, job())")


@contextmanager
def written(target: Path) -> Generator[Path]:
    """Yield a path to write, which then becomes ``target``; after an error nothing is left.

    Raises:
        CheckpointError: it cannot be written.
    """
    unfinished = target.with_name(f".{target.name}.partial-{os.getpid()}")
    missing = [folder for folder in target.parents if not folder.exists()]
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        yield unfinished
        unfinished.rename(target)
    except OSError as error:
        raise CheckpointError(f"{target} could not be written: {error.strerror or error}") from None
    finally:
        if unfinished.exists():
            remove(unfinished)
        if not target.exists():
            with suppress(OSError):
                for folder in missing:
                    folder.rmdir()


def model_tensors(path: Path, *, averaged: bool = False) -> dict[str, torch.Tensor]:
    """Return every tensor of the model in checkpoint ``path``, whole, by its name in the model.

    Tied parameters have the first name. Tensors are verified as they are read. ``averaged`` gives the averaged weights
    and the buffers that belong to them.

    Raises:
        CheckpointError: the checkpoint is damaged, or holds no model.
        SpecError: there is no average.
    """
    manifest = _of_model(path, averaged=averaged)
    tensors = {name: torch.empty(one.shape, dtype=one.dtype) for name, one in manifest.tensors.items()}
    fill(path, manifest, tensors)
    return take_out(MODEL, tensors)


def _of_model(path: Path, *, averaged: bool) -> Manifest:
    """Return the manifest of checkpoint ``path`` with model tensors only; ``averaged`` selects the averaged weights.

    Tensors without an average, such as frozen parameters, keep their own value.
    """
    manifest = Manifest.read(path)
    stored = {name: manifest.tensors[name] for name in names_of(MODEL, manifest.tensors).values()}
    if not stored:
        raise CheckpointError(f"{path} holds no model")
    if averaged:
        averages = take_out(AVERAGE, manifest.tensors)
        if not averages:
            given = f"{path}, which holds no averaged weights"
            allowed = "a checkpoint of a job with an average, of a step at which that has begun"
            raise SpecError.of("averaged", given, allowed, "px.Job(..., average=px.Average(decay=0.999))")
        stored |= put_in(MODEL, averages)
    return replace(manifest, tensors=stored)


def contents(path: Path) -> dict[str, Any]:
    """Return the declared content of the checkpoint ``path`` as JSON: step, samples, files, bytes, tensors.

    Raises:
        CheckpointError: its manifest or its state is damaged.
    """
    path = Path(path)
    manifest, state = Manifest.read(path), read_state(path)
    tensors = {
        name: {
            "dtype": dtype_name(stored.dtype),
            "shape": list(stored.shape),
            "bytes": math.prod(stored.shape) * stored.dtype.itemsize,
            "chunks": len(stored.chunks),
        }
        for name, stored in sorted(manifest.tensors.items())
    }
    told = {"path": str(path), "step": manifest.step, "samples": state.get("samples")}
    nbytes = sum(file.size for file in manifest.files.values())
    return {**told, "files": len(manifest.files), "bytes": nbytes, "tensors": tensors}


_PICKLED = (".pt", ".pth", ".bin", ".ckpt", ".pkl")


def refuse_target(target: Path) -> None:
    """Refuse an existing or impossible target before reading or writing starts.

    Raises:
        SpecError: the target exists, has a file name for a folder, or a file is in the place of a parent folder.
    """
    if target.suffix in _PICKLED:
        given, allowed = f"{target}, as files of torch.save are called", "a new *.safetensors, or a new folder"
        raise SpecError.of(where="target", given=given, allowed=allowed, fix=str(target.with_suffix(".safetensors")))
    if target.exists() or target.is_symlink():
        allowed = "a folder or a file that does not exist yet"
        raise SpecError.of(where="target", given=f"{target}, which exists", allowed=allowed, fix=str(_free(target)))
    nearest = next(folder for folder in target.parents if folder.exists() or folder.is_symlink())
    if not nearest.is_dir():
        given, fix = f"{target}, where {nearest} is a file", str(nearest.with_name(nearest.stem) / target.name)
        raise SpecError.of(where="target", given=given, allowed="a new file or folder, in a folder", fix=fix)


def _free(taken: Path) -> Path:
    file = taken.suffix == ".safetensors" or taken.is_file()
    stem, suffix = (taken.stem, ".safetensors") if file else (taken.name, "")
    names = (taken.with_name(f"{stem}{f'-{at}' if at else ''}{suffix}") for at in count())
    return next(path for path in names if not path.exists() and not path.is_symlink())


def _converted(stored: torch.dtype, wanted: torch.dtype | None) -> torch.dtype:
    return wanted if wanted is not None and stored.is_floating_point else stored


def _pieces(
    path: Path, manifest: Manifest, left_out: Mapping[str, torch.Tensor], entries: list[TensorEntry]
) -> Iterator[memoryview | bytes]:
    # Large to small keeps every tensor aligned to its own element size behind the header.
    entries = sorted(entries, key=lambda entry: -entry.dtype.itemsize)
    yield header_of(entries)
    for entry in entries:
        whole = left_out.get(entry.key)
        if whole is None:
            name = name_in(MODEL, entry.key)
            whole = torch.empty(entry.shape, dtype=manifest.tensors[name].dtype)
            fill(path, manifest, {name: whole}, verified=True)
        yield bytes_of(whole.to(entry.dtype).contiguous())


def _write_folder(
    folder: Path,
    pieces: Callable[[list[TensorEntry]], Iterator[memoryview | bytes]],
    entries: list[TensorEntry],
    config: Any,
    shard: int,
) -> list[str]:
    folder.mkdir()
    parts = list(_shards(entries, shard))
    names = [f"model-{at:05d}-of-{len(parts):05d}.safetensors" for at in range(1, len(parts) + 1)]
    names = names if len(parts) > 1 else ["model.safetensors"]
    for name, part in zip(names, parts, strict=True):
        write_file(folder / name, pieces(part))
    texts: dict[str, Any] = {}
    if len(parts) > 1:
        places = {entry.key: name for name, part in zip(names, parts, strict=True) for entry in part}
        total = sum(entry.nbytes for entry in entries)
        texts["model.safetensors.index.json"] = {"metadata": {"total_size": total}, "weight_map": places}
    if config is not None:
        texts["config.json"] = config
    for name, value in texts.items():
        write_file(folder / name, [json.dumps(value, indent=2, sort_keys=True).encode() + b"\n"])
    return [*names, *texts]


def _shards(entries: list[TensorEntry], most: int) -> Iterator[list[TensorEntry]]:
    part, size = list[TensorEntry](), 0
    for entry in entries:
        if part and size + entry.nbytes > most:
            yield part
            part, size = [], 0
        part.append(entry)
        size += entry.nbytes
    yield part
