"""The ticket in a run folder, by which a launched run is found again.

A ticket leads to engines whose answers are trusted. So it counts only with this user's mark: an HMAC over ticket and
folder, under a key that only this user can read.
"""

from __future__ import annotations

import fcntl
import hmac
import json
import os
import secrets
import shlex
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from phalanx.errors import RunError, SpecError
from phalanx.files import open_plain, read_text, replace_text
from phalanx.launch.targets.find_target import TARGETS, find_target
from phalanx.launch.targets.launch_folder import FOLDER, TICKET, attached_log
from phalanx.launch.targets.target import Submission, Target

_KEY = 32  # bytes


class UnmarkedError(SpecError):
    """A ticket that this user has not written."""


def write_ticket(submission: Submission, to: str, ticket: Mapping[str, Any]) -> None:
    """Write the ticket into the run folder, with this user's mark."""
    told = {"to": to, **ticket}
    told["mark"] = _mark(submission.run.folder, told)
    replace_text(submission.folder / TICKET, json.dumps(told) + "\n")


def _mark(folder: Path, told: Mapping[str, Any]) -> str:
    text = json.dumps([str(folder.resolve()), told], sort_keys=True)
    return hmac.digest(_key(), text.encode(), "sha256").hex()


def _key() -> bytes:
    """Return this user's key, made on first use."""
    base = os.environ.get("XDG_CONFIG_HOME", "")
    base = base if os.path.isabs(base) else os.path.expanduser("~/.config")  # a relative one does not count
    path = Path(base) / "phalanx" / "ticket.key"
    try:
        if not path.exists():
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            new = path.with_name(f".{secrets.token_hex(8)}")
            with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                file.write(secrets.token_bytes(_KEY))
            with suppress(FileExistsError):  # another process was first
                os.link(new, path)
            new.unlink()
        with os.fdopen(open_plain(path, os.O_RDONLY), "rb") as file:
            found, key = os.fstat(file.fileno()), file.read(_KEY)
        if len(key) == _KEY and found.st_uid == os.getuid() and not found.st_mode & 0o077:
            return key
        why = "it can be read by others, or is another user's"
    except OSError as error:
        why = error.strerror
    raise RunError(f"{path}, the key that marks tickets, cannot be used: {why}\n    try: XDG_CONFIG_HOME=/a/folder")


def is_handed_over(folder: Path) -> bool:
    """Return True if the run in ``folder`` was launched on a target."""
    return os.path.exists(folder / FOLDER / TICKET)


def earlier_ticket(folder: Path, name: str) -> Mapping[str, Any] | None:
    """Return the ticket of the run in ``folder`` if its last launch was on the target ``name``.

    Raises:
        SpecError: it is damaged.
    """
    if not is_handed_over(folder):
        return None
    target, ticket = ticket_of(folder)
    return ticket if target.name == name else None


def refuse_handed_over(folder: Path) -> None:
    """Refuse a folder whose run waits or runs on its target.

    Raises:
        SpecError: it does; with the target's words.
    """
    if not is_handed_over(folder):
        return
    target, ticket = ticket_of(folder)
    standing = target.standing(ticket, folder)
    if standing.state in ("waiting", "running"):
        given = f"{folder}, whose run {target.name} has already: {standing.state} {standing.detail}".rstrip()
        raise SpecError.of("run.folder", given, "one launch of a folder at a time", f"phalanx stop {folder}")


@contextmanager
def one_launch_at_a_time(folder: Path) -> Iterator[None]:
    """Hold a lock against other launches of ``folder``; wait for one under way.

    The lock is on the nearest existing parent folder, writes nothing, and ends with this process. A launch ends in
    time, as each answer of an engine has a time limit.
    """
    _key()  # before a run is launched that could not be marked
    above = next(one for one in folder.absolute().parents if one.is_dir())
    handle = os.open(above, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with suppress(OSError):  # storage without locks
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        with suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_UN)  # processes started meanwhile have it, too
        os.close(handle)


def forget_handed_over(folder: Path) -> None:
    """Remove the ticket of a run that has ended on its target and resumes elsewhere."""
    (folder / FOLDER / TICKET).unlink(missing_ok=True)


def log_of(folder: Path, rank: int | None) -> Path:
    """Return the file with the output of ``rank`` of a run, or of all ranks; it may not exist yet.

    Raises:
        SpecError: its target has one output for all ranks.
    """
    if is_handed_over(folder):
        target, ticket = ticket_of(folder)
        return target.log(ticket, folder, rank)
    return attached_log(folder, rank)


def ticket_of(folder: Path) -> tuple[Target, Mapping[str, Any]]:
    """Return the target and the ticket of the run in ``folder``.

    Raises:
        SpecError: it was not launched, or the ticket is damaged.
        UnmarkedError: the ticket is another user's, or another folder's.
    """
    path = folder / FOLDER / TICKET
    fix = f"rm {shlex.quote(str(path))}"
    if not path.is_file():
        given = f"{folder}, which no phalanx launch handed over"
        raise SpecError.of("RUN", given, "the folder of a launched run", "phalanx launch JOB --to slurm")
    with suppress(ValueError, KeyError, TypeError, AttributeError, RecursionError):
        told = json.loads(read_text(path, where="ticket", fix=fix))
        if told["to"].partition(":")[0] in TARGETS:
            if hmac.compare_digest(str(told.pop("mark", "")).encode(), _mark(folder, told).encode()):
                return find_target(told["to"]), told
            given, allowed = f"{path}, which has no mark of yours", "a ticket that phalanx launch wrote for you, here"
            raise UnmarkedError.of("RUN", given, allowed, f"{fix}, where you know what it leads to")
    raise SpecError.of("RUN", f"{path}, which is damaged", "what phalanx launch wrote", fix)
