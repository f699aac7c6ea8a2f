"""Files of a checkpoint, opened without leaving the checkpoint's folder.

A checkpoint may come from a stranger or from a faulty disk: a symbolic link, a folder in place of a file, or a device
is never followed, read or deleted through.
"""

from __future__ import annotations

import errno
import os
import shutil
import stat
from pathlib import Path

from phalanx.errors import CheckpointError, DamagedError

# What the disk answers where something else is than was written; any other failure may pass.
_DAMAGE = {errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENXIO, errno.ENODEV, errno.EIO, errno.EINVAL}


def damaged(path: Path, message: str, *, file: str = "", tensor: str = "") -> DamagedError:
    """Return the error for a damaged checkpoint in folder ``path``."""
    return DamagedError(message, checkpoint=str(path), file=file, tensor=tensor)


def open_file(folder: Path, name: str) -> int:
    """Open the regular file ``name`` in the checkpoint's ``folder`` and return a descriptor to read it.

    Raises:
        DamagedError: it is missing or is no regular file.
        CheckpointError: it cannot be opened for another reason.
    """
    try:
        # Without waiting: a pipe in the place of the file would have no writer.
        handle = os.open(folder / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise unreadable(folder, name, error) from None
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise damaged(folder, f"{folder / name} is not a file", file=name)
    return handle


def unreadable(folder: Path, name: str, error: OSError) -> CheckpointError:
    """Return the error for a file ``name`` that the operating system could not read."""
    if error.errno == errno.ENOENT:
        return damaged(folder, f"{folder} is not a complete checkpoint: it has no {name}", file=name)
    if error.errno == errno.ELOOP:
        return damaged(folder, f"{folder / name} is a symbolic link, which is not followed", file=name)
    text = f"{folder / name} cannot be read: {error.strerror or error}"
    return damaged(folder, text, file=name) if error.errno in _DAMAGE else CheckpointError(text)


def create(path: Path) -> int:
    """Create the file ``path`` and return a descriptor to write it.

    Raises:
        OSError: a file or link exists there, or it cannot be made.
    """
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)


def read_file(folder: Path, name: str) -> bytes:
    """Return the content of the file ``name`` in the checkpoint's ``folder``.

    Raises:
        CheckpointError: see ``open_file``.
    """
    with open(open_file(folder, name), "rb") as file:
        try:
            return file.read()
        except OSError as error:
            raise unreadable(folder, name, error) from None


def size_of(path: Path) -> int | str:
    """Return the bytes of the regular file ``path``, or a message if it is not one."""
    try:
        found = path.lstat()
    except OSError:
        return "is missing"
    return found.st_size if stat.S_ISREG(found.st_mode) else "is not a file"


def is_link(path: Path) -> bool:
    """Return True if ``path`` is a symbolic link."""
    try:
        return stat.S_ISLNK(path.lstat().st_mode)
    except OSError:
        return False


def is_folder(path: Path) -> bool:
    """Return True if ``path`` is a folder, and not a link to one."""
    try:
        return stat.S_ISDIR(path.lstat().st_mode)
    except OSError:
        return False


def remove(path: Path) -> None:
    """Delete ``path``: a folder with its content, or a link itself.

    Raises:
        OSError: it cannot be deleted.
    """
    if is_folder(path):
        shutil.rmtree(path)
    else:
        path.unlink()
