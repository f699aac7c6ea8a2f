"""Step times: hardware bounds, pipelines against the orders that run, published runs; none further off than it was."""

from __future__ import annotations

import json
import math
import random
import tomllib
from dataclasses import fields, replace
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
from small_profiles import LARGE, transformer

from claims_page import pages
from golden import NUMBERS, ROWS, numbers
from phalanx.config import Cluster, Plan
from phalanx.errors import RefusedError
from phalanx.forecast import Forecast, Work, forecast
from phalanx.forecast.kernels import DeviceSetting, price
from phalanx.forecast.layouts import SCHEDULES, Layouts
from phalanx.forecast.network import Fabric, collective
from phalanx.forecast.operation_arrays import Array, table
from phalanx.forecast.pipeline import Lanes, PipelineTimes, duration, pipeline, simulated
from phalanx.forecast.presets import PHALANX
from phalanx.forecast.rates import Wires, rates
from phalanx.forecast.step_time import StepTime
from phalanx.forecast.uncertainty import FILE, interval, quantile, technique
from phalanx.hardware import cluster, entry
from phalanx.trace import ModelPart, Operation, Profile, SizeLaw
from published import Outcome, forecast_rows, read
from published.spread import quantiles

SMALL, BIG = transformer(length=128), transformer(**LARGE)
FABRIC = Fabric(inside=300e9, node=200e9, per_node=8, wires=Wires())
GIB = np.array([2.0**30])


def told(plan: str, on: str = "8xA100-80GB", profile: Profile = BIG, batch: int = 64) -> Forecast:
    return forecast(Work(profile=profile, batch=batch), Plan.parse(f"{plan} precision=bf16"), cluster(on))


def product(m: float, n: float, k: float, device: str = "A100-80GB") -> tuple[float, float]:
    """Seconds of a matrix product in bf16, and its FLOP."""
    dims = (SizeLaw(1.0), SizeLaw(m), SizeLaw(n), SizeLaw(k))
    part = ModelPart(name="one", role="block", forward=(Operation(kind="matmul", name="mm", dims=dims),))
    setting = DeviceSetting(rates=rates(entry(device).device), fabric=FABRIC, preset=PHALANX, precision="bf16")
    priced = price(table(Profile(parts=(part,))), Layouts.of([Plan()], 1, 1), setting)
    return float(priced[0, 0]), 2.0 * m * n * k


def sent(kind: str, size: Array = GIB, ranks: float = 8, stride: float = 1, fabric: Fabric = FABRIC) -> float:
    return float(collective(kind, size, np.array([ranks]), np.array([stride]), fabric)[0])


@pytest.mark.parametrize("device", ["A100-80GB", "H100"])
def test_no_product_is_faster_than_the_peak(device: str) -> None:
    peak = entry(device).device.peak["bf16"]
    for size in (16, 100, 512, 4096, 16384):
        seconds, flops = product(size, size, size, device)
        assert seconds > flops / peak
    large, flops = product(16384, 16384, 16384, device)
    assert flops / large > 0.5 * peak


def test_collectives_keep_to_the_bandwidth_of_the_links() -> None:
    ring = 2.0**30 * 7 / 8
    for kind in ("all-gather", "reduce-scatter", "all-to-all"):
        assert sent(kind) > ring / FABRIC.inside
    assert sent("send", ranks=2) > 2.0**30 / FABRIC.inside
    assert sent("all-gather", ranks=32) > 2.0**30 * 31 / 32 / FABRIC.node


def test_an_all_reduce_is_a_reduce_scatter_and_an_all_gather() -> None:
    for ranks in (2, 8, 32):
        both = sent("reduce-scatter", ranks=ranks) + sent("all-gather", ranks=ranks)
        assert sent("all-reduce", ranks=ranks) == pytest.approx(both, rel=0.01)


def test_between_nodes_it_takes_longer_and_fewer_ranks_of_a_node_have_less_of_its_network() -> None:
    assert sent("all-reduce", ranks=16) > sent("all-reduce", ranks=8)
    assert sent("all-reduce", ranks=8, stride=8) > sent("all-reduce", ranks=8, stride=1)
    assert sent("send", ranks=2, stride=8) > sent("send", ranks=2, stride=1)
    wide = replace(FABRIC, node=2 * FABRIC.node)
    assert sent("all-reduce", ranks=32, fabric=wide) < sent("all-reduce", ranks=32)


