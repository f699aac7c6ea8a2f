"""Looks on while a run trains: called by the loop that every run goes through, by default with nobody to listen."""

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
    """A run as it stands, seen from one process of it. What is read is as of now, and not to be changed.

    Attributes:
        notes: what the plan does not keep of one device's result.
        replica: which of the replicas that step by themselves this process is of; 0 where none do.
        slices: which part of the whole each tensor here is, as in ``RankHoldings``.
    """

    notes: list[str]
    replica: int
    slices: Mapping[str, TensorShard]

    @property
    @abstractmethod
    def modules(self) -> list[nn.Module]:
        """Every copy of the model in this process; the first one's names are everybody's."""

    @abstractmethod
    def values(self) -> Mapping[str, torch.Tensor]:
        """Parameter → what forward reads of it here, frozen ones among them."""

    @abstractmethod
    def stepped(self) -> Mapping[str, torch.Tensor]:
        """Parameter → what the optimizer steps of it here."""

    @abstractmethod
    def buffers(self) -> Mapping[str, torch.Tensor]:
        """Buffer → its values here."""

    @abstractmethod
    def gradients(self) -> Mapping[str, torch.Tensor]:
        """Parameter → its gradient, where it has one."""

    @abstractmethod
    def state(self) -> State:
        """The state of the optimizer."""

    @abstractmethod
    def groups(self) -> list[tuple[list[str], dict[str, Any]]]:
        """Each parameter group of the optimizer: names of its parameters, its options that are numbers."""

    @abstractmethod
    def from_every_process(self, value: Any) -> list[Any]:
        """One small JSON-like value of each process that is observed, in rank order. Collective."""


class Observer:
    """Told of a run as it goes, in each of its processes; tells nothing back. This one does nothing with it.

    With servers the first of them is told, for all, and what it is shown is whole; ``begins`` is not called there, and
    ``steps`` once all servers have stepped, with what each gave its optimizer. Their workers are told of what they
    were sent alone. ``listens``: whether it is to be told of gradients that nobody else asks for.
    ``finding``: what a run's log is to have as a ``check``, once.
    """

    listens = False
    finding: dict[str, Any] | None = None

    def built(self, scene: Scene) -> None:
        """Model, optimizer and loader are there, restored where the run resumes; no step was taken yet."""

    def begins(self, batch: StepBatch) -> None:
        """A step begins, with this process's part of its batch."""

    def gradients(self, batch: StepBatch, totals: Totals) -> None:
        """Gradients are those of the global batch, divided by its count, not yet clipped.

        Where replicas step by themselves, those of this replica's part; ``totals`` are its loss's sum and count.
        """

    def steps(self, batch: StepBatch) -> None:
        """The optimizer is about to step, with the gradients as they are now."""

    def received(self, version: int, values: Mapping[str, torch.Tensor], buffers: Mapping[str, torch.Tensor]) -> None:
        """A worker of servers has been sent what they hold after ``version`` updates, to compute with."""

    def updated(self, batch: StepBatch, metrics: Metrics) -> None:
        """The new values are where forward reads them."""

    def evaluated(self, step: int, result: Mapping[str, Any]) -> None:
        """The model was evaluated after ``step`` steps: ``loss``, ``samples``, ``metrics``."""

    def saved(self, step: int, path: Path) -> None:
        """A checkpoint was written after ``step`` steps."""

    def ended(self) -> None:
        """The last step is taken, evaluated and saved; everything is still there."""


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
    """Names and options of each parameter group."""
    names = {id(tensor): name for name, tensor in parameters.items()}
    return [
        (
            [names[id(tensor)] for tensor in group["params"]],
            {key: number for key, value in group.items() if key != "params" and (number := numeric(value)) is not None},
        )
        for group in optimizer.param_groups
    ]


def numeric(value: Any) -> Any:
    """Return an option as JSON holds it; ``None`` for what is neither a number nor a few of them."""
    if isinstance(value, torch.Tensor):
        return float(value.detach()) if value.numel() == 1 else None
    if isinstance(value, tuple | list):
        numbers = [numeric(one) for one in value]
        return None if None in numbers else numbers
    return value if isinstance(value, bool | int | float) else None


@contextmanager
def changes_of_forward() -> Generator[dict[str, Any]]:
    """Give the names of parameters and attributes, but for buffers, that forwards of models change meanwhile."""
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
