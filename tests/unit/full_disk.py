"""A disk that is full, or will be soon."""

from __future__ import annotations

import errno
import os
from typing import Any

import pytest


class FullDisk:
    """``os.write`` on a disk that holds so many more bytes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.room, self._write = 10**9, os.write
        monkeypatch.setattr(os, "write", self)

    def __call__(self, file: int, content: Any) -> int:
        if len(content) and not self.room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        part = bytes(content[: self.room])
        self.room -= len(part)
        return self._write(file, part)
