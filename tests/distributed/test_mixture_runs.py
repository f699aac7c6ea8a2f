"""A mixture under several plans, beside a plain loop over the order that one epoch after another has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from small import batches_of, fit, job, plain_losses, table

import phalanx as px
from phalanx.data import read_ledger
from phalanx.report.samples_seen import samples_seen

SOURCES = {"many": table(60, seed=1), "few": table(9, seed=2)}
MIXTURE = px.Mixture(SOURCES, {"many": 0.75, "few": 0.25}, samples=40)
HOW: dict[str, Any] = {
    "data": lambda: MIXTURE,
    "sampler": MIXTURE.sampler,
    "batch": 16,
    "epochs": 3,
    "optimizer": lambda params: torch.optim.SGD(params, lr=0.1),
}
ORDERS = [MIXTURE.sampler.indices(0, epoch, 16) for epoch in range(3)]
STEPS = [order[start : start + 16].tolist() for order in ORDERS for start in (0, 16, 32)]
COLUMNS = {name: torch.cat([SOURCES[source].columns[name] for source in ("many", "few")]) for name in "xy"}


def test_each_epoch_has_so_many_of_each() -> None:
    assert [(sum(order < 60), sum(order >= 60)) for order in ORDERS] == [(30, 10)] * 3
    assert sorted(int(index) for order in ORDERS[:2] for index in order if index < 60) == list(range(60))


@pytest.mark.parametrize("plan", ["single", "dp=2 micro=5", "fsdp=2 zero=3", "pp=2 micro=4", "dp=2 server=1"])
def test_a_run_takes_the_mixture(plan: str, tmp_path: Path) -> None:
    run = fit(plan, tmp_path / "run", **HOW)
    assert [ids.tolist() for _, ids in read_ledger(run.folder / "ledger").values()] == [sorted(ids) for ids in STEPS]
    seen = samples_seen(run.folder)
    assert (seen.once, seen.epochs, seen.epoch_samples) == (True, 3, 40), seen.answer
    assert run.losses == pytest.approx(plain_losses(batches_of(COLUMNS, STEPS), **HOW), abs=2e-6)


def test_a_resume_in_mid_epoch_under_another_plan(tmp_path: Path) -> None:
    fit("dp=2", tmp_path / "run", **{**HOW, "epochs": None, "steps": 4})
    run = fit("fsdp=2", tmp_path / "run", resume=True, **HOW)
    assert run.losses[-5:] == pytest.approx(plain_losses(batches_of(COLUMNS, STEPS), **HOW)[-5:], abs=2e-6)
    assert samples_seen(tmp_path / "run").once
    other = px.Mixture(SOURCES, {"many": 0.5, "few": 0.5}, samples=40)
    with pytest.raises(px.PhalanxError, match="their order"):
        fit("single", tmp_path / "run", resume=True, **{**HOW, "data": lambda: other, "sampler": other.sampler})


def test_it_is_proven() -> None:
    assert px.prove(job(**HOW), "dp=2", steps=4).equal
