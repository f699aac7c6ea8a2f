"""Whether a run saw each sample exactly once an epoch, from its ledger: the proof that its data were split rightly."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from phalanx.data import audit, records
from phalanx.errors import DataError
from phalanx.report.summary import events_of


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplesSeen:
    """What the ledger of a run shows.

    Attributes:
        samples: in the data; ``None`` for a stream, of which only double samples and gaps can be told.
        drop_last: whether the partial last batch of each epoch was dropped.
        steps: optimizer steps recorded.
        epochs: passes over the data that were finished; ``None`` for a stream.
        wrong: what is wrong, one sentence each; empty where nothing is.
    """

    folder: str
    samples: int | None
    batch: int
    drop_last: bool
    steps: int
    epochs: int | None
    wrong: tuple[str, ...]

    @property
    def once(self) -> bool:
        return not self.wrong

    @property
    def answer(self) -> str:
        """``yes`` or ``no``, and over what."""
        if self.wrong:
            first, *others = self.wrong
            return f"no: {first} (and {len(others)} more)" if others else f"no: {first}"
        if self.samples is None:
            return f"yes, in {self.steps} steps of a stream"
        if self.epochs == 0:
            return f"yes, in {self.steps} steps of the first epoch"
        unfinished = self.steps - (self.epochs or 0) * _per_epoch(self.samples, self.batch, self.drop_last)
        rest = f" and {unfinished} step{'s' if unfinished > 1 else ''} of the next" if unfinished else ""
        return f"yes, in {self.epochs} epoch{'' if self.epochs == 1 else 's'}{rest}"

    def to_dict(self) -> dict[str, Any]:
        return {"once": self.once, **asdict(self)}


def samples_seen(folder: Path) -> SamplesSeen:
    """What the ledger of the run in ``folder`` shows, over all its parts where it was resumed.

    Raises:
        DataError: if it holds no run, no ledger, or was written before its log said how many samples there are.
    """
    start = events_of(folder)[0]  # of the last part: none may change its data or its batch
    if "samples" not in start:
        raise DataError(
            f"the log of {folder} does not say how many samples its data hold: an earlier version wrote it\n"
            "    try: phalanx.data.audit(folder, length=..., batch=..., drop_last=...)"
        )
    samples, batch, drop_last = start["samples"], start["batch"], start["drop_last"]
    steps = len(records(folder / "ledger"))
    epochs = None if samples is None else steps // max(1, _per_epoch(samples, batch, drop_last))
    wrong = tuple(audit(folder / "ledger", length=samples, batch=batch, drop_last=drop_last))
    data: dict[str, Any] = {"folder": str(folder), "samples": samples, "batch": batch, "drop_last": drop_last}
    return SamplesSeen(**data, steps=steps, epochs=epochs, wrong=wrong)


def seen_table(result: SamplesSeen) -> RenderableType:
    """The answer, and everything that is wrong."""
    data = "a stream" if result.samples is None else f"{result.samples} samples"
    over = f"{data}, {result.batch} a step, {result.steps} steps recorded in {result.folder}"
    answer = ("bold green", result.answer) if result.once else ("bold red", "no")
    return Group(
        Text.assemble("each sample seen exactly once per epoch: ", (answer[1], answer[0])),
        *(Text(f"  {sentence}") for sentence in result.wrong),
        Text(over, style="dim"),
    )


def _per_epoch(samples: int, batch: int, drop_last: bool) -> int:
    return samples // batch if drop_last else -(-samples // batch)
