"""Batches and data that change with the step, under several plans, beside a plain loop on one device."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from small import batches_of, fit, job, table
from torch import nn
from torch.nn.functional import cross_entropy

import phalanx as px
from longer import longer
from phalanx.data import read_ledger
from phalanx.data.sampler import Permutation
from phalanx.report.samples_seen import samples_seen
from phalanx.train.build_model import build_model

SGD = {"optimizer": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9)}


class Block(nn.Module):
    """Two layers that share out their weights under tp."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 8), nn.Linear(8, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Net(nn.Module):
    """Three blocks and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList(Block(9) for _ in range(3)), nn.Linear(9, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


LENGTH = 50
RAMP: dict[str, Any] = {
    **SGD,
    "model": Net,
    "data": lambda: table(LENGTH),
    "batch": 16,
    "batch_ramp": {0: 4, 3: 8, 9: 16},
    "epochs": 3,
    "schedule": px.Schedule(decay="linear", warmup_steps=2),
}
SIZES = [4, 4, 4, 8, 8, 8, 8, 6, 8, 16, 16, 10, 16, 16, 16, 2]
"""Of the steps of three passes over 50 samples: 12 + 32 + 6, 8 + 42, 50."""


def order(length: int, epoch: int) -> list[int]:
    return Permutation.keyed(length, 0, epoch)(torch.arange(length).numpy()).tolist()


def ramp_steps() -> list[list[int]]:
    ids = [index for epoch in range(3) for index in order(LENGTH, epoch)]
    ends = [sum(SIZES[: at + 1]) for at in range(len(SIZES))]
    return [ids[end - size : end] for end, size in zip(ends, SIZES, strict=True)]


def plain(how: dict[str, Any], batches: Iterable[tuple[Any, torch.Tensor]], rates: list[float]) -> list[float]:
    """Losses of plain PyTorch on one device over inputs and labels, with the learning rate of each step."""
    given = job(**how)
    net, losses = given.model(), list[float]()
    net.load_state_dict(build_model(given).state_dict())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    for (inputs, labels), rate in zip(batches, rates, strict=True):
        optimizer.param_groups[0]["lr"] = rate
        loss = cross_entropy(net(inputs).flatten(0, -2), labels.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def ramp_losses() -> list[float]:
    rates = [0.1 * (0.5 if step == 0 else 1 - max(step - 2, 0) / 14) for step in range(len(SIZES))]
    return plain(RAMP, batches_of(table(LENGTH).columns, ramp_steps()), rates)


def seen_by(folder: Path) -> list[list[int]]:
    return [ids.tolist() for _, ids in read_ledger(folder / "ledger").values()]


@pytest.mark.parametrize(
    "plan",
    [
        "dp=2 micro=3",
        "pp=2 micro=4",
        "dp=2 server=1",
        *longer("threads=2", "fsdp=2 zero=1", "tp=2", "dp=2 shares=3,1"),
    ],
)
def test_a_batch_that_grows(plan: str, tmp_path: Path) -> None:
    run = fit(plan, tmp_path / "run", **RAMP)
    assert seen_by(run.folder) == [sorted(ids) for ids in ramp_steps()]
    assert [event["samples"] for event in run.events() if event["event"] == "step"] == SIZES
    assert run.losses == pytest.approx(ramp_losses(), abs=3e-6)
    seen = samples_seen(run.folder)
    assert (seen.once, seen.epochs) == (True, 3), seen.answer


@pytest.mark.parametrize("stop", [5, *longer(2, 9)])
def test_a_resume_in_mid_ramp_under_another_plan(stop: int, tmp_path: Path) -> None:
    how = {**RAMP, "schedule": px.Schedule(decay="linear", warmup_steps=2, total_steps=16)}
    fit("dp=2", tmp_path / "run", **{**how, "epochs": None, "steps": stop})
    run = fit("fsdp=2", tmp_path / "run", resume=True, **how)
    assert run.losses == pytest.approx(ramp_losses(), abs=3e-6)
    assert seen_by(run.folder) == [sorted(ids) for ids in ramp_steps()]
    assert samples_seen(tmp_path / "run").once
    with pytest.raises(px.PhalanxError, match="batch_ramp"):
        fit("single", tmp_path / "run", resume=True, **{**how, "batch_ramp": {0: 4, 3: 8, 10: 16}})


class Text(nn.Module):
    """Tokens of any number, between an embedding and a head; each sees those before it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.blocks = nn.ModuleList(Block(8) for _ in range(3))
        self.head = nn.Linear(8, 11)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x.cumsum(1) / x.shape[1])
        return self.head(x)


