"""Passes a run's events on to experiment trackers. Each is an extra, imported when first used."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, final

from phalanx.errors import MissingExtraError
from phalanx.events.following import Event, Viewer

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


@final
class TensorBoard(Viewer):
    """Writes losses, learning rates, gradient norms, pace and evaluations as TensorBoard scalars, by step.

    The writer is made with the first event: it starts a thread, which must not be there when workers are forked.
    """

    def __init__(self, folder: Path) -> None:
        if find_spec("tensorboard") is None:
            raise MissingExtraError("tensorboard", "tensorboard")
        self._folder = folder
        self._writer: SummaryWriter | None = None

    def event(self, event: Event) -> None:
        match event["event"]:
            case "step":
                scalars = {
                    "train/loss": event["loss"],
                    "train/lr": event["lr"],
                    "train/grad_norm": event["grad_norm"],
                    **{f"train/loss/{phase}": loss for phase, loss in event.get("losses", {}).items()},
                    "speed/samples_per_second": event["samples"] / event["seconds"] if event["seconds"] > 0 else None,
                }
                self._write(scalars, event["step"] + 1)
            case "evaluate":
                values = {"loss": event["loss"], **event["metrics"]}
                self._write({f"evaluation/{name}": value for name, value in values.items()}, event["step"])
            case "start":
                self._open().add_text("plan", event["plan"], event["first_step"])
            case _:
                pass

    def close(self) -> None:
        if self._writer:
            self._writer.close()

    def _write(self, scalars: dict[str, float | None], step: int) -> None:
        for name, value in scalars.items():
            if value is not None:
                self._open().add_scalar(name, value, step)

    def _open(self) -> SummaryWriter:
        if self._writer is None:
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(str(self._folder))
        return self._writer
