"""A batch saved in a run's folder to be run again: its tensors as safetensors, the rest as JSON."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import torch

from phalanx.errors import DataError, PhalanxError
from phalanx.files import check_writer, make_folder, open_plain, replace_file

_TENSORS, _FACTS = "batch.safetensors", "accident.json"
_MOST_BYTES = 64 * 2**20  # of a batch's tensors; of a larger one only what they are is written
_MOST_SAVED = 20  # side by side in one folder
_BELOW = 2  # a batch's folder and the one it is in, of a run that may be a stranger's, are no links


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class SavedBatch:
    """One micro-batch of a run in which an error occurred.

    Attributes:
        folder: its folder.
        step: its optimizer step.
        reason: the error, in words.
        where: the first module or parameter with numbers that were not finite; empty if none was found.
        samples: ids of its samples.
        rank: of its process.
        micro: its index among that process's micro-batches of the step.
        seed: of the random stream at the begin of its forward: ``torch.manual_seed(seed)``.
    """

    folder: Path
    step: int
    reason: str
    where: str
    samples: tuple[int, ...]
    rank: int
    micro: int
    seed: int

    @property
    def batch(self) -> Any:
        """Return the batch as passed to the job's ``inputs`` and ``loss``, its tensors on the host.

        A value that was neither a tensor nor JSON, or was too large to be kept, is replaced by a description.

        Raises:
            DataError: if it cannot be read.
            SpecError: if a link or another special file is in its place.
        """
        from safetensors import SafetensorError
        from safetensors.torch import load

        try:
            tensors = load(_content(self.folder / _TENSORS))
            return _decoded(json.loads(_content(self.folder / _FACTS))["batch"], tensors)
        except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError, SafetensorError) as error:
            raise _unreadable(self.folder, error) from error

    @classmethod
    def read(cls, folder: Path) -> SavedBatch:
        """Read the batch in ``folder``.

        Raises:
            DataError: if there is none, or it cannot be read.
            SpecError: if a link or another special file is in its place.
        """
        try:
            facts = json.loads(_content(folder / _FACTS))
            known: dict[str, Any] = {name: int(facts[name]) for name in ("step", "rank", "micro", "seed")}
            known |= {name: str(facts[name]) for name in ("reason", "where")}
            return cls(folder=folder, samples=tuple(int(one) for one in facts["samples"]), **known)
        except (OSError, ValueError, LookupError, TypeError, ArithmeticError, RecursionError) as error:
            raise _unreadable(folder, error) from error

    def keep(self, batch: Any) -> bool:
        """Write it, unless the most allowed are saved beside it; return True if it is there."""
        beside = self.folder.parent
        if beside.is_dir() and not self.folder.exists() and len(list(beside.iterdir())) >= _MOST_SAVED:
            return False
        try:
            self.write(batch)
        except (OSError, PhalanxError):  # a full disk, a link there or another writer must not hide what went wrong
            return False
        return True

    def write(self, batch: Any) -> None:
        """Write it, with ``batch``, into its folder, replacing old content.

        Raises:
            OSError: if it cannot be written.
            RunError: if another run has taken over the run folder.
            SpecError: if its folder, or the parent folder, is a link.
        """
        from safetensors.torch import save

        tensors: dict[str, torch.Tensor] = {}
        described = _encoded(batch, "batch", tensors)
        check_writer(self.folder)
        make_folder(self.folder, below=_BELOW)
        replace_file(self.folder / _TENSORS, save(tensors), below=_BELOW + 1)
        facts = {name: getattr(self, name) for name in ("step", "reason", "where", "rank", "micro", "seed")}
        facts |= {"samples": list(self.samples), "batch": described}
        replace_file(self.folder / _FACTS, json.dumps(facts, indent=1).encode(), below=_BELOW + 1)


def _content(path: Path) -> bytes:
    with os.fdopen(open_plain(path, os.O_RDONLY, below=_BELOW + 1), "rb") as file:
        return file.read()


def _unreadable(folder: Path, error: Exception) -> DataError:
    return DataError(
        f"{folder} holds no batch that can be read: {error}\n    try: phalanx audit {folder.parent.parent}"
    )


def _encoded(value: Any, name: str, tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    if isinstance(value, torch.Tensor):
        stored = sum(one.nbytes for one in tensors.values())
        if value.layout != torch.strided or stored + value.nbytes > _MOST_BYTES:
            return {"left_out": f"a tensor of {value.dtype} and shape {tuple(value.shape)}"}
        tensors[name] = value.detach().cpu().clone().contiguous()
        return {"tensor": name}
    if isinstance(value, Mapping):
        items = [[str(key), _encoded(item, f"{name}.{key}", tensors)] for key, item in value.items()]
        return {"dict": items}
    if isinstance(value, tuple | list):
        kind = "tuple" if isinstance(value, tuple) else "list"
        return {kind: [_encoded(item, f"{name}.{place}", tensors) for place, item in enumerate(value)]}
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": repr(value)}
    if value is None or isinstance(value, bool | int | float | str):
        return {"value": value}
    return {"left_out": f"a {type(value).__name__}"}


def _decoded(found: dict[str, Any], tensors: Mapping[str, torch.Tensor]) -> Any:
    ((kind, content),) = found.items()
    match kind:
        case "tensor":
            return tensors[content]
        case "dict":
            return {key: _decoded(item, tensors) for key, item in content}
        case "list" | "tuple":
            items = [_decoded(item, tensors) for item in content]
            return tuple(items) if kind == "tuple" else items
        case "float":
            return float(content)
        case "value" | "left_out":
            return content
        case _:
            raise ValueError(f"unknown kind {kind!r}")
