"""What a worker leaves for whoever watches it: its stacks on a signal, the exchanges it has begun, what it spends its
time on.

Stacks are written by ``faulthandler`` in the signal's handler, in C: a main thread that waits inside a collective, or
holds the interpreter's lock for ever, still answers. A thread of Python adds what only Python can ask for. It looks ten
times a second at where the main thread stands, which takes about a tenth of a millisecond; nothing is exchanged
between ranks, and nothing waits for it.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, final

from phalanx.comm import Place
from phalanx.launch.hang_report import CollectiveCall, RankStand
from phalanx.launch.stack_frames import StackFrame, frames_of_thread, parse_stacks

SIGNAL = signal.SIGUSR2
"""At which a worker writes down its stacks."""

QUIET = 0.5
"""Share of the timeout without a new step after which a worker writes down its exchanges, too."""

PROBE_FILES = ("stacks", "standing")
"""Names of the files, where they have names."""

_LOOK = 0.1  # seconds between looks at the main thread
_WRITE = 1.0  # seconds between writings of what was seen
_RECORDER, _BUFFER = "TORCH_FR_BUFFER_SIZE", "64"  # exchanges that torch remembers


@dataclass(frozen=True, slots=True)
class ProbeFiles:
    """Descriptors of two files that a worker writes and its watcher reads: stacks, and one line of JSON."""

    stacks: int
    standing: int

    @classmethod
    def made(cls, paths: Iterable[Path]) -> ProbeFiles:
        """In a worker: new files at these paths, for as long as the process lives."""
        how = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
        return cls(*(os.open(path, how, 0o600) for path in paths))

    def answer(self, since: int) -> tuple[int, tuple[StackFrame, ...]]:
        """In the watcher: how long the stacks have become, and the frames written after byte ``since``."""
        size = os.fstat(self.stacks).st_size
        return size, parse_stacks(os.pread(self.stacks, size - since, since).decode(errors="replace"))

    def read(self) -> tuple[RankStand | None, TimeSpent]:
        """In the watcher: what the worker has written down last; nothing where it is just being written."""
        line, whole, _ = os.pread(self.standing, 1 << 20, 0).partition(b"\n")
        with suppress(ValueError, KeyError, TypeError):
            if whole:
                fields = json.loads(line)
                return RankStand.from_json(fields["stand"]), TimeSpent(*fields["spent"])
        return None, TimeSpent()


class TimeSpent(NamedTuple):
    """How often the main thread was found computing, waiting for other ranks, and waiting for data.

    Beside that the seconds it was ready to run without a core, and the seconds in which all that was.
    """

    computes: int = 0
    waits: int = 0
    loads: int = 0
    queues: float = 0.0
    seconds: float = 0.0

    @property
    def looks(self) -> int:
        """How often it was looked at."""
        return self.computes + self.waits + self.loads


@final
class RankProbe:
    """Watches the main thread of this process from inside; ``start`` once, ends with the process."""

    def __init__(
        self, place: Place, files: ProbeFiles | None, publish: Callable[[RankStand], None] | None = None
    ) -> None:
        """``files``: for a launcher on this machine; ``None`` where there is none.

        ``publish`` is called by a thread with where this rank stands, without a stack where it goes on.
        """
        self._rank, self._timeout, self._files, self._publish = place.rank, place.timeout, files, publish
        self._step: int | None = None
        self._ended = False
        self._written, self._told = 0.0, False
        self._since = time.monotonic()
        self._spent = [0, 0, 0]
        self._began = time.monotonic()
        self._main = threading.main_thread().ident or 0
        self._clock = MainThreadClock(os.getpid())
        self._host = socket.gethostname()

    def start(self) -> None:
        """From now on this process answers. To be called by its main thread."""
        if _RECORDER not in os.environ:
            os.putenv(_RECORDER, _BUFFER)  # torch alone reads it, when the first process group is made
        if self._files:
            # of the thread that takes the signal alone: frames of others change while they are read, which may crash
            faulthandler.register(SIGNAL, file=self._files.stacks, all_threads=False)
            os.write(self._files.stacks, b"ready\n")
        threading.Thread(target=self._run, name="phalanx-probe", daemon=True).start()

    def end(self) -> None:
        """The run has ended here: what was written last is where this rank stood."""
        self._ended = True

    def report_step(self, step: int | None) -> None:
        """A step begins."""
        self._step, self._since = step, time.monotonic()

    def _run(self) -> None:
        while not self._ended:
            time.sleep(_LOOK)
            with suppress(Exception):  # of a look that fails the next one knows nothing
                self._look_and_tell()

    def _look_and_tell(self) -> None:
        stand = self.look()
        self._spent[1 if stand.waits else 2 if stand.loads else 0] += 1
        now = time.monotonic()
        quiet = now - self._since > QUIET * self._timeout
        if now - self._written < (max(_LOOK, min(_WRITE, self._timeout / 20)) if quiet else _WRITE):
            return
        self._written = now
        if quiet:
            stand = replace(stand, calls=collective_calls())
        if self._files:
            self._write(self._files, stand if quiet else replace(stand, frames=()))
        if self._publish and not self._ended and (quiet or not self._told):
            self._publish(stand if quiet else replace(stand, frames=()))
        self._told = not quiet

    def look(self) -> RankStand:
        """Where the main thread stands now."""
        return RankStand(
            rank=self._rank,
            step=self._step,
            pid=os.getpid(),
            host=self._host,
            frames=frames_of_thread(self._main),
            busy=self._clock.busy(),
        )

    def _write(self, files: ProbeFiles, stand: RankStand) -> None:
        spent = [*self._spent, self._clock.queued, time.monotonic() - self._began]
        line = json.dumps({"stand": stand.to_json(), "spent": spent}).encode() + b"\n"
        with suppress(OSError):  # a full disk is no reason to end
            os.pwrite(files.standing, line, 0)


def collective_calls() -> tuple[CollectiveCall, ...]:
    """Of each process group the last exchange that this process has begun, as torch's flight recorder has it."""
    torch_c = sys.modules.get("torch._C._distributed_c10d")
    dump: Callable[[], bytes] | None = getattr(torch_c, "_dump_fr_trace_json", None)
    if dump is None:
        return ()
    found: dict[str, CollectiveCall] = {}
    # what is told of an exchange is torch's own affair, and another torch may tell it otherwise
    with suppress(ValueError, RuntimeError, LookupError, TypeError, AttributeError):
        members = _members()
        for entry in json.loads(dump()).get("entries", ()):
            call = _call(entry, members)
            held = found.get(call.group)
            if held is None or not held.pending or call.pending:
                found[call.group] = call
    return tuple(found.values())


