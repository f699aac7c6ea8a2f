"""Brings the run folder together here, where each host of a launch writes into a copy of its own: ``RunGathering``.

Agents tell what has changed in their copies; what is wanted is asked for in pieces, so that what comes never waits in
memory. The event log grows here as it does there. A checkpoint is held on all hosts, each of which has the files of its
own ranks, and gets its name here once all files of its manifest have come; the ledger comes with it, and at the end.
"""

from __future__ import annotations

import base64
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, final

from phalanx.checkpoint.folder import begin, give_up, name_of, newest_first, prune, publish, temporary
from phalanx.checkpoint.format import MANIFEST, Manifest, step_of
from phalanx.config import RunSpec
from phalanx.config.run_files import CHECKPOINTS, EVENTS, RUN_FILES, RUN_TOML, Brought
from phalanx.errors import CheckpointError, RunError, SpecError
from phalanx.files import replace_text
from phalanx.files.plain_files import MOST
from phalanx.launch.runfile import absolute
from phalanx.launch.targets.host_folder import PIECE
from phalanx.launch.targets.launch_folder import append
from phalanx.launch.targets.ssh_host import SshHost

_WINDOW = 8  # pieces that are asked for at a time


@dataclass(slots=True)
class _Transfer:
    """A file, or a part of it, on its way here.

    Attributes:
        path: in the host's copy.
        into: where it is written; ``None``: only into ``data``.
        at, end: what of it is wanted.
    """

    host: int
    path: str
    into: Path | None
    at: int
    end: int
    done: Callable[[_Transfer], None]
    failed: Callable[[_Transfer], None] = lambda _: None  # it is told again when it has changed again
    asked: int = 0
    data: bytearray = field(default_factory=bytearray)


@dataclass(slots=True)
class _Checkpoint:
    """A checkpoint that is on its way.

    Attributes:
        waiting: hosts that have not said yet what they hold of it.
        held: file → host, path in its copy, and bytes.
        left: files, and ledgers, that have not come.
    """

    name: str
    step: int
    waiting: set[int]
    held: dict[str, tuple[int, str, int]] = field(default_factory=dict[str, tuple[int, str, int]])
    left: int = 0
    given_up: bool = False


