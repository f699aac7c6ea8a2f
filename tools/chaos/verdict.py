"""A job run twice, undisturbed and under faults, and the verdict: was anything lost?"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, final

from chaos.faults import Fault, draw
from chaos.injector import InjectedRun
from chaos.outcome import Outcome
from chaos.processes import adopting, children_of_this_process, end_all, left_over, refuse_without_proc
from chaos.run_equality import (
    Repeats,
    SamplesCompared,
    WeightsCompared,
    compare_samples,
    compare_weights,
)
from chaos.train_command import TrainCommand
from phalanx.config import Plan
from phalanx.config.run_files import CHECKPOINTS
from phalanx.errors import CheckpointError, Problem, RunError, SpecError

_PATIENCE = 5.0  # seconds that processes have to be gone after the run's end


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """What faults made of a run.

    Attributes:
        outcomes: of each fault, in the order in which they struck.
        ended: whether the run came to its end.
        failure: how it ended otherwise.
        starts: how often the command was begun.
        lives: how often its workers were begun.
        weights: final checkpoint against the undisturbed run's; ``None`` where the run did not end.
        samples: the ledger against the undisturbed run's; ``None`` where the run did not end.
        repeats: why weights need not be equal bit for bit under this plan; empty where they must be.
        left: processes and files that were left over.
        seconds: of the run with faults.
        undisturbed_seconds: of the run without.
        asked: faults that were asked for in words, each of which is to strike; drawn ones may come too late.
    """

    job: str
    plan: str
    steps: int
    checkpoint_every: int
    outcomes: tuple[Outcome, ...]
    ended: bool
    failure: str
    starts: int
    lives: int
    weights: WeightsCompared | None
    samples: SamplesCompared | None
    repeats: str
    left: tuple[str, ...]
    seconds: float
    undisturbed_seconds: float
    asked: tuple[str, ...] = ()

    @property
    def struck(self) -> tuple[Outcome, ...]:
        """Outcomes of the faults that came about."""
        return tuple(outcome for outcome in self.outcomes if outcome.struck)

    @property
    def passed(self) -> bool:
        """Whether nothing was lost, under every fault that was asked for."""
        return self.nothing_lost and not self.missed

    @property
    def missed(self) -> tuple[str, ...]:
        """Faults that were asked for and did not strike, one sentence each: the run says nothing of them."""
        left, found = Counter(self.asked), list[str]()
        for one in sorted(self.outcomes, key=lambda one: not one.took_effect):
            if left[one.fault] > 0:
                left[one.fault] -= 1
                if not one.took_effect:
                    found.append(f"{one.fault} {'found no checkpoint to damage' if one.struck else one.what}")
        return tuple(found)

    @property
    def nothing_lost(self) -> bool:
        return not self.lost

    @property
    def lost(self) -> tuple[str, ...]:
        """What was lost, one sentence each; empty where nothing was."""
        found = [] if self.ended else [f"the run did not come to its end: {self.failure}"]
        if (weights := self.weights) and weights.first:
            found.append(
                f"{weights.differing} of {weights.tensors} tensors of the final checkpoint are not the undisturbed "
                f"run's, such as {weights.first} (relative difference up to {weights.largest:.2g})"
            )
        if (samples := self.samples) and (samples.lost or samples.doubled):
            found.append(f"{samples.lost} samples were lost, {samples.doubled} seen more often than undisturbed")
        found += self.samples.wrong if self.samples else ()
        found += [f"{one.damaged} was damaged and believed, after {one.fault}" for one in self.outcomes if one.believed]
        found += [
            f"the run hung after {one.fault}" for one in self.outcomes if one.hung and "for ever" not in one.fault
        ]
        found += [f"left over: {one}" for one in self.left]
        return tuple(found)

    def to_dict(self) -> dict[str, Any]:
        return {
            "passed": self.passed,
            "missed": list(self.missed),
            "nothing_lost": self.nothing_lost,
            "lost": list(self.lost),
            "struck": len(self.struck),
            **asdict(self),
            "outcomes": [outcome.to_dict() for outcome in self.outcomes],
        }

    def __str__(self) -> str:
        said = "nothing was lost" if self.nothing_lost else "LOST:\n" + "\n".join(f"- {one}" for one in self.lost)
        return "\n".join([*(str(outcome) for outcome in self.outcomes), said, *self.missed])


@final
class Chaos:
    """A job under a plan, to be run under faults: ``Chaos("train.py", "dp=2", folder=tmp_path / "chaos").run(faults)``.

    The run is a ``phalanx train`` of its own, begun again after each death. What it is compared with, the same run
    without faults, is made once. Linux only.
    """

    def __init__(
        self,
        job: str,
        plan: Plan | str,
        *,
        folder: Path,
        steps: int = 60,
        checkpoint_every: int = 5,
        options: Sequence[str] = (),
        limit: float = 120.0,
    ) -> None:
        """Nothing is started yet.

        Args:
            job: a Python file with a function ``job()``, ``file.py:name`` or ``package.module:name``.
            plan: it runs under.
            folder: where both runs' folders go; made if missing.
            steps: optimizer steps of the run.
            checkpoint_every: steps between checkpoints.
            options: further options of ``phalanx train``, such as ``("--batch", "64")``.
            limit: seconds without progress after which the run is taken to hang, and is ended.

        Raises:
            SpecError: steps or checkpoint_every are no numbers to run with.
            RefusedError: this system does not show processes as Linux does.
        """
        refuse_without_proc()
        problems = [
            Problem(where=f"--{name}", given=str(value), allowed="a whole number, 1 or more", fix=f"--{name} {fix}")
            for name, value, fix in (("steps", steps, 60), ("checkpoint-every", checkpoint_every, 5))
            if value < 1
        ]
        if problems:
            raise SpecError(problems)
        self.plan = plan if isinstance(plan, Plan) else Plan.parse(plan)
        self.folder = Path(folder).absolute()
        self.steps, self.checkpoint_every = steps, checkpoint_every
        self._limit = limit
        self._command = TrainCommand(
            job=job, plan=self.plan, steps=steps, checkpoint_every=checkpoint_every, options=tuple(options)
        )
        self._undisturbed: InjectedRun | None = None
        self._trials = 0

    def draw(self, count: int, *, seed: int, kinds: Sequence[str] = ("SIGKILL",)) -> list[Fault]:
        """``count`` random faults for this run; see ``chaos.draw``."""
        shape = {"ranks": self.plan.processes, "steps": self.steps, "checkpoint_every": self.checkpoint_every}
        return draw(count, seed=seed, kinds=kinds, **shape)

    def undisturbed(self) -> Path:
        """The folder of the run without faults; it is run when this is first asked for.

        Raises:
            RunError: it fails.
        """
        if self._undisturbed is None:
            run = InjectedRun(self._command, self._new_folder("undisturbed"), limit=self._limit)
            with adopting():
                run.run()
            if not run.ended:
                raise RunError(
                    f"the run fails without any fault: {run.failure}\n    try: phalanx train {self._command.job}"
                )
            self._undisturbed = run
        return self._undisturbed.run_folder

    def run(
        self, faults: Sequence[Fault | str], say: Callable[[Outcome], None] = lambda _: None, *, seed: int = 0
    ) -> Verdict:
        """Run under ``faults``, and compare with the undisturbed run. ``say`` is given each outcome when it is known.

        The same ``seed`` has ``tear`` and ``flip`` hit the same place of the same files.
        Faults in words are asked for: the verdict says which of them did not strike.

        Raises:
            SpecError: a fault cannot be had with this plan or on this machine.
            RunError: the run fails without any fault.
        """
        asked = tuple(str(Fault.parse(fault)) for fault in faults if isinstance(fault, str))
        chosen = [fault if isinstance(fault, Fault) else Fault.parse(fault) for fault in faults]
        chosen.sort(key=lambda fault: fault.step(self.checkpoint_every))
        if problems := [problem for fault in chosen if (problem := self._cannot(fault))]:
            raise SpecError(problems)
        before = children_of_this_process()
        undisturbed = self.undisturbed()
        self._trials += 1
        folder = self._new_folder(f"disturbed-{self._trials}")
        run = InjectedRun(self._command, folder, faults=chosen, limit=self._limit, seed=seed)
        with adopting():
            run.run(say)
            processes = left_over(before, patience=_PATIENCE)
            end_all(processes)
            left_over(before, patience=_PATIENCE)
        left = [*run.stayed, *(f"process {entry.name} ({entry.pid})" for entry in processes), *_stray_files(folder)]
        return replace(self._judged(run, undisturbed, tuple(left)), asked=asked)

    def _judged(self, run: InjectedRun, undisturbed: Path, left: tuple[str, ...]) -> Verdict:
        repeats, weights, samples = Repeats.of(self.plan), None, None
        ended, failure = run.ended, run.failure
        if ended:
            samples = compare_samples(undisturbed, run.run_folder)
            try:
                weights = compare_weights(undisturbed, run.run_folder, repeats)
            except CheckpointError as error:
                ended, failure = False, f"its final checkpoint cannot be read: {error}"
        return Verdict(
            job=self._command.job,
            plan=str(self.plan),
            steps=self.steps,
            checkpoint_every=self.checkpoint_every,
            outcomes=tuple(run.outcomes),
            ended=ended,
            failure=failure,
            starts=run.starts,
            lives=run.lives,
            weights=weights,
            samples=samples,
            repeats=repeats.why,
            left=left,
            seconds=run.seconds,
            undisturbed_seconds=self._undisturbed.seconds if self._undisturbed else 0.0,
        )

    def _cannot(self, fault: Fault) -> Problem | None:
        """Why the fault cannot be had here; ``None`` where it can."""
        given = str(fault)
        if fault.target == "rank" and fault.rank >= self.plan.processes:
            allowed = f"rank 0 to {self.plan.processes - 1} under {self.plan}"
            return Problem(where="--at", given=given, allowed=allowed, fix=f"--at '{replace(fault, rank=0)}'")
        if fault.step(self.checkpoint_every) > self.steps:
            allowed = f"a moment within the run's {self.steps} steps, with a save every {self.checkpoint_every}"
            return Problem(where="--at", given=given, allowed=allowed, fix=f"--steps {2 * self.steps}")
        return None

    def _new_folder(self, name: str) -> Path:
        folder = self.folder / name
        if folder.exists():
            allowed = "a folder that holds no earlier trial"
            raise SpecError.of("--run", str(folder), allowed, f"--run {self.folder}-2")
        folder.mkdir(parents=True)
        return folder


def _stray_files(folder: Path) -> list[str]:
    """Files that the run left where nothing of it should be: its temporary folder, and what saves that died left."""
    found = [path for path in (folder / "tmp").rglob("*") if path.is_file() and "torchinductor" not in str(path)]
    found += (folder / "run" / CHECKPOINTS).glob(".*")
    found += (folder / "run").glob(".*.toml.*")
    return [f"file {path.relative_to(folder)}" for path in found]