def _call(entry: Mapping[str, Any], members: Mapping[str, tuple[int, ...]]) -> CollectiveCall:
    name, to_one = entry["process_group"][0], entry["is_p2p"]
    sizes = " ".join("×".join(map(str, size)) or "1" for size in entry["input_sizes"][:3])
    kind = entry["profiling_name"].partition(":")[2] or entry["profiling_name"]
    types = "/".join(sorted({str(kind).lower() for kind in entry["input_dtypes"]}))
    return CollectiveCall(
        # messages are numbered on each side by itself
        group=f"{name} messages" if to_one else name,
        ranks=() if to_one else members.get(name, ()),
        number=entry["p2p_seq_id"] if to_one else entry["collective_seq_id"],
        what=f"{kind} of {types} {sizes}".strip(),
        pending=not entry["retired"],
    )


def _members() -> dict[str, tuple[int, ...]]:
    """Process group → its ranks."""
    from torch.distributed import distributed_c10d

    world = distributed_c10d._world
    return {name: tuple(world.pg_group_ranks.get(group, ())) for group, name in list(world.pg_names.items())}


@final
class MainThreadClock:
    """How busy the main thread of a process is: time on a core, and time waiting for one.

    Attributes:
        queued: seconds of the latter, of the whole life of the process.
    """

    def __init__(self, pid: int) -> None:
        self._file = Path(f"/proc/{pid}/task/{pid}/schedstat")
        self.queued = 0.0
        self._last = self._now()

    def busy(self) -> float | None:
        """Share of the time since the last call that it was not asleep; ``None`` where that is not known."""
        last, self._last = self._last, self._now()
        if self._last is None or last is None or self._last[0] <= last[0]:
            return None
        return (self._last[1] - last[1]) / (self._last[0] - last[0])

    def _now(self) -> tuple[int, int] | None:
        with suppress(OSError, ValueError):
            ran, queued, _ = map(int, self._file.read_text().split())
            self.queued = queued / 1e9
            return time.monotonic_ns(), ran + queued
        return None
