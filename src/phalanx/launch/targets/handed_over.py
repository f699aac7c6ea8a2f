"""What finds a run again that was handed to a target: a ticket in its folder.

A ticket leads to engines that are asked, and may answer with code. So it counts only with the mark of this user: an
HMAC over it and the folder, under a key that only this user can read.
"""

from __future__ import annotations

import fcntl
import hmac
import json
import os
import secrets
import shlex
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from phalanx.errors import RunError, SpecError
from phalanx.files import open_plain, read_text, replace_text
from phalanx.launch.targets.find_target import TARGETS, find_target
from phalanx.launch.targets.launch_folder import FOLDER, TICKET, attached_log
from phalanx.launch.targets.target import Submission, Target

_PATIENCE = 60.0  # seconds for another launch to have been handed over
_SOON = 0.05
_KEY = 32  # bytes


class UnmarkedError(SpecError):
    """A ticket that this user has not written."""


def write_ticket(submission: Submission, to: str, ticket: Mapping[str, Any]) -> None:
    """Leave in the run folder what finds the run again, with this user's mark."""
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
    why = "it can be read by others, or is another user's"
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
        if path.is_absolute() and len(key) == _KEY and found.st_uid == os.getuid() and not found.st_mode & 0o077:
            return key
    except OSError as error:
        why = error.strerror
    raise RunError(f"{path}, the key that marks tickets, cannot be used: {why}\n    try: XDG_CONFIG_HOME=/a/folder")


def is_handed_over(folder: Path) -> bool:
    """Whether the run in ``folder`` was, by a launch."""
    return os.path.exists(folder / FOLDER / TICKET)


def earlier_ticket(folder: Path, name: str) -> Mapping[str, Any] | None:
    """The ticket of the last launch of the run in ``folder``, where the target ``name`` took it.

    Raises:
        SpecError: it is damaged.
    """
    if not is_handed_over(folder):
        return None
    target, ticket = ticket_of(folder)
    return ticket if target.name == name else None


def refuse_handed_over(folder: Path) -> None:
    """Refuse a folder whose run was handed over before and still waits or runs.

    Raises:
        SpecError: it does, with what its target says.
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
    """Within, no other launch sees whether the run in ``folder`` was handed over, or hands it over.

    Waits for one that does. The lock is on the folder above it, and so is of all runs there; it writes nothing, and
    ends with this process at the latest. Storage without locks has none.

    Raises:
        SpecError: another launch has not come to its end within a minute.
    """
    _key()  # before anything is handed over that could not be marked
    above = folder.absolute().parent
    while not above.is_dir() and above != above.parent:
        above = above.parent
    handle = os.open(above, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    until = time.monotonic() + _PATIENCE
    try:
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() > until:
                    given = f"{folder}, beside which another launch has been under way for {_PATIENCE:g} s"
                    raise SpecError.of("run.folder", given, "one launch at a time", "wait for it, or end it") from None
                time.sleep(_SOON)
                continue
            except OSError:
                pass
            break
        yield
    finally:
        with suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_UN)  # what was started within has it, too
        os.close(handle)


def forget_handed_over(folder: Path) -> None:
    """The run in ``folder`` is no more its target's, which had ended it: whoever calls this goes on with it."""
    (folder / FOLDER / TICKET).unlink(missing_ok=True)


def log_of(folder: Path, rank: int | None) -> Path:
    """The file with what ``rank`` of the run in ``folder`` has printed, or all did; it may not be there yet.

    Raises:
        SpecError: its target does not keep ranks apart.
    """
    if is_handed_over(folder):
        target, ticket = ticket_of(folder)
        return target.log(ticket, folder, rank)
    return attached_log(folder, rank)


def ticket_of(folder: Path) -> tuple[Target, Mapping[str, Any]]:
    """Where the run in ``folder`` was handed to, and its ticket.

    Raises:
        SpecError: it was not launched, or what says so is damaged.
        UnmarkedError: another user has written the ticket, or another folder had it.
    """
    path = folder / FOLDER / TICKET
    if not path.is_file():
        given, fix = f"{folder}, which no phalanx launch handed over", "phalanx launch JOB --to slurm"
        raise SpecError.of(where="RUN", given=given, allowed="the folder of a launched run", fix=fix)
    with suppress(ValueError, KeyError, TypeError, AttributeError, RecursionError):
        told = json.loads(read_text(path, where="ticket", fix=f"rm {shlex.quote(str(path))}"))
        if told["to"].partition(":")[0] in TARGETS:
            if hmac.compare_digest(str(told.pop("mark", "")).encode(), _mark(folder, told).encode()):
                return find_target(told["to"]), told
            given, allowed = f"{path}, which has no mark of yours", "a ticket that phalanx launch wrote for you, here"
            fix = f"rm {shlex.quote(str(path))}, where you know what it leads to"
            raise UnmarkedError.of(where="RUN", given=given, allowed=allowed, fix=fix)
    raise damaged_ticket(folder)


def damaged_ticket(folder: Path) -> SpecError:
    """What to raise where the ticket in the run folder is not as it was written."""
    path = folder / FOLDER / TICKET
    fix = f"rm {shlex.quote(str(path))}"
    return SpecError.of(where="RUN", given=f"{path}, which is damaged", allowed="what phalanx launch wrote", fix=fix)
