"""The average of the weights that a job asks for, kept on each rank of exactly what its optimizer steps there.

Replicas each keep their own, the same on all of them; of a shard or slice the average is that of the shard or slice.
The arithmetic is that of ``torch.optim.swa_utils``.
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
    """What a rank keeps: the average of its parameters, and a copy of its buffers.

    Attributes:
        updates: weights that have been averaged so far; before the first there is no average.
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
        """Return True if the model has the averaged weights just now."""
        return self._inside

    def refuse_within(self, what: str) -> None:
        """Refuse ``what`` would take the averaged weights for those that are trained.

        Raises:
            RunError: within ``applied()``.
        """
        if self._inside:
            raise RunError(f"{what} within average.applied(), where the model has the averaged weights: leave it first")

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        """The average by name, as this rank holds it: of parameters as the optimizer steps them, and of buffers."""
        return {**self._parameters, **self._buffers}

    @torch.no_grad()
    def stepped(self, step: int) -> None:
        """The optimizer has stepped, and ``step`` optimizer steps are taken: take the new weights in, if it is time."""
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
        """Within, the model has the averaged weights; afterwards all is as it was. Nothing before there are any.

        Collective. Within itself, as an evaluation may be, it changes nothing.
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
        """What a checkpoint says of it, beside its tensors."""
        return {"kind": self.how.kind, "updates": self.updates}

    def to_save(self, parts: Mapping[str, TensorPart]) -> dict[str, Tensor | PartTensor]:
        """Its tensors by the names that checkpoints have for them, with the ``parts`` of the whole that they are.

        None before there is an average.
        """
        return self._named(parts) if self.updates else {}

    def buffer_names(self) -> set[str]:
        """The names under which ``to_save`` has buffers."""
        return {name_in(AVERAGE, name) for name in self._buffers}

    def restore(self, path: Path, saved: Mapping[str, Any] | None, parts: Mapping[str, TensorPart]) -> str:
        """Go on from the checkpoint in ``path``, whose state says ``saved``. Collective.

        Returns a sentence where there is nothing to go on with.
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