def texts(count: int, length: int) -> px.Table:
    return px.Table(tokens=torch.randint(11, (count, length + 1), generator=torch.Generator().manual_seed(length)))


SHORT, LONG = texts(20, 4), texts(15, 9)
TEXTS: dict[str, Any] = {
    **SGD,
    "model": Text,
    "data": lambda: px.Curriculum({0: SHORT, 5: LONG}),
    "inputs": lambda batch: batch["tokens"][:, :-1],
    "loss": lambda output, batch: px.cross_entropy(output, batch["tokens"][:, 1:]),
    "batch": 8,
    "epochs": None,
    "steps": 9,
}
BY_STEP = [
    *[(SHORT, order(20, 0)[start : start + 8]) for start in (0, 8, 16)],
    *[(SHORT, order(20, 1)[start : start + 8]) for start in (0, 8)],
    *[(LONG, order(15, epoch)[start : start + 8]) for epoch in (0, 1) for start in (0, 8)],
]


def text_losses() -> list[float]:
    rows = [source.columns["tokens"][ids] for source, ids in BY_STEP]
    return plain(TEXTS, [(tokens[:, :-1], tokens[:, 1:]) for tokens in rows], [0.1] * len(rows))


def text_ids() -> list[list[int]]:
    return [sorted(index + 20 * (source is LONG) for index in ids) for source, ids in BY_STEP]


@pytest.mark.parametrize(
    "plan", ["fsdp=2 zero=1", "tp=2", *longer("dp=2 micro=3", "threads=2", "pp=2 micro=4", "dp=2 server=1")]
)
def test_short_texts_first(plan: str, tmp_path: Path) -> None:
    run = fit(plan, tmp_path / "run", **TEXTS)
    assert seen_by(run.folder) == text_ids()
    assert run.losses == pytest.approx(text_losses(), abs=3e-6)
    seen = samples_seen(run.folder)
    assert (seen.once, seen.epochs) == (True, 4), seen.answer


@pytest.mark.parametrize("stop", [7, *longer(4, 5)])
def test_a_resume_with_data_that_change(stop: int, tmp_path: Path) -> None:
    fit("pp=2 micro=4", tmp_path / "run", **{**TEXTS, "steps": stop})
    run = fit("dp=2", tmp_path / "run", resume=True, **TEXTS)
    assert run.losses == pytest.approx(text_losses(), abs=3e-6)
    assert seen_by(run.folder) == text_ids()
    with pytest.raises(px.PhalanxError, match="from step 6 on"):
        fit("single", tmp_path / "run", resume=True, **{**TEXTS, "data": lambda: px.Curriculum({0: SHORT, 6: LONG})})


def test_who_reads_ahead_reads_the_same(tmp_path: Path) -> None:
    run = fit("dp=2", tmp_path / "run", **TEXTS, workers=1, batch_ramp={0: 4, 3: 8})
    plain = fit("single", tmp_path / "plain", **TEXTS, batch_ramp={0: 4, 3: 8})
    assert seen_by(run.folder) == seen_by(plain.folder)
    assert run.losses == pytest.approx(plain.losses, abs=3e-6)


def test_a_loop_of_ones_own() -> None:
    step, loader = px.build(job(**RAMP), "single")
    seen = [(batch.samples, step(batch).loss) for batch in loader]
    assert [samples for samples, _ in seen] == SIZES
    assert [found for _, found in seen] == pytest.approx(ramp_losses(), abs=3e-6)
    assert (loader.steps_per_epoch, loader.total_steps) == (None, len(SIZES))


def test_both_at_once_and_proven() -> None:
    how = {**TEXTS, "batch_ramp": {0: 4, 3: 8}, "data": lambda: px.Curriculum({0: SHORT, 2: LONG}), "steps": 5}
    assert px.prove(job(**how), "fsdp=2", steps=5).equal
