"""Running statistics are the same on every rank after a step, and come back as they were."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from small import OfOutput, fit, job, table
from torch import nn

from phalanx.comm import Place, default_process_group
from phalanx.config import Plan
from phalanx.launch import launch
from phalanx.parallel import assemble


class Normal(nn.Module):
    """Batch normalisation inside blocks and after them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(9, 9), nn.BatchNorm1d(9)) for _ in range(2)])
        self.last = nn.BatchNorm1d(9)
        self.head = nn.Linear(9, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return self.head(self.last(x))


def statistics_after_two_steps(plan: Plan) -> Callable[[Place, Any], dict[str, list[float]]]:
    """A worker's work: steps on data of its own rank; afterwards name → values of every running statistic."""

    backward = OfOutput(lambda output: output.square().mean())

    def work(place: Place, report: Any) -> dict[str, list[float]]:
        torch.set_num_threads(1)
        with default_process_group(place, torch.device("cpu")):
            torch.manual_seed(0)
            layout = assemble(Normal(), job(), plan, place.rank, torch.device("cpu"))
            generator = torch.Generator().manual_seed(place.rank)
            for _ in range(2):
                layout.accumulate([[torch.randn(6, 9, generator=generator) for _ in range(2)]], backward)
                layout.finish()
                layout.stepped()
            return {name: tensor.tolist() for name, tensor in layout.module.named_buffers() if "running" in name}

    return work


@pytest.mark.parametrize(
    "plan", ["dp=2", "fsdp=2", "fsdp=2 zero=1", "fsdp=2 zero=2", "dp=2 offload=optimizer", "dp=2 fsdp=2"]
)
def test_every_rank_has_the_same_statistics(plan: str) -> None:
    chosen = Plan.parse(f"{plan} device=cpu")
    first, *others = launch(statistics_after_two_steps(chosen), chosen.world_size)
    assert len(first) == 6
    assert any(value not in (0.0, 1.0) for values in first.values() for value in values)
    for other in others:
        assert other == first


@pytest.mark.parametrize("plan", ["dp=2", "fsdp=2"])
def test_resuming_with_statistics_changes_no_bit(plan: str, tmp_path: Path) -> None:
    whole = fit(plan, tmp_path / "whole", model=Normal, drop_last=True)
    fit(plan, tmp_path / "half", model=Normal, drop_last=True, epochs=None, steps=4)
    assert fit(plan, tmp_path / "half", model=Normal, drop_last=True, resume=True).losses == whole.losses


@pytest.mark.parametrize("plan", ["dp=2", "fsdp=2 zero=1", "fsdp=2 zero=2"])
def test_evaluation_reads_the_statistics_that_are_saved(plan: str, tmp_path: Path) -> None:
    """A checkpoint evaluated on one device gives what the ranks measured together."""
    how: dict[str, Any] = {"model": Normal, "drop_last": True, "epochs": None, "steps": 3}
    how["evaluate"] = lambda: table(35, seed=1)
    many = fit(plan, tmp_path / "run", **how).evaluation
    one = fit("single", tmp_path / "run", resume=True, **how).evaluation  # no step is left: it evaluates
    assert many is not None
    assert one is not None
    assert many["loss"] == pytest.approx(one["loss"], rel=1e-6)