def test_full_recompute_adds_a_forward() -> None:
    """A backward is two forwards, so that matrix products take a third more."""
    plain, full = (told(f"fsdp=8 zero=3 recompute={kind}", profile=SMALL) for kind in ("none", "full"))
    assert plain.seconds["recompute"] == 0
    computed = ("products", "attention", "memory")
    assert [full.seconds[name] for name in computed] == pytest.approx([plain.seconds[name] for name in computed])
    blocks = replace(SMALL, parts=(SMALL.parts[1],))  # embedding and head are never computed again
    plain, full = (told(f"fsdp=8 zero=3 recompute={kind}", profile=blocks) for kind in ("none", "full"))
    share = full.seconds["recompute"] / sum(plain.seconds[name] for name in computed)
    assert 0.2 < share < 0.5
    selective = told("fsdp=8 zero=3 recompute=selective", profile=SMALL).seconds["recompute"]
    assert 0 < selective < full.seconds["recompute"]


def test_sequence_parallelism_sends_as_many_bytes_and_moves_fewer() -> None:
    """Korthikanti et al. 2022, section 4.2.2: an all-reduce is a reduce-scatter and an all-gather."""
    plain, cut = (told(f"tp=8 micro=1 sequence={flag}") for flag in ("false", "true"))
    assert cut.seconds["exchange"] == pytest.approx(plain.seconds["exchange"], rel=0.05)
    assert cut.seconds["memory"] < plain.seconds["memory"]
    assert cut.seconds["products"] == plain.seconds["products"]


def test_a_mixed_cluster_has_the_peak_and_the_watts_of_all_its_devices() -> None:
    kinds = [cluster(text).groups[0] for text in ("1x4xA100-80GB", "1x4xH100")]
    both = Cluster(groups=tuple(kinds), network=cluster("2x4xH100").network)
    found = forecast(Work(profile=SMALL, batch=64), Plan.parse("dp=8 precision=bf16"), both)
    assert found.peak == pytest.approx(sum(group.devices * group.device.peak["bf16"] for group in kinds))
    assert found.watts == pytest.approx(sum(group.devices * (group.device.power or 0) for group in kinds))
    assert min(told("dp=8", f"8x{name}", SMALL).step for name in ("A100-80GB", "H100")) <= found.step


def test_the_interval_holds_the_forecast_and_is_wider_where_nothing_was_measured() -> None:
    for on in ("8xA100-80GB", "8xH100", "8xL4"):
        found = told("dp=8 micro=1", on, SMALL)
        assert found.low < found.step < found.high
        assert found.low * found.high == pytest.approx(found.step**2)
    parts = dict.fromkeys((one.name for one in fields(StepTime)), 1.0)
    names = ("A100-80GB", "L4")
    known, unknown = (interval(parts, entry(name).device, PHALANX, Plan(dp=8)) for name in names)
    assert unknown.low < known.low < known.high < unknown.high
    assert "no run of Phalanx on such devices has been measured yet" in known.basis


def test_four_of_five_errors_lie_within_their_quantile() -> None:
    errors = [("pipeline", 0.01 * at) for at in range(1, 21)] + [("split", -1.0)] * 9
    found = quantiles(errors)
    assert found == {"all": 1.0, "pipeline": pytest.approx(0.17)}  # 17 is 0.8 x 21, rounded up; 9 are too few
    assert quantile(found, "split") == 1.0
    assert quantiles([("one", 0.5)])["all"] == 0.5


@pytest.mark.parametrize(
    ("plan", "name"),
    [
        ("single", "single"),
        ("threads=2", "replicas"),
        ("dp=2 fsdp=2", "sharded"),
        ("fsdp=2 tp=2", "split"),
        ("pp=2 tp=2", "pipeline"),
        ("dp=2 compress=int8", "loose"),
        ("dp=2 sync=local", "loose"),
        ("dp=2 server=1", "loose"),
    ],
)
def test_errors_are_counted_by_technique(plan: str, name: str) -> None:
    assert technique(Plan.parse(plan)) == name


def test_a_precision_that_devices_lack_is_refused() -> None:
    with pytest.raises(RefusedError, match="precision=bf16 on V100-16GB"):
        told("dp=8", on="8xV100")


