"""Opening files in a folder that may be a stranger's: no link is followed, only plain files are opened.

A run folder may itself be a link, since the user who names it knows its target; its content was not named. A link there
could make a run overwrite or delete any file of its user; opening a FIFO would wait for ever.
"""

from __future__ import annotations

import errno
import os
import shlex
import stat
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from phalanx.errors import SpecError

MOST = 64 * 2**20
"""Most bytes of a document that is read whole: settings, forecasts, placements."""

_WRITES = os.O_WRONLY | os.O_RDWR
_KINDS = (
    (stat.S_ISLNK, "a symbolic link"),
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISFIFO, "a FIFO"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


def open_plain(path: Path, flags: int, *, below: int = 1) -> int:
    """Open the regular file ``path`` with ``flags`` of ``os.open`` (without ``O_TRUNC``) and return a descriptor.

    Args:
        below: number of the path's last parts that may not be links; 1 is the file alone, 2 its folder, too. 0, for a
            file that the user has named, lets it be a link.

    Raises:
        SpecError: it is a link or no regular file, or it is to be written and has a second name (a hard link), under
            which something else would change with it.
        OSError: as of ``os.open``, such as ``FileNotFoundError``.
    """
    path = Path(path)
    parent = _open_parent(path, below)
    flags |= os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY | (os.O_NOFOLLOW if below > 0 else 0)
    try:
        descriptor = os.open(path.name, flags, 0o666, dir_fd=parent)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.EISDIR, errno.ENXIO, errno.ENODEV) and (kind := _kind(path)):
            raise _unsafe(path, kind) from None
        raise
    finally:
        os.close(parent)
    found = os.fstat(descriptor)
    kind = next((name for test, name in _KINDS if test(found.st_mode)), "")
    if not kind and flags & _WRITES and found.st_nlink > 1:
        kind = "a file with a second name (a hard link)"
    if kind:
        os.close(descriptor)
        raise _unsafe(path, kind)
    os.set_blocking(descriptor, True)
    return descriptor


def read_text(path: Path, *, where: str, fix: str, below: int = 1, most: int = MOST) -> str:
    """Return the text of a whole file.

    Args:
        where: the name of the file, for the error.
        fix: a line to copy that would work.

    Raises:
        SpecError: it cannot be read, is no plain file, is longer than ``most`` bytes, or no UTF-8.
    """
    allowed = "a text file that can be read"
    try:
        with os.fdopen(open_plain(path, os.O_RDONLY, below=below), "rb") as file:
            content = file.read(most + 1)
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        raise SpecError.of(where, f"{path}: {getattr(error, 'strerror', None) or error}", allowed, fix) from None
    if len(content) > most:
        raise SpecError.of(where, f"{path}, longer than {most} bytes", allowed, fix)
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        given = f"{path}, which is no text: byte {error.start} is 0x{content[error.start]:02x}"
        raise SpecError.of(where, given, allowed, fix) from None


def replace_text(path: Path, text: str) -> None:
    """Write a file whole or not at all, replacing an old one. Raises the errors of ``replace_file``."""
    replace_file(path, text.encode())


def replace_file(path: Path, content: bytes, *, below: int = 1) -> None:
    """Write a file whole or not at all, replacing an old one or a link; ``below``: as of ``open_plain``.

    Raises:
        SpecError: one of the folders that ``below`` counts is a link.
        OSError: it cannot be written; the old one stays.
    """
    path = Path(path)
    partial = f".{path.name}.{os.getpid()}"
    parent = _open_parent(path, below)
    try:
        with suppress(FileNotFoundError):
            os.unlink(partial, dir_fd=parent)  # of a process of the same number that was killed
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        with os.fdopen(os.open(partial, flags, 0o666, dir_fd=parent), "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path.name, src_dir_fd=parent, dst_dir_fd=parent)
    except OSError:
        with suppress(OSError):
            os.unlink(partial, dir_fd=parent)
        raise
    finally:
        os.close(parent)


def make_folder(path: Path, *, below: int = 1) -> None:
    """Make the folder ``path``, and its last ``below`` - 1 parents, if missing.

    Raises:
        SpecError: one of these ``below`` folders is a link.
        OSError: it cannot be made, or is no folder.
    """
    path = Path(path)
    if below > 1:
        make_folder(path.parent, below=below - 1)
    parent = _open_parent(path, below)
    try:
        with suppress(FileExistsError):
            os.mkdir(path.name, dir_fd=parent)
    finally:
        os.close(parent)
    os.close(_open_parent(path / "any", below + 1))


def refuse_links(folder: Path, names: Iterable[str]) -> None:
    """Refuse a run folder if one of ``names``, which the run reads or writes, is neither plain file nor folder.

    Raises:
        SpecError: with the first of them.
    """
    for name in names:
        kind = _kind(folder / name)
        if kind and kind != "a folder":
            raise _unsafe(folder / name, kind)


def _open_parent(path: Path, below: int) -> int:
    try:
        return _open_folder(path.parent, below - 1)
    except NotADirectoryError:
        for folder in [*path.parents][: max(0, below - 1)]:
            if folder.is_symlink():
                raise _unsafe(folder, "a symbolic link") from None
        raise


def _open_folder(folder: Path, below: int) -> int:
    if below <= 0 or folder.name in ("", ".."):
        return os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    parent = _open_folder(folder.parent, below - 1)
    try:
        return os.open(folder.name, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW, dir_fd=parent)
    finally:
        os.close(parent)


def _kind(path: Path) -> str:
    try:
        mode = path.lstat().st_mode
    except OSError:
        return ""
    return next((name for test, name in _KINDS if test(mode)), "")


def _unsafe(path: Path, kind: str) -> SpecError:
    allowed = "in a run folder, plain files only: what is elsewhere is neither read nor written through it"
    name = shlex.quote(str(path))
    if kind == "a symbolic link":
        fix = f"cp -rL {name} {name}.copy && rm {name} && mv {name}.copy {name}"
    elif "hard link" in kind:
        fix = f"cp {name} {name}.copy && mv {name}.copy {name}"
    else:
        fix = f"mv {name} {name}.away"
    return SpecError.of("file", f"{path}, which is {kind}", allowed, fix)
