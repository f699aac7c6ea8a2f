"""The average of the weights for a job, kept on each rank for exactly the tensors its optimizer steps.

Replicas each keep their own, equal on all of them; a rank with a shard or slice keeps the average of it. The arithmetic
is that of ``torch.optim.swa_utils``.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

import torch
from torch import Tensor
from torch.optim.swa_utils import get_ema_multi_avg_fn, get_swa_multi_avg_fn

from phalanx import checkpoint
from phalanx.checkpoint.sections import AVERAGE, name_in, put_in
from phalanx.comm import local
from phalanx.config import Average
from phalanx.errors import RunError
from phalanx.parallel import Layout

if TYPE_CHECKING:
    from phalanx.checkpoint import PartTensor, TensorPart


@final
class WeightAverage:
    """A rank's average of its parameters, and a copy of its buffers.

    Attributes:
        updates: number of averaged weights so far; before the first there is no average.
    """

    def __init__(self, how: Average, layout: Layout) -> None:
        self.how, self.updates = how, 0
        self._layout = layout
        persistent = layout.module.state_dict(keep_vars=True).keys()
        self._named_buffers = frozenset(name for name, _ in layout.module.named_buffers() if name in persistent)
        self._parameters = {name: tensor.detach().clone() for name, tensor in layout.parameters.items()}
        self._buffers = {name: tensor.detach().clone() for name, tensor in self._buffers_now()}
        self._inside = False
        self._add: Any = get_ema_multi_avg_fn(how.factor) if how.kind == "ema" else get_swa_multi_avg_fn()

    @property
    def inside(self) -> bool:
        """Return True if the model has the averaged weights at present."""
        return self._inside

    def refuse_within(self, what: str) -> None:
        """Refuse ``what``, which would take the averaged weights for the trained ones.

        Raises:
            RunError: within ``applied()``.
        """
        if self._inside:
            raise RunError(f"{what} within average.applied(), where the model has the averaged weights: leave it first")

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        """Return this rank's average by name, of stepped parameters and of buffers."""
        return {**self._parameters, **self._buffers}

    @torch.no_grad()
    def stepped(self, step: int) -> None:
        """Include the new weights in the average after ``step`` optimizer steps, if it is time."""
        if not self.how.takes(step):
            return
        averages = [local(tensor) for tensor in self._parameters.values()]
        weights = [local(tensor.detach()) for tensor in self._layout.parameters.values()]
        if self.updates and averages:
            self._add(averages, weights, self.updates)
        else:
            _copy(weights, averages)
        for name, buffer in self._buffers_now():
            _copy([local(buffer.detach())], [local(self._buffers[name])])
        self.updates += 1

    @contextmanager
    def applied(self) -> Generator[None]:
        """Put the averaged weights into the model for the block, if there are any.

        Collective. Nested blocks, as in an evaluation, change nothing.
        """
        if not self.updates or self._inside:
            yield
            return
        self._inside = True
        self._exchange()
        self._layout.stepped()
        try:
            yield
        finally:
            self._exchange()
            self._inside = False
        self._layout.stepped()  # not where something was raised, perhaps on this rank alone: others would not come

    def state(self) -> dict[str, Any]:
        """Return the JSON for a checkpoint."""
        return {"kind": self.how.kind, "updates": self.updates}

    def to_save(self, parts: Mapping[str, TensorPart]) -> dict[str, Tensor | PartTensor]:
        """Return its tensors by their names in checkpoints, with ``parts`` of the whole.

        Empty before there is an average.
        """
        return self._named(parts) if self.updates else {}

    def buffer_names(self) -> set[str]:
        """Return the names of buffers in ``to_save``."""
        return {name_in(AVERAGE, name) for name in self._buffers}

    def restore(self, path: Path, saved: Mapping[str, Any] | None, parts: Mapping[str, TensorPart]) -> str:
        """Restore from the checkpoint ``path``, whose state is ``saved``. Collective.

        Returns a sentence if there is no matching average.
        """
        self.updates = 0
        if saved is None or saved.get("kind") != self.how.kind:
            there = f"is a {saved.get('kind')}" if saved else "has none"
            return f"average: that of the checkpoint {there}; the {self.how.kind} begins anew."
        if saved["updates"]:
            checkpoint.load(path, self._named(parts))
            self.updates = saved["updates"]
        return ""

    def _named(self, parts: Mapping[str, TensorPart]) -> dict[str, Tensor | PartTensor]:
        found = {
            name: checkpoint.PartTensor(tensor, parts[name]) if name in parts else tensor
            for name, tensor in self.tensors.items()
        }
        return put_in(AVERAGE, found)

    @torch.no_grad()
    def _exchange(self) -> None:
        kept = self.tensors
        for name, tensor in [*self._layout.parameters.items(), *self._buffers_now()]:
            here, there = local(tensor.detach()), local(kept[name])
            before = here.clone()
            here.copy_(there)
            there.copy_(before)

    def _buffers_now(self) -> Iterator[tuple[str, Tensor]]:
        # Looked up each time: a module may put another tensor in place of its buffer.
        if not self._named_buffers:
            return iter(())
        return ((name, one) for name, one in self._layout.module.named_buffers() if name in self._named_buffers)


def _copy(sources: list[Tensor], targets: list[Tensor]) -> None:
    for source, target in zip(sources, targets, strict=True):
        target.copy_(source)
