"""Proofs of jobs at the edges: dropout in compiled layers, data smaller than the batch."""

from __future__ import annotations

from typing import Any

import torch
from models import job, rows
from torch import nn

import phalanx as px
from phalanx.verify import references


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
    from dataclasses import replace

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
