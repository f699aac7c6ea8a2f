"""Data sets of Hugging Face's ``datasets`` under several plans, beside a plain loop over the same rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from small import BATCH, LENGTH, batches_of, fit, job, plain_losses, table

import phalanx as px
from phalanx.data import GlobalBatchSampler, Lane, Loader, read_ledger
from phalanx.errors import SpecError
from phalanx.report.samples_seen import samples_seen

ROWS = {name: column.tolist() for name, column in table().columns.items()}


def rows() -> datasets.Dataset:
    return datasets.Dataset.from_dict(ROWS)


def in_order() -> datasets.IterableDataset:
    return rows().to_iterable_dataset(num_shards=3).with_format("torch")


def shuffled() -> datasets.IterableDataset:
    return in_order().shuffle(seed=3, buffer_size=20)


def as_rows(samples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    return {name: torch.tensor([sample[name] for sample in samples]) for name in ("x", "y")}


def permuted() -> Iterator[np.ndarray]:
    sampler = GlobalBatchSampler(length=LENGTH, batch=BATCH, seed=0)
    return (sampler.ids(step) for step in range(8))


def read(stream: Callable[[], datasets.IterableDataset]) -> Iterator[np.ndarray]:
    """The rows of a stream's global batches, found by their values."""
    places = {tuple(np.float32(row)): place for place, row in enumerate(ROWS["x"])}
    for epoch in range(2):
        passed = stream()
        passed.set_epoch(epoch)
        ids = np.array([places[tuple(sample["x"].numpy())] for sample in passed])
        yield from (ids[start : start + BATCH] for start in range(0, LENGTH, BATCH))


HOW: dict[str, Any] = {"optimizer": lambda params: torch.optim.SGD(params, lr=0.1)}
CASES: dict[str, tuple[dict[str, Any], Callable[[], Iterator[np.ndarray]]]] = {
    "a table of tensors": ({"data": lambda: rows().with_format("torch")}, permuted),
    "a table with a collate": ({"data": rows, "collate": as_rows}, permuted),
    "a stream": ({"data": in_order}, lambda: read(in_order)),
    "a stream that shuffles": ({"data": shuffled, "workers": 2}, lambda: read(shuffled)),
}


@pytest.mark.parametrize("plan", ["single", "dp=2 micro=5", "fsdp=2", "pp=2 micro=4"])
@pytest.mark.parametrize("case", CASES)
def test_a_run_takes_them_as_they_are(case: str, plan: str, tmp_path: Path) -> None:
    how, steps = CASES[case]
    run = fit(plan, tmp_path / "run", **HOW, **how)
    assert len(read_ledger(run.folder / "ledger")) == 8
    assert samples_seen(run.folder).once
    assert run.losses == pytest.approx(plain_losses(batches_of(table().columns, steps()), **HOW), abs=2e-6)


@pytest.mark.parametrize(("before", "after"), [("dp=2", "fsdp=2"), ("single", "dp=2")])
@pytest.mark.parametrize("case", CASES)
def test_a_resume_in_mid_epoch_under_another_plan(case: str, before: str, after: str, tmp_path: Path) -> None:
    how, steps = CASES[case]
    fit(before, tmp_path / "run", **HOW, **how, epochs=None, steps=5)
    run = fit(after, tmp_path / "run", resume=True, **HOW, **how)
    assert run.losses[-3:] == pytest.approx(plain_losses(batches_of(table().columns, steps()), **HOW)[-3:], abs=2e-6)
    assert samples_seen(run.folder).once


@pytest.mark.parametrize("data", [rows, lambda: rows().to_iterable_dataset()])
def test_lists_that_torch_would_turn_on_their_side_are_refused(data: Callable[[], Any], tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"(?s)columns of lists \(x\).*with_format"):
        fit("dp=2", tmp_path / "run", data=data)
    with pytest.raises(SpecError, match="columns of lists"):
        fit("single", tmp_path / "run", data=data)


def test_so_are_those_to_evaluate_on(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"(?s)job\.evaluate: .*columns of lists.*evaluate=lambda"):
        fit("dp=2", tmp_path / "run", evaluate=rows)
    fit("dp=2", tmp_path / "run", evaluate=lambda: rows().with_format("torch"), epochs=None, steps=1)


class StatefulDataLoader:
    """What torchdata's offers, without its being a ``DataLoader`` of torch."""

    def __init__(self, dataset: Any) -> None:
        self.dataset, self.batch_sampler, self.batch_size = dataset, None, 4

    def __iter__(self) -> Iterator[Any]:
        return iter(self.dataset)

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        del state


def test_what_makes_batches_of_its_own_is_refused() -> None:
    one = job()
    with pytest.raises(SpecError, match="a StatefulDataLoader, which makes batches of its own"):
        Loader(StatefulDataLoader(table()), one, Lane(), micro=None)


class Counting:
    """A stream whose reader can say and be told where it is."""

    def __init__(self) -> None:
        self.place = 0

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        data = table()
        while self.place < LENGTH:
            self.place += 1
            yield data[self.place - 1]
        self.place = 0

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.place = state["place"]


def test_a_stream_that_keeps_its_place(tmp_path: Path) -> None:
    steps = [np.arange(start, min(start + BATCH, LENGTH)) for _ in range(2) for start in range(0, LENGTH, BATCH)]
    fit("dp=2", tmp_path / "run", **HOW, data=Counting, epochs=None, steps=5)
    run = fit("fsdp=2", tmp_path / "run", resume=True, **HOW, data=Counting)
    assert run.losses[-3:] == pytest.approx(plain_losses(batches_of(table().columns, steps), **HOW)[-3:], abs=2e-6)


def test_a_job_of_a_table_is_proven() -> None:
    assert px.prove(job(**HOW, data=lambda: rows().with_format("torch")), "dp=2", steps=4).equal
