"""Streams as torchdata.nodes has them, samplers of the user's own, batches and data that change with the step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from small import BATCH, LENGTH, Blocks, batches_of, fit, job, plain_losses, table
from torch import nn
from torch.nn.functional import cross_entropy

import phalanx as px
from chaos.run_equality import read_ledger
from law_rows import longer
from phalanx.data.sampler import Permutation
from phalanx.report.samples_seen import samples_seen
from phalanx.train.build_model import build_model

BY_NODES: dict[str, Any] = {"optimizer": lambda params: torch.optim.SGD(params, lr=0.1)}


class Shuffled(torch.utils.data.Sampler[int]):
    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        yield from torch.randperm(LENGTH, generator=torch.Generator().manual_seed(self.epoch)).tolist()


class Rows:
    """A node: the iterator of one pass over the rows, until it is reset; ``torchdata.nodes.SamplerWrapper``."""

    def __init__(self, sampler: Any = None) -> None:
        self.sampler, self.rows, self.epoch, self.started = sampler or range(LENGTH), table(), 0, False

    def reset(self, initial_state: dict[str, int] | None = None) -> None:
        state = initial_state or {"at": 0, "epoch": self.epoch + self.started}
        self.at, self.epoch, self.started = 0, state["epoch"], False
        if isinstance(self.sampler, Shuffled):
            self.sampler.set_epoch(self.epoch)
        self.order = iter(self.sampler)
        while self.at < state["at"]:
            next(self)

    def get_state(self) -> dict[str, int]:
        return {"at": self.at, "epoch": self.epoch}

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        self.started, place = True, next(self.order)
        self.at += 1
        return self.rows[place]


class NodeLoader:
    """Passes over a node, each from the begin or from a state: ``torchdata.nodes.Loader``."""

    def __init__(self, root: Rows | None = None) -> None:
        self.root, self.state, self.pending = root or Rows(), dict[str, int](), False

    def __iter__(self) -> Iterator[Any]:
        if not self.pending:
            self.root.reset(self.state or None)
            self.state = {}
        self.pending = False
        return self.root

    def state_dict(self) -> dict[str, int]:
        if not hasattr(self.root, "at"):
            iter(self)
            self.pending = True
        return self.root.get_state()

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.state = state


def by_epoch() -> Shuffled:
    return Shuffled()


def by_global_draws() -> Any:
    return torch.utils.data.RandomSampler(range(LENGTH))


def by_own_draws() -> Any:
    return torch.utils.data.RandomSampler(range(LENGTH), generator=torch.Generator().manual_seed(3))


def shuffled_losses(sampler: Any, seed: int) -> list[float]:
    """Plain PyTorch on one device, over a loader as torchdata's pages have it."""
    from phalanx.data.sampler import EpochSeeds

    def batches() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        loader = NodeLoader(Rows(sampler))
        for epoch in range(3):
            EpochSeeds.of(seed, epoch).plant(0)
            rows = list(loader)
            for start in range(0, LENGTH, BATCH):
                batch = torch.utils.data.default_collate(rows[start : start + BATCH])
                yield batch["x"], batch["y"]

    return plain_losses(batches(), **BY_NODES)


SHARED: dict[Any, Any] = {}


@pytest.mark.parametrize(
    ("sampler", "made", "plan"),
    [
        (by_epoch, "node", "dp=2"),
        (by_global_draws, "loader", "dp=2 micro=2"),
        (by_own_draws, "one loader", "dp=2"),
        *longer((by_epoch, "one loader", "fsdp=2 micro=2"), (by_own_draws, "node", "single")),
    ],
)
def test_each_epoch_is_another_pass(sampler: Any, made: str, plan: str, tmp_path: Path) -> None:
    def data() -> Any:
        if made == "one loader":
            return SHARED.setdefault(sampler, NodeLoader(Rows(sampler())))
        return Rows(sampler()) if made == "node" else NodeLoader(Rows(sampler()))

    expected = shuffled_losses(sampler(), job(**BY_NODES).seed)
    fit(plan, tmp_path / "run", **BY_NODES, data=data, epochs=None, steps=6)
    run = fit("single", tmp_path / "run", resume=True, **BY_NODES, data=data, epochs=3)
    assert run.losses == pytest.approx(expected, abs=2e-6)
    if made == "loader":
        assert "is equal to one device" in str(px.prove(job(**BY_NODES, data=data, epochs=3), plan, steps=6))


