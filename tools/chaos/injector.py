"""One run with faults: followed by its event log, its folder and ``/proc``, hit at given moments, begun again."""

from __future__ import annotations

import random
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from chaos.faults import Fault
from chaos.outcome import Outcome, damage, missed
from chaos.processes import (
    children_of_this_process,
    descendants,
    end_all,
    left_over,
    rank_processes,
    send,
)
from chaos.train_command import TrainCommand
from phalanx.config.run_files import CHECKPOINTS, EVENTS
from phalanx.events import EventReader

_TICK, _FINE_TICK = 0.002, 0.0005  # seconds between looks; the second while a save is waited for
_STANDS = 0.001  # seconds until a process that was sent SIGSTOP stands
_FILE_CLOCK = 0.02  # seconds that times of files may lag behind
_AFTER_LAUNCHER = 5.0  # seconds in which a run's processes have to be gone once its launcher is
_UNHARMED = 10  # steps in which what was hit goes on: it is not going to end
_HEEDED = 30.0  # seconds after a deadly fault in which it may yet: ranks agree on the step at which they stop
_SAVING = re.compile(r"\.step-(\d+)\.tmp")


@dataclass(kw_only=True, slots=True)
class _Strike:
    """A fault that was carried out: when, on whom, and where in the log."""

    fault: Fault
    pids: tuple[int, ...]
    at: float
    index: int
    step: int
    saving: int | None
    damaged: str = ""
    whole_from: int | None = None
    """Since which event whoever was hit is there again, or no longer hindered."""
    code: int | None = None
    hung: bool = False


