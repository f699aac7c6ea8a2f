"""Which worker failed first, and what its user should do about it.

When one worker dies, the others soon fail as well, because their peer is gone. Those failures are true and useless;
this file tells them from the first one. A worker describes its own exception (``describe_error``), the launcher adds
what it sees from outside (signals, silent exits), ``first_failure`` picks and ``worker_error`` words it.
"""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from phalanx.comm.roll_call import reports_lost_peer
from phalanx.config.run_files import EVENTS
from phalanx.errors import (
    PhalanxError,
    RunError,
    WorkerError,
    error_from_dict,
    error_to_dict,
    is_out_of_memory,
)
from phalanx.events import EventLog
from phalanx.train.user_traceback import format_for_user

_MISMATCH = re.compile(r"Received data size doesn't match expected size|Watchdog caught collective operation timeout")
_GAVE_UP = re.compile(r"timed out|timeout|doesn't match expected size", re.IGNORECASE)
_LESS_MEMORY = "use less memory: a smaller micro= in the plan, then recompute=full, then fsdp= over more devices"


HANG = "hang"
"""The kind of failure that is a rank that did not come, found by whoever watches it."""

_SAME_TIME, _SAME_TIME_LOST = 0.3, 1.0  # seconds; the second while all that is known is that peers were lost


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """How one worker failed.

    Attributes:
        step: the optimizer step it had reported last, ``None`` before the first.
        kind: class name of its exception, ``signal 9`` and the like, or ``exit 0``.
        time: seconds on the machine's monotonic clock.
        lost_peer: the exception only reports that another worker is gone.
        signal: the signal that ended the worker, or 0.
        expected: raised by Phalanx on purpose; its message already says what to do.
        everywhere: by all ranks together.
        problems: of a SpecError, each as JSON: it is raised again as what it was.
        hang: where every rank stands, as the ``hang`` event has it, where the run did not go on.
        host: the name of the worker's, where the launcher knows several.
    """

    rank: int
    step: int | None
    kind: str
    message: str
    traceback: str
    time: float
    lost_peer: bool = False
    signal: int = 0
    expected: bool = False
    everywhere: bool = False
    exit_code: int = 3
    problems: Sequence[Mapping[str, str]] = ()
    hang: Mapping[str, Any] | None = None
    host: str = ""

    @property
    def is_loss(self) -> bool:
        """Whether a worker was lost, rather than that its code failed or went another way than its peers'."""
        if self.hang:
            return self.hang["cause"] != "mismatch"
        return bool(self.signal) or self.lost_peer


def describe_error(error: BaseException) -> dict[str, Any]:
    """What a worker reports about its own exception: the fields of a Failure that only the worker knows, as JSON."""
    fields: dict[str, Any] = {
        **error_to_dict(error),
        "traceback": "",
        "time": time.monotonic(),
        "lost_peer": reports_lost_peer(error),
        "expected": isinstance(error, PhalanxError),
        "everywhere": isinstance(error, RunError) and error.everywhere,
        "exit_code": error.exit_code if isinstance(error, PhalanxError) else 3,
    }
    with suppress(MemoryError):  # the kind and the message are worth more than nothing
        fields["traceback"] = format_for_user(error)
    return fields


def failure_of_exit(rank: int, step: int | None, code: int, traceback: str = "", said: str = "") -> Failure:
    """How a worker failed that only its exit code tells of, negative where a signal ended it.

    ``said``: what it wrote to stderr last. gloo ends a process that gets more from another than it waits for, which is
    whichever comes second: it may be in the right exchange, and the other is not.
    """
    mismatched = _MISMATCH.search(said) if code == -signal.SIGABRT else None
    return Failure(
        rank=rank,
        step=step,
        kind=f"signal {-code}" if code < 0 else f"exit {code}",
        message=signal_name(-code) + (f": {mismatched[0]}" if mismatched else "")
        if code < 0
        else "the process ended without a result",
        traceback=traceback,
        time=time.monotonic(),
        lost_peer=mismatched is not None,
        signal=max(0, -code),
    )


def first_failure(failures: Sequence[Failure]) -> Failure:
    """The failure that caused the others: the earliest that is not merely about a lost peer, else the earliest."""
    return min(failures, key=lambda failure: (failure.lost_peer, failure.time))


def time_for_others(failures: Collection[Failure]) -> float:
    """Seconds, from the first of ``failures``, for reports of workers that failed at the same time.

    With those of ending workers they stay under the 3 s in which everything has to be over.
    """
    return _SAME_TIME_LOST if all(failure.lost_peer for failure in failures) else _SAME_TIME


def gave_up(failure: Failure) -> bool:
    """Whether a worker failed as another did not come to an exchange, or to another one: no connection broke."""
    return failure.lost_peer and _GAVE_UP.search(failure.message) is not None


def refusal(failure: Failure) -> Exception | None:
    """Return the error by which a worker refused the job or the plan; ``None`` if it failed otherwise."""
    return error_from_dict(asdict(failure)) if failure.problems else None


