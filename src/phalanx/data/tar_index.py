"""The offsets of the samples in a tar archive: found by its headers, once in a process."""

from __future__ import annotations

import os
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from phalanx.data.dataset_facts import digest_of_bytes
from phalanx.errors import DataError, SpecError

_COMPRESSED = {
    b"\x1f\x8b": ("gzip", "gunzip"),
    b"BZh": ("bzip2", "bunzip2"),
    b"\xfd7zXZ": ("xz", "unxz"),
    b"\x28\xb5\x2f\xfd": ("zstd", "unzstd"),
}
"""First bytes of a file → the compression, and the program that undoes it."""

Extensions = tuple[tuple[str, ...], ...]
Members = dict[str, tuple[int, int]]  # of a sample: extension → offset and size

_AFTER_END = 1 << 16  # bytes after the end of an archive that are looked at; tar pads with 10 KiB of zeros
_INDEXED = 10_000  # archives
_SPREAD, _BEGIN = 8, 4096  # samples, and bytes of each of their members, that tell an archive from others


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TarShard:
    """The samples of an archive, in order.

    Attributes:
        path: of the archive.
        names: of each sample: the common part of its members' names.
        extensions: of the members read from each sample: the first of several alternatives; empty without a sample.
        offsets: bytes before each member's content, int64 of (samples, extensions).
        sizes: bytes of it, of the same shape.
        digest: identifies the archive, by its members' names and sizes, and the begins of some members.
    """

    path: str
    names: tuple[str, ...]
    extensions: Extensions
    offsets: np.ndarray
    sizes: np.ndarray
    digest: str

    def read(self, place: int) -> list[bytes]:
        """Return the content of each member of the sample at ``place``.

        Raises:
            DataError: if the archive has become shorter.
        """
        found: list[bytes] = []
        file = os.open(self.path, os.O_RDONLY)
        try:
            for offset, size in zip(self.offsets[place].tolist(), self.sizes[place].tolist(), strict=True):
                found.append(_whole(file, offset, size, self.path))
        finally:
            os.close(file)
        return found


def _whole(file: int, offset: int, size: int, path: str) -> bytes:
    content = os.pread(file, size, offset)
    while 0 < len(content) < size:  # Linux reads 2 GiB at most at once
        more = os.pread(file, size - len(content), offset + len(content))
        if not more:
            break
        content += more
    if len(content) < size:
        raise DataError(f"{path} has become shorter since the run began\n    try: the archive as it was")
    return content


def tar_shard(path: str, extensions: Extensions | None, *, exact: bool) -> TarShard:
    """Return the samples of an archive, each with these ``extensions``; ``None``: with those of its first sample.

    ``exact`` refuses a sample with other extensions; by default they are not read.

    Raises:
        SpecError: if it is compressed, broken or cut off, or holds samples that are not whole.
    """
    try:
        state = os.stat(path)
        return _indexed(path, state.st_size, state.st_mtime_ns, extensions, exact)
    except (OSError, EOFError, ValueError, tarfile.TarError) as error:
        raise _problem(f"{path}: {error}", "archives that can be read") from error


@lru_cache(maxsize=_INDEXED)  # a job's data are made several times in a process: to look at, to plan, to train on
def _indexed(path: str, size: int, changed: int, extensions: Extensions | None, exact: bool) -> TarShard:
    names: list[str] = []
    places: list[list[tuple[int, int]]] = []
    listed: list[tuple[str, Members]] = []
    for name, members in _samples(path):
        listed.append((name, members))
        extensions = tuple((one,) for one in members) if extensions is None else extensions
        names.append(name)
        places.append([members[one] for one in _read(path, name, members, extensions, exact)])
    array = np.asarray(places, dtype=np.int64).reshape(len(names), len(extensions or ()), 2)
    return TarShard(
        path=path,
        names=tuple(names),
        extensions=extensions or (),
        offsets=np.ascontiguousarray(array[..., 0]),
        sizes=np.ascontiguousarray(array[..., 1]),
        digest=digest_of_bytes(_told_apart(path, listed)),
    )


