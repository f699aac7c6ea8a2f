"""Streams as ``torchdata.nodes`` has them, and samplers of the user's own, beside a plain loop over the rows."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from small import BATCH, LENGTH, batches_of, fit, job, plain_losses, table

import phalanx as px
from longer import longer
from phalanx.data import Lane, Loader, read_ledger
from phalanx.errors import DataError, SpecError
from phalanx.report.samples_seen import samples_seen

BY_NODES: dict[str, Any] = {"optimizer": lambda params: torch.optim.SGD(params, lr=0.1)}


class Shuffled(torch.utils.data.Sampler[int]):
    """An order by epoch, as ``DistributedSampler`` has it."""

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
        (by_global_draws, "loader", "fsdp=2 micro=2"),
        (by_own_draws, "one loader", "dp=2"),
        *longer((by_epoch, "one loader", "fsdp=2 micro=2"), (by_global_draws, "node", "single")),
        *longer((by_own_draws, "node", "fsdp=2 micro=2"), (by_own_draws, "loader", "single")),
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


def test_one_loader_that_two_read() -> None:
    loader = NodeLoader(Rows(by_epoch()))
    given = job(**BY_NODES, data=lambda: loader, epochs=3)
    passes = iter(Loader(given.data(), given, Lane(), micro=None))
    next(passes)
    next(iter(Loader(given.data(), given, Lane(), micro=None, first_step=5, total_steps=6)))
    with pytest.raises(DataError, match="one NodeLoader"):
        list(passes)


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


def test_a_sampler_is_proven() -> None:
    assert px.prove(job(**BY_SAMPLER), "dp=2", steps=4).equal


def test_an_index_out_of_range_is_refused_before_processes_start(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="index 200"):
        fit("dp=2", tmp_path / "run", sampler=lambda seed, epoch: [200])


def test_worker_processes_see_the_same() -> None:
    def ids(workers: int) -> list[tuple[int, ...]]:
        one = job(**BY_SAMPLER, workers=workers)
        loader = Loader(one.data(), one, Lane(), micro=5)
        return [micro.ids for step in loader for part in step.parts for micro in part]

    assert ids(2) == ids(0)
