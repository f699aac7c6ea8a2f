"""The reference run for plans, and facts about a model needed before a proof."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from importlib import import_module
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load, save_file
from torch import Tensor, nn

from phalanx.comm import Place, device_for
from phalanx.config import Job, Plan
from phalanx.config.plan import Device, Precision
from phalanx.errors import RefusedError
from phalanx.launch.local import launch
from phalanx.launch.side_process import Send, SideProcess
from phalanx.parallel import batch_statistics, device_kind, dropouts
from phalanx.train.build_model import build_model
from phalanx.train.observer import numeric
from phalanx.verify.capture import Watch, proven
from phalanx.verify.compare import noise_of
from phalanx.verify.record import RunRecord, StepRecord
from phalanx.witness.dropout_off import dropout_off
from phalanx.witness.own_loop import OwnLoop
from phalanx.witness.plain_loop import Witness, why_not
from phalanx.witness.reference_step import real
from phalanx.witness.rounding import DRAWS, LAST_PLACE, Variation

_MOMENTS = ("values", "buffers", "reduced", "used")


@dataclass(frozen=True, kw_only=True, slots=True)
class ReferenceRun:
    """The settings of the run on one device.

    Attributes:
        against: a user's own loop, in place of the job's plain loop.
    """

    precision: Precision = "fp32"
    device: Device = "auto"
    against: OwnLoop | None = None

    @property
    def plan(self) -> Plan:
        """Return the plan of one device."""
        return Plan(precision=self.precision, device=self.device)

    def record(self, job: Job, steps: tuple[int, int], folder: Path, watch: Watch = None) -> RunRecord:
        """Return the record of the loop: the plain one of ``job``, or the user's own.

        It takes the first number of ``steps``. The plain one continues, at most to the second, until each parameter had
        a gradient.

        Raises:
            WorkerError: if the loop failed, or returned a wrong type.
        """
        asked, most = steps
        given = proven(job, asked, None if self.against else most)

        def run(device: torch.device) -> tuple[Witness, dict[str, float]]:
            how: dict[str, Any] = {"precision": self.precision, "device": device}
            with dropout_off():
                if not self.against:
                    return varied(given, asked, {**how, "most": most})
                witness = self.against.run(given, asked, device)
                noise: dict[str, float] = {}
                with suppress(Exception):  # a plain loop may not take what the user's own does
                    noise = {} if why_not(given) else varied(given, asked, how)[1]
                return witness, noise

        return _observed(run, self.plan, folder, watch)


def varied(job: Job, steps: int, how: dict[str, Any]) -> tuple[Witness, dict[str, float]]:
    """Run the plain loop, and again with changed weights; return it, and the noise of its results."""
    one = Witness.of(job, steps, varied=Variation(), **how)
    given: dict[str, Any] = {"share": LAST_PLACE[how["precision"]], "batches": one.batches}
    given |= {"evaluation": one.evaluation_data}
    others = [Witness.of(job, steps, varied=Variation(**given, seed=draw), **how) for draw in range(DRAWS)]
    return one, noise_of(_record(*_flat(one)), [_record(*_flat(other)) for other in others], how["precision"])


def _observed(
    run: Callable[[torch.device], tuple[Witness, dict[str, float]]], alone: Plan, folder: Path, watch: Watch
) -> RunRecord:
    def work(place: Place, report: Callable[[int], None]) -> dict[str, Any]:
        witness, noise = run(device_for(place, device_kind(alone, place.workers_here)))
        tensors, numbers = _flat(witness)
        save_file(tensors, folder / "plain.safetensors")
        return {**numbers, "noise": noise}

    def meanwhile() -> None:
        # This process is idle while the loop runs, and is about to need what saves and reads checkpoints.
        import_module("phalanx.checkpoint.store")
        if watch:
            watch()

    (numbers,) = launch(work, 1, watch=meanwhile)
    return _record(load((folder / "plain.safetensors").read_bytes()), numbers)


def _flat(witness: Witness) -> tuple[dict[str, Tensor], dict[str, Any]]:
    tensors: dict[str, Tensor] = {}
    for kind in _MOMENTS:
        for moment, named in getattr(witness, kind).items():
            tensors |= {f"{kind}|{moment}|{name}": real(tensor) for name, tensor in named.items()}
    numbers: dict[str, dict[str, float]] = {}
    for moment, entries in witness.state.items():
        numbers[moment] = {}
        for name, state in entries.items():
            for key, value in state.items():
                alike = isinstance(value, Tensor) and value.shape == witness.values[moment][name].shape
                if isinstance(value, Tensor) and (alike or value.dim()) and key != "step":
                    tensors[f"state|{moment}|{name}.{key}"] = real(value)
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
    ids = witness.samples[0] if witness.samples else []
    options = {  # those that are numbers, or a few of them
        name: {key: number for key, value in group.items() if (number := numeric(value)) is not None}
        for name, group in witness.options.items()
    }
    return tensors, {
        "steps": steps,
        "numbers": numbers,
        "options": options,
        "evaluations": witness.evaluations,
        "ids": ids,
    }


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
        numbers=answer["numbers"],
        options=answer["options"],
        noise=answer.get("noise", {}),
        ids=answer["ids"],
        evaluations={int(step): result for step, result in answer["evaluations"].items()},
    )


def _by_step(grads: Mapping[str, dict[str, Tensor]]) -> dict[int, dict[str, Tensor]]:
    """Sort by step: files may have any order, and bounds use a parameter's first gradient."""
    return {step: grads[str(step)] for step in sorted(map(int, grads))}


