"""Tar archives of samples in the form of webdataset, read at any index."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, final

import numpy as np
import torch

from phalanx.data.dataset_facts import MapStyle, digest_of_bytes
from phalanx.data.file_names import Names, file_paths
from phalanx.data.part_index import PartIndex
from phalanx.data.tar_index import TarShard, tar_shard
from phalanx.errors import DataError, Problem, SpecError

_EXAMPLE = 'px.TarFiles("train-*.tar", keys=("jpg", "cls"), decode={"jpg": decode_image})'


@final
@dataclass(frozen=True, eq=False)
class TarFiles(MapStyle):
    """A map-style dataset of the samples in tar archives, such as the shards of webdataset.

    Members of an archive that lie beside each other and share a name up to the first dot are one sample:
    ``cat/001.jpg`` and ``cat/001.cls``. It is a dict: extension → value, and ``__key__``, the name (``cat/001``), which
    other archives may have too. Extensions are in lower case, and may have dots of their own (``seg.png``). Folders,
    hidden files and files without an extension are left out, as webdataset does.

    Values are by the last part of the extension: ``txt`` a str, ``cls`` an int, ``json`` what it holds, ``npy`` an
    array, ``pt`` what ``torch.load(weights_only=True)`` gives; all others, images among them, are bytes unless
    ``decode`` has a function for them.

    The headers of all archives are read once in each process, which takes about 40 µs a member. Then any sample is read
    by its place in the archive, so that archives have to be uncompressed.

    Attributes:
        files: an archive, a pattern such as ``train-*.tar``, whose archives are taken in the order of their names, or a
            list of both.
        keys: extensions that each sample must have; others are not read. Or what an entry is to be called → its
            extension, or several, of which the first that a sample has is read: ``{"image": ("jpg", "png")}``.
            ``None``: those of the first sample, and each other sample must have the same.
        decode: entry, or the last part of its extension → a function of the bytes that gives the value. It may draw
            from Python's, numpy's and torch's global generators, which are seeded for each sample.

    Raises:
        SpecError: if an option is wrong, an archive is not there, is compressed, broken or cut off, or its samples are
            not whole: members of one sample apart from each other, an extension twice, or one that is missing.
    """

    files: Names
    _: KW_ONLY
    keys: Sequence[str] | Mapping[str, str | Sequence[str]] | None = None
    decode: Mapping[str, Callable[[bytes], Any]] | None = None
    _shards: tuple[TarShard, ...] = field(init=False, repr=False)
    _index: PartIndex = field(init=False, repr=False)  # of samples in archives
    _readers: tuple[tuple[str, Callable[[bytes], Any] | None, str], ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if problems := _problems(self.keys, self.decode):
            raise SpecError(problems)
        entries = None if self.keys is None else _entries(self.keys)
        wanted = None if entries is None else tuple(entries.values())
        shards: list[TarShard] = []
        for path in file_paths(self.files, "px.TarFiles.files", _EXAMPLE):
            shards.append(tar_shard(path, wanted, exact=self.keys is None))
            wanted = wanted or shards[-1].extensions or None  # those of the first sample hold for all
        if wanted is None or not any(shard.names for shard in shards):
            raise SpecError.of("px.TarFiles.files", f"{shards[0].path}, without a sample", "1 sample or more", _EXAMPLE)
        entries = entries or {one: (one,) for (one,) in wanted}
        own = {name.lower(): function for name, function in (self.decode or {}).items()}
        readers = tuple(_reader(name, extensions, own) for name, extensions in entries.items())
        if unread := set(own) - {key for _, _, key in readers}:
            allowed = f"entries of the samples: {', '.join(entries)}, or the last part of an extension that all have"
            raise SpecError.of("px.TarFiles.decode", repr(min(unread)), allowed, _EXAMPLE)
        object.__setattr__(self, "_shards", tuple(shards))
        object.__setattr__(self, "_index", PartIndex(len(shard.names) for shard in shards))
        object.__setattr__(self, "_readers", readers)
        object.__setattr__(self, "draws", bool(own))
        object.__setattr__(self, "files_digest", digest_of_bytes(shard.digest.encode() for shard in shards))

    def __len__(self) -> int:
        return len(self._index)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Return the sample ``index``, 0 is the first of the first archive.

        Raises:
            IndexError: if there is no such sample.
            DataError: if the archive has become shorter, or a value does not match its extension.
        """
        number, place = self._index.locate(index, from_end=True)
        shard = self._shards[number]
        sample: dict[str, Any] = {"__key__": shard.names[place]}
        for (key, read, own), content in zip(self._readers, shard.read(place), strict=True):
            try:
                sample[key] = content if read is None else read(content)
            except Exception as error:
                where = f"{shard.names[place]}.{key} in {shard.path}"
                if own:
                    error.add_note(f"while decoding {where}")
                    raise
                raise DataError(f"{where} cannot be decoded: {error}\n    try: decode={{{key!r}: bytes}}") from error
        return sample


