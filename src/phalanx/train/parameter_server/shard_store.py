"""One server's part of a job's parameters and running statistics, saved and restored.

Servers keep running statistics of normalisation layers beside the parameters. A worker brings those of a step's first
piece; they are used in the next step. So they evolve as rank 0's do in synchronous replicas.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils._pytree import tree_map

from phalanx import checkpoint
from phalanx.checkpoint.sections import MODEL, OPTIMIZER, name_in, put_in
from phalanx.config import Job, Plan
from phalanx.errors import RefusedError
from phalanx.parallel.buffer_sync import statistics_of
from phalanx.parallel.layout import SingleLayout
from phalanx.parallel.parameter_server import Flat, RowSlice, Rule, Shard, cut_out, form_of, partition
from phalanx.train.adapters import SECTION as ADAPTERS
from phalanx.train.adapters import adapters_of
from phalanx.train.build_model import build_model
from phalanx.train.build_optimizer import build_optimizer
from phalanx.train.elementwise import Parameters, elementwise
from phalanx.train.refusals import server_problems
from phalanx.train.state import buffer_names, identity, model_config, model_tensors, restore_values, training_state


@dataclass(frozen=True, slots=True)
class ServerShare:
    """One server's part: parameters, in the order of ``ShardStore.held``, and its optimizer's state without tensors.

    ``tensors`` are ``model.<parameter>`` and ``optimizer.<parameter>.<key>`` → its rows; ``states`` are parameter → key
    → JSON, as from ``optimizer_tensors``.
    """

    held: list[list[Any]]
    tensors: dict[str, torch.Tensor]
    states: dict[str, dict[str, Any]]


@final
class ShardStore:
    """One server's shard, with the whole model beside it for names, buffers and initial values.

    Attributes:
        layout: the whole model; its parameters have the initial values.
        slices: this server's part, name → rows.
        rates: the job's learning rate of each parameter group.
        elements: of the whole model.
        shard: the parameters of ``slices`` and their optimizer.
        statistics: of normalisation layers, as sent to workers; server 0's count.
    """

    def __init__(self, job: Job, plan: Plan, index: int) -> None:
        """Begin with the job's initial values.

        Raises:
            RefusedError: if there are more servers than parameters to hold.
        """
        self.index = index
        self._job = job
        self.layout = SingleLayout(build_model(job), torch.device("cpu"))
        self._whole = build_optimizer(job, self.layout).optimizer
        parameters = self.layout.parameters
        if problems := server_problems(job, plan, parameters):
            raise RefusedError(problems)
        cut = elementwise(job, parameters)
        self.slices = {one.name: one for one in partition(parameters, plan.server, cut=cut)[index]}
        self.rates = [float(group["lr"]) for group in self._whole.param_groups]
        rule = Rule(keeps_each_gradient=plan.backup > 0, ahead=bool(plan.staleness))
        self.elements = sum(tensor.numel() for tensor in self.layout.module.parameters())
        self.shard = Shard(self._cut(parameters), lambda named: job.optimizer(Parameters(named)), rule)
        self._buffers = ServerStatistics(self.layout.module)
        self.statistics = self._buffers.take()

    @property
    def held(self) -> list[list[Any]]:
        """Return this server's rows in the order of messages: name, first row, row after the last, whether whole."""
        ordered = (self.slices[name] for name in self.shard.form)
        return [[one.name, one.start, one.stop, one.whole] for one in ordered]

    def resume(self, path: Path) -> dict[str, Any]:
        """Begin with the checkpoint ``path``, written under any plan. Returns its state."""
        state = training_state(path)
        restore_values(path, self.layout, self._whole)
        step = int(state["step"])
        with torch.no_grad():
            self._set()
        self.shard.begin_at(step)
        self.statistics = self._buffers.take()
        return state

    def settle(self) -> None:
        """Release values of other servers after the start. Server 0 keeps memory for them, to save them."""
        self._whole.state.clear()
        if self.index:
            for tensor in self.layout.module.parameters():
                tensor.data = tensor.data.new_empty(0)

    def share(self, what: str) -> ServerShare:
        """Return this server's ``parameters``, ``gradients`` (prepared or ``used``), or ``everything`` to save."""
        shard = self.shard
        if what in ("gradients", "used"):
            return ServerShare(self.held, put_in(MODEL, shard.gradient() if what == "gradients" else shard.used), {})
        model = put_in(MODEL, {name: tensor.detach() for name, tensor in shard.parameters.items()})
        if what == "parameters":
            return ServerShare(self.held, model, {})
        tensors, groups = checkpoint.optimizer_tensors(shard.optimizer, shard.parameters)
        model |= {name: one for name, one in tensors.items() if isinstance(one, torch.Tensor)}
        return ServerShare(self.held, model, groups["state"])

    def save(
        self,
        folder: Path,
        tensors: dict[str, torch.Tensor],
        states: dict[str, Any],
        progress: dict[str, Any],
        kept: dict[str, int],
    ) -> Path:
        """Write an ordinary checkpoint from whole ``tensors`` and the other parts of each state.

        ``kept`` are the arguments of ``checkpoint.save`` on deletion.
        """
        held = self.layout.holdings
        with torch.no_grad():
            for name, parameter in held.parameters.items():
                parameter.copy_(tensors.pop(name_in(MODEL, name)))
        self._buffers.put(self.statistics)
        self._whole.state.clear()
        _, groups = checkpoint.optimizer_tensors(self._whole, held.parameters)
        known = identity(self._job, progress.pop("data"))
        state = {"identity": known, "loss_scale": None}
        state |= {
            OPTIMIZER: {**groups, "state": states},
            "model_config": model_config(self.layout.module),
            ADAPTERS: adapters_of(self.layout.module),
            **progress,
        }
        everything = {**model_tensors(self.layout), **tensors}
        infinite, step = buffer_names(self.layout), progress["step"]
        return checkpoint.save(folder, step=step, tensors=everything, state=state, infinite=infinite, **kept)

    def _cut(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {name: cut_out(tensors[name].detach(), part) for name, part in self.slices.items()}

    def _set(self) -> None:
        for name, part in self.slices.items():
            whole, mine = self.layout.parameters[name], self.shard.parameters[name]
            mine.data.copy_(cut_out(whole.detach(), part))
            state = self._whole.state.get(whole, {})
            self.shard.optimizer.state[mine] = tree_map(lambda one, w=whole, p=part: _rows(one, w, p), dict(state))
            if not state:
                self.shard.optimizer.state.pop(mine)


def _rows(value: Any, whole: torch.Tensor, part: RowSlice) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return (cut_out(value, part) if value.shape == whole.shape else value).clone()


def put_together(
    parts: Iterable[ServerShare], whole: Mapping[str, torch.Tensor]
) -> tuple[dict[str, torch.Tensor], dict[str, dict[str, Any]]]:
    """Return whole tensors by name, and the states' JSON by parameter, from each server's part.

    ``whole`` are the parameters, for their names.
    """
    found: dict[str, list[tuple[int, torch.Tensor]]] = {}
    states: dict[str, dict[str, Any]] = {}
    cut: set[str] = set()
    for part in parts:
        starts = {name: start for name, start, _, _ in part.held}
        cut |= {name for name, _, _, all_rows in part.held if not all_rows}
        rows = {name: stop - start for name, start, stop, _ in part.held}
        for name, tensor in part.tensors.items():
            owner = _owner(name, whole)
            alike = owner in cut and tensor.dim() == whole[owner].dim() and tensor.shape[0] == rows[owner]
            found.setdefault(name, []).append((starts[owner] if alike else -1, tensor))
        states = part.states | states
    return {name: _joined(pieces) for name, pieces in found.items()}, states


def _joined(pieces: list[tuple[int, torch.Tensor]]) -> torch.Tensor:
    if len(pieces) == 1 or pieces[0][0] < 0:
        return pieces[0][1]
    return torch.cat([tensor for _, tensor in sorted(pieces, key=lambda one: one[0])])


def _owner(name: str, whole: Mapping[str, torch.Tensor]) -> str:
    _, _, rest = name.partition(".")
    while rest not in whole:
        rest = rest.rpartition(".")[0]
    return rest


@final
class ServerStatistics:
    """The running means and variances in ``module``, and their form on the wire."""

    def __init__(self, module: nn.Module) -> None:
        layers = {name: child for name, child in module.named_modules() if statistics_of(child)}
        counts = ("num_batches_tracked",)
        self._layers = {
            name: (child, statistics_of(child) + (counts if isinstance(child, _NormBase) else ()))
            for name, child in layers.items()
        }

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """Map name to buffer, looked up each time, because moving a module replaces them."""
        return {
            f"{name}.{key}" if name else key: value
            for name, (layer, keys) in self._layers.items()
            for key in keys
            if isinstance(value := getattr(layer, key), torch.Tensor)
        }

    def take(self) -> Flat:
        """Return a copy of them on the host."""
        found = self.tensors
        flat = Flat(form_of(found))
        for name, tensor in flat.named.items():
            tensor.copy_(found[name])
        return flat

    def put(self, flat: Flat) -> None:
        """Set them to the values of ``flat``."""
        found = self.tensors
        with torch.no_grad():
            for name, tensor in flat.named.items():
                found[name].copy_(tensor)
