"""Which exchanges a step is priced with: what a run does, counted by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from small_profiles import transformer
from torch import nn

from phalanx.config import Cluster, Plan
from phalanx.forecast import Work, forecast
from phalanx.hardware import cluster
from phalanx.trace import ModelCall, trace

KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "send")
GPT = Work(profile=transformer(layers=4, width=64, heads=4, vocabulary=100), batch=16)


def slow(kind: str) -> Cluster:
    """GPUs on which each exchange of this ``kind`` takes a second to start, and nothing else does."""
    lines = {f"{one}.{ranks}.{end}": 0.0 for one in KINDS for ranks in (2, 4) for end in ("start", "byte")}
    lines |= {f"{kind}.{ranks}.start": 1.0 for ranks in (2, 4)}
    known = cluster("8xA100")
    group = known.groups[0]
    device = replace(group.device, measured={**group.device.measured, **lines})
    return replace(known, groups=(replace(group, device=device),))


def seconds(text: str, kind: str, part: str, work: Work = GPT) -> float:
    return forecast(work, Plan.parse(text), slow(kind)).seconds[part]


class Rows(nn.Module):
    """Three layers that no container repeats."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.third(torch.relu(self.second(torch.relu(self.first(x)))))


def work_of(module: nn.Module) -> Work:
    profile = trace(ModelCall(module=module, args=(torch.ones(4, 8),), loss=lambda output, _: output.sum()))
    return Work(profile=profile, batch=16)


class TestGradients:
    @pytest.mark.parametrize("text", ["dp=2", "cp=2", "dp=2 cp=2", "cp=2 tp=2", "ep=2", "fsdp=2 cp=2 zero=1"])
    def test_all_that_hold_the_same_sum_them_once(self, text: str) -> None:
        assert round(seconds(text, "all-reduce", "replicas")) == 1

    @pytest.mark.parametrize("text", ["single", "tp=2", "pp=2 micro=4", "fsdp=2 zero=1", "fsdp=2"])
    def test_where_none_hold_the_same_nobody_does(self, text: str) -> None:
        assert seconds(text, "all-reduce", "replicas") == pytest.approx(0.0, abs=1e-3)


class TestSharded:
    @pytest.mark.parametrize(("kind", "times"), [("all-gather", 2), ("reduce-scatter", 1)])
    def test_a_model_without_repeated_blocks_is_one(self, kind: str, times: int) -> None:
        work = work_of(Rows())
        assert not work.profile.repeated
        assert round(seconds("fsdp=2", kind, "replicas", work)) == times
        assert round(seconds("fsdp=2 micro=2", kind, "replicas", work)) == 4 * times

    def test_repeated_blocks_are_gathered_one_by_one(self) -> None:
        blocks = [nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(5)]
        work = work_of(nn.Sequential(nn.Sequential(*blocks)))
        assert work.profile.repeated
        assert round(seconds("fsdp=2", "all-gather", "replicas", work)) == 2 * 5

    def test_a_model_without_repeated_blocks_is_there_whole(self) -> None:
        def gathered(work: Work) -> float:
            return forecast(work, Plan.parse("fsdp=2"), cluster("8xA100")).memory["gathered"]

        work = work_of(Rows())
        parameters = 4 * work.profile.parameters
        assert gathered(work) >= parameters
        assert gathered(replace(work, profile=replace(work.profile, repeated=True))) < parameters


class TestTensorParallel:
    def test_a_pair_takes_the_place_of_each_sum_where_tokens_are_cut(self) -> None:
        sums = seconds("tp=2", "all-reduce", "exchange")
        assert sums >= 4 * 4  # two forward, two backward, in each of four blocks
        # the embeddings are added up whole, and three numbers a token in the loss over classes that are cut
        assert seconds("tp=2 sequence=true", "all-reduce", "exchange") == pytest.approx(1.0 + 3.0, abs=1e-3)
        for kind in ("all-gather", "reduce-scatter"):
            there = 4 * 4 + 1 + (kind == "all-gather")  # of the head both; of the embeddings the gradients are gathered
            assert seconds("tp=2 sequence=true", kind, "exchange") == pytest.approx(there, abs=1e-3)


class Routed(nn.Module):
    """Attention, and behind it rows that are chosen by their values."""

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.blocks = nn.Linear(8, 24), nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])
        self.chosen = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            query, key, value = self.mix(block(x)).chunk(3, -1)
            x = x + nn.functional.scaled_dot_product_attention(query, key, value)
        x = nn.functional.rms_norm(x, (8,))
        return self.chosen(x[x[..., 0] > 0])


def test_what_depends_on_values_is_profiled_with_those_of_the_data() -> None:
    """Twice the same samples choose twice as many rows; values that nobody computed choose any."""
    torch.manual_seed(0)
    module, x = Routed(), torch.randn(2, 16, 8)
    given: dict[str, Any] = {"module": module, "args": (x,), "loss": lambda output, _: output.sum(), "values": True}
    profile = trace(ModelCall(**given))
    rows = [
        one.dims[1] for part in profile.parts if part.role == "after" for one in part.forward if one.kind == "matmul"
    ]
    with torch.no_grad():
        for block in module.blocks:
            query, key, value = module.mix(block(x)).chunk(3, -1)
            x = x + nn.functional.scaled_dot_product_attention(query, key, value)
        chosen = int((nn.functional.rms_norm(x, (8,))[..., 0] > 0).sum())
    assert rows[-1].at(2, 16) == pytest.approx(chosen)
    assert rows[-1].by_samples == 1.0