_BY_KIND: dict[str, Callable[[bytes], Any]] = {
    "txt": bytes.decode,
    "cls": int,
    "json": json.loads,
    "npy": lambda content: np.load(io.BytesIO(content), allow_pickle=False),
    "pt": lambda content: torch.load(io.BytesIO(content), weights_only=True, map_location="cpu"),
}


def _kind(key: str) -> str:
    return key.rpartition(".")[2]


def _entries(keys: Sequence[str] | Mapping[str, str | Sequence[str]]) -> dict[str, tuple[str, ...]]:
    named = keys if isinstance(keys, Mapping) else {key.lower(): key for key in keys}
    several = {name: (given,) if isinstance(given, str) else tuple(given) for name, given in named.items()}
    return {name: tuple(one.lower() for one in extensions) for name, extensions in several.items()}


def _reader(
    name: str, extensions: tuple[str, ...], own: Mapping[str, Callable[[bytes], Any]]
) -> tuple[str, Callable[[bytes], Any] | None, str]:
    kinds = {_kind(one) for one in extensions}
    kind = kinds.pop() if len(kinds) == 1 else ""
    key = next((one for one in (name.lower(), kind) if one in own), "")
    return name, own[key] if key else _BY_KIND.get(kind), key


def _problems(keys: Any, decode: Any) -> list[Problem]:
    found: list[Problem] = []

    def wrong(name: str, given: str, allowed: str, fix: str) -> None:
        found.append(Problem(where=f"px.TarFiles.{name}", given=given, allowed=allowed, fix=fix))

    if keys is not None and not _are_keys(keys):
        allowed = "extensions without the dot before them, each once, or entry → one or several of them, or None"
        wrong("keys", repr(keys), allowed, 'keys=("jpg", "cls")')
    if decode is not None:
        if not isinstance(decode, Mapping):
            wrong("decode", f"a {type(decode).__name__}", "extension → function", 'decode={"jpg": decode_image}')
        elif bad := [name for name in decode if not isinstance(name, str) or not callable(decode[name])]:
            given = f"{bad[0]!r}: a {type(decode[bad[0]]).__name__}"
            wrong("decode", given, "extension → function of the bytes", 'decode={"jpg": decode_image}')
    return found


def _are_keys(keys: Any) -> bool:
    if isinstance(keys, str) or not isinstance(keys, Sequence | Mapping) or not keys:
        return False
    several = list(keys.values()) if isinstance(keys, Mapping) else list(keys)
    if isinstance(keys, Mapping):
        if not all(isinstance(name, str) and name != "__key__" for name in keys):
            return False
        several = [one for given in several for one in ([given] if isinstance(given, str) else given or [""])]
    return all(isinstance(one, str) and one and one[0] != "." and "/" not in one for one in several) and (
        len({one.lower() for one in several}) == len(several)
    )
