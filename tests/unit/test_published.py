"""Forecasts beside published runs: rows, what they are to Phalanx, measures by hand, and accuracy that must stay."""

from __future__ import annotations

import csv
import json
import math
import re
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from small_profiles import transformer

from golden import NUMBERS, ROWS, numbers
from phalanx.errors import SpecError
from phalanx.forecast.uncertainty import FILE
from published import Comparison, Outcome, Row, accuracy, forecast_rows, read
from published.accuracy import Errors, choice, source
from published.left_out import LeftOut, Without, framework
from published.page import Measure, measures, page
from published.subject import subject
from validate import command, main

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


def forecast_of(*rows: Row) -> Outcome:
    return forecast_rows(rows, lambda _: transformer())


def measured(id: str, share: float, **cells: str) -> Comparison:
    """A run whose measured time is ``share`` of the forecast."""
    (one,) = forecast_of(row(id=id, **cells)).found
    return replace(one, row=row(**{**cells, "id": id, "step_s": str(one.forecast.step * share)}))


@pytest.fixture(scope="module")
def golden() -> Outcome:
    return forecast_rows(read(ROWS))


def timed_in(golden: Outcome) -> list[Comparison]:
    return [one for one in golden.found if one.row.step and not one.row.ran_out]


def seen_by_none(golden: Outcome) -> LeftOut:
    """The tables of what was left out, here with forecasts that were not made so: what they say is not looked at."""
    timed = timed_in(golden)
    names = dict.fromkeys(framework(one.row) for one in timed)
    groups = [Without(source=name, found=tuple(one for one in timed if framework(one.row) == name)) for name in names]
    return LeftOut(sources=tuple(groups), devices=tuple(groups), constants={})


def masked(line: str) -> str:
    """A line without its numbers."""
    return re.sub(r"[-+]?\d[\d,.]*", "#", line)


class TestRows:
    def test_cells_are_read_as_what_they_are(self) -> None:
        (one,) = read(written(row(peak_gib="2", oom="1", tp="-1")))
        assert (one.step, one.peak, one.ran_out, one.whole("tp"), one.whole("cp")) == (0.5, 2 * 2**30, True, 1, 1)
        with pytest.raises(SpecError, match=r"one.step_s: given 'fast'"):
            _ = row(step_s="fast").step

    def test_half_of_all_ids_is_calibrated_on(self) -> None:
        halves = [row(id=f"row-{index}").calibrated for index in range(400)]
        assert 160 < sum(halves) < 240
        assert halves == [row(id=f"row-{index}").calibrated for index in range(400)]

    @pytest.mark.parametrize(("text", "said"), [("id,kind\na,b\n", "without device"), ("id,kind\n", "without rows")])
    def test_a_table_without_what_all_rows_need_is_refused(self, text: str, said: str) -> None:
        Path("rows.csv").write_text(text, encoding="utf-8")
        with pytest.raises(SpecError, match=said):
            read(Path("rows.csv"))
        with pytest.raises(SpecError, match="No such file"):
            read(Path("none.csv"))

    def test_a_row_that_cannot_be_forecast_is_told_by_its_id(self) -> None:
        outcome = forecast_of(row(), row(id="two", device="Abacus"))
        assert [one.row.id for one in outcome.found] == ["one"]
        assert "Abacus" in outcome.refused["two"]


class TestSubject:
    def test_a_dense_model_under_data_parallelism(self) -> None:
        found = subject(row())
        assert (found.shape.family, found.shape.layers, found.shape.ffn, found.shape.length) == ("gpt", 8, 1024, 512)
        assert (str(found.plan), found.batch) == ("dp=8 micro=2 precision=fp16", 64)
        assert (found.cluster.devices, found.preset.name) == (8, "megatron-2021")

    def test_optimizer_state_sharded_over_replicas_is_fsdp(self) -> None:
        plan = subject(row(zero="1")).plan
        assert (plan.dp, plan.fsdp, plan.zero) == (1, 8, 1)

    def test_a_pipeline_with_chunks_is_interleaved(self) -> None:
        plan = subject(row(dp="2", pp="4", vpp="2")).plan
        assert (plan.pp, plan.schedule, plan.stages) == (4, "interleaved", 2)
        assert subject(row(dp="2", pp="4")).plan.schedule == "1f1b"

    @pytest.mark.parametrize(
        ("cells", "family", "preset"),
        [
            ({"gated": "1", "framework": "torchtitan"}, "llama", "torchtitan"),
            ({"model": "MPT-7b", "framework": "llm-foundry", "device": "H100-SXM"}, "mpt", "llm-foundry-hopper"),
            ({"device": "H100-SXM"}, "gpt", "megatron-core"),
            ({"kind": "resnet50", "framework": "PyTorch (NVIDIA examples)"}, "resnet50", "nvidia-examples"),
        ],
    )
    def test_families_and_habits(self, cells: dict[str, str], family: str, preset: str) -> None:
        found = subject(row(**cells))
        assert (found.shape.family, found.preset.name) == (family, preset)


