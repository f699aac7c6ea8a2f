"""Forecasts beside published runs: rows, measures by hand, accuracy that must stay, and sources left out of the fit."""

from __future__ import annotations

import csv
import json
import math
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
from small_profiles import transformer

from golden import NUMBERS, ROWS, numbers
from phalanx.errors import SpecError
from phalanx.forecast.uncertainty import FILE
from published import Outcome, Row, forecast_rows, left_out, read
from published.accuracy import Comparison, Errors
from published.left_out import CONSTANTS, Without
from published.subject import subject

ROOT = Path(__file__).resolve().parents[2]
CELLS = {
    "id": "one",
    "kind": "transformer",
    "framework": "Megatron-LM",
    "source": "Table 1",
    "layers": "8",
    "hidden": "256",
    "heads": "8",
    "vocab": "1000",
    "seq": "512",
    "device": "A100-80GB-SXM",
    "devices": "8",
    "per_node": "8",
    "batch": "64",
    "dp": "8",
    "micro": "2",
    "precision": "fp16",
    "step_s": "0.5",
}


def row(**cells: str) -> Row:
    every = {**CELLS, **cells}
    return Row(id=every["id"], cells=every)


def written(*rows: Row) -> Path:
    path = Path("rows.csv")
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, fieldnames=sorted({name for one in rows for name in one.cells}))
        writer.writeheader()
        writer.writerows(one.cells for one in rows)
    return path


@pytest.fixture(scope="module")
def golden() -> Outcome:
    return forecast_rows(read(ROWS))


class TestRows:
    def test_cells_are_read_as_what_they_are(self) -> None:
        (one,) = read(written(row(peak_gib="2", oom="1", tp="-1")))
        assert (one.step, one.peak, one.ran_out, one.whole("tp"), one.whole("cp")) == (0.5, 2 * 2**30, True, 1, 1)
        with pytest.raises(SpecError, match=r"one.step_s: given 'fast'"):
            _ = row(step_s="fast").step


class TestSubject:
    def test_a_dense_model_under_data_parallelism(self) -> None:
        found = subject(row())
        assert (found.shape.family, found.shape.layers, found.shape.ffn, found.shape.length) == ("gpt", 8, 1024, 512)
        assert (str(found.plan), found.batch) == ("dp=8 micro=2 precision=fp16", 64)
        assert (found.cluster.devices, found.preset.name) == (8, "megatron-2021")

    def test_a_pipeline_with_chunks_is_interleaved(self) -> None:
        plan = subject(row(dp="2", pp="4", vpp="2")).plan
        assert (plan.pp, plan.schedule, plan.stages) == (4, "interleaved", 2)
        assert subject(row(dp="2", pp="4")).plan.schedule == "1f1b"


class TestAccuracy:
    def test_errors_by_hand(self) -> None:
        found = Errors.of([0.1, -0.3, 0.2, 0.0])
        assert (found.rows, found.mean, found.median, found.most) == (4, 0.15, pytest.approx(0.15), 0.3)
        assert found.bias == pytest.approx(0.0)
        assert math.isnan(Errors.of([]).mean)


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


FREE = ("product", "stream", "eager", "fused")
PROFILE = transformer(layers=8, width=2048, heads=16)


def row_of(framework: str, micro: int, seconds: float = 1.0) -> Row:
    sizes = {"hidden": "2048", "heads": "16", "micro": str(micro), "precision": "bf16", "step_s": str(seconds)}
    return row(id=f"{framework}-{micro}", framework=framework, source="", **sizes)


@pytest.fixture(autouse=True)
def few_constants(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only those that the rows here can tell are fitted, and the few rows outweigh what they start from."""
    free = [one.name in FREE and one.family != "hopper" for one in CONSTANTS]
    kept = [replace(one, spread=3 * one.spread if wide else 0.0) for one, wide in zip(CONSTANTS, free, strict=True)]
    monkeypatch.setattr(left_out, "CONSTANTS", tuple(kept))


def off(source: str, *sizes: float) -> Without:
    """A source whose forecasts are off by these logarithms."""
    (one,) = forecast_rows([row_of("Megatron-LM", 1)], lambda _: PROFILE).found
    found = [replace(one, row=row_of("Megatron-LM", 1, one.forecast.step * math.exp(size))) for size in sizes]
    return Without(source=source, found=tuple[Comparison, ...](found))
