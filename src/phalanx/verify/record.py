"""The record of one run of a job by any program, assembled from its processes' answers and files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load
from torch import Tensor

from phalanx.verify.fingerprints import Fingerprint, Fingerprints
from phalanx.verify.module_trace import Passed
from phalanx.witness.reference_step import Piece, cut_out

Tensors = Mapping[str, Tensor]
"""Name → the whole tensor, on the host."""

START, FIRST, END = "start", "first", "end"
"""Moments at which values are looked at: before the first step, after its update, after the last."""
AVERAGE = "average"
"""In place of a moment: the average of the weights, and the buffers as of it, as the last checkpoint has them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepRecord:
    """The record of one optimizer step.

    Attributes:
        loss: of the global batch.
        skipped: whether fp16's loss scale skipped the update.
        count: the divisor of the loss; ``None`` if unknown.
        samples: in the global batch; ``None`` if unknown.
        norm: of all gradients, before clipping; ``None`` if it was not needed.
        rates: learning rate by parameter, as the optimizer read it; empty if the update was skipped. For a phase
            without its turn in the step: those of its last one.
        losses: of each phase in its turn, by name; empty if the job has none.
    """

    loss: float
    skipped: bool = False
    count: float | None = None
    samples: int | None = None
    norm: float | None = None
    rates: Mapping[str, float] = field(default_factory=dict[str, float])
    losses: Mapping[str, float] = field(default_factory=dict[str, float])


@dataclass(frozen=True, kw_only=True, slots=True)
class Copy:
    """One process's part of one tensor at one moment.

    Attributes:
        piece: the part of the whole tensor.
        digest: of the bytes of its values.
        shape: of the whole tensor.
        values: on the host, if they were kept: by the first process with this piece, and by those with other bytes.
        differs_by: relative differences of further copies in the same process.
    """

    piece: Piece
    digest: str
    shape: tuple[int, ...] = ()
    values: Tensor | None = None
    differs_by: tuple[float, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class RankRecord:
    """The record of one process of a plan, beside the common ``RunRecord``.

    Attributes:
        replica: of this process, among independent replicas.
        ids: samples of its part of the first batch.
        copies: moment → kind and name (``value.<parameter>``) → its copy.
    """

    steps: list[StepRecord]
    replica: int = 0
    ids: list[int] = field(default_factory=list[int])
    copies: Mapping[str, Mapping[str, Copy]] = field(default_factory=dict[str, Mapping[str, Copy]])
    numbers: Mapping[str, Mapping[str, float]] = field(default_factory=dict[str, Mapping[str, float]])
    evaluations: Mapping[int, Mapping[str, Any]] = field(default_factory=dict[int, Mapping[str, Any]])


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """The record of a run; tensors are whole.

    A loop that is not Phalanx's fills the fields it knows, ``steps`` and ``values`` at least.

    Attributes:
        steps: of each optimizer step, in order.
        values: moment (``start``, ``first``, ``end``) → parameter → its value. ``first``: after the first update;
            ``average``: the averaged weights, if a job has them and they are known.
        reduced: step → parameter → gradient of the global batch divided by its count, before clipping. For the first
            steps all; for later ones those of parameters that had none, or only zeros, before.
        used: step → parameter → gradient as the optimizer got it, after clipping.
        noise: key of a result → its movement when weights change in their last place; of a reference.
        buffers: moment → buffer → its value.
        state: moment (``first``, ``end``) → ``<parameter>.<key>`` → tensor of the optimizer's state.
        numbers: moment → ``<parameter>.<key>`` → a number of the optimizer's state, such as ``step``.
        options: parameter → the numeric options of its group, without the learning rate.
        evaluations: steps taken → ``loss``, ``samples``, ``metrics`` of an evaluation.
        saved: the last checkpoint, read back: ``model.<name>``, ``optimizer.<parameter>.<key>`` → tensor.
        loaded: the same after one device has loaded it; empty if that was not tried.
        ids: sample numbers of the first step, if the reference knows them.
        notes: the run's notes on differences from one device.
        ranks: of each process, in rank order; empty for a single one without anything to compare.
        workers: of each worker of servers, moment → kind and name → the received copy.
        traces: of each process, the traffic of modules in the first step, on request.
        auxiliary: of parameters that choose experts, the gradients without those through experts; on request.
    """

    steps: list[StepRecord]
    values: Mapping[str, Tensors]
    reduced: Mapping[int, Tensors] = field(default_factory=dict[int, Tensors])
    used: Mapping[int, Tensors] = field(default_factory=dict[int, Tensors])
    noise: Mapping[str, float] = field(default_factory=dict[str, float])
    buffers: Mapping[str, Tensors] = field(default_factory=dict[str, Tensors])
    state: Mapping[str, Tensors] = field(default_factory=dict[str, Tensors])
    numbers: Mapping[str, Mapping[str, float]] = field(default_factory=dict[str, Mapping[str, float]])
    options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict[str, Mapping[str, Any]])
    evaluations: Mapping[int, Mapping[str, Any]] = field(default_factory=dict[int, Mapping[str, Any]])
    saved: Tensors = field(default_factory=dict[str, Tensor])
    loaded: Tensors = field(default_factory=dict[str, Tensor])
    ids: list[int] = field(default_factory=list[int])
    notes: list[str] = field(default_factory=list[str])
    ranks: list[RankRecord] = field(default_factory=list[RankRecord])
    workers: list[Mapping[str, Mapping[str, Copy]]] = field(default_factory=list[Mapping[str, Mapping[str, Copy]]])
    traces: list[dict[str, Passed]] = field(default_factory=list[dict[str, Passed]])
    auxiliary: Tensors = field(default_factory=dict[str, Tensor])

    @property
    def losses(self) -> list[float]:
        return [step.loss for step in self.steps]

    @property
    def gradients(self) -> Tensors:
        """Return the gradients of the first step, before clipping."""
        return self.reduced.get(0, {})

    @property
    def last_gradient(self) -> tuple[str, int] | None:
        """Return the parameter that was the last to get a nonzero gradient, and its step."""
        first: dict[str, int] = {}
        for step, grads in sorted((self.reduced or self.used).items()):
            for name in (name for name, grad in grads.items() if name not in first and bool(grad.any())):
                first[name] = step
        return max(first.items(), key=lambda one: one[1], default=None)

    @cached_property
    def never(self) -> list[str]:
        """Return trained parameters without a nonzero gradient in any step."""
        steps = (self.reduced or self.used).values()
        had = {name for grads in steps for name, grad in grads.items() if bool(grad.any())}
        return [name for name in self.options if name not in had]

    def fingerprints(self, when: str) -> list[Fingerprints]:
        """Return each process's fingerprints at a moment: ``start``, ``gradients`` (of the first step), ``end``."""
        kind, moment = ("gradient", "reduced-0") if when == "gradients" else ("value", when)
        whole = self.gradients if kind == "gradient" else self.values[moment]
        found: list[Fingerprints] = [{} for _ in self.ranks]
        for rank, known in zip(self.ranks, found, strict=True):
            for key, copy in rank.copies.get(moment, {}).items():
                of, _, name = key.partition(".")
                if of == kind and name in whole:
                    values = cut_out(whole[name], copy.piece) if copy.values is None else copy.values
                    known[name] = copy.piece, Fingerprint.of(values)
        return found


