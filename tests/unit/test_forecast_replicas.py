"""Forecasts of what replicas exchange: sums, averages, servers, compressed messages, uneven shares; numbers by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from small_profiles import transformer
from torch import nn

from law_rows import longer
from phalanx.config import Cluster, Plan
from phalanx.forecast import Forecast, Preset, Work, forecast
from phalanx.forecast.gradient_sync import averaged, averaging, server_time
from phalanx.forecast.kernels import DeviceSetting
from phalanx.forecast.layouts import Layouts
from phalanx.forecast.memory import memory
from phalanx.forecast.network import Fabric
from phalanx.forecast.rates import Kernels, Rates, Wires
from phalanx.hardware import cluster
from phalanx.planner import Question
from phalanx.planner.rules import problems
from phalanx.trace import ModelCall, trace

PLAIN = Preset(name="plain", reserved=1.0)
GIANT = np.array([1e9])
WIRES = Wires(inside=1.0, between=1.0, start=0.0, hop=0.0, start_between=0.0, hop_between=0.0, crowd=0.0)
WORK = Work(profile=transformer(layers=12, width=1024, heads=16, vocabulary=30000), batch=64)
MIXED = "8xA100+8xV100-32GB"


def setting(per_node: int = 8) -> DeviceSetting:
    """A link of 100 GB/s, a network of 10 GB/s a node, 20 GB/s to the host; memory moves 1 TB/s, a host's 0.1 TB/s."""
    fabric = Fabric(inside=100e9, node=10e9, per_node=per_node, wires=WIRES)
    rates = Rates(peak={"fp32": 1e12}, bandwidth=1e12, kernels=Kernels(stream=1.0))
    return DeviceSetting(rates=rates, fabric=fabric, preset=PLAIN, precision="fp32", host=20e9, processor=100e9)


def layouts(*texts: str, batch: int = 64) -> Layouts:
    return Layouts.of([Plan.parse(text) for text in texts], batch, 1)


def told(text: str, on: str | Cluster = MIXED, work: Work = WORK) -> Forecast:
    return forecast(work, Plan.parse(f"{text} precision=fp16"), cluster(on) if isinstance(on, str) else on)


def of_plan(found: Forecast) -> list[str]:
    """Notes but for those on what of the cluster is not priced."""
    return [note for note in found.notes if not note.startswith("Of the hosts, ")]


class TestAveraging:
    @pytest.mark.parametrize(
        ("text", "seconds"),
        [
            ("dp=4", 0.0),
            # a ring of 4 sends 2 x 3/4 of 4 GB at 100 GB/s
            ("dp=4 sync=local", 0.06),
            ("dp=4 sync=local every=10", 0.006),
            # and 28 bytes a parameter move at 1 TB/s to step a copy, 8 more for the momentum
            ("dp=4 sync=diloco every=10 outer=sgd", 0.0088),
            ("dp=4 sync=diloco every=10", 0.0096),
            # ranks of fsdp average a half each
            ("dp=4 fsdp=2 sync=local every=10", 0.003),
        ],
    )
    def test_is_spread_over_the_steps_between(self, text: str, seconds: float) -> None:
        assert averaged(GIANT, layouts(text), setting())[0] == pytest.approx(seconds)


class TestServers:
    @pytest.mark.parametrize(
        ("text", "computing", "seconds"),
        [
            # 4 workers push 4 GB each into a server's 20 GB/s, 76 bytes a parameter move at 0.1 TB/s, and back
            ("dp=4 server=1", 1.0, 0.8 + 0.76 + 0.8),
            ("dp=4 server=2", 1.0, 0.4 + 0.76 + 0.4),
            # no worker is faster than its own link: 4 GB at 20 GB/s
            ("dp=4 server=8", 1.0, 0.2 + 0.76 + 0.2),
            # without waiting each gradient is a step of 28 bytes: 4 of them take 1.12 s, and a turn 2.72 s
            ("dp=4 server=1 staleness=1", 1.0, (1.0 + 2.72) / 2 - 1.0),
            ("dp=4 server=1 staleness=3", 1.0, 1.12 - 1.0),
            ("dp=4 server=1 staleness=1", 3.0, 0.0),
            # over the network each of 8 workers of a node has an eighth of 10 GB/s
            ("dp=32 server=1", 1.0, 12.8 + 4.12 + 12.8),
            ("dp=32 server=4", 1.0, 3.2 + 1.03 + 3.2),
            ("dp=32 server=8", 1.0, 3.2 + 1.03 + 3.2),
        ],
    )
    def test_take_what_links_and_hosts_allow(self, text: str, computing: float, seconds: float) -> None:
        found = server_time(GIANT, np.array([computing]), layouts(text), setting())
        assert found[0] == pytest.approx(seconds, abs=1e-12)


