"""What a plan is held against, and what a proof has to know of a model before it runs it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load, save_file
from torch import Tensor, nn

from phalanx.comm import Place, device_for
from phalanx.config import Job, Plan
from phalanx.config.plan import Device, Precision
from phalanx.launch import launch
from phalanx.launch.side_process import Send, SideProcess
from phalanx.parallel import batch_statistics, device_kind, dropouts
from phalanx.train.build_model import build_model
from phalanx.verify.capture import Watch, proven
from phalanx.verify.record import RunRecord, StepRecord
from phalanx.verify.wandering import fed_by
from phalanx.witness.dropout_off import dropout_off
from phalanx.witness.own_loop import OwnLoop
from phalanx.witness.plain_loop import Witness

_MOMENTS = ("values", "buffers", "reduced", "used")


@dataclass(frozen=True, kw_only=True, slots=True)
class ReferenceRun:
    """How the run on one device is made that plans are held against.

    Attributes:
        against: a loop of the user's own, in place of the plain loop that the job is turned into.
    """

    precision: Precision = "fp32"
    device: Device = "auto"
    against: OwnLoop | None = None

    @property
    def plan(self) -> Plan:
        """One device."""
        return Plan(precision=self.precision, device=self.device)

    def record(self, job: Job, steps: tuple[int, int], folder: Path, watch: Watch = None) -> RunRecord:
        """What the loop gives: the plain one of ``job``, or the user's own.

        It takes the first number of ``steps``; the plain one goes on, to the second at most, until each parameter had a
        gradient.

        Raises:
            WorkerError: if the loop failed, or did not give what it must.
        """
        asked, most = steps
        given = proven(job, asked, None if self.against else most)

        def run(device: torch.device) -> Witness:
            how: dict[str, Any] = {"precision": self.precision, "device": device, "most": most}
            with dropout_off():
                if self.against:
                    return self.against.run(given, asked, device)
                return Witness.of(given, asked, **how)

        return _observed(run, self.plan, folder, watch)


def _observed(run: Callable[[torch.device], Witness], alone: Plan, folder: Path, watch: Watch) -> RunRecord:
    """Run it in a process of its own."""

    def work(place: Place, report: Callable[[int], None]) -> dict[str, Any]:
        witness = run(device_for(place, device_kind(alone, place.workers_here)))
        tensors, numbers = _flat(witness)
        save_file(tensors, folder / "plain.safetensors")
        return numbers

    def meanwhile() -> None:
        # This process is idle while the loop runs, and is about to need what saves and reads checkpoints.
        import_module("phalanx.checkpoint.store")
        if watch:
            watch()

    (numbers,) = launch(work, 1, watch=meanwhile)
    return _record(load((folder / "plain.safetensors").read_bytes()), numbers)


def _flat(witness: Witness) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors by ``kind|moment|name``, and the rest as JSON."""
    tensors: dict[str, Tensor] = {}
    for kind in _MOMENTS:
        for moment, named in getattr(witness, kind).items():
            tensors |= {f"{kind}|{moment}|{name}": tensor for name, tensor in named.items()}
    numbers: dict[str, dict[str, float]] = {}
    for moment, entries in witness.state.items():
        numbers[moment] = {}
        for name, state in entries.items():
            for key, value in state.items():
                alike = isinstance(value, Tensor) and value.shape == witness.values[moment][name].shape
                if isinstance(value, Tensor) and (alike or value.dim()) and key != "step":
                    tensors[f"state|{moment}|{name}.{key}"] = value
                elif isinstance(value, Tensor | int | float):
                    numbers[moment][f"{name}.{key}"] = float(value)
    skipped = witness.skipped or [False] * len(witness.losses)
    steps = [
        {
            "loss": loss,
            "skipped": skipped[step],
            "count": witness.counts[step] if witness.counts else None,
            "samples": len(witness.samples[step]) if witness.samples else None,
            "norm": witness.norms[step] if witness.norms else None,
            "rates": witness.rates[step] if witness.rates and not skipped[step] else {},
            "losses": witness.phases[step] if witness.phases else {},
        }
        for step, loss in enumerate(witness.losses)
    ]
    options = {name: _numeric(group) for name, group in witness.options.items()}
    kept = {name: getattr(witness, name) for name in ("evaluations", "magnitudes", "ways")}
    return tensors, {"steps": steps, "numbers": numbers, "options": options, **kept}


