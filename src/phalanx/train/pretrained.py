"""Initial values from safetensors files: a folder from ``save_pretrained``, its shards, or one file.

Each parameter is read when its rank makes it, and only the rank's part of a memory-mapped file is read from disk: no
rank holds the whole model. There is no unpickling.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from phalanx.config.job import Pretrained
from phalanx.config.phases import fits
from phalanx.errors import Problem, SpecError
from phalanx.parallel.deferred_init import StoredValue, fill, recipes, store
from phalanx.units import show_names

_FILE, _INDEX, _PICKLED = "model.safetensors", "model.safetensors.index.json", "pytorch_model.bin"


def fill_from(module: nn.Module, given: str | Path | Pretrained, *, deferred: bool = False) -> None:
    """Give ``module`` the values in ``given``; if ``deferred``, parameters on the meta device get them later.

    Names and shapes must agree. Tied parameters need one name, and the prefix of a transformers base model within a
    model with a head may be missing or additional. Values are converted to each parameter's dtype.

    Raises:
        SpecError: with all missing and additional names and all shapes that differ, or the file that cannot be read.
    """
    wanted = Pretrained.of(given)
    stored = _entries(Path(wanted.path))
    found, missing = _matched(module, stored)
    missing = [name for name in missing if not fits(name, wanted.missing)]
    used = {entry.name for _, _, entry in found}
    unused = [name for name in stored if name not in used and not fits(name, wanted.unused)]
    other = [
        f"{name} {list(tensor.shape)} here, {list(entry.shape)} there"
        for name, tensor, entry in found
        if tuple(tensor.shape) != entry.shape or tensor.is_floating_point() != entry.floating
    ]
    says = {"missing there": missing, "only there": unused, "other shape or kind": other}
    if problems := [f"{said} ({len(names)}): {show_names(sorted(names), 10)}" for said, names in says.items() if names]:
        fix = f"initial=px.Pretrained({str(wanted.path)!r}, missing=('head.*',), unused=('pooler.*',))"
        front = f"{next(iter(unused), '').partition('.')[0]}."  # such as "module.", of DistributedDataParallel
        if missing and {name.removeprefix(front) for name in unused} == {*missing}:
            named = f'{{name.removeprefix("{front}"): value for name, value in load_file("{wanted.path}").items()}}'
            fix = f'save_file({named}, "{wanted.path}") of safetensors.torch, without the "{front}" in front'
        raise _wrong(
            f"{wanted.path}, which does not fit the model: {'; '.join(problems)}",
            "values for every parameter and persistent buffer of the model, and no others",
            fix,
        )
    with torch.no_grad():
        for _, tensor, entry in found:
            if tensor.is_meta:
                store(tensor, StoredValue(entry.read, entry.mark))
            else:
                tensor.copy_(entry.read())
        if not deferred:
            fill(module, recipes(module))


@dataclass(frozen=True, kw_only=True, slots=True)
class _Entry:
    """One tensor of a file."""

    name: str
    file: Path
    shape: tuple[int, ...]
    dtype: str

    @property
    def floating(self) -> bool:
        return self.dtype.startswith(("F", "BF"))

    @property
    def mark(self) -> tuple[int, float, float]:
        """Return elements, file size and name length: ranks compare these to see that they read the same."""
        return _elements(self.shape), float(self.file.stat().st_size), float(len(self.name))

    def read(self) -> Tensor:
        with _opened(self.file) as file:
            return file.get_tensor(self.name)


def _elements(shape: Iterable[int]) -> int:
    return torch.Size(tuple(shape)).numel()


def _matched(module: nn.Module, stored: Mapping[str, _Entry]) -> tuple[list[tuple[str, Tensor, _Entry]], list[str]]:
    aliases: dict[int, tuple[Tensor, list[str]]] = {}
    for name, tensor in _tensors(module):
        aliases.setdefault(id(tensor), (tensor, []))[1].append(name)
    base = getattr(module, "base_model_prefix", "")
    found, missing = list[tuple[str, Tensor, _Entry]](), list[str]()
    for tensor, names in aliases.values():
        entry = next((stored[one] for name in names for one in _spellings(name, base) if one in stored), None)
        if entry is None:
            missing.append(names[0])
        else:
            found.append((names[0], tensor, entry))
    return found, missing


def _tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters(remove_duplicate=False)
    persistent = module.state_dict(keep_vars=True)
    yield from ((name, one) for name, one in module.named_buffers(remove_duplicate=False) if name in persistent)


def _spellings(name: str, base: object) -> list[str]:
    if not (isinstance(base, str) and base):
        return [name]
    return [name, name.removeprefix(f"{base}."), f"{base}.{name}"]


def _entries(path: Path) -> dict[str, _Entry]:
    found: dict[str, _Entry] = {}
    for file, names in _files(path).items():
        with _opened(file) as opened:
            there = list(opened.keys())
            if lacking := [name for name in names if name not in there]:
                raise _wrong(f"{file}, which lacks {show_names(lacking)} of its index", "a whole file", str(path))
            for name in names or there:
                part = opened.get_slice(name)
                entry = _Entry(name=name, file=file, shape=tuple(part.get_shape()), dtype=part.get_dtype())
                found[name] = entry
    return found


def _files(path: Path) -> dict[Path, list[str]]:
    if path.is_file() and path.suffix == ".safetensors":
        return {path: []}
    index = path / _INDEX
    if index.is_file():
        try:
            given = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            places = {str(name): str(file) for name, file in given.items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise _wrong(
                f"{index}: {type(error).__name__}: {error}", "an index of safetensors files", str(path)
            ) from None
        files: dict[Path, list[str]] = {}
        for name, file in places.items():
            if Path(file).name != file or not file.endswith(".safetensors"):
                raise _wrong(f"{index}, which names {file!r}", "safetensors files beside it", str(path))
            files.setdefault(path / file, []).append(name)
        return files
    if (path / _FILE).is_file():
        return {path / _FILE: []}
    there = "which does not exist" if not path.exists() else f"which has neither {_FILE} nor {_INDEX}"
    allowed = "a folder that save_pretrained or phalanx checkpoint export wrote, or a .safetensors file"
    fix, pickled = 'initial="path/to/folder"', next((one for one in (path, path / _PICKLED) if one.is_file()), None)
    if (path / ".metadata").is_file():
        there, pickled = "a folder of torch.distributed.checkpoint", path.with_name(f"{path.name}.pt")
        fix = f'torch.distributed.checkpoint.format_utils.dcp_to_torch_save("{path}", "{pickled}"), then '
    elif pickled:
        there, fix = "which would have to be unpickled, and may run code then", ""
    if pickled:
        inner = '["state_dict"]' if pickled.suffix == ".ckpt" else ""
        new = pickled.with_suffix(".safetensors")
        fix += f'safetensors.torch.save_file(torch.load("{pickled}", weights_only=True){inner}, "{new}")'
    raise _wrong(f"{path}, {there}", allowed, fix)


def _opened(file: Path) -> safe_open:
    try:
        return safe_open(file, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise _wrong(f"{file}: {error}", "a safetensors file", 'initial="path/to/folder"') from None


def _wrong(given: str, allowed: str, fix: str) -> SpecError:
    return SpecError([Problem(where="job.initial", given=given, allowed=allowed, fix=fix)])
