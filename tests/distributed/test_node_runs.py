"""Nodes as ``torchdata.nodes`` has them, which are streams: under several plans, beside a plain loop over the rows."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from small import BATCH, LENGTH, batches_of, fit, job, plain_losses, table

import phalanx as px
from phalanx.data import Lane, Loader
from phalanx.errors import DataError

HOW: dict[str, Any] = {"optimizer": lambda params: torch.optim.SGD(params, lr=0.1)}
STEPS = [slice(start, min(start + BATCH, LENGTH)) for _ in range(2) for start in range(0, LENGTH, BATCH)]


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


@pytest.mark.parametrize("data", [Rows, NodeLoader])
@pytest.mark.parametrize("plan", ["single", "dp=2", "fsdp=2 micro=2"])
def test_a_run_goes_through_the_rows(plan: str, data: Any, tmp_path: Path) -> None:
    run = fit(plan, tmp_path / "run", **HOW, data=data)
    assert run.losses == pytest.approx(plain_losses(batches_of(table().columns, STEPS), **HOW), abs=2e-6)


@pytest.mark.parametrize("data", [Rows, NodeLoader])
def test_a_resume_in_mid_epoch_under_another_plan(data: Any, tmp_path: Path) -> None:
    fit("dp=2", tmp_path / "run", **HOW, data=data, epochs=None, steps=5)
    run = fit("fsdp=2 micro=2", tmp_path / "run", resume=True, **HOW, data=data)
    assert run.losses[-3:] == pytest.approx(plain_losses(batches_of(table().columns, STEPS), **HOW)[-3:], abs=2e-6)


@pytest.mark.parametrize("data", [Rows, NodeLoader])
def test_two_passes_are_proven(data: Any) -> None:
    assert "is equal to one device over 6 steps" in str(px.prove(job(**HOW, data=data), "dp=2", steps=6))  # of 4 a pass


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

    return plain_losses(batches(), **HOW)


SHARED: dict[Any, Any] = {}


@pytest.mark.parametrize("made", ["node", "loader", "one loader"])
@pytest.mark.parametrize("sampler", [by_epoch, by_global_draws, by_own_draws])
def test_each_epoch_is_another_pass(sampler: Any, made: str, tmp_path: Path) -> None:
    def data() -> Any:
        if made == "one loader":
            return SHARED.setdefault(sampler, NodeLoader(Rows(sampler())))
        return Rows(sampler()) if made == "node" else NodeLoader(Rows(sampler()))

    expected = shuffled_losses(sampler(), job(**HOW).seed)
    for plan in ("single", "dp=2", "fsdp=2 micro=2"):
        run = fit(plan, tmp_path / plan, **HOW, data=data, epochs=3)
        assert run.losses == pytest.approx(expected, abs=2e-6)
    fit("dp=2", tmp_path / "run", **HOW, data=data, epochs=None, steps=6)
    run = fit("single", tmp_path / "run", resume=True, **HOW, data=data, epochs=3)
    assert run.losses[-6:] == pytest.approx(expected[-6:], abs=2e-6)
    assert "is equal to one device" in str(px.prove(job(**HOW, data=data, epochs=3), "dp=2", steps=6))


def test_one_loader_that_two_read() -> None:
    loader = NodeLoader(Rows(by_epoch()))
    given = job(**HOW, data=lambda: loader, epochs=3)
    passes = iter(Loader(given.data(), given, Lane(), micro=None))
    next(passes)
    next(iter(Loader(given.data(), given, Lane(), micro=None, first_step=5, total_steps=6)))
    with pytest.raises(DataError, match="one NodeLoader that two read at a time"):
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


@pytest.mark.parametrize("plan", ["single recompute=full", "fsdp=2"])
@pytest.mark.parametrize(("data", "epochs"), [(Counted, 2), (read_once, 1)], ids=["node", "generator"])
def test_a_look_at_the_model_takes_no_samples(data: Any, epochs: int, plan: str, tmp_path: Path) -> None:
    plain = fit("single", tmp_path / "plain", **HOW, data=data, epochs=epochs)
    looked = fit(plan, tmp_path / "looked", **HOW, data=data, epochs=epochs)
    assert looked.losses == pytest.approx(plain.losses, rel=1e-5)