def _told_apart(path: str, samples: list[tuple[str, Members]]) -> Iterator[bytes]:
    for name, members in samples:
        sizes = ",".join(f"{extension}:{size}" for extension, (_, size) in members.items())
        yield f"{name} {sizes}".encode()
    spread = {len(samples) * part // _SPREAD for part in range(_SPREAD)} if samples else ()
    with open(path, "rb") as file:
        for place in sorted(spread):
            for offset, size in samples[place][1].values():
                file.seek(offset)
                yield file.read(min(size, _BEGIN))


def _read(path: str, name: str, members: Members, extensions: Extensions, exact: bool) -> list[str]:
    listed = ", ".join(" or ".join(one) for one in extensions)
    read = [next((one for one in several if one in members), "") for several in extensions]
    if not all(read):
        missing = " or ".join(extensions[read.index("")])
        given = f"{name} in {path}, without {missing} (it has {', '.join(members)})"
        raise _problem(given, f"samples that each have {listed}", "keys", _keys(read))
    if exact and (more := [one for one in members if one not in read]):
        given = f"{name} in {path}, with {more[0]}, which the first sample does not have"
        allowed = "samples that each have the same extensions, or keys that say which are read"
        raise _problem(given, allowed, "keys", _keys(read))
    return read


def _keys(read: list[str]) -> str:
    shared = tuple(one for one in read if one)
    return f"keys={shared!r}" if shared else 'keys={"image": ("jpg", "png")}'


def _samples(path: str) -> Iterator[tuple[str, Members]]:
    seen: set[str] = set()
    current, members = "", Members()
    for name, extension, place in _members(path):
        if name != current:
            if current:
                yield current, members
            if name in seen:
                given = f"{path}, where {name}.{extension} lies apart from other members of {name}"
                fix = "tar --sort=name -cf shard.tar folder"
                raise _problem(given, "members of one sample beside each other", fix=fix)
            seen.add(name)
            current, members = name, {}
        if extension in members:
            given = f"{path}, with {name}.{extension} twice"
            raise _problem(given, "each member once", fix="tar --sort=name -cf shard.tar folder")
        members[extension] = place
    if current:
        yield current, members


def _members(path: str) -> Iterator[tuple[str, str, tuple[int, int]]]:
    with open(path, "rb") as file:
        begin = file.read(8)
        for name, program in (told for magic, told in _COMPRESSED.items() if begin.startswith(magic)):
            allowed = "uncompressed archives, of which any sample can be read by its place (images are compressed)"
            raise _problem(f"{path}, compressed by {name}", allowed, fix=f"{program} {path}")
        file.seek(0)
        with tarfile.open(fileobj=file, mode="r:") as archive:
            for member in archive:
                folder, _, base = member.name.rpartition("/")
                stem, _, extension = base.partition(".")
                if member.isdir() or not stem or not extension:
                    continue
                if not member.isreg() or member.issparse():
                    what = (
                        "sparse" if member.issparse() else "a link" if member.islnk() or member.issym() else "no file"
                    )
                    fix = "tar --hard-dereference --dereference -cf shard.tar folder"
                    raise _problem(f"{path}, in which {member.name} is {what}", "archives of plain files", fix=fix)
                name = f"{folder}/{stem}" if folder else stem
                yield name, extension.lower(), (member.offset_data, member.size)
            end = archive.offset
        file.seek(end)
        rest = file.read(_AFTER_END)
    if len(rest) < tarfile.BLOCKSIZE or any(rest[: tarfile.BLOCKSIZE]):
        given = f"{path}, which goes no further than byte {end:,} and has no end of an archive there"
        raise _problem(given, "whole archives: it was cut off or damaged", fix="tar -tf shard.tar, and write it anew")
    if any(rest):
        given = f"{path}, with more after the end of the archive at byte {end:,}"
        raise _problem(given, "one archive in a file", fix="tar --concatenate --file=all.tar first.tar second.tar")


def _problem(given: str, allowed: str, name: str = "files", fix: str = 'px.TarFiles("train-*.tar")') -> SpecError:
    return SpecError.of(f"px.TarFiles.{name}", given, allowed, fix)
