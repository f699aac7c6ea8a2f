"""Puts a record together from what the processes of a run have told and written."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load
from torch import Tensor

from phalanx.verify.prints import Piece
from phalanx.verify.record import Copy, RankRecord, Record, StepRecord


def record_of(answers: list[dict[str, Any]], folder: Path, first: int = 0, after: int = 0) -> Record:
    """The record of a run whose processes gave ``answers``, in order from rank ``first`` on, written to ``folder``.

    In the first ``after`` steps replicas that step by themselves tell of the whole batch, later of their own part.
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
    return Record(
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
    """What each worker of servers was sent."""
    return [{moment: _copies(told, {}) for moment, told in answer["moments"].items()} for answer in answers]


def _file(folder: Path, moment: str, rank: int) -> dict[str, Tensor]:
    file = folder / f"{moment}-{rank}.safetensors"
    return load(file.read_bytes()) if file.exists() else {}  # read whole, not mapped: the folder goes


def _copies(told: Mapping[str, Any], values: Mapping[str, Tensor]) -> dict[str, Copy]:
    return {
        key: Copy(piece=_piece(piece), digest=digest, values=values.get(key), shape=tuple(shape), beside=tuple(beside))
        for key, (piece, digest, shape, beside) in told.items()
    }


def _piece(told: Any) -> Piece:
    return tuple((dim, tuple((start, stop) for start, stop in ranges)) for dim, ranges in told)


def _whole(moment: str, copies: list[dict[str, Copy]], answers: list[dict[str, Any]]) -> dict[str, Tensor]:
    """Every tensor, from the parts that processes have kept.

    Gradients of replicas that step by themselves are added up, weighted by what their losses counted; of what else they
    hold the first's counts.
    """
    replicas = sorted({answer["replica"] for answer in answers})
    if not moment.startswith(("reduced", "used")) or len(replicas) == 1:
        return _of_replica(copies, answers, replicas[0])
    found: dict[str, Tensor] = {}
    step = moment.rpartition("-")[2]
    shares = {answer["replica"]: answer["counts"][step] for answer in answers}
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
    """Write that part of ``whole``: the inverse of ``cut_out``."""
    if not piece:
        whole.copy_(values)
        return
    (dim, ranges), *others = piece
    at = 0
    for start, stop in ranges:
        part = values.narrow(dim, at, stop - start)
        _put(whole.narrow(dim, start, stop - start), part, tuple(others))
        at += stop - start


def _rank(answer: Mapping[str, Any], copies: dict[str, dict[str, Copy]]) -> RankRecord:
    names = [group for group, _ in answer["groups"]]
    return RankRecord(
        steps=[
            StepRecord(
                **{
                    **step,
                    "rates": {name: rate for group, rate in zip(names, step["rates"], strict=False) for name in group},
                }
            )
            for step in answer["steps"]
        ],
        replica=answer["replica"],
        ids=answer["ids"],
        copies=copies,
        numbers=answer["numbers"],
        evaluations={int(step): result for step, result in answer["evaluations"].items()},
    )


def _steps_of_all(ranks: list[RankRecord], after: int) -> list[StepRecord]:
    """Each step with the rates of all parameters; the loss of all replicas, where they step by themselves."""
    found: list[StepRecord] = []
    firsts = list({rank.replica: rank for rank in reversed(ranks)}.values())
    for each in zip(*(rank.steps for rank in ranks), strict=True):
        rates = {name: rate for step in each for name, rate in step.rates.items()}
        step = each[0]
        found.append(replace(step, rates=rates))
    if len(firsts) > 1:
        apart = enumerate(found[after:], after)
        found[after:] = [_together(one, [rank.steps[at] for rank in firsts]) for at, one in apart]
    return found


def _together(one: StepRecord, each: list[StepRecord]) -> StepRecord:
    count = sum(step.count or 0.0 for step in each)
    loss = sum(step.loss * step.count for step in each if step.count) / count
    return StepRecord(loss=loss, skipped=one.skipped, count=count, samples=one.samples, norm=None, rates=one.rates)


def _kind(found: Mapping[str, Tensor], kind: str) -> dict[str, Tensor]:
    return {key.removeprefix(f"{kind}."): tensor for key, tensor in found.items() if key.startswith(f"{kind}.")}


def _by_step(whole: Mapping[str, Any], kind: str) -> Iterator[tuple[int, str]]:
    return ((int(moment.removeprefix(f"{kind}-")), moment) for moment in whole if moment.startswith(f"{kind}-"))