@final
class InjectedRun:
    """One run of a command in a folder, from its begin to its end, with the faults it is to have.

    Attributes:
        outcomes: of each fault, as they become known.
        ended: whether the run came to its end, with exit code 0.
        failure: how it ended otherwise.
        starts: how often the command was begun.
        lives: how often workers were begun, as the event log says.
        stayed: names of processes that were still there some seconds after their launcher had ended.
        seconds: from the first begin to the end.
    """

    def __init__(
        self, command: TrainCommand, folder: Path, *, faults: Sequence[Fault] = (), limit: float, seed: int = 0
    ) -> None:
        """``limit``: seconds without an event after which the run is ended as hung.

        ``seed``: what is drawn from it, which bytes of a file are damaged.
        """
        self.outcomes: list[Outcome] = []
        self.ended, self.failure = False, ""
        self.starts = self.lives = 0
        self.stayed: list[str] = []
        self.seconds = 0.0
        self._command, self._folder, self._faults, self._limit = command, folder, tuple(faults), limit
        self._run = folder / "run"
        self._before = set[int]()
        self._over = False
        # by themselves: how often a save is waited for, and drawn for, differs from run to run
        self._dice, self._moments = random.Random(seed), random.Random(seed)
        self._events: list[tuple[float, dict[str, Any]]] = []
        self._strike: _Strike | None = None
        self._hit_since_start = False
        self._begun = self._heard = time.monotonic()
        self._alive_since = 0.0  # by the clock of files: when workers were begun
        self._step: int | None = None  # last one completed since workers were begun; None before they were

    @property
    def run_folder(self) -> Path:
        return self._run

    def run(self, say: Callable[[Outcome], None] = lambda _: None) -> None:
        """Run to the end; ``say`` is given each outcome as soon as it is known."""
        self._folder.mkdir(parents=True, exist_ok=True)
        self._before = children_of_this_process()
        self._begun = time.monotonic()
        self._begin()
        try:
            for fault in self._faults:
                self.outcomes.append(self._inject(fault))
                say(self.outcomes[-1])
            while not self._over:
                self._tick()
        finally:
            self.seconds = time.monotonic() - self._begun
            self._end()

    def _begin(self) -> None:
        self._process: subprocess.Popen[bytes] = self._command.start(
            self._run, self._folder / "train.log", restarts=len(self._faults) + 3
        )
        self.starts += 1
        self._hit_since_start, self._step, self._heard = False, None, time.monotonic()
        if not self._run.exists() or self.starts == 1:
            self._log = EventReader(self._run / EVENTS)

    def _inject(self, fault: Fault) -> Outcome:
        while not self._over:
            strike = self._carry_out(fault) if self._is_due(fault) else None
            if strike:
                return self._follow(strike)
            self._tick(_FINE_TICK if fault.phase == "save" else _TICK)
        return missed(fault, "the run was over before")

    def _is_due(self, fault: Fault) -> bool:
        if self._step is None or self._process.poll() is not None:
            return False
        if fault.phase == "step":
            return self._step + 1 >= fault.number
        saving = self._saving()
        return saving is not None and saving >= fault.step(self._command.checkpoint_every)

    def _saving(self) -> int | None:
        """The step whose checkpoint is being written now; what an earlier save left when it died is older."""
        steps: list[int] = []
        with suppress(OSError):
            for path in (self._run / CHECKPOINTS).iterdir():
                if (found := _SAVING.fullmatch(path.name)) and path.stat().st_ctime > self._alive_since:
                    steps.append(int(found[1]))
        return max(steps, default=None)

    def _carry_out(self, fault: Fault) -> _Strike | None:
        """Have the fault happen; ``None`` where the moment has passed, or who is to be hit is not there yet."""
        ranks = rank_processes(self._process.pid)
        if len(ranks) < self._command.plan.processes:
            return None
        pids = _hit(fault, ranks, self._process.pid)
        if fault.phase == "step":
            return self._harm(fault, pids, None)
        time.sleep(self._moments.random() * 0.004)
        with _standing([*ranks.values(), self._process.pid], unless=pids if fault.kind == "SIGSTOP" else ()):
            saving = self._saving()
            if saving is None or saving < fault.step(self._command.checkpoint_every):
                send(pids, signal.SIGCONT)
                return None
            return self._harm(fault, pids, saving)

    def _harm(self, fault: Fault, pids: tuple[int, ...], saving: int | None) -> _Strike:
        self._take_events()
        step = 0 if self._step is None else self._step + 1
        strike = _Strike(fault=fault, pids=pids, at=time.monotonic(), index=len(self._events), step=step, saving=saving)
        self._strike, self._hit_since_start = strike, True
        match fault.kind:
            case "SIGKILL" | "SIGTERM" | "SIGSTOP":
                send(pids, getattr(signal, fault.kind))
            case _:
                send(pids, signal.SIGKILL)
                self._process.wait()
                self._await_nobody()
                strike.damaged = damage(self._run / CHECKPOINTS, fault, self._dice)
        return strike

    def _follow(self, strike: _Strike) -> Outcome:
        """See what comes of it, up to the next step that is completed after."""
        lasting = not strike.fault.deadly
        while not self._over and not self._recovered(strike):
            if lasting and time.monotonic() > strike.at + strike.fault.seconds:
                send(strike.pids, signal.SIGCONT)
                lasting, strike.whole_from = False, len(self._events)
            self._tick()
        if lasting:
            send(strike.pids, signal.SIGCONT)
        self._strike = None
        return self._outcome(strike)

    def _recovered(self, strike: _Strike) -> bool:
        names = [event["event"] for _, event in self._events[strike.index :]]
        if "start" in names:
            return "step" in names[names.index("start") :]
        may_end = strike.fault.deadly and time.monotonic() < strike.at + _HEEDED
        if names.count("step") > _UNHARMED and not may_end:
            return True
        if strike.whole_from is None and strike.fault.deadly and "step" in names:
            there = rank_processes(self._process.pid)
            gone = not {self._process.pid, *there.values()} & set(strike.pids)
            if len(there) == self._command.plan.processes and gone:
                strike.whole_from = len(self._events)
        if strike.whole_from is None:
            return False
        return "step" in names[strike.whole_from - strike.index :]

    def _outcome(self, strike: _Strike) -> Outcome:
        after = self._events[strike.index :]
        names = [event["event"] for _, event in after]
        began = names.index("start") if "start" in names else None
        start = after[began][1] if began is not None else None
        first = began if began is not None else (strike.whole_from or strike.index) - strike.index
        steps = [at for at, event in after[first:] if event["event"] == "step"]
        resumed = next((event for _, event in after[first:] if event["event"] == "resume"), None)
        done = [event["step"] + 1 for _, event in after[:began] if event["event"] == "step"]
        return Outcome(
            fault=str(strike.fault),
            seconds=strike.at - self._begun,
            step=strike.step,
            saving=strike.saving,
            what=_in_words(strike, start, over=self._over and not steps),
            next_step=steps[0] - strike.at if steps else None,
            again=max(0, max([strike.step, *done]) - start["first_step"]) if start else 0,
            damaged=strike.damaged,
            believed=bool(
                strike.damaged and resumed and Path(resumed["path"]).name == Path(strike.damaged).parent.name
            ),
            hung=strike.hung,
        )

    def _tick(self, pause: float = _TICK) -> None:
        """Wait a moment, take in what the run says, and begin it again where it has died."""
        time.sleep(pause)
        self._take_events()
        code = self._process.poll()
        if code is not None:
            self._take_in_end(code)
        elif time.monotonic() > self._heard + self._limit:
            self._end_hung()

    def _take_events(self) -> None:
        new, now = self._log.new(), time.monotonic()
        if new:
            self._heard = now
        for event in new:
            self._events.append((now, event))
            if event["event"] == "start":
                self._step, self.lives = event["first_step"] - 1, self.lives + 1
                self._alive_since = event["time"] - _FILE_CLOCK
            elif event["event"] == "step" and self._step is not None:
                self._step = event["step"]

    def _take_in_end(self, code: int) -> None:
        self._await_nobody()
        self._take_events()
        if self._strike:
            self._strike.code = code
        if code == 0:
            self._over = self.ended = True
        elif self._hit_since_start:
            self._begin()
        else:
            self._over = True
            self.failure = f"it ended with exit code {code}, though no fault had struck\n{self._last_words()}"

    def _end_hung(self) -> None:
        if self._strike:
            self._strike.hung = True
        if not self._hit_since_start:
            self.failure = f"nothing happened for {self._limit:g} s, though no fault had struck\n{self._last_words()}"
            self._over = True
            return
        self._end()

    def _end(self) -> None:
        end_all(descendants(self._process.pid))
        self._process.kill()
        self._process.wait()

    def _await_nobody(self) -> None:
        """Wait until nothing of the run is there: what died with its launcher takes a moment."""
        if there := left_over(self._before, patience=_AFTER_LAUNCHER):
            self.stayed += [f"{entry.name} ({entry.pid})" for entry in there]
            end_all(there)

    def _last_words(self) -> str:
        lines = (self._folder / "train.log").read_text(errors="replace").splitlines()
        return "\n".join(f"    | {line}" for line in lines[-15:])


def _hit(fault: Fault, ranks: dict[int, int], launcher: int) -> tuple[int, ...]:
    """The processes that a fault hits."""
    match fault.target:
        case "rank":
            return (ranks[fault.rank],)
        case "launcher":
            return (launcher,)
        case "ranks":
            return tuple(ranks.values())
        case _:
            return (launcher, *ranks.values())


@contextmanager
def _standing(pids: Sequence[int], *, unless: Sequence[int]) -> Iterator[None]:
    """Within the block these processes stand still, so that what is seen of them stays so; some stand on after it."""
    send(pids, signal.SIGSTOP)
    time.sleep(_STANDS)
    try:
        yield
    finally:
        send([pid for pid in pids if pid not in unless], signal.SIGCONT)


def _in_words(strike: _Strike, start: dict[str, Any] | None, *, over: bool) -> str:
    hung = "hung, and was ended from outside; " if strike.hung else ""
    if start is None:
        return f"{hung}{'the run came to its end' if over else 'the run went on'}"
    how = "begun again by itself" if strike.code is None else f"exit code {strike.code}, begun again"
    return f"{hung}{how} from step {start['first_step']}"