class TestAccuracy:
    def test_errors_by_hand(self) -> None:
        found = Errors.of([0.1, -0.3, 0.2, 0.0])
        assert (found.rows, found.mean, found.median, found.most) == (4, 0.15, pytest.approx(0.15), 0.3)
        assert found.bias == pytest.approx(0.0)
        assert math.isnan(Errors.of([]).mean)

    def test_by_source(self) -> None:
        found = accuracy([measured("a", 0.5), measured("b", 2.0), measured("c", 1.0, framework="torchtitan")])
        assert found.sources["SC21 Table 1"].mean == pytest.approx((1.0 + 0.5) / 2)
        assert found.sources["SC21 Table 1"].bias == pytest.approx((1.0 - 0.5) / 2)
        assert found.sources["torchtitan"].mean == pytest.approx(0.0)
        assert (found.rest.rows, found.ran) == (1, 1.0)
        assert found.inside == pytest.approx(1 / 3)

    def test_sources_have_names(self) -> None:
        assert source(row(source="arXiv 2205.05198, Table 5")) == "sequence-parallel paper, Table 5"
        assert source(row(framework="Megatron-DeepSpeed", devices="64")) == "Megatron-DeepSpeed, 64-512 GPUs"
        assert source(row(framework="Megatron-DeepSpeed")) == "Megatron-DeepSpeed, <= 8 GPUs"
        assert source(row(source="somewhere")) == "Megatron-LM on H100"

    def test_regret_is_what_the_wrong_choice_costs(self) -> None:
        one, two = measured("a", 1.0), measured("b", 1.0, dp="1", tp="8")
        assert one.forecast.step != two.forecast.step
        quick, slow = sorted((one, two), key=lambda each: each.forecast.step)
        right = [replace(quick, row=row(step_s="1")), replace(slow, row=row(id="b", step_s="1.5"))]
        assert (choice(right).regret, choice(right).best) == (0.0, 1.0)
        wrong = [replace(quick, row=row(step_s="1.5")), replace(slow, row=row(id="b", step_s="1"))]
        found = choice(wrong)
        assert (found.groups, found.regret, found.best, found.random) == (1, 0.5, 0.0, 0.25)

    def test_running_out_of_memory_is_no_step_time(self) -> None:
        found = accuracy([measured("a", 1.0, oom="1"), measured("b", 1.0, framework="AA-Megatron", oom="1")])
        assert not found.sources
        assert found.feasible == 0.0
        assert math.isnan(found.ran)

    def test_measures_say_whether_they_are_reached(self) -> None:
        bounds = Measure(name="share", peer="", least=0.75, most=0.85, value=0.8)
        assert (bounds.reached, bounds.asked, bounds.shown) == (True, "75–85 %", "80.0 %")
        assert not replace(bounds, value=math.nan).reached
        assert any("SC21 Table 1" in one.name for one in measures(accuracy([measured("a", 1.0)])))


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

    def test_the_command_prints_the_same(self, golden: Outcome) -> None:
        result = CliRunner().invoke(command, [str(ROWS), "--json"])
        assert result.exit_code == 0, result.output
        found: dict[str, Any] = json.loads(result.stdout)
        assert [one["id"] for one in found["rows"]] == [one.row.id for one in golden.found]
        assert found["rows"][0]["step_s"] == golden.found[0].forecast.step
        halves = found["accuracy"]["held_out"]["sources"], found["accuracy"]["fitted"]["sources"]
        rows = sum(each["rows"] for half in halves for each in half.values())
        assert rows == sum(1 for one in golden.found if one.row.step and not one.row.ran_out)

    def test_the_page_has_every_source_and_the_largest_errors(self, golden: Outcome) -> None:
        text = page(golden.found, seen_by_none(golden), timed_in(golden))
        held = accuracy([one for one in golden.found if not one.row.calibrated])
        assert all(f"| {name} |" in text for name in held.sources)
        timed = [one for one in golden.found if one.row.step and not one.row.ran_out]
        assert max(timed, key=lambda one: abs(one.error)).row.id in text

    def test_every_line_of_the_reference_is_one_that_its_script_writes(self, golden: Outcome) -> None:
        written = {masked(line) for line in page(golden.found, seen_by_none(golden), timed_in(golden)).splitlines()}
        there = (ROOT / "docs/project/accuracy.md").read_text(encoding="utf-8").splitlines()
        prose = [line for line in there if not line.startswith("|")]
        assert [line for line in prose if masked(line) not in written] == []
        headings = [line for line in there if line.startswith("|") and "---" not in line and masked(line) == line]
        assert [line for line in headings if "|" in line and line not in written] == []

    def test_the_reference_and_the_intervals_that_forecasts_print_are_of_one_run(self) -> None:
        text = (ROOT / "docs/project/accuracy.md").read_text(encoding="utf-8")
        spread = tomllib.loads(FILE.read_text(encoding="utf-8"))
        for name in ("published", "unknown"):
            size = spread[name]["four_of_five"]["all"]
            assert f"{100 * (math.exp(-size) - 1):.0f} to {100 * (math.exp(size) - 1):+.0f} %" in " ".join(text.split())
            assert f"| all, by row | {spread[name]['runs']:,} |" in text

    def test_the_command_tells_of_rows_without_a_forecast(self) -> None:
        result = CliRunner().invoke(command, [str(written(row(id="bad", device="Abacus")))])
        assert result.exit_code == 0
        assert "not forecast: bad" in result.output

    def test_a_table_that_is_not_there_is_wrong_use(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setattr("sys.argv", ["validate.py", "none.csv", "--json"])
        assert main() == 2
        printed = capsys.readouterr()
        assert "none.csv: No such file" in printed.err
        assert json.loads(printed.out)["error"]["exit_code"] == 2
