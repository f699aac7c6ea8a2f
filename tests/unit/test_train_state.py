"""What comes back from a checkpoint, and what the job says anew."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import phalanx as px
from phalanx.checkpoint import BackgroundSaver
from phalanx.comm import Place
from phalanx.errors import CheckpointError
from phalanx.train.assembly import Assembly, build
from phalanx.train.lr_schedule import RunStart
from phalanx.train.state import restore, to_save

sys.path.insert(0, str(Path(__file__).parent.parent / "distributed"))
from small import Net, job


def saved_and_restored(folder: Path, before: dict[str, Any], after: dict[str, Any]) -> Assembly:
    """Two steps with AdamW of ``before``, restored into a job with AdamW of ``after``."""
    first, second = (
        job(optimizer=lambda params, options=options: torch.optim.AdamW(params, **options))
        for options in (before, after)
    )
    assembly = build(first, px.Plan(), Place(), torch.device("cpu"))
    batches = iter(assembly.loader)
    for _ in range(2):
        assembly.step(next(batches))
    path = BackgroundSaver().save(to_save(folder, first, assembly, keep=1), at_once=True).path
    resumed = build(second, px.Plan(), Place(), torch.device("cpu"), start=RunStart(resumes=True, step=2))
    restore(path, second, resumed)
    for then, now in zip(assembly.optimizer.state.values(), resumed.optimizer.state.values(), strict=True):
        assert all(torch.equal(then[key], now[key]) for key in ("step", "exp_avg", "exp_avg_sq"))
    return resumed


@pytest.mark.parametrize("form", [float, torch.tensor])
def test_hyper_parameters_are_the_jobs_as_it_is_now(tmp_path: Path, form: Any) -> None:
    before = {"lr": form(0.5), "weight_decay": 0.3, "betas": (0.5, 0.6)}
    after = {"lr": form(0.125), "weight_decay": 0.1, "betas": (0.9, 0.99)}
    resumed = saved_and_restored(tmp_path, before, after)
    (group,) = resumed.optimizer.param_groups
    assert (float(group["lr"]), group["weight_decay"], group["betas"]) == (0.125, 0.1, (0.9, 0.99))
    assert group["lr"] is after["lr"] or not isinstance(group["lr"], torch.Tensor)
    assert resumed.step(next(iter(resumed.loader))).lr == 0.125


class Masked(Net):
    """With a buffer of minus infinity, as masks are."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.full((2,), float("-inf")))


def test_a_mask_may_be_infinite_and_a_parameter_may_not(tmp_path: Path) -> None:
    masked = job(model=Masked)
    assembly = build(masked, px.Plan(), Place(), torch.device("cpu"))
    assembly.step(next(iter(assembly.loader)))
    BackgroundSaver().save(to_save(tmp_path, masked, assembly, keep=1), at_once=True)
    with torch.no_grad():
        assembly.layout.parameters["head.bias"][0] = float("inf")
    with pytest.raises(CheckpointError, match=r"model\.head\.bias is not finite \(1 infinite"):
        BackgroundSaver().save(to_save(tmp_path / "other", masked, assembly, keep=1), at_once=True)
