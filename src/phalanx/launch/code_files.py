"""Digests of files of a job's code."""

from __future__ import annotations

import hashlib
import os


def digest_of(path: str | os.PathLike[str]) -> str:
    """Return the SHA-256 of a file."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
