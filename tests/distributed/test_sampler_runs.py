"""A sampler of the user's own under several plans, beside a plain loop over the order that it gives."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from small import LENGTH, batches_of, fit, job, plain_losses, table

import phalanx as px
from phalanx.data import read_ledger
from phalanx.data.loader import Loader
from phalanx.errors import SpecError
from phalanx.placement.batch_split import Lane
from phalanx.report.samples_seen import samples_seen


def drawn(seed: int, epoch: int) -> np.ndarray:
    return np.random.default_rng([seed, epoch]).integers(LENGTH, size=80)


HOW = {"sampler": px.Sampler(drawn, repeats=True), "optimizer": lambda params: torch.optim.SGD(params, lr=0.1)}
STEPS = [drawn(0, epoch)[start : start + 32] for epoch in range(2) for start in (0, 32, 64)]


@pytest.mark.parametrize("plan", ["single", "dp=2", "dp=2 micro=5", "fsdp=2 zero=3 micro=7", "dp=2 server=1"])
def test_a_run_takes_the_order_of_the_sampler(plan: str, tmp_path: Path) -> None:
    run = fit(plan, tmp_path / "run", **HOW)
    assert [ids.tolist() for _, ids in read_ledger(run.folder / "ledger").values()] == [sorted(ids) for ids in STEPS]
    seen = samples_seen(run.folder)
    assert (seen.once, seen.epochs, seen.epoch_samples, seen.repeats) == (True, 2, 80, True), seen.answer
    assert run.losses == pytest.approx(plain_losses(batches_of(table().columns, STEPS), **HOW), abs=2e-6)


def test_a_resume_in_mid_epoch_under_another_plan(tmp_path: Path) -> None:
    whole = fit("single", tmp_path / "whole", **HOW)
    fit("dp=2", tmp_path / "parts", epochs=None, steps=2, **HOW)
    parts = fit("single", tmp_path / "parts", resume=True, **HOW)
    assert parts.losses[-4:] == pytest.approx(whole.losses[-4:], abs=2e-6)
    assert samples_seen(tmp_path / "parts").once
    with pytest.raises(px.PhalanxError, match="their order"):
        fit("single", tmp_path / "parts", resume=True, **{**HOW, "sampler": px.weighted([1.0] * LENGTH)})


def test_it_is_proven() -> None:
    assert px.prove(job(**HOW), "dp=2", steps=4).equal


def test_an_index_out_of_range_is_refused_before_processes_start(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="index 200 at place 0"):
        fit("dp=2", tmp_path / "run", sampler=lambda seed, epoch: [200])


def test_worker_processes_see_the_same() -> None:
    def ids(workers: int) -> list[tuple[int, ...]]:
        one = job(**HOW, workers=workers)
        loader = Loader(one.data(), one, Lane(), micro=5)
        return [micro.ids for step in loader for part in step.parts for micro in part]

    assert ids(2) == ids(0)