class TestShares:
    def test_even_ones_go_at_the_pace_of_the_slowest(self) -> None:
        even, slow = told("dp=16"), told("dp=16", "2x8xV100-32GB")
        assert even.seconds["products"] == slow.seconds["products"]
        assert even.room == slow.room
        assert "as slow as the slowest" in of_plan(even)[-1]

    def test_the_step_is_the_longest_of_share_times_time(self) -> None:
        alike = {kind: f"2x8x{kind}" for kind in ("A100", "V100-32GB")}
        for fast, slow in ((6, 2), (7, 1), (3, 5)):
            found = told(f"dp=16 shares={','.join([str(fast)] * 8 + [str(slow)] * 8)}")
            quick = told("dp=16", alike["A100"], replace(WORK, batch=16 * fast))
            late = told("dp=16", alike["V100-32GB"], replace(WORK, batch=16 * slow))
            busy = max(quick, late, key=lambda one: one.step - one.seconds["replicas"])
            for part in ("products", "attention", "memory"):
                assert found.seconds[part] == busy.seconds[part]
            assert f"{fast} on A100-80GB, {slow} on V100-32GB" in of_plan(found)[-1]

    @pytest.mark.parametrize("rest", [" micro=1", *longer("", " micro=4 recompute=full")])
    def test_auto_is_as_good_as_any_weights(self, rest: str) -> None:
        steps = [told(f"dp=2 shares={fast},{64 - fast}{rest}", "A100+V100-32GB").step for fast in range(1, 64)]
        found = told(f"dp=2 shares=auto{rest}", "A100+V100-32GB")
        assert found.step <= 1.01 * min(steps)
        assert found.step < 0.9 * told(f"dp=2{rest}", "A100+V100-32GB").step


class TestPlanner:
    @pytest.fixture
    def question(self) -> Question:
        return Question(work=WORK, cluster=cluster(MIXED), precision="fp16")

    def test_names_the_plans_that_can_use_unlike_devices(self, question: Question) -> None:
        (problem,) = problems(Plan.parse("fsdp=16 precision=fp16"), WORK, question.cluster)
        assert problem.fix == 'plan="dp=2 fsdp=8 shares=auto"'
        assert "dp=16 shares=auto" in problem.allowed
        named = Plan.parse(problem.fix.partition('"')[2].rstrip('"'))
        assert problems(replace(named, precision="fp16"), WORK, question.cluster) == []


ALL = ("fp16", "bf16", "int8", "topk:0.01", "powersgd:4")


@pytest.mark.parametrize(
    ("compress", "wire", "made"),
    [
        # a ring of 4 sends 2 x 3/4 of 4 GB at 100 GB/s
        ("none", 0.06, 0.0),
        # halves as much; 48 bytes an element move at 1 TB/s
        ("bf16", 0.03, 0.048),
        ("fp16", 0.03, 0.076),
        # a byte, and 4 for 256
        ("int8", 0.06 / 4 * 260 / 256, 0.135),
        # 3 others get 8 bytes of each hundredth element
        ("topk:0.01", 0.0024, 0.082),
        # a ring of the thin elements
        ("powersgd:4", 0.00006, 0.062),
    ],
)
def test_what_is_sent_and_what_making_it_takes(compress: str, wire: float, made: float) -> None:
    rows = layouts(f"dp=4 compress={compress}")
    found = averaging(GIANT, GIANT / 1000, rows, np.ones(1), setting())
    assert [float(one[0]) for one in found] == pytest.approx([wire, made])


def test_servers_get_less_and_give_as_much() -> None:
    found = server_time(GIANT, np.array([1.0]), layouts("dp=4 server=1 compress=int8"), setting())
    # 4 workers push 260/256 GB each into 20 GB/s, pull 4 GB; encoding moves 97 bytes, and reading 17 for each of 4
    assert found[0] == pytest.approx(0.2 * 260 / 256 + 0.8 + 0.76 + 0.097 + 0.68)


@pytest.mark.parametrize("compress", ALL)
def test_no_codec_is_ignored(compress: str) -> None:
    slow = "4x1xA100@1Gb/s"
    rest = ("", " sync=local every=4", " server=1") if not compress.startswith("powersgd") else ("",)
    for way in rest:
        whole, less = told(f"dp=4{way}", slow), told(f"dp=4{way} compress={compress}", slow)
        assert less.seconds["replicas"] < 0.8 * whole.seconds["replicas"]
        assert less.seconds["products"] == whole.seconds["products"]
        assert not less.plan.exact


def test_what_is_left_out_takes_memory() -> None:
    whole, *others = (
        memory(WORK.profile, layouts(f"dp=4 compress={text}"), PLAIN, "fp32", 8.0).gradients[0]
        for text in ("none", *ALL)
    )
    assert [one - whole for one in others] == [0, 0, *[4 * WORK.profile.parameters] * 3]


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
    def test_all_that_hold_the_same_sum_them_once(self) -> None:
        for text in ("dp=2", "cp=2", "dp=2 cp=2", "cp=2 tp=2", "ep=2", "fsdp=2 cp=2 zero=1"):
            assert round(seconds(text, "all-reduce", "replicas")) == 1, text
        for text in ("single", "tp=2", "pp=2 micro=4", "fsdp=2 zero=1", "fsdp=2"):
            assert seconds(text, "all-reduce", "replicas") == pytest.approx(0.0, abs=1e-3), text


class TestSharded:
    @pytest.mark.parametrize(("kind", "times"), [("all-gather", 2), ("reduce-scatter", 1)])
    def test_a_model_without_repeated_blocks_is_one(self, kind: str, times: int) -> None:
        work = work_of(Rows())
        assert not work.profile.repeated
        assert round(seconds("fsdp=2", kind, "replicas", work)) == times
        assert round(seconds("fsdp=2 micro=2", kind, "replicas", work)) == 4 * times


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
