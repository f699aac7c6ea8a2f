"""The event log and the ledger of a run with servers, and the run as an observer of server 0 sees it."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, final

import torch
from torch import nn

from phalanx.config import RunSpec
from phalanx.data import Ledger, MicroBatch, StepBatch
from phalanx.data.loader import Pieces
from phalanx.events import EventLog, read
from phalanx.parallel import TensorShard
from phalanx.parallel.parameter_server import Report
from phalanx.train.metrics import Metrics
from phalanx.train.observer import Scene, State, groups_of
from phalanx.train.parameter_server.server_group import Group
from phalanx.train.parameter_server.shard_store import ShardStore, put_together


@final
class Recorder:
    """Writes what happens; one thread uses it."""

    def __init__(self, run: RunSpec, pieces: Pieces, first: int) -> None:
        self._run, self._pieces = run, pieces
        self._log = EventLog(run.folder / "events.jsonl")
        self._ledger = self._segment(first)
        self._begun = self._last = time.perf_counter()
        self._unwritten: dict[str, Any] | None = None

    def close(self) -> None:
        """Bring everything to disk."""
        self._ledger.close()
        self._log.close()

    def flush(self) -> None:
        """Bring the ledger to disk."""
        self._ledger.flush()

    def write(self, event: str, **fields: Any) -> None:
        """One event."""
        self._log.write(event, **fields)

    def updated(self, metrics: Metrics, version: int, reports: Mapping[int, Report], dropped: int) -> None:
        """One update: its ``step``, where its gradients came from, and its samples in the ledger."""
        self._record(metrics.step, list(reports))
        now = time.perf_counter()
        seconds, self._last = now - self._last, now
        fields = {
            "step": metrics.step,
            "epoch": metrics.epoch,
            "loss": metrics.loss,
            "count": metrics.count,
            "samples": metrics.samples,
            "seconds": seconds,
            "lr": metrics.lr,
            "grad_norm": metrics.grad_norm,
            "skipped": False,
        }
        due = metrics.step % self._run.log_every == 0 or metrics.step + 1 == self._pieces.total_steps
        self._unwritten = None if due else fields
        if due:
            self.write("step", **fields)
        self.write(
            "update",
            step=metrics.step,
            version=version,
            staleness=[version - 1 - report.version for report in reports.values()],
            workers=[report.worker for report in reports.values()],
            dropped=dropped,
        )

    def go_back(self, first: int, done: list[int]) -> None:
        """From ``first`` on steps are taken anew, but for those in ``done``."""
        self._ledger.close()
        self._ledger = self._segment(first)
        for step in done:
            sizes = self._pieces.sizes(step)
            self._record(step, [part for part, size in enumerate(sizes) if size])

    @property
    def seconds(self) -> float:
        """Since it began, to the last update."""
        return self._last - self._begun

    def last(self) -> None:
        """The last update, if its step was not due to be written."""
        if self._unwritten:
            self.write("step", **self._unwritten)

    def _record(self, step: int, parts: list[int]) -> None:
        self._ledger.record(batch_of(self._pieces, step, parts))

    def _segment(self, first: int) -> Ledger:
        return Ledger(self._run.folder / "ledger", rank=0, first_step=first, world_size=1)


def batch_of(pieces: Pieces, step: int, parts: list[int]) -> StepBatch:
    """The samples of a step's ``parts``; the batches themselves are with the workers."""
    micros = tuple(
        MicroBatch(batch=None, ids=tuple(ids.tolist()), samples=len(ids))
        for ids in (pieces.ids(step, part) for part in parts)
    )
    samples = sum(micro.samples for micro in micros)
    return StepBatch(step=step, epoch=pieces.epoch(step), samples=samples, parts=(micros,))


def last_version(run: RunSpec) -> int:
    """Updates that the run in this folder has made since it last began, as its events tell."""
    version = 0
    for event in read(run.folder / "events.jsonl"):
        if event["event"] == "start":
            version = int(event["first_step"])
        elif event["event"] in ("update", "server"):
            version = int(event["version"])
    return version


@final
class ServerScene(Scene):
    """What all servers hold. Workers, which are sent copies, are not seen."""

    def __init__(self, keeper: ShardStore, group: Group, notes: list[str]) -> None:
        self._keeper, self._group, self._notes = keeper, group, notes
        self.scale = 1.0
        """What the sums that servers hold are to be multiplied by, to be gradients."""
        self.stepped_with = False
        """Whether gradients are those that optimizers were given, and no longer those brought together."""

    @property
    def notes(self) -> list[str]:
        return self._notes

    @property
    def replica(self) -> int:
        return 0

    @property
    def slices(self) -> Mapping[str, TensorShard]:
        return {}

    @property
    def modules(self) -> list[nn.Module]:
        return [self._keeper.layout.module]

    def values(self) -> Mapping[str, torch.Tensor]:
        module = self._keeper.layout.module
        frozen = {name: tensor for name, tensor in module.named_parameters() if not tensor.requires_grad}
        return {**frozen, **self._gathered("parameters")}

    def stepped(self) -> Mapping[str, torch.Tensor]:
        return {}

    def buffers(self) -> Mapping[str, torch.Tensor]:
        return {**dict(self._keeper.layout.module.named_buffers()), **self._keeper.statistics.named}

    def gradients(self) -> Mapping[str, torch.Tensor]:
        if self.stepped_with:
            return self._gathered("used")
        return {name: tensor * self.scale for name, tensor in self._gathered("gradients").items()}

    def state(self) -> State:
        tensors, states = put_together(self._group.gather("everything"), self._keeper.layout.parameters)
        return {name: _filled(state, tensors) for name, state in states.items()}

    def groups(self) -> list[tuple[list[str], dict[str, Any]]]:
        """Those of server 0, with the parameters that it holds."""
        shard = self._keeper.shard
        return groups_of(shard.optimizer, shard.parameters)

    def from_every_process(self, value: Any) -> list[Any]:
        return [value]

    def _gathered(self, what: str) -> dict[str, torch.Tensor]:
        found, _ = put_together(self._group.gather(what), self._keeper.layout.parameters)
        return {name.removeprefix("model."): tensor for name, tensor in found.items()}


def _filled(state: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """A parameter's state with the tensors that its references name."""
    return {
        key: tensors[value["$tensor"]] if isinstance(value, dict) and "$tensor" in value else value
        for key, value in state.items()
    }