def record_of(answers: list[dict[str, Any]], folder: Path, first: int = 0, after: int = 0) -> RunRecord:
    """Assemble the record from ``answers`` of processes, in order from rank ``first`` on, and files in ``folder``.

    In the first ``after`` steps independent replicas report the whole batch, later their own part.
    """
    moments: dict[str, list[dict[str, Copy]]] = {}
    whole: dict[str, dict[str, Tensor]] = {}
    for moment in dict.fromkeys(name for answer in answers for name in answer["moments"]):
        copies = [
            _copies(answer["moments"].get(moment, {}), _file(folder, moment, first + rank))
            for rank, answer in enumerate(answers)
        ]
        moments[moment] = copies
        whole[moment] = _whole(moment, copies, answers)
    names = list(dict.fromkeys(name for answer in answers for group, _ in answer["groups"] for name in group))
    ranks = [
        _rank(answer, {moment: copies[rank] for moment, copies in moments.items()})
        for rank, answer in enumerate(answers)
    ]
    numbers = {
        moment: {key: value for answer in reversed(answers) for key, value in answer["numbers"][moment].items()}
        for moment in answers[0]["numbers"]
    }
    options = {name: values for answer in answers for group, values in answer["groups"] for name in group}
    return RunRecord(
        steps=_steps_of_all(ranks, after),
        values={moment: _kind(found, "value") for moment, found in whole.items() if "-" not in moment},
        buffers={moment: _kind(found, "buffer") for moment, found in whole.items() if "-" not in moment},
        state={moment: _kind(found, "state") for moment, found in whole.items() if moment in numbers},
        reduced={step: _kind(whole[moment], "gradient") for step, moment in _by_step(whole, "reduced")},
        used={step: _kind(whole[moment], "gradient") for step, moment in _by_step(whole, "used")},
        numbers=numbers,
        options={name: {key: value for key, value in options[name].items() if key != "lr"} for name in names},
        evaluations=ranks[0].evaluations,
        notes=answers[0]["notes"],
        ranks=ranks,
    )


