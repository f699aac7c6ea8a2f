"""A recorder of a training run: each process's tensors as digests, and every part of every tensor once."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load, save_file
from torch import Tensor

from phalanx.comm import local
from phalanx.data import StepBatch
from phalanx.parallel import TensorShard
from phalanx.train.metrics import Metrics, Totals
from phalanx.train.observer import Observer, Scene
from phalanx.verify import compare
from phalanx.verify.record import END, FIRST, START
from phalanx.witness.reference_step import piece_of

Found = tuple[Tensor, TensorShard | None]
"""What a process has of a tensor, and which part of the whole that is."""

GRADIENT_STEPS = 3
"""Steps whose gradients are all looked at; later ones only where a parameter had none before."""


class Recording(Observer):
    """One process's part of a record; ``answer`` is its JSON, tensors go to files in ``folder``.

    Processes exchange digests of their tensors. The first with a part of a tensor keeps its values, and so does every
    other one whose digest differs.
    """

    listens = True

    def __init__(self, folder: Path, rank: int) -> None:
        self._folder, self._rank = folder, rank
        self._scene: Scene | None = None
        self._pending: set[str] = set()
        self._metrics: list[Metrics] = []
        self._rates: dict[int, list[float]] = {}
        self._totals: list[float] = []
        self.answer: dict[str, Any] = {"moments": {}, "numbers": {}, "evaluations": {}, "ids": [], "counts": {}}

    def built(self, scene: Scene) -> None:
        self._scene = scene
        self.answer |= {"notes": scene.notes, "replica": scene.replica, "groups": scene.groups()}
        self._pending = set(scene.stepped()) or set(scene.values())
        self._take(START, self._values())

    def gradients(self, batch: StepBatch, totals: Totals) -> None:
        self._totals = [float(one) for one in totals]
        self.answer["counts"][str(batch.step)] = self._totals[1]
        if batch.step == 0:
            self.answer["ids"] = [one for part in batch.parts for micro in part for one in micro.ids]
        if batch.step < GRADIENT_STEPS or self._pending:
            self._take_gradients(f"reduced-{batch.step}", only=batch.step >= GRADIENT_STEPS)

    def steps(self, batch: StepBatch) -> None:
        self._rates[batch.step] = self._rates_now()
        if batch.step < GRADIENT_STEPS:
            self._take(f"used-{batch.step}", self._gradients(self._there.gradients()))

    def received(self, version: int, values: Mapping[str, Tensor], buffers: Mapping[str, Tensor]) -> None:
        moment = {0: START, 1: FIRST}.get(version)
        if moment and moment not in self.answer["moments"]:
            tensors = {f"value.{name}": one for name, one in values.items()}
            tensors |= {f"buffer.{name}": one for name, one in buffers.items()}
            plain = {key: _plain(one) for key, one in tensors.items()}
            self.answer["moments"][moment] = {
                key: [(), _digest(one), list(one.shape), []] for key, one in plain.items() if one.numel()
            }

    def updated(self, batch: StepBatch, metrics: Metrics) -> None:
        self._metrics.append(metrics)
        if not metrics.skipped:
            # Servers do not tell that a step begins; elsewhere a hook of the optimizer may have set the next rates.
            self._rates.setdefault(batch.step, self._rates_now())
        if len(self._metrics) == 1:
            self._take(FIRST, {**self._values(), **self._state(FIRST)})

    def evaluated(self, step: int, result: Mapping[str, Any]) -> None:
        self.answer["evaluations"][str(step)] = dict(result)

    def saved(self, step: int, path: Path) -> None:
        self.answer["checkpoint"] = str(path)

    def ended(self) -> None:
        self._take(END, {**self._values(), **self._state(END)})
        self.answer["steps"] = [
            {name: getattr(one, name) for name in ("loss", "skipped", "count", "samples", "losses")}
            | {"norm": one.grad_norm, "rates": self._rates.get(one.step, [])}
            for one in sorted(self._metrics, key=lambda one: one.step)
        ]

    def _rates_now(self) -> list[float]:
        return [options["lr"] for _, options in self._there.groups()]

    @property
    def _there(self) -> Scene:
        assert self._scene is not None
        return self._scene

    def _values(self) -> dict[str, Found]:
        scene = self._there
        slices, read, found = scene.slices, scene.values(), dict[str, Found]()
        for name, tensor in read.items():
            found[f"value.{name}"] = tensor, slices.get(name)
        for name, tensor in scene.stepped().items():
            if name not in read or _storage(read[name]) != _storage(tensor):
                found[f"stepped.{name}"] = tensor, slices.get(name)
        for name, tensor in scene.buffers().items():
            holding = slices.get(name)
            if holding is None or holding.counts:  # that of another stage is kept up to date there
                found[f"buffer.{name}"] = tensor, holding
        return found

    def _beside(self, key: str) -> list[Tensor]:
        kind, _, name = key.partition(".")
        others = self._there.modules[1:]
        if kind == "value":
            return [one.get_parameter(name) for one in others]
        return [one.get_buffer(name) for one in others] if kind == "buffer" else []

    def _gradients(self, grads: Mapping[str, Tensor]) -> dict[str, Found]:
        slices = self._there.slices
        return {f"gradient.{name}": (grad, slices.get(name)) for name, grad in grads.items()}

    def _state(self, moment: str) -> dict[str, Found]:
        scene, found, numbers = self._there, dict[str, Found](), dict[str, float]()
        slices, parameters = scene.slices, {**scene.values(), **scene.stepped()}
        for name, entries in scene.state().items():
            for key, value in entries.items():
                alike = isinstance(value, Tensor) and value.shape == parameters[name].shape
                if isinstance(value, Tensor) and (alike or value.dim()) and key != "step":
                    found[f"state.{name}.{key}"] = value, slices.get(name) if alike else None
                elif isinstance(value, Tensor | int | float):
                    numbers[f"{name}.{key}"] = float(value)
        self.answer["numbers"][moment] = numbers
        return found

    def _take_gradients(self, moment: str, *, only: bool) -> None:
        grads = self._there.gradients()
        here = {name: grad for name, grad in grads.items() if name in self._pending or not only}
        came = [name for name, grad in here.items() if name in self._pending and bool(_plain(local(grad)).any())]
        everyone = self._there.from_every_process([came, sorted(self._pending)])
        anywhere = {name for names, _ in everyone for name in names}
        kept = {name: grad for name, grad in here.items() if name in anywhere or not only}
        if anywhere or not only:
            self._take(moment, self._gradients(kept))
        self._pending = {name for _, names in everyone for name in names} - anywhere

    @torch.no_grad()
    def _take(self, moment: str, tensors: Mapping[str, Found]) -> None:
        there: dict[str, Tensor] = {}
        told: dict[str, Any] = {}
        for key, (tensor, holding) in tensors.items():
            values = _plain(local(tensor))
            if values.numel():
                shape = holding.shape if holding is not None else tensor.shape
                beside = [_off(values, _plain(local(one))) for one in self._beside(key)]
                told[key] = [piece_of(tensor, holding), _digest(values), list(shape), beside]
                there[key] = values
        everyone = self._there.from_every_process([self._there.replica, told])
        first: dict[tuple[Any, ...], tuple[int, str]] = {}
        for rank, (replica, known) in enumerate(everyone):
            for key, (piece, digest, *_) in known.items():
                first.setdefault((replica, key, json.dumps(piece)), (rank, digest))
        mine = self._rank if len(everyone) > 1 else 0
        owners = {key: first[self._there.replica, key, json.dumps(told[key][0])] for key in there}
        kept = {key: there[key] for key, (rank, digest) in owners.items() if rank == mine or digest != told[key][1]}
        file = self._folder / f"{moment}-{self._rank}.safetensors"
        if moment in self.answer["moments"]:  # by another phase of the step, of other parameters
            told, kept = {**self.answer["moments"][moment], **told}, {**load(file.read_bytes()), **kept}
        self.answer["moments"][moment] = told
        save_file(kept, file)


def _plain(tensor: Tensor) -> Tensor:
    values = tensor.detach().to_dense() if tensor.is_sparse else tensor.detach()
    values = torch.view_as_real(values) if values.is_complex() else values
    return values.to("cpu", copy=True).contiguous()


def _digest(values: Tensor) -> str:
    return hashlib.blake2b(values.reshape(-1).view(torch.uint8).numpy().data, digest_size=12).hexdigest()


def _off(values: Tensor, other: Tensor) -> float:
    if values.shape == other.shape and _digest(values) == _digest(other):
        return 0.0
    return compare.difference("", values, other, max(compare.norm(values), 1e-30), 0.0).relative or math.nan


def _storage(tensor: Tensor) -> int:
    return local(tensor).untyped_storage()._cdata