@final
class RunGathering:
    """Brings together one run; ``take`` is given what agents tell.

    Attributes:
        lacking: names of hosts whose connection ended before all had come.
    """

    def __init__(self, hosts: Sequence[SshHost], run: RunSpec, log_size: int) -> None:
        """``log_size``: bytes of the event log that copies begin with."""
        self._hosts, self._run, self._folder = hosts, absolute(run), run.folder
        self._waiting: dict[int, deque[_Transfer]] = {one.number: deque() for one in hosts}
        self._moving: dict[int, _Transfer] = {}
        self._log_at = {one.number: log_size for one in hosts}
        self._log_end = dict(self._log_at)
        self._ledgers: dict[str, tuple[int, int]] = {}  # path → host that writes it, bytes
        self._changed_by: dict[str, int] = {}
        self._steps: dict[int, str] = {}  # step → name, of checkpoints that have not been looked at
        self._met = {path.name for path in newest_first(run.folder / CHECKPOINTS)}
        self._checkpoint: _Checkpoint | None = None
        self._over: set[int] = set()
        self._lost: set[int] = set()
        self._last_ledger = False
        self.lacking: list[str] = []

    @property
    def goes_on(self) -> bool:
        """Whether there is more to come."""
        return not (len(self._over) == len(self._hosts) and self._idle and self._last_ledger)

    def take(self, host: int, message: Mapping[str, Any]) -> None:
        """Take in what the agent of ``host`` tells.

        Raises:
            RunError: what comes cannot be written here, or another run has taken the folder.
        """
        try:
            for path, (size, _) in message.get("changed", {}).items():
                self._want(host, path, size)
            for path in message.get("gone", ()):
                self._remove(host, path)
            if "piece" in message:
                self._take_piece(host, message)
            elif message.get("files") == "hold":
                self._take_held(host, message["result"])
            elif "over" in message:
                self._over.add(host)
            self._look_for_more()
        except (OSError, CheckpointError, SpecError, ValueError) as error:
            what = f"what host {self._hosts[host].entry.name} has of the run cannot be written to {self._folder}"
            raise RunError(f"{what}: {error}\n    try: free space there, and go on with --resume") from None

    def lose(self, host: int) -> None:
        """The connection to ``host`` is over."""
        if host in self._lost:
            return
        if host not in self._over or self._moving.get(host) or self._waiting[host]:
            self.lacking.append(self._hosts[host].entry.name)
        self._lost.add(host)
        self._over.add(host)
        lost = [*filter(None, [self._moving.pop(host, None)]), *self._waiting[host]]
        self._waiting[host].clear()
        for one in lost:
            one.failed(one)  # pyrefly: ignore[missing-attribute]
        if self._checkpoint and host in self._checkpoint.waiting:
            self._take_held(host, {})
        with suppress(OSError, CheckpointError):
            self._look_for_more()

    @property
    def _idle(self) -> bool:
        return not (self._moving or any(self._waiting.values()) or self._checkpoint or self._steps)

    def _want(self, host: int, path: str, size: int) -> None:
        self._changed_by[path] = host
        how, below = _brought(path), path.partition("/")[2]
        if how == "appended":
            self._log_end[host] = max(self._log_end[host], size)
            self._bring_log(host)
        elif how == "complete":
            name = below.partition("/")[0]
            step = step_of(Path(name))
            if step is not None and name not in self._met:
                self._steps[step] = name
        elif how == "with a checkpoint":
            self._ledgers[path] = host, size
        elif how == "with paths here":
            self._bring(_Transfer(host, path, None, 0, min(size, MOST), self._write_runfile))
        elif how:
            self._bring_file(host, path, size)

    def _remove(self, host: int, path: str) -> None:
        target = self._folder / path
        inside = target.parent.resolve() == self._folder.resolve() / Path(path).parent
        if self._changed_by.get(path, host) == host and _brought(path) in ("whole", "with a checkpoint") and inside:
            self._ledgers.pop(path, None)
            with suppress(OSError):
                target.unlink()

    def _bring_log(self, host: int) -> None:
        on_its_way = any(one.path == EVENTS for one in self._of(host))
        if self._log_end[host] > self._log_at[host] and not on_its_way and host not in self._lost:
            start = self._log_at[host]
            end = min(self._log_end[host], start + MOST)
            self._bring(_Transfer(host, EVENTS, None, start, end, self._append_log), first=True)

    def _append_log(self, one: _Transfer) -> None:
        """Whole lines only: other hosts, and this machine, write there too."""
        whole = one.data.rfind(b"\n") + 1
        if not whole and len(one.data) == MOST:
            raise ValueError(f"{EVENTS} has a line of more than {MOST} bytes")
        self._log_at[one.host] += whole
        append(self._folder / EVENTS, bytes(one.data[:whole]), below=1)
        if self._log_end[one.host] > self._log_at[one.host] + len(one.data) - whole:
            self._bring_log(one.host)

    def _write_runfile(self, one: _Transfer) -> None:
        """As it is here: the job and the folder have other paths there."""
        told = RunSpec.from_toml(one.data.decode())
        replace_text(self._folder / RUN_TOML, replace(told, job=self._run.job, folder=self._run.folder).to_toml())

    def _bring_file(self, host: int, path: str, size: int, done: Callable[[], None] | None = None) -> None:
        target = self._folder / path
        partial = target.with_name(f".{target.name}.partial-{host}")

        def here(_: _Transfer) -> None:
            partial.replace(target)
            if done:
                done()

        def failed(_: _Transfer) -> None:
            partial.unlink(missing_ok=True)
            if done:
                done()

        self._bring(_Transfer(host, path, partial, 0, size, here, failed))

    def _bring_ledgers(self, done: Callable[[], None] | None = None) -> int:
        """All that have been written since the start: a mark in one changes neither its size nor, perhaps, its time."""
        wanted = [(path, *found) for path, found in self._ledgers.items() if found[0] not in self._lost]
        for path, host, size in wanted:
            self._bring_file(host, path, size, done)
        return len(wanted)

    def _of(self, host: int) -> list[_Transfer]:
        moving = self._moving.get(host)
        return [*([moving] if moving else []), *self._waiting[host]]

    def _bring(self, one: _Transfer, *, first: bool = False) -> None:
        if one.host in self._lost:
            one.failed(one)
            return
        waiting = self._waiting[one.host]
        waiting.appendleft(one) if first else waiting.append(one)
        self._next(one.host)

    def _next(self, host: int) -> None:
        while host not in self._moving and self._waiting[host]:
            one = self._moving[host] = self._waiting[host].popleft()
            if one.into is not None:
                one.into.unlink(missing_ok=True)
                self._write(one, b"")
            one.asked = one.at
            if one.at >= one.end:
                del self._moving[host]
                one.done(one)
            else:
                self._ask_pieces(one)

    def _write(self, one: _Transfer, data: bytes) -> None:
        if one.into is None:
            one.data += data
        else:
            append(one.into, data, len(one.into.relative_to(self._folder).parts))

    def _ask_pieces(self, one: _Transfer) -> None:
        while one.asked < one.end and one.asked - one.at < _WINDOW * PIECE:
            self._hosts[one.host].ask("read", path=one.path, at=one.asked)
            one.asked += PIECE

    def _take_piece(self, host: int, message: Mapping[str, Any]) -> None:
        one = self._moving.get(host)
        if one is None or message["piece"] != one.path or message["at"] != one.at:
            return  # of one that was given up
        data = base64.b64decode(message.get("data", ""))[: one.end - one.at]
        self._write(one, data)
        one.at += len(data)
        if not data or (len(data) < PIECE and one.at < one.end):
            del self._moving[host]
            one.failed(one)
        elif one.at >= one.end:
            del self._moving[host]
            one.done(one)
        else:
            self._ask_pieces(one)
        self._next(host)

    def _look_for_more(self) -> None:
        """Begin to bring the newest checkpoint that has not come, and at the very end the ledger."""
        if self._checkpoint is None and self._steps:
            self._hold(max(self._steps))
        if len(self._over) == len(self._hosts) and self._idle and not self._last_ledger:
            self._last_ledger = True
            self._bring_ledgers()

    def _hold(self, step: int) -> None:
        every, name = self._run.keep_every, self._steps.pop(step)
        stays = {other for other in self._steps if every and other % every == 0}
        older = [name_of(other) for other in self._steps if other < step and other not in stays]
        self._steps = {other: self._steps[other] for other in stays}
        self._met.add(name)
        there = {one.number for one in self._hosts} - self._lost
        self._checkpoint = _Checkpoint(name, step, there)
        for number in sorted(there):
            self._hosts[number].call("hold", name=name, others=older)

    def _take_held(self, host: int, files: Mapping[str, int]) -> None:
        one = self._checkpoint
        if one is None or host not in one.waiting:
            return
        one.waiting.discard(host)
        one.held |= {path.rpartition("/")[2]: (host, path, size) for path, size in files.items()}
        if one.waiting:
            return
        if MANIFEST not in one.held:
            self._release(one)
            return
        begin(self._folder / CHECKPOINTS, one.step)
        one.left = 1
        self._bring_part(one, MANIFEST, self._take_manifest)

    def _bring_part(self, one: _Checkpoint, name: str, done: Callable[[_Transfer], None]) -> None:
        host, path, size = one.held[name]
        into = temporary(self._folder / CHECKPOINTS, one.step) / name
        self._bring(_Transfer(host, path, into, 0, size, done, lambda _: self._come(one, whole=False)))

    def _take_manifest(self, _: _Transfer) -> None:
        one = self._checkpoint
        assert one
        manifest = Manifest.read(temporary(self._folder / CHECKPOINTS, one.step))
        lacking = [file for file in manifest.files.values() if one.held.get(file.name, (0, "", -1))[2] != file.size]
        if lacking:
            self._come(one, whole=False)
            return
        one.left += len(manifest.files)
        for name in manifest.files:
            self._bring_part(one, name, lambda _: self._come(one))
        one.left += 1
        one.left += self._bring_ledgers(lambda: self._come(one))
        self._come(one)
        self._come(one)

    def _come(self, one: _Checkpoint, *, whole: bool = True) -> None:
        """A part of it has come, or will not; with the last part it gets its name."""
        one.left -= 1
        one.given_up |= not whole
        if one.left > 0 or one is not self._checkpoint:
            return
        folder = self._folder / CHECKPOINTS
        if one.given_up:
            give_up(folder, one.step)
        else:
            publish(folder, one.step)
            prune(folder, keep=self._run.keep, keep_every=self._run.keep_every or 0, upto=one.step)
        self._release(one)

    def _release(self, one: _Checkpoint) -> None:
        self._checkpoint = None
        for host in self._hosts:
            if host.number not in self._lost:
                host.call("release", name=one.name, tells=False)

    def drop(self) -> None:
        """Have hosts remove their copies, all of which is here, and say so."""
        for host in self._hosts:
            host.call("drop")


def _brought(path: str) -> Brought:
    top = path.partition("/")[0]
    return RUN_FILES[top].brought if top in RUN_FILES else "whole"