def workers_of(answers: list[dict[str, Any]]) -> list[Mapping[str, Mapping[str, Copy]]]:
    """Return the copies received by each worker of servers."""
    return [{moment: _copies(told, {}) for moment, told in answer["moments"].items()} for answer in answers]


def _file(folder: Path, moment: str, rank: int) -> dict[str, Tensor]:
    file = folder / f"{moment}-{rank}.safetensors"
    return load(file.read_bytes()) if file.exists() else {}  # read whole, not mapped: the folder goes


def _copies(told: Mapping[str, Any], values: Mapping[str, Tensor]) -> dict[str, Copy]:
    found: dict[str, Copy] = {}
    for key, (cut, digest, shape, beside) in told.items():
        piece = tuple((dim, tuple((start, stop) for start, stop in ranges)) for dim, ranges in cut)
        known: dict[str, Any] = {"digest": digest, "values": values.get(key)}
        found[key] = Copy(piece=piece, shape=tuple(shape), differs_by=tuple(beside), **known)
    return found


def _whole(moment: str, copies: list[dict[str, Copy]], answers: list[dict[str, Any]]) -> dict[str, Tensor]:
    """Assemble every tensor from the parts kept by processes.

    Gradients of independent replicas are added up, weighted by their loss counts; other tensors are the first's.
    """
    replicas = sorted({answer["replica"] for answer in answers})
    if not moment.startswith(("reduced", "used")) or len(replicas) == 1:
        return _of_replica(copies, answers, replicas[0])
    found: dict[str, Tensor] = {}
    shares = {answer["replica"]: answer["counts"][moment.rpartition("-")[2]] for answer in answers}
    for replica in replicas:
        for key, tensor in _of_replica(copies, answers, replica).items():
            part = tensor * (shares[replica] / sum(shares.values()))
            found[key] = found[key] + part if key in found else part
    return found


def _of_replica(copies: list[dict[str, Copy]], answers: list[dict[str, Any]], replica: int) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    filled: set[tuple[str, Piece]] = set()
    for known, answer in zip(copies, answers, strict=True):
        for key, copy in known.items() if answer["replica"] == replica else ():
            if copy.values is None or (key, copy.piece) in filled:
                continue
            filled.add((key, copy.piece))
            if not copy.piece:
                found[key] = copy.values
                continue
            shape = (*copy.shape, *copy.values.shape[len(copy.shape) :])
            _put(found.setdefault(key, torch.zeros(shape, dtype=copy.values.dtype)), copy.values, copy.piece)
    return found


def _put(whole: Tensor, values: Tensor, piece: Piece) -> None:
    if not piece:
        whole.copy_(values)
        return
    (dim, ranges), *others = piece
    at = 0
    for start, stop in ranges:
        _put(whole.narrow(dim, start, stop - start), values.narrow(dim, at, stop - start), tuple(others))
        at += stop - start


def _rank(answer: Mapping[str, Any], copies: dict[str, dict[str, Copy]]) -> RankRecord:
    groups = [names for names, _ in answer["groups"]]
    steps: list[StepRecord] = []
    for step in answer["steps"]:
        rates = {name: rate for names, rate in zip(groups, step["rates"], strict=False) for name in names}
        steps.append(StepRecord(**{**step, "rates": rates}))  # pyrefly: ignore[bad-argument-type]
    return RankRecord(
        steps=steps,
        replica=answer["replica"],
        ids=answer["ids"],
        copies=copies,
        numbers=answer["numbers"],
        evaluations={int(step): result for step, result in answer["evaluations"].items()},
    )


def _steps_of_all(ranks: list[RankRecord], after: int) -> list[StepRecord]:
    found: list[StepRecord] = []
    firsts = list({rank.replica: rank for rank in reversed(ranks)}.values())
    for at, each in enumerate(zip(*(rank.steps for rank in ranks), strict=True)):
        step = replace(each[0], rates={name: rate for one in each for name, rate in one.rates.items()})
        if len(firsts) > 1 and at >= after:
            parts = [rank.steps[at] for rank in firsts]
            count = sum(part.count or 0.0 for part in parts)
            loss = sum(part.loss * part.count for part in parts if part.count) / count
            step = replace(step, loss=loss, count=count, norm=None)
        found.append(step)
    return found


def _kind(found: Mapping[str, Tensor], kind: str) -> dict[str, Tensor]:
    return {key.removeprefix(f"{kind}."): tensor for key, tensor in found.items() if key.startswith(f"{kind}.")}


def _by_step(whole: Mapping[str, Any], kind: str) -> Iterator[tuple[int, str]]:
    return ((int(moment.removeprefix(f"{kind}-")), moment) for moment in whole if moment.startswith(f"{kind}-"))
