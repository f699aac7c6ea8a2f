"""Proofs against a loop that the user wrote, and of jobs at the edges: dropout in an LSTM, data below the batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from models import job, rows
from torch import nn

import phalanx as px
from phalanx.errors import WorkerError
from phalanx.verify import references

TABLE = rows()


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 8), nn.Tanh(), nn.Dropout(0.5), nn.Linear(8, 5))


def classified(**how: Any) -> px.Job:
    loss = lambda output, batch: px.cross_entropy(output, batch["y"])  # noqa: E731
    given: dict[str, Any] = {"inputs": lambda batch: batch["x"], **how}
    return job(net, TABLE, loss, **given)


def steps_of(model: nn.Module, samples: Any, steps: int, *, rate: float = 1e-3, clip: float = 0.3) -> Iterator[Any]:
    """What a user might write; 40 samples in batches of 14, 14 and 12."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    for step in range(steps):
        ids = torch.tensor(samples[step])
        loss = nn.functional.cross_entropy(model(TABLE.columns["x"][ids]), TABLE.columns["y"][ids])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        yield loss


def whole(steps: int, model: nn.Module, samples: Any) -> Any:
    yield from steps_of(model, samples, steps)
    return model


def listed(steps: int, samples: Any) -> dict[str, Any]:
    model = net()
    return {"losses": [loss.item() for loss in steps_of(model, samples, steps)], "model": model}


@pytest.mark.parametrize("loop", [whole, listed])
def test_a_users_own_loop_is_the_measure(loop: Callable[..., Any]) -> None:
    proof = px.prove(classified(), "dp=2", steps=6, against=loop)
    assert proof.equal, proof.first
    assert proof.reference == f"your own {loop.__name__}()"
    kinds = {check.kind for check in proof.checks}
    assert {"loss", "used", "parameter", "state", "copies"} <= kinds
    assert proof.parameters


@pytest.mark.parametrize(
    ("how", "first", "cause"),
    [
        ({"rate": 2e-3}, "the learning rate of", "the learning rates differ"),
        ({"clip": 0.1}, "that the optimizer was given in step 0", "changed between backward and the update"),
    ],
    ids=str,
)
def test_a_loop_that_does_something_else_is_not_equal(how: dict[str, float], first: str, cause: str) -> None:
    def loop(steps: int, model: nn.Module, samples: Any) -> Any:
        yield from steps_of(model, samples, steps, **how)
        return model

    proof = px.prove(classified(), "single", steps=3, against=loop)
    assert not proof.equal
    assert first in proof.first
    assert cause in proof.cause
    assert ("clipping" in proof.cause) == ("clip" in how)


def test_a_mean_of_means_is_not_equal() -> None:
    def loop(steps: int, model: nn.Module, samples: Any) -> Any:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        for step in range(steps):
            halves = torch.tensor(samples[step]).tensor_split([5])
            x, y = TABLE.columns["x"], TABLE.columns["y"]
            loss = sum(nn.functional.cross_entropy(model(x[ids]), y[ids]) for ids in halves) / 2
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            yield loss
        return model

    proof = px.prove(classified(clip=None), "single", steps=3, against=loop)
    assert not proof.equal
    assert "the loss of step 0" in proof.first


@pytest.mark.parametrize(
    ("loop", "words"),
    [
        (lambda model: [1.0], "gave a list"),
        (lambda steps, model: {"losses": [0.5], "model": model}, "1 losses for 3 steps"),
        (lambda batches: None, "asks for batches"),
        (lambda steps, model: {"losses": [0.5] * steps, "model": model}, "no step of a torch.optim.Optimizer"),
    ],
)
def test_what_is_no_training_loop_is_said(loop: Callable[..., Any], words: str) -> None:
    with pytest.raises(WorkerError, match=words):
        px.prove(classified(), "single", steps=3, against=loop)


def test_a_job_that_the_plain_loop_fails_with_is_told_by_phalanx() -> None:
    wrong = replace(classified(), loss=lambda output, batch: output)
    with pytest.raises(WorkerError, match=r"it may give px\.Loss"):
        px.prove(wrong, "single", steps=2)


def classify(output: torch.Tensor, batch: dict[str, torch.Tensor]) -> Any:
    return nn.functional.cross_entropy(output, batch["y"])


class Recurrent(nn.Module):
    """Two layers of an LSTM with dropout between them, which torch's compiled code draws."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 8, num_layers=2, dropout=0.5, batch_first=True)
        self.head = nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(x.view(len(x), 4, 4))[0][:, -1])


def test_recurrent_dropout_is_off_and_said() -> None:
    said: list[str] = []
    proof = px.prove(
        job(Recurrent, rows(), classify, inputs=lambda batch: batch["x"]), "dp=2", steps=2, say=said.append
    )
    assert proof.equal, proof.first
    assert any("dropout is switched off" in note and "lstm" in note for note in said)


def test_data_smaller_than_the_batch_are_no_fault_of_the_sampler() -> None:
    def net() -> nn.Module:
        return nn.Sequential(nn.Linear(16, 8), nn.BatchNorm1d(8), nn.Linear(8, 5))

    small = job(net, rows(), classify, inputs=lambda batch: batch["x"])
    proof = px.prove(replace(small, batch=10 * small.batch), "dp=2", steps=2)
    assert not proof.equal
    assert "BatchNorm" in proof.cause


def test_gradients_that_were_read_back_are_in_the_order_of_steps() -> None:
    kinds = {f"{kind}|{step}|a": torch.ones(1) for kind in ("reduced", "used") for step in (10, 2, 0, 1)}
    answer = {
        "steps": [],
        "numbers": {},
        "options": {},
        "evaluations": {},
        "magnitudes": {},
        "masks_of_no_sample": {},
        "ways": {},
    }
    record = references._record(kinds, answer)
    assert [*record.reduced] == [*record.used] == [0, 1, 2, 10]