def _record(tensors: Mapping[str, Tensor], answer: Mapping[str, Any]) -> RunRecord:
    kinds: dict[str, dict[str, dict[str, Tensor]]] = {kind: {} for kind in (*_MOMENTS, "state")}
    for key, tensor in tensors.items():
        kind, moment, name = key.split("|", 2)
        kinds[kind].setdefault(moment, {})[name] = tensor
    return RunRecord(
        steps=[StepRecord(**step) for step in answer["steps"]],
        values=kinds["values"],
        buffers=kinds["buffers"],
        state=kinds["state"],
        reduced=_by_step(kinds["reduced"]),
        used=_by_step(kinds["used"]),
        **{name: answer[name] for name in ("numbers", "options", "ways")},
        magnitudes={int(step): found for step, found in answer["magnitudes"].items()},
        evaluations={int(step): result for step, result in answer["evaluations"].items()},
    )


def _by_step(grads: Mapping[str, dict[str, Tensor]]) -> dict[int, dict[str, Tensor]]:
    """In order: a file gives its tensors in any, and bounds are taken from a parameter's first gradient."""
    return {step: grads[str(step)] for step in sorted(map(int, grads))}


def _numeric(group: Mapping[str, Any]) -> dict[str, Any]:
    """The options that are numbers, or a few of them."""
    return {key: number for key, value in group.items() if (number := _number(value)) is not None}


def _number(value: Any) -> Any:
    if isinstance(value, Tensor):
        return float(value.detach()) if value.numel() == 1 else None
    if isinstance(value, tuple | list):
        numbers = [_number(one) for one in value]
        return None if None in numbers else numbers
    return value if isinstance(value, bool | int | float) else None


_PATIENCE = 600.0  # seconds to build a model in


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelFacts:
    """Of one model.

    Attributes:
        layers: how many modules have parameters of their own.
        dropouts: names of modules that drop elements.
        batch_statistics: names of modules that take statistics of their micro-batch.
        fed: running mean of a BatchNorm → the bias of the layer before it, and its momentum.
    """

    layers: int = 1
    dropouts: list[str] = field(default_factory=list[str])
    batch_statistics: list[str] = field(default_factory=list[str])
    fed: dict[str, list[Any]] = field(default_factory=dict[str, list[Any]])

    @classmethod
    def of(cls, module: nn.Module, job: Job) -> ModelFacts:
        named = module.named_modules()
        recurrent = [name for name, child in named if isinstance(child, nn.RNNBase) and child.dropout > 0]
        return cls(
            layers=sum(1 for one in module.modules() if next(one.parameters(recurse=False), None) is not None),
            dropouts=list(dict.fromkeys([*dropouts(module), *recurrent])),
            batch_statistics=batch_statistics(module) if job.batch_statistics == "micro" else [],
            fed=fed_by(module),
        )

    @property
    def notes(self) -> list[str]:
        """Notes for the user before a proof."""
        found: list[str] = []
        if names := self.dropouts:
            many = f"{len(names)} modules, {names[0]} the first"
            found.append(f"dropout is switched off for the comparison ({many})")
        if names := self.batch_statistics:
            what = "BatchNorm takes statistics of each micro-batch and is not equal when one is split"
            found.append(f'{what} ({names[0]}); batch_statistics="global" makes it equal')
        return found


def facts_of(job: Job) -> ModelFacts:
    """The facts of the job's model, which a process of its own builds: this one is to stay as it was.

    Building draws random numbers, and may touch CUDA, which workers are forked without. Of a model that cannot be
    built, nothing: the run says why.
    """

    def work(send: Send) -> None:
        send(asdict(ModelFacts.of(build_model(job), job)))

    with SideProcess(work) as process:
        facts = process.next(_PATIENCE)
    return ModelFacts(**facts) if facts else ModelFacts()
