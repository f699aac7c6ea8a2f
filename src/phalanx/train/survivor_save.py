"""The steps since the last checkpoint, saved by a rank whose peers are lost.

Under plain data parallelism every rank holds all that a checkpoint holds. Ranks exchange gradients, counts and running
statistics before any of them updates, so a rank that finds its peers gone has the state after the last step that it
finished, whole: it writes that, as a checkpoint, and fails as it would have. The run that is started again goes on from
there. Of ranks that are one step apart the later one is right: that all had a part in its last step it could not have
finished it otherwise. What samples they had in it has to be in the ledger, or it counts as not taken.

Left to the checkpoints on the disk are plans under which no rank holds everything, jobs with phases, whose ranks
exchange gradients after an update as well, replicas that step by themselves,
gradients that are sent with something left out, and CUDA: who loses a peer there is ended by NCCL's watchdog, or goes
on with sums that have not arrived.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

from phalanx.checkpoint import read_state, save_as_survivor
from phalanx.checkpoint.all_ranks import alone
from phalanx.checkpoint.folder import newest_first
from phalanx.checkpoint.format import step_of
from phalanx.comm import Place
from phalanx.comm.roll_call import reports_lost_peer
from phalanx.config import Job, Plan, RunSpec
from phalanx.config.run_files import CHECKPOINTS, EVENTS, LEDGER
from phalanx.data import last_steps
from phalanx.device_kinds import on_host
from phalanx.errors import CheckpointError
from phalanx.events import EventLog
from phalanx.files import token_of
from phalanx.train.launcher_link import Unsaved
from phalanx.train.run_recorder import RunRecorder
from phalanx.train.state import SURVIVOR, to_save
from phalanx.units import show_names

if TYPE_CHECKING:
    from phalanx.train.assembly import Assembly


@final
class SurvivorSave:
    """Saves what this rank holds if its peers are lost, where that is the whole training."""

    def __init__(
        self, job: Job, run: RunSpec, place: Place, recorder: RunRecorder, tell: Callable[[Unsaved], None]
    ) -> None:
        """``tell`` takes what whoever ends the ranks of a run that has failed should know of this one."""
        self._job, self._run, self._place, self._recorder, self._tell = job, run, place, recorder, tell
        self._told = Unsaved.NOTHING
        self._first, self._known = 0, frozenset[str]()

    @classmethod
    def of(
        cls,
        job: Job,
        run: RunSpec,
        place: Place,
        assembly: Assembly,
        recorder: RunRecorder,
        tell: Callable[[Unsaved], None],
    ) -> SurvivorSave | None:
        """That of this rank; ``None`` where it could not save the training, or is given no time to."""
        token = token_of(run.folder)
        if token is None or token.gathered or job.phases or not (run.grace and holds_all(run.plan, assembly)):
            return None
        assembly.step.boundary.keep(assembly.layout.modules)
        recorder.outlive()
        made = cls(job, run, place, recorder, tell)
        made.began(assembly.step.progress.step)
        return made

    def began(self, step: int) -> None:
        """The run goes on from ``step``: later checkpoints that are there have been found damaged."""
        self._first = step
        paths = newest_first(self._run.folder / CHECKPOINTS)
        self._known = frozenset(path.name for path in paths if (step_of(path) or 0) > step)

    def stepped(self) -> None:
        """A step is finished."""
        if self._told is Unsaved.NOTHING:
            self._say(Unsaved.STEPS)

    def over(self) -> None:
        """There is nothing that could be saved any more."""
        self._say(Unsaved.NOTHING)

    def failed(self, error: Exception, assembly: Assembly) -> None:
        """Save the last finished step if ``error`` only says that peers are lost. What goes wrong becomes a warning."""
        step = assembly.step
        if not reports_lost_peer(error) or step.progress.step == self._first:
            return
        if (step.drift is not None and step.drift.found) or not step.boundary.go_back():
            return
        self._say(Unsaved.SAVING)
        try:
            self._save(assembly)
        except Exception as trouble:
            what = f"rank {self._place.rank} could not save step {step.progress.step}, though it held all of it"
            self._write("warning", message=f"{what}: {trouble}")

    def _save(self, assembly: Assembly) -> None:
        run, rank, step = self._run, self._place.rank, assembly.step
        begun, there = time.perf_counter(), last_steps(run.folder / LEDGER, self._first)
        if lacking := [one for one in range(run.plan.world_size) if there.get(one, -1) < step.progress.step - 1]:
            ranks = show_names([str(one) for one in lacking], 10)
            what = f"the samples of rank {ranks} in its last step are not in the ledger"
            raise CheckpointError(f"{what}, which could perhaps not be written")
        with alone():
            asked = to_save(
                run.folder / CHECKPOINTS, self._job, assembly, keep=run.keep, keep_every=run.keep_every, survivor=rank
            )
            path = save_as_survivor(asked, rank=rank, known=self._known)
        if path is None:
            return
        seconds = time.perf_counter() - begun
        if step.last is not None:
            self._recorder.complete(step.last, sum(step.seconds))
        size = sum(file.lstat().st_size for file in path.iterdir())
        relative = str(path.relative_to(run.folder))
        facts = {"bytes": size, "seconds": seconds, "standstill": seconds}
        self._write("checkpoint", step=asked.step, path=relative, **facts)

    def _write(self, event: str, **fields: Any) -> None:
        with EventLog(self._run.folder / EVENTS) as log:
            log.write(event, **fields)

    def _say(self, unsaved: Unsaved) -> None:
        self._told = unsaved
        self._tell(unsaved)


def holds_all(plan: Plan, assembly: Assembly) -> bool:
    """Whether each rank has all that a checkpoint of this training has, as the others have it, between two steps."""
    held = assembly.layout.holdings
    return plan.kind == "replicate" and on_host(assembly.device) and not (assembly.local_sgd or held.sender)


def saved_by(path: Path) -> int | None:
    """The rank that wrote the checkpoint in folder ``path`` by itself; ``None`` where all did, or it cannot be read."""
    try:
        rank = read_state(path).get(SURVIVOR)
    except CheckpointError:
        return None
    return rank if isinstance(rank, int) else None
