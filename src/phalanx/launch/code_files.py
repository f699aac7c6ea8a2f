"""Digests of files, and the unpacking of a job's code."""

from __future__ import annotations

import hashlib
import os
import shutil
import tarfile
from typing import IO

_PIECE = 1 << 18  # bytes that are read at a time


def digest_of(path: str | os.PathLike[str]) -> str:
    """Return the SHA-256 of a file."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while data := file.read(_PIECE):
            digest.update(data)
    return digest.hexdigest()


def unpack_files(pack: IO[bytes], folder: str, *, mode: int) -> None:
    """Unpack the ``tar.gz`` that ``pack`` reads into ``folder``, in which none of its files may be yet.

    ``mode``: what of its permissions a file keeps. By hand: Python 3.11 has learnt only with 3.11.4 to leave out links,
    devices and what is outside.

    Raises:
        OSError: there is more in it than plain files inside of ``folder``, or they cannot be written.
    """
    with tarfile.open(fileobj=pack, mode="r:gz") as archive:
        for entry in archive:
            content = archive.extractfile(entry) if entry.isreg() else None
            if content is None or os.path.isabs(entry.name) or ".." in entry.name.split("/"):
                raise OSError(f"{entry.name!r} is nothing that is packed")
            path = os.path.join(folder, entry.name)
            os.makedirs(os.path.dirname(path), exist_ok=True)
            with open(path, "xb") as file:
                shutil.copyfileobj(content, file)
            os.chmod(path, entry.mode & mode)
