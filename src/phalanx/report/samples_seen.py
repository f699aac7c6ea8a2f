"""The answer of a run's ledger: was each sample seen exactly once per epoch."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from phalanx.config.run_files import LEDGER
from phalanx.errors import DataError
from phalanx.events import RunLog
from phalanx.report.summary import left_out


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplesSeen:
    """The content of a run's ledger.

    Attributes:
        samples: in the data; ``None`` for a stream, which is checked for double samples and gaps alone.
        drop_last: True if the partial last batch of each epoch was dropped.
        epoch_samples: in an epoch, by the job's sampler; ``None`` for a stream.
        repeats: True if the sampler may repeat a sample in an epoch.
        changes: True if batch or data change with the step; ``epochs`` are then passes over one of these data.
        epochs: finished passes over the data; ``None`` for a stream.
        wrong: a sentence for each fault.
        notes: about lines of the log that could not be read.
        left_out: recorded steps without an update, because of an accident.
    """

    folder: str
    samples: int | None
    batch: int
    drop_last: bool
    steps: int
    epochs: int | None
    wrong: tuple[str, ...]
    notes: tuple[str, ...] = ()
    left_out: tuple[int, ...] = ()
    epoch_samples: int | None = None
    repeats: bool = False
    changes: bool = False

    @property
    def once(self) -> bool:
        return not self.wrong

    @property
    def question(self) -> str:
        """The question of ``answer``: about all samples, or about those that a sampler chose."""
        if self.samples is None or self.epoch_samples is None or self.epoch_samples >= self.samples or self.repeats:
            return "each sample seen exactly once per epoch"
        return f"each of the {self.epoch_samples} samples of an epoch, of {self.samples}, seen exactly once in it"

    @property
    def answer(self) -> str:
        """``yes`` or ``no``, with the steps or epochs, and the number of steps without an update."""
        several = f"{len(self.left_out)} steps" if len(self.left_out) > 1 else f"step {max(self.left_out, default=0)}"
        return self._seen + (f"; no update was made of {several}" if self.left_out else "")

    @property
    def _seen(self) -> str:
        if self.wrong:
            first, *others = self.wrong
            return f"no: {first} (and {len(others)} more)" if others else f"no: {first}"
        size = self.samples if self.epoch_samples is None else self.epoch_samples
        if self.repeats and self.samples is not None:
            return f"as often as the job's sampler gave it: {self.steps} steps of {size} samples an epoch"
        if self.changes:
            return f"yes, in {self.steps} steps, whose batch or data change, and {self.epochs} passes that ended"
        if size is None:
            return f"yes, in {self.steps} steps of a stream"
        if self.epochs == 0:
            return f"yes, in {self.steps} steps of the first epoch"
        unfinished = self.steps - (self.epochs or 0) * _per_epoch(size, self.batch, self.drop_last)
        rest = f" and {unfinished} step{'s' if unfinished > 1 else ''} of the next" if unfinished else ""
        return f"yes, in {self.epochs} epoch{'' if self.epochs == 1 else 's'}{rest}"

    def to_dict(self) -> dict[str, Any]:
        return {"once": self.once, **asdict(self)}


def samples_seen(folder: Path) -> SamplesSeen:
    """Return the content of the ledger of the run in ``folder``, over all its parts.

    Raises:
        SpecError: if it holds no run.
        DataError: if it holds no ledger, or was written before its log said how many samples there are.
    """
    from phalanx.data import audit_run, due, finished_epochs, records  # which load torch

    log = RunLog(folder)
    start = log.part[0]  # none of its parts may change its data or its batch
    if "samples" not in start or "drop_last" not in start:
        error = DataError(
            f"the log of {folder} does not say how many samples its data hold: an earlier version wrote it\n"
            "    try: phalanx.data.audit(folder, length=..., batch=..., drop_last=...)"
        )
        error.exit_code = 2  # what was given is wrong; nothing has run
        raise error
    samples, batch, drop_last = start["samples"], start["batch"], start["drop_last"]
    recorded = records(folder / LEDGER)
    steps = len(recorded)
    without_update = tuple(step for step, those in recorded.items() if any(one.left_out for one in those))
    order = {"epoch_samples": start.get("epoch_samples"), "repeats": bool(start.get("repeats"))}
    size = samples if order["epoch_samples"] is None else order["epoch_samples"]
    epochs = None if size is None else steps // max(1, _per_epoch(size, batch, drop_last))
    if stretches := start.get("stretches"):
        epochs = next(islice(due(stretches, drop_last=drop_last), steps, None)).epoch
    if start.get("batch_tokens"):
        epochs = finished_epochs(folder / LEDGER, start["epoch_samples"])
    wrong = tuple(audit_run(folder / LEDGER, start))
    notes = tuple(left_out(log))
    data: dict[str, Any] = {"folder": str(folder), "samples": samples, "batch": batch, "drop_last": drop_last, **order}
    data["changes"] = bool(stretches or start.get("batch_tokens"))
    return SamplesSeen(**data, steps=steps, epochs=epochs, wrong=wrong, notes=notes, left_out=without_update)


def troubles(folder: Path) -> list[str]:
    """Return the errors and drifts in the log of the run's last part, or a sentence about its missing end."""
    part = RunLog(folder).part
    found = [f"{event['event']}: {event['message']}" for event in part if event["event"] == "error"]
    found += [event["message"] for event in part if event["event"] == "warning" and "drifted apart" in event["message"]]
    return found if part[-1]["event"] == "end" or found else ["the run has not ended, or was ended from outside"]


def _per_epoch(samples: int, batch: int, drop_last: bool) -> int:
    return samples // batch if drop_last else -(-samples // batch)
