"""Observers of a training run, called by the loop of every run; the default one does nothing."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from phalanx.data import StepBatch
from phalanx.parallel import TensorShard
from phalanx.train.metrics import Metrics, Totals

if TYPE_CHECKING:
    from phalanx.train.assembly import Assembly

State = Mapping[str, Mapping[str, Any]]
"""Parameter → key → what an optimizer keeps of it: tensors and numbers."""


class Scene(ABC):
    """The present state of a run, seen from one of its processes. Its values are current, and must not be changed.

    Attributes:
        notes: differences of the plan from one device.
        replica: of this process among independent replicas; 0 without such.
        slices: the part of the whole for each tensor here, as in ``RankHoldings``.
    """

    notes: list[str]
    replica: int
    slices: Mapping[str, TensorShard]

    @property
    @abstractmethod
    def modules(self) -> list[nn.Module]:
        """Return every copy of the model in this process; the first one's names are used."""

    @abstractmethod
    def values(self) -> Mapping[str, torch.Tensor]:
        """Map parameter to its forward value here, frozen ones included."""

    @abstractmethod
    def stepped(self) -> Mapping[str, torch.Tensor]:
        """Map parameter to the tensor that the optimizer steps here."""

    @abstractmethod
    def buffers(self) -> Mapping[str, torch.Tensor]:
        """Map buffer to its values here."""

    @abstractmethod
    def gradients(self) -> Mapping[str, torch.Tensor]:
        """Map parameter to its gradient, if it has one."""

    @abstractmethod
    def state(self) -> State:
        """Return the state of the optimizer."""

    @abstractmethod
    def groups(self) -> list[tuple[list[str], dict[str, Any]]]:
        """Return the names and the numeric options of each parameter group of the optimizer."""

    @abstractmethod
    def from_every_process(self, value: Any) -> list[Any]:
        """Return a small JSON-like value of each observed process, in rank order. Collective."""


class Observer:
    """A listener to a run, in each of its processes; this base does nothing.

    With servers the first of them is notified, for all, and sees whole tensors. ``begins`` is not called there, and
    ``steps`` follows once all servers have stepped, with each optimizer's input. Their workers are notified of received
    values only. ``listens``: whether it needs gradients that are otherwise not computed. ``finding``: fields of a
    ``check`` event for the run's log, written once.
    """

    listens = False
    finding: dict[str, Any] | None = None

    def built(self, scene: Scene) -> None:
        """Handle the built model, optimizer and loader, restored if the run resumes, before the first step."""

    def begins(self, batch: StepBatch) -> None:
        """Handle the begin of a step, with this process's part of its batch."""

    def gradients(self, batch: StepBatch, totals: Totals) -> None:
        """Handle the gradients of the global batch, divided by its count, before clipping.

        For independent replicas, those of this replica's part; ``totals`` are its loss's sum and count.
        """

    def steps(self, batch: StepBatch) -> None:
        """Handle the moment before the optimizer steps."""

    def received(self, version: int, values: Mapping[str, torch.Tensor], buffers: Mapping[str, torch.Tensor]) -> None:
        """Handle the values a worker received from servers after ``version`` updates."""

    def updated(self, batch: StepBatch, metrics: Metrics) -> None:
        """Handle the new values, now in the forward's parameters."""

    def evaluated(self, step: int, result: Mapping[str, Any]) -> None:
        """Handle an evaluation after ``step`` steps: ``loss``, ``samples``, ``metrics``."""

    def saved(self, step: int, path: Path) -> None:
        """Handle a checkpoint written after ``step`` steps."""

    def ended(self) -> None:
        """Handle the end, after the last step, evaluation and save, before resources are released."""


class AssemblyScene(Scene):
    """A worker's assembly, with the ``step`` that takes its steps."""

    def __init__(self, assembly: Assembly) -> None:
        self._assembly, self.step, self.notes = assembly, assembly.step, assembly.notes
        self.replica = assembly.local_sgd.across.index if assembly.local_sgd else 0
        self.slices = assembly.layout.holdings.slices

    @property
    def modules(self) -> list[nn.Module]:
        return self._assembly.layout.modules

    def values(self) -> Mapping[str, torch.Tensor]:
        return dict(self._assembly.layout.module.named_parameters())

    def stepped(self) -> Mapping[str, torch.Tensor]:
        return self._assembly.layout.parameters

    def buffers(self) -> Mapping[str, torch.Tensor]:
        return dict(self._assembly.layout.module.named_buffers())

    def gradients(self) -> Mapping[str, torch.Tensor]:
        return {name: tensor.grad for name, tensor in self.stepped().items() if tensor.grad is not None}

    def state(self) -> State:
        states = self._assembly.optimizer.state
        return {name: states[tensor] for name, tensor in self.stepped().items() if tensor in states}

    def groups(self) -> list[tuple[list[str], dict[str, Any]]]:
        return groups_of(self._assembly.optimizer, self.stepped())

    def from_every_process(self, value: Any) -> list[Any]:
        return self._assembly.from_every_rank(value)


def groups_of(
    optimizer: torch.optim.Optimizer, parameters: Mapping[str, torch.Tensor]
) -> list[tuple[list[str], dict[str, Any]]]:
    """Return names and options of each parameter group."""
    names = {id(tensor): name for name, tensor in parameters.items()}
    return [
        (
            [names[id(tensor)] for tensor in group["params"]],
            {key: number for key, value in group.items() if key != "params" and (number := numeric(value)) is not None},
        )
        for group in optimizer.param_groups
    ]


def numeric(value: Any) -> Any:
    """Return an option in JSON form; ``None`` for anything but a number or a few of them."""
    if isinstance(value, torch.Tensor):
        return float(value.detach()) if value.numel() == 1 else None
    if isinstance(value, tuple | list):
        numbers = [numeric(one) for one in value]
        return None if None in numbers else numbers
    return value if isinstance(value, bool | int | float) else None


@contextmanager
def changes_of_forward() -> Generator[dict[str, Any]]:
    """Yield names of parameters and attributes, without buffers, that models' forwards change in the block."""
    found, inside = dict[str, Any](), dict[nn.Module, dict[str, Any]]()

    def enter(module: nn.Module, *_: Any) -> None:
        if not inside:
            inside[module] = _held(module)

    def leave(module: nn.Module, *_: Any) -> None:
        if before := inside.pop(module, None):
            now = _held(module)
            found.update((name, one) for name, one in now.items() if not _same(one, before.get(name, (None, None))))

    enters, leaves = register_module_forward_pre_hook(enter), register_module_forward_hook(leave)
    try:
        yield found
    finally:
        enters.remove()
        leaves.remove()


def _held(model: nn.Module) -> dict[str, Any]:
    found: dict[str, Any] = {name: (one, one._version) for name, one in model.named_parameters()}
    for place, module in model.named_modules():
        own = [(name, one) for name, one in vars(module).items() if name not in _OF_MODULES]
        found |= {
            f"{place}.{name}".removeprefix("."): (one, len(one) if isinstance(one, list | dict) else 0)
            for name, one in own
        }
    return found


def _same(one: tuple[Any, Any], other: tuple[Any, Any]) -> bool:
    return one[1] == other[1] and (one[0] is other[0] or (isinstance(one[0], int | float | str) and one[0] == other[0]))


_OF_MODULES = frozenset(vars(nn.Module()))
