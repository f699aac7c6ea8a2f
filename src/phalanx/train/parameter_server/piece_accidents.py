"""Numbers in a piece that are not finite: what its worker keeps and tells of them, and what becomes of that.

A worker leaves the micro-batch under a name of its own and of the piece, so that two pieces of a step in which
something is met are not in each other's way; the coordinator gives the one that came first its place in the run folder.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, final

from phalanx.data import MicroBatch
from phalanx.data.saved_batch import SavedBatch
from phalanx.parallel.parameter_server import BatchPiece, Report
from phalanx.parallel.parameter_server.protocol import MOST_SAMPLES, line
from phalanx.parallel.rng_streams import stream
from phalanx.train.nonfinite_trace import Sighting

_BEFORE, _UNKNOWN = (-1.0, 0.0, 0.0), (9.0, 0.0, 0.0)  # orders: before the first forward; who knows where


def not_found(error: Exception) -> Sighting:
    """What is told where running the piece again failed, as of memory that runs out."""
    return Sighting(order=_UNKNOWN, where="", part=0, micro=-1, trouble=str(error) or type(error).__name__)


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class PieceAccidents:
    """One worker's.

    Attributes:
        folder: of the run.
        rank: of the worker.
        seed: the job's.
    """

    folder: Path
    rank: int
    seed: int

    def tell(self, seen: Sighting, piece: BatchPiece, loss: float, micros: Sequence[MicroBatch]) -> dict[str, Any]:
        """What the coordinator is told of ``seen``, which was met in ``piece`` of that mean loss.

        Its micro-batch, if one is to blame, is kept in the run folder.
        """
        blamed = micros[seen.micro] if seen.micro >= 0 and not seen.parameter else None
        ids = [ids for micro in micros for ids in micro.ids] if seen.micro < 0 else []
        if blamed is not None:
            ids = [blamed.ids[row] for row in seen.rows] or [*blamed.ids]
        return {
            "order": [*(seen.order or _BEFORE)],
            **{name: line(text) for name, text in asdict(seen).items() if name in ("where", "parameter", "trouble")},  # pyrefly: ignore[bad-argument-type]
            "micro": seen.micro,
            "samples": ids[:MOST_SAMPLES],
            "kept": blamed is not None and self._keep(seen, piece, loss, blamed),
        }

    def _keep(self, seen: Sighting, piece: BatchPiece, loss: float, micro: MicroBatch) -> bool:
        step, part = piece.step, piece.part
        of = f"part {part} of step {step}"
        fine = f"the gradient of {of} is not finite, and its loss is {loss:.4g}"
        saved = SavedBatch(
            folder=_left_by(self.folder, step, part, self.rank),
            step=step,
            reason=fine if math.isfinite(loss) else f"the loss of {of} is {loss}",
            where=seen.where,
            samples=micro.ids,
            rank=self.rank,
            micro=seen.micro,
            seed=stream(self.seed, step, seen.micro, part),
        )
        return saved.keep(micro.batch)


def first_of(reports: Mapping[int, Report], *, spike: bool) -> tuple[int, Sighting]:
    """The first that workers met in the pieces of a step (part → report), and of which part.

    Of a ``spike``, and where no worker met anything, it is the piece with the largest mean loss, and says no place.
    """
    told = {part: report.sighting for part, report in reports.items() if report.sighting}
    if told and not spike:
        part = min(told, key=lambda part: (*told[part]["order"], part))
        names = ("where", "parameter", "trouble", "micro")
        seen = Sighting(order=(), part=0, rank=reports[part].worker, **{name: told[part][name] for name in names})
        return part, seen
    sums = {part: report.gradient_sums["loss"] for part, report in reports.items()}
    means = {part: total / (count or 1.0) for part, (total, count) in sums.items()}
    part = max(means, key=lambda part: (not math.isfinite(means[part]), means[part]))
    return part, Sighting(order=(), where="", part=0, micro=-1, rank=reports[part].worker)


def take_over(folder: Path, step: int, part: int, rank: int) -> str:
    """Give the batch of ``part`` of ``step`` that worker ``rank`` has kept its place in the run folder ``folder``.

    What others have kept of the step goes. Returns the place, relative to the folder; empty where there is no batch.
    """
    mine, place = _left_by(folder, step, part, rank), Path("accidents") / f"step-{step:08d}"
    path = ""
    if mine.is_dir():
        shutil.rmtree(folder / place, ignore_errors=True)
        try:
            mine.rename(folder / place)
            path = str(place)
        except OSError:  # the batch stays where it is; what went wrong is told all the same
            pass
    for other in mine.parent.glob(_left_by(folder, step, "*", "*").name):
        shutil.rmtree(other, ignore_errors=True)
    return path


def discard(folder: Path) -> None:
    """Let go of batches of pieces that did not count, as the run ends."""
    for left in (folder / "accidents").glob(_left_by(folder, "*", "*", "*").name):
        shutil.rmtree(left, ignore_errors=True)


def _left_by(folder: Path, step: int | Literal["*"], part: int | Literal["*"], rank: int | Literal["*"]) -> Path:
    number = step if isinstance(step, str) else f"{step:08d}"
    return folder / "accidents" / f".step-{number}-part-{part}-rank-{rank}"
