"""The one writer of a run folder: a lock between processes of one kernel, and a token that the next writer replaces.

``writer.json`` in the folder names its writer: host, process, start, and a *fencing token*, a number that grows with
each writer and a random identity. During a run, its launcher and its forked workers hold a ``flock`` on that file,
which the kernel frees when the last of them has ended in any way. If two hosts do not see each other's locks (NFS,
Lustre), the later run takes the folder by writing its own token; every publication checks the token first, so that the
earlier run stops instead of writing between the other's files.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import secrets
import socket
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from phalanx.errors import RunError, SpecError
from phalanx.files.documents import json_value
from phalanx.files.plain_files import open_plain

NAME = "writer.json"
"""The file of a run folder that says who writes it. It is never replaced, for the lock is on it."""

_LENGTH = 1024  # bytes of the file, spaces at its end: one write changes all of it
_NO_LOCKS = {errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL}
_PATIENCE = 10.0  # seconds for children of a killed process to end; torch's loaders look every 5 s
_SOON = 0.05


@dataclass(frozen=True, kw_only=True, slots=True)
class Token:
    """The right to write a run folder. It holds until another run takes the folder.

    Attributes:
        number: grows with each run that takes the folder.
        identity: random; no other run has it.
    """

    folder: Path
    number: int
    identity: str

    def check(self) -> None:
        """Raise unless this run still is the folder's writer; call it just before a publication.

        Raises:
            RunError: another run has taken the folder, or its token file is gone.
        """
        try:
            found = _read(self.folder)
        except (OSError, SpecError) as error:
            what = f"whether this run still may write {self.folder} cannot be told: {error}"
            raise RunError(f'{what}\n    try: a folder on storage that stays: folder="{self.folder}-2"') from None
        if found.get("identity") != self.identity:
            what = f"the run folder {self.folder} was taken over by {_who(found)}: this run ends without writing there"
            raise RunError(f"{what}\n    try: one training at a time in a folder; another gets its own")


_held: dict[
    Path, tuple[Token, int, int]
] = {}  # token, descriptor of the lock (-1: someone else's), process that took it


def take(folder: Path) -> Token:
    """Become the one writer of ``folder``, which exists, until ``release`` or the end of the process.

    Processes forked from this one are writers with it. A second call by the same process returns the same token.

    Raises:
        SpecError: an active run writes it, with its process and host; or it cannot be written.
    """
    key = Path(folder).resolve()
    if key in _held and _held[key][2] == os.getpid():
        return _held[key][0]
    try:
        descriptor = open_plain(folder / NAME, os.O_RDWR | os.O_CREAT)
    except OSError as error:
        raise _unwritable(folder, error) from None
    try:
        _lock(folder, descriptor)
        number = _whole(_parse(os.pread(descriptor, _LENGTH, 0)).get("number")) + 1
        token = Token(folder=Path(folder), number=number, identity=secrets.token_hex(16))
        me = {"number": number, "identity": token.identity, "host": socket.gethostname(), "pid": os.getpid()}
        text = json.dumps({**me, "since": time.time()}).ljust(_LENGTH - 1) + "\n"
        os.pwrite(descriptor, text.encode(), 0)
        os.ftruncate(descriptor, _LENGTH)
        os.fsync(descriptor)
    except BaseException as error:
        os.close(descriptor)
        if isinstance(error, OSError):
            raise _unwritable(folder, error) from None
        raise
    _held[key] = token, descriptor, os.getpid()
    return token


def refuse_taken(folder: Path) -> None:
    """Refuse a folder that an active run writes, without changing it.

    Raises:
        SpecError: with the run's process and host.
    """
    try:
        descriptor = open_plain(folder / NAME, os.O_RDONLY)
    except OSError:
        return  # it was never taken
    try:
        key = Path(folder).resolve()
        if not (key in _held and _held[key][2] == os.getpid()):
            _lock(folder, descriptor, fcntl.LOCK_SH)  # NFS locks what is open for reading in no other way
    except OSError as error:
        raise _unwritable(folder, error) from None
    finally:
        os.close(descriptor)


def is_written(folder: Path) -> bool:
    """Return True if an active run writes ``folder``, by the locks on this machine, without changing it."""
    try:
        descriptor = open_plain(folder / NAME, os.O_RDONLY)
    except OSError:
        return False  # it was never taken
    try:
        if not is_running(_whole(_parse(os.pread(descriptor, _LENGTH, 0)).get("pid"))):
            return False  # without a lock of our own, which could block a process that takes the folder now
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return False


@dataclass(frozen=True, kw_only=True, slots=True)
class Writer:
    """The process that took a folder last; it may have ended."""

    host: str
    pid: int


def writer_of(folder: Path) -> Writer | None:
    """Return the last writer of ``folder``, or ``None`` if there is none, or its file cannot be read."""
    try:
        found = _read(folder)
    except (OSError, SpecError):
        return None
    host, pid = found.get("host"), _whole(found.get("pid"))
    return Writer(host=host, pid=pid) if isinstance(host, str) and pid else None


def token_of(folder: Path) -> Token | None:
    """Return the token for ``folder`` of this process, or of the one it was forked from, or ``None``."""
    held = _held.get(Path(folder).resolve())
    return held[0] if held else None


def join(folder: Path, identity: str) -> Token:
    """Join a writer of ``folder`` by its token's ``identity``, in a process that it has started anew.

    Raises:
        RunError: another run has taken the folder since.
    """
    token = Token(folder=Path(folder), number=0, identity=identity)
    token.check()
    _held[Path(folder).resolve()] = token, -1, os.getpid()
    return token


def release(token: Token) -> None:
    """Let others write the folder, if this process took it itself."""
    key = token.folder.resolve()
    held, descriptor, pid = _held.get(key, (None, -1, 0))
    if held == token and pid == os.getpid():
        del _held[key]
        if descriptor >= 0:
            with suppress(OSError):
                fcntl.flock(descriptor, fcntl.LOCK_UN)  # of processes forked from this one, too, that are about to end
            os.close(descriptor)


def check_writer(path: Path) -> None:
    """Check the token for the run folder that contains ``path``, if this process, or its parent, has one.

    It is that of the nearest folder from ``path`` upwards. Code that publishes into a run folder (a checkpoint,
    ``run.toml``) calls it just before the rename.

    Raises:
        RunError: another run has taken the folder.
    """
    path = Path(path).resolve()
    if folder := next((folder for folder in (path, *path.parents) if folder in _held), None):
        _held[folder][0].check()


def _lock(folder: Path, descriptor: int, kind: int = fcntl.LOCK_EX) -> None:
    until = time.monotonic() + _PATIENCE
    while True:
        try:
            fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = _parse(os.pread(descriptor, _LENGTH, 0))
            gone = owner.get("host") == socket.gethostname() and not is_running(_whole(owner.get("pid")))
            soon = gone or not owner or (kind == fcntl.LOCK_EX and _only_looked_at(descriptor))
            if not soon or time.monotonic() > until:
                raise _taken(folder, owner, gone) from None
            time.sleep(_SOON)  # its children are about to end, too; or its file is about to be written
        except OSError as error:
            if error.errno in _NO_LOCKS:
                return  # the token alone has to do
            raise
        else:
            return


def _only_looked_at(descriptor: int) -> bool:
    with suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        fcntl.flock(descriptor, fcntl.LOCK_UN)
        return True
    return False


def _taken(folder: Path, owner: dict[str, Any], gone: bool) -> SpecError:
    left = ", which has ended but left a process that still holds the folder" if gone else ""
    given = f"{folder}, in which another training goes on: {_who(owner)}{left}"
    allowed = "one training at a time in a folder"
    return SpecError.of("run.folder", given, allowed, f'folder="{folder}-2", or wait for it, or end it first')


def _who(found: dict[str, Any]) -> str:
    host, pid, since = found.get("host"), found.get("pid"), found.get("since")
    if not isinstance(host, str) or not isinstance(pid, int):
        return "a process that does not say which"
    when = ""
    if isinstance(since, int | float):
        with suppress(ValueError, OverflowError, OSError):
            when = f", since {time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(since))}"
    return f"process {pid} on {host}{when}"


def _read(folder: Path) -> dict[str, Any]:
    descriptor = open_plain(folder / NAME, os.O_RDONLY)
    try:
        return _parse(os.pread(descriptor, _LENGTH, 0))
    finally:
        os.close(descriptor)


def _parse(content: bytes) -> dict[str, Any]:
    with suppress(ValueError):
        found = json_value(content)
        if isinstance(found, dict):
            return found
    return {}


def _whole(value: object) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**53 else 0


def is_running(pid: int) -> bool:
    """Return True if there is a process with that number, zombies included; False for 0."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        pass  # someone else's
    return pid != 0


def _unwritable(folder: Path, error: OSError) -> SpecError:
    return SpecError.of(
        "run.folder", f"{folder}: {error.strerror}", "a folder that can be written", 'folder="/tmp/run-1"'
    )