def small_copy(job: Job, plan: Plan) -> Job:
    """Return ``job`` with fewer layers: the first two of each run of equal modules in a list.

    If ``plan`` has more stages, as many as these. ``job.initial`` is left out: the model draws its values.
    """
    least = max(2, plan.pp * plan.stages)

    def model() -> nn.Module:
        built, dropped = job.model(), 0
        for part in [one for one in built.modules() if isinstance(one, nn.ModuleList | nn.Sequential | nn.ModuleDict)]:
            runs = [list(run) for _, run in groupby(part._modules.items(), _kind_and_size)]
            kept = [one for run in runs for one in run[:least]]
            dropped += len(part) - len(kept)
            places = all(name.isdigit() for name, _ in kept) and not isinstance(part, nn.ModuleDict)
            part._modules = {str(at) if places else name: child for at, (name, child) in enumerate(kept)}
        if not dropped:
            given = f"a model without a list of more than {least} modules of one class in a row"
            raise RefusedError.of("small", given, "layers in an nn.ModuleList or nn.Sequential", "prove it as it is")
        return built

    return replace(job, model=model, initial=None)


def _kind_and_size(named: tuple[str, Any]) -> tuple[type, list[torch.Size]]:
    return type(named[1]), [one.shape for one in named[1].parameters()]


_PATIENCE = 600.0  # seconds to build a model in


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelFacts:
    """Facts about one model.

    Attributes:
        dropouts: names of modules that drop elements.
        batch_statistics: names of modules that take statistics of their micro-batch.
    """

    dropouts: list[str] = field(default_factory=list[str])
    batch_statistics: list[str] = field(default_factory=list[str])

    @classmethod
    def of(cls, module: nn.Module, job: Job) -> ModelFacts:
        named = module.named_modules()
        recurrent = [name for name, child in named if isinstance(child, nn.RNNBase) and child.dropout > 0]
        return cls(
            dropouts=list(dict.fromkeys([*dropouts(module), *recurrent])),
            batch_statistics=batch_statistics(module) if job.batch_statistics == "micro" else [],
        )

    @property
    def notes(self) -> list[str]:
        """Return notes for the user before a proof."""
        found: list[str] = []
        if names := self.dropouts:
            many = f"{len(names)} modules, {names[0]} the first"
            found.append(f"dropout is switched off for the comparison ({many})")
        if names := self.batch_statistics:
            what = "BatchNorm takes statistics of each micro-batch and is not equal when one is split"
            found.append(f'{what} ({names[0]}); batch_statistics="global" makes it equal')
        return found


def facts_of(job: Job) -> ModelFacts:
    """Return facts about the job's model, built in a process of its own.

    Building draws random numbers, and may initialise CUDA, which workers cannot be forked with. Empty for a model that
    cannot be built: the run shows its error.
    """

    def work(send: Send) -> None:
        send(asdict(ModelFacts.of(build_model(job), job)))

    with SideProcess(work) as process:
        facts = process.next(_PATIENCE)
    return ModelFacts(**facts) if facts else ModelFacts()