class Counted(Rows):
    """Each reset begins another pass, in another order: a sampler with ``set_epoch`` behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.passes = -1

    def reset(self, initial_state: dict[str, int] | None = None) -> None:
        super().reset(initial_state)
        self.passes += 1

    def __next__(self) -> Any:
        super().__next__()
        return self.rows[(self.at * 7 + 13 * self.passes) % LENGTH]


def read_once() -> Iterator[Any]:
    yield from (table()[index] for index in range(LENGTH))


@pytest.mark.parametrize(
    ("data", "epochs", "plan"),
    [(Counted, 2, "single recompute=full"), (read_once, 1, "fsdp=2"), *longer((Counted, 2, "fsdp=2"))],
)
def test_a_look_at_the_model_takes_no_samples(data: Any, epochs: int, plan: str, tmp_path: Path) -> None:
    plain = fit("single", tmp_path / "plain", **BY_NODES, data=data, epochs=epochs)
    looked = fit(plan, tmp_path / "looked", **BY_NODES, data=data, epochs=epochs)
    assert looked.losses == pytest.approx(plain.losses, rel=1e-5)


def drawn(seed: int, epoch: int) -> np.ndarray:
    return np.random.default_rng([seed, epoch]).integers(LENGTH, size=80)


BY_SAMPLER = {"sampler": px.Sampler(drawn, repeats=True), "optimizer": lambda params: torch.optim.SGD(params, lr=0.1)}
STEPS = [drawn(0, epoch)[start : start + 32] for epoch in range(2) for start in (0, 32, 64)]


@pytest.mark.parametrize("plan", ["dp=2 micro=5", "dp=2 server=1", *longer("fsdp=2 zero=3 micro=7")])
def test_a_run_takes_the_order_of_the_sampler(plan: str, tmp_path: Path) -> None:
    run = fit(plan, tmp_path / "run", **BY_SAMPLER)
    assert [ids.tolist() for _, ids in read_ledger(run.folder / "ledger").values()] == [sorted(ids) for ids in STEPS]
    seen = samples_seen(run.folder)
    assert (seen.once, seen.epochs, seen.epoch_samples, seen.repeats) == (True, 2, 80, True), seen.answer
    assert run.losses == pytest.approx(plain_losses(batches_of(table().columns, STEPS), **BY_SAMPLER), abs=2e-6)


def test_a_resume_in_mid_epoch_under_another_plan(tmp_path: Path) -> None:
    fit("dp=2", tmp_path / "parts", epochs=None, steps=2, **BY_SAMPLER)
    parts = fit("single", tmp_path / "parts", resume=True, **BY_SAMPLER)
    assert parts.losses == pytest.approx(plain_losses(batches_of(table().columns, STEPS), **BY_SAMPLER), abs=2e-6)
    assert samples_seen(tmp_path / "parts").once
    with pytest.raises(px.PhalanxError, match="their order"):
        fit("single", tmp_path / "parts", resume=True, **{**BY_SAMPLER, "sampler": px.weighted([1.0] * LENGTH)})


SGD = {"optimizer": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9)}


RAMP_LENGTH = 50
RAMP: dict[str, Any] = {
    **SGD,
    "model": partial(Blocks, 3),
    "data": lambda: table(RAMP_LENGTH),
    "batch": 16,
    "batch_ramp": {0: 4, 3: 8, 9: 16},
    "epochs": 3,
    "schedule": px.Schedule(decay="linear", warmup_steps=2),
}
SIZES = [4, 4, 4, 8, 8, 8, 8, 6, 8, 16, 16, 10, 16, 16, 16, 2]
"""Of the steps of three passes over 50 samples: 12 + 32 + 6, 8 + 42, 50."""


def keyed_order(length: int, epoch: int) -> list[int]:
    return Permutation.keyed(length, 0, epoch)(torch.arange(length).numpy()).tolist()


def ramp_steps() -> list[list[int]]:
    ids = [index for epoch in range(3) for index in keyed_order(RAMP_LENGTH, epoch)]
    ends = [sum(SIZES[: at + 1]) for at in range(len(SIZES))]
    return [ids[end - size : end] for end, size in zip(ends, SIZES, strict=True)]


def plain_of(how: dict[str, Any], batches: Iterable[tuple[Any, torch.Tensor]], rates: list[float]) -> list[float]:
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
    return plain_of(RAMP, batches_of(table(RAMP_LENGTH).columns, ramp_steps()), rates)


def seen_by(folder: Path) -> list[list[int]]:
    return [ids.tolist() for _, ids in read_ledger(folder / "ledger").values()]


@pytest.mark.parametrize(
    "plan", ["dp=2 micro=3", "dp=2 server=1", *longer("pp=2 micro=4", "fsdp=2 zero=1", "tp=2", "dp=2 shares=3,1")]
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
    run = fit("threads=2", tmp_path / "run", resume=True, **how)
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
        made = (nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)) for _ in range(3))
        self.blocks = nn.ModuleList(made)
        self.head = nn.Linear(8, 11)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = x + block(x.cumsum(1) / x.shape[1])
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
    *[(SHORT, keyed_order(20, 0)[start : start + 8]) for start in (0, 8, 16)],
    *[(SHORT, keyed_order(20, 1)[start : start + 8]) for start in (0, 8)],
    *[(LONG, keyed_order(15, epoch)[start : start + 8]) for epoch in (0, 1) for start in (0, 8)],
]


def text_losses() -> list[float]:
    rows = [source.columns["tokens"][ids] for source, ids in BY_STEP]
    return plain_of(TEXTS, [(tokens[:, :-1], tokens[:, 1:]) for tokens in rows], [0.1] * len(rows))


def text_ids() -> list[list[int]]:
    return [sorted(index + 20 * (source is LONG) for index in ids) for source, ids in BY_STEP]


@pytest.mark.parametrize(
    "plan", ["tp=2", *longer("fsdp=2 zero=1", "dp=2 micro=3", "threads=2", "pp=2 micro=4", "dp=2 server=1")]
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
    plain_of = fit("single", tmp_path / "plain", **TEXTS, batch_ramp={0: 4, 3: 8})
    assert seen_by(run.folder) == seen_by(plain_of.folder)
    assert run.losses == pytest.approx(plain_of.losses, abs=3e-6)


def test_both_at_once_and_proven() -> None:
    how = {**TEXTS, "batch_ramp": {0: 4, 3: 8}, "data": lambda: px.Curriculum({0: SHORT, 2: LONG}), "steps": 5}
    assert px.prove(job(**how), "dp=2", steps=5).equal