def worker_error(failure: Failure, world_size: int, *, memory_kills: int, launched: bool = True) -> WorkerError:
    """The error to raise: who failed and where, its own traceback, then what to do.

    ``memory_kills``: processes the kernel ended for lack of memory since the launch began; ``launched``: a launcher of
    Phalanx says it, which knows how the other workers fared, rather than the worker itself.
    """
    where = f"rank {failure.rank} of {world_size}" + (f", on {failure.host}," if failure.host else "")
    when = "before the first step" if failure.step is None else f"in step {failure.step}"
    if failure.expected and (failure.exit_code == 2 or failure.everywhere):
        text = failure.message  # what was written is wrong, whichever rank says so; or all say so
    elif failure.expected:
        text = f"{where} {when}: {failure.message}"
    elif failure.lost_peer and not failure.hang and not launched:
        said = next(iter(failure.message.strip().splitlines()), failure.kind)
        text = f"rank {failure.rank} lost its connection to another rank {when}, which may have died: {said}"
    elif failure.hang:
        text = failure.message
    elif failure.signal:
        text = f"{where} was ended {when} by {failure.message}"
    else:
        headline = f"{failure.kind}: {failure.message.strip()}" if failure.message.strip() else failure.kind
        text = f"{where} failed {when}: {headline.splitlines()[0]}"
    if failure.traceback and not failure.expected:
        text += f"\n\n{failure.traceback.rstrip()}"
    hint = "" if failure.expected or failure.hang else advice(failure, world_size, memory_kills=memory_kills)
    if failure.lost_peer and hint and not launched:
        hint = "see the lines of what started the workers (torchrun): they say which rank ended first, and how"
    if hint:
        text += f"\n\nwhat to do: {hint}"
    where_and_how = ("rank", "step", "kind", "traceback", "exit_code")
    error = WorkerError(text, **{name: getattr(failure, name) for name in where_and_how})
    error.hang, error.lost = failure.hang, failure.is_loss
    return error


def record(error: Exception, folder: Path) -> None:
    """Append the error to the events of the run in ``folder``."""
    message = str(error).partition("\n\n")[0]
    rank, step, kind, lost = 0, None, type(error).__name__, False
    if isinstance(error, WorkerError):
        rank, step, kind, lost = error.rank, error.step, error.kind, error.lost
    with EventLog(folder / EVENTS, warns=False) as log:
        if isinstance(error, WorkerError) and error.hang:
            log.write("hang", step=step, **error.hang)
        log.write("error", rank=rank, step=step, kind=kind, message=message, lost=lost)


def advice(failure: Failure, world_size: int, *, memory_kills: int) -> str:
    """Return advice about a failure that Phalanx did not foresee; empty if its own message says all that is known."""
    if failure.signal == signal.SIGKILL and memory_kills:
        return f"the kernel ended a process here because memory ran out; {_LESS_MEMORY}"
    if failure.signal:
        return _BY_SIGNAL.get(failure.signal, "something outside sent this signal; the job itself did not fail")
    said = f"{failure.kind}: {failure.message}"
    if known := next((advice for pattern, advice in _BY_MESSAGE.items() if re.search(pattern, said)), ""):
        return known
    if is_out_of_memory(failure.kind, failure.message):
        return _LESS_MEMORY
    if failure.lost_peer:
        return "a connection between workers broke, though none of them died first: see the network and its timeouts"
    return 'to see it alone, run the same job on one device: plan="single"' if world_size > 1 else ""


_BY_MESSAGE = {
    r"DataLoader worker \(pid.*?\) (is killed|exited)": "a data loading process died, perhaps as memory ran out: "
    "fewer workers= in the job, or workers=0, which shows its own error; or enlarge /dev/shm",
    "unable to allocate shared memory": "enlarge /dev/shm (docker run --shm-size=8g), or set workers=0 in the job",
    "explicit nodesplitter": "nodesplitter=lambda urls: urls, so that each rank reads all of it; or px.TarFiles",
    "Too many open files": "a larger limit (ulimit -n 65536), or fewer workers=, prefetch= or tensors a sample",
    "No space left on device": "free some disk space, then go on from the last whole checkpoint with resume=True",
    "stack expects each tensor to be equal size": "samples of unlike sizes: collate= of the job may pad them to one",
    "^(ModuleNotFound|Import)Error:": "install the missing package here, or import it at the top of the job file",
    "^exit ": "see what the worker has printed; if that is nothing, something in it called os._exit()",
}
_CRASH = (
    "compiled code crashed, not Python: the traceback shows the last Python line before it. "
    'If it crashes on one device (plan="single"), too, suspect the extension named in that line, or its version'
)
_BY_SIGNAL: dict[int, str] = {
    signal.SIGKILL: "something outside ended it: kill -9, a batch system's limit, or the kernel when memory runs out "
    f"(dmesg | grep -i oom); if it was memory, {_LESS_MEMORY}",
    signal.SIGBUS: "shared memory or a memory-mapped file ran out of room: enlarge /dev/shm, or set workers=0",
    **dict.fromkeys((signal.SIGSEGV, signal.SIGABRT, signal.SIGILL, signal.SIGFPE), _CRASH),
}


def signal_name(number: int) -> str:
    """``SIGKILL`` for 9; ``signal 63`` where it has no name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def memory_kills() -> int:
    """Return the processes that this machine's kernel has ended for lack of memory; 0 if it does not say."""
    with suppress(OSError):
        found = re.search(r"^oom_kill (\d+)$", Path("/proc/vmstat").read_text(), re.MULTILINE)
        return int(found[1]) if found else 0
    return 0