CHUNKS = {"gpipe": 1, "1f1b": 1, "interleaved": 2, "zero-bubble": 2, "zbv": 2, "dualpipev": 2}


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_what_is_extrapolated_is_what_would_be_run(schedule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = import_module("phalanx.forecast.pipeline")
    draw = random.Random(7)
    chunks = CHUNKS[schedule]

    def times() -> tuple[float, ...]:
        return tuple(chunks * draw.uniform(0.9, 1.1) for _ in range(3))

    forward, inputs, weights = times(), times(), times()
    long = PipelineTimes(
        schedule=schedule, ranks=3, chunks=chunks, micros=60, forward=forward, inputs=inputs, weights=weights
    )
    short = duration(long)
    duration.cache_clear()
    monkeypatch.setattr(module, "_FEW", 1000)
    assert short == pytest.approx(duration(long), rel=0.01)
    duration.cache_clear()


@pytest.mark.parametrize(
    ("schedule", "most"),
    [
        ("gpipe", 0.001),
        ("1f1b", 0.02),
        ("interleaved", 0.02),
        ("zero-bubble", 0.025),
        ("zbv", 0.025),
        ("dualpipev", 0.025),
    ],
)
def test_the_closed_form_is_as_the_events(schedule: str, most: float) -> None:
    differences = _differences(schedule)
    assert np.mean(np.abs(differences)) <= most
    if most <= 0.02:
        assert min(differences) >= -0.001  # it never says too little
    assert max(np.abs(differences)) <= 0.07


def _differences(schedule: str) -> list[float]:
    """Closed form over events, less 1, for random times of stages that differ by up to a fifth."""
    draw, found = random.Random(3), list[float]()
    for _ in range(30):
        ranks = draw.choice([2, 4, 8])
        stages = f" stages={CHUNKS[schedule]}" if CHUNKS[schedule] > 1 and schedule != "zero-bubble" else ""
        plan = Plan.parse(f"pp={ranks} schedule={schedule}{stages} micro=1")
        layouts = Layouts.of([plan], ranks * draw.choice([2, 4, 8]), 128)
        forward = np.array([[draw.uniform(0.9, 1.1)] for _ in range(3)])
        there = np.array([[1.0], [ranks - 2.0], [1.0]])
        lanes = Lanes(forward=forward + 0.02, backward=2 * forward + 0.02, weights=forward, there=there)
        found.append(float(pipeline(lanes, layouts)[0] / simulated(lanes, layouts)[0] - 1))
    return found


def test_page_and_chart_are_current() -> None:
    behind = [path.name for path, text in pages().items() if path.read_text(encoding="utf-8") != text]
    assert behind == [], "behind the code, or forecasts have changed\n    try: python tools/claims_page.py"


ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def golden() -> Outcome:
    return forecast_rows(read(ROWS))


class TestGolden:
    def test_forecasts_are_no_further_off_than_they_were(self, golden: Outcome) -> None:
        found = numbers(golden)
        before: dict[str, float] = json.loads(NUMBERS.read_text(encoding="utf-8"))
        assert found.keys() == before.keys(), "sources changed: python tools/golden.py"
        worse = {name: f"{before[name]:.2%} -> {value:.2%}" for name, value in found.items()}
        worse = {name: said for name, said in worse.items() if found[name] > before[name] + 0.005}
        assert not worse, f"further off than before: {worse}; if that is meant: python tools/golden.py"

    def test_every_row_is_forecast(self, golden: Outcome) -> None:
        assert golden.refused == {}
        assert len(golden.found) > 80
        assert sum(one.row.ran_out for one in golden.found) >= 6

    def test_the_reference_and_the_intervals_that_forecasts_print_are_of_one_run(self) -> None:
        text = (ROOT / "docs/project/accuracy.md").read_text(encoding="utf-8")
        spread = tomllib.loads(FILE.read_text(encoding="utf-8"))
        for name in ("published", "unknown"):
            size = spread[name]["four_of_five"]["all"]
            assert f"{100 * (math.exp(-size) - 1):.0f} to {100 * (math.exp(size) - 1):+.0f} %" in " ".join(text.split())
            assert f"| all, by row | {spread[name]['runs']:,} |" in text
