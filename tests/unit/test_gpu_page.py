"""The page of GPU records: its tables, plots and the README's paragraph, and files that cannot be used."""

from __future__ import annotations

import copy
import json
import math
import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gpu_record.page import main, page, paragraph
from gpu_record.page_records import STEPS, read_records
from gpu_record.recorder import TRAINING
from gpu_record.run import STEPS as PLANNED

pytestmark = pytest.mark.quick

ROOT = Path(__file__).resolve().parents[2]
SVG = "{http://www.w3.org/2000/svg}"
SMALL = "small versions on a CPU: they show that the programme works, not how fast Phalanx is"


def training(model: str, method: str, measured: float, forecast: float, **more: Any) -> dict[str, Any]:
    plain = method == "plain PyTorch"
    content = {"step_seconds": forecast, "low_seconds": 0.8 * forecast, "high_seconds": 1.2 * forecast}
    row = {
        "model": model,
        "method": method,
        "plan": "" if plain else "compile=true precision=bf16",
        "rounds": [measured, 1.01 * measured, 0.99 * measured],
        "step_seconds": measured,
        "rate": 8192 / measured,
        "rate_unit": "tokens/s",
        "mfu": 0.47,
        "peak_bytes": 40 * 2**30,
        "forecast": None if plain else {**content, "peak_bytes": 42 * 2**30, "blame": "matrix products"},
        "time_error": None if plain else forecast / measured - 1,
        "memory_error": None if plain else 0.05,
        "ratio": None if plain else 0.981,
    }
    return {**row, **more}


def step(name: str, rows: list[dict[str, Any]] | None = None, **more: Any) -> dict[str, Any]:
    content = {"name": name, "status": "done", "limit": 60, "seconds": 12.5, "reason": "", "traceback": "", "facts": {}}
    return {**content, "rows": rows or [], **more}


def proof(model: str, plan: str, result: str = "equal", **more: Any) -> dict[str, Any]:
    content = {"model": model, "plan": plan, "result": result, "difference": 3.1e-7, "where": "", "reason": ""}
    return {**content, "seconds": 4.0, **more}


def record(**more: Any) -> dict[str, Any]:
    """Build a full record of a CUDA device that does not exist."""
    environment = {"gpu": "NVIDIA T1000", "gpus": 1, "memory_bytes": 80 * 2**30, "driver": "575.1", "torch": "2.13.0"}
    wait = {"steps": 50, "host_waits_per_step": 1, "ratio": 1.21}
    refused = proof("ResNet", "tp=2", "refused", difference=None, reason="no attention | nothing\nto cut")
    unequal = proof("LoRA", "micro=2", "not equal", difference=0.02, where="layer.0.weight")
    sizes = {"bytes": 4 * 10**9, "standstill_seconds": 0.033, "seconds": 2.5, "host_bytes": 5 * 2**30}
    errors = {"measured_seconds": 0.1, "forecast_catalog": 0.13, "forecast_calibrated": 0.11}
    shares = {"step_seconds": 0.21, "compute_share": 0.913, "launch_gap_share": 0.05, "host_wait_share": 0.037}
    steps = [
        step("environment", facts={**environment, "matmul_tflops": 712.0, "peak_tflops": None}),
        step("overhead", [{"model": "MLP", "method": "phalanx", "step_seconds": 2e-4, **wait}]),
        step("proof", [proof("GPT", "tp=2"), refused, unequal]),
        step(
            "llama_1b",
            [
                training("Llama 1 B", "plain PyTorch", 0.2, 0.2),
                training("Llama 1 B", "phalanx eager", 0.3, 0.39, mfu=0.31, ratio=0.66),
                training("Llama 1 B", "phalanx compiled", 0.204, 0.224),
            ],
            facts={"parameters": 1.1e9, "sequence": 2048, "note": "random tokens"},
        ),
        step("gpt2_124m", [training("GPT-2", "phalanx compiled", 0.05, 0.045)]),
        step("resnet50", [training("ResNet-50", "phalanx compiled", 0.09, 0.1, rate=711.0, rate_unit="samples/s")]),
        step("bert_base", [training("BERT", "phalanx compiled", 0.06, 0.06)]),
        step("lora_8b", [training("LoRA 8 B", "phalanx eager", 1.4, 1.5, memory_error=-0.12, ratio=None)]),
        step("checkpoint", [{**sizes, "peak_bytes_before": 2**30, "peak_bytes_during": 2**31}]),
        step(
            "calibrate",
            [{"model": "GPT-2", "method": "phalanx eager", **errors, "error_catalog": 0.3, "error_calibrated": 0.1}],
            facts={"cluster": 'name = "here"\n', "seconds": 31.0},
        ),
        step("gpu_tests", facts={"passed": 41, "failed": 0, "skipped": 3, "errors": 0, "tail": "41 passed"}),
        step("trace", [{"kernel": "gemm<128, 64>", "seconds": 0.11, "share": 0.52}], facts=shares),
    ]
    content = {"schema": 1, "started": "2026-11-28T10:00:00Z", "seconds": 512.3, "minutes": 9, "device": "cuda"}
    content |= {"small": False, "phalanx": {"version": "0.1.0", "commit": "3f7d206f"}, "complete": True, "steps": steps}
    return {**content, **more}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Build a clone with the files that the page needs."""
    (tmp_path / "docs" / "project").mkdir(parents=True)
    (tmp_path / "tools" / "published" / "gpu").mkdir(parents=True)
    (tmp_path / "README.md").write_text("# Top\n\n<!-- generated: gpu -->\nold\n<!-- end -->\n\nrest\n")
    return tmp_path


def written(root: Path, *records: dict[str, Any]) -> tuple[str, str]:
    """Return the page and the README's paragraph made of ``records``."""
    for index, one in enumerate(records):
        (root / "tools" / "published" / "gpu" / f"run{index}.json").write_text(json.dumps(one))
    assert main([], root) == 0
    readme = (root / "README.md").read_text()
    assert readme.startswith("# Top\n")
    assert readme.endswith("<!-- end -->\n\nrest\n")
    content = readme.partition("<!-- generated: gpu -->\n")[2].partition("<!-- end -->")[0]
    return (root / "docs" / "project" / "gpu.md").read_text(), " ".join(content.split())


def rows_of(content: str, heading: str) -> list[list[str]]:
    """Return the cells of all tables below a heading, up to the next heading."""
    part = content.partition(f"{heading}\n")[2]
    part = re.split(r"^#+ ", part, maxsplit=1, flags=re.MULTILINE)[0]
    lines = [line for line in part.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]


class TestNoRecord:
    def test_page_names_the_commands_and_every_step(self, root: Path) -> None:
        content, readme = written(root)
        assert "No run on a GPU is on record yet." in content
        assert "`make gpu-pack`" in content
        assert "`make gpu-record`" in content
        assert [name for name, limit, *_ in PLANNED if f"| {STEPS[name].title} | {limit:g} s |" not in content] == []
        assert {name for name, *_ in PLANNED} == set(STEPS)
        assert "`make gpu-record`" in readme
        assert list(root.rglob("*.svg")) == []


class TestFullRecord:
    def test_glance_says_met_or_missed(self, root: Path) -> None:
        content, _ = written(root, record())
        rows = {(row[0], row[1]): row[2:] for row in rows_of(content, "## At a glance")}
        assert rows["Llama 1 B", "plain PyTorch"] == ["–", "47.0 %", "–", "–"]
        missed = [f"{number}, **missed**" for number in ("0.660", "31.0 %", "+30.0 %")]
        assert rows["Llama 1 B", "phalanx eager"] == [*missed, "+5.0 %, met"]
        assert rows["Llama 1 B", "phalanx compiled"] == ["0.981, met", "47.0 %, met", "+9.8 %, met", "+5.0 %, met"]
        assert rows["LoRA 8 B", "phalanx eager"] == ["–", "47.0 %, met", "+7.1 %, met", "-12.0 %, **missed**"]
        assert content.index("## At a glance") < content.index("## NVIDIA T1000, 2026-11-28")

    def test_tables_hold_the_numbers(self, root: Path) -> None:
        content, _ = written(root, record())
        compared = ["204 ms", "224 ms", "179 ms to 269 ms", "+9.8 %", "40.0 GiB", "42.0 GiB", "+5.0 %"]
        wanted = [
            ("## NVIDIA T1000, 2026-11-28", ["commit", "3f7d206f"]),
            ("## NVIDIA T1000, 2026-11-28", ["Step overhead", "done", "12.5", "60", "–"]),
            ("### Environment", ["matrix product", "712 TFLOP/s"]),
            ("### Step overhead", ["MLP", "phalanx", "200 µs", "50", "1", "1.210"]),
            ("### Proofs", ["`tp=2`", "equal, 3.1e-07", "refused", "–"]),
            ("### Proofs", ["`micro=2`", "–", "–", "**not equal**, 2.0e-02 in `layer.0.weight`"]),
            ("### Checkpoint", ["3.7 GiB", "33 ms", "2.5 s", "1.0 GiB", "2.0 GiB", "5.0 GiB"]),
            ("### Calibration", ["GPT-2, phalanx eager", "100 ms", "130 ms", "+30.0 %", "110 ms", "+10.0 %"]),
            ("### GPU tests", ["41", "0", "3", "0"]),
            ("### Trace of one step", ["210 ms", "91.3 %", "5.0 %", "3.7 %"]),
            ("### Trace of one step", ["gemm&lt;128, 64>", "110 ms", "52.0 %"]),
            ("### Llama, 1 B parameters", ["Llama 1 B, phalanx compiled", *compared, "matrix products"]),
        ]
        assert [row for row in wanted if row[1] not in rows_of(content, row[0])] == []

    def test_every_row_has_as_many_cells_as_its_heading(self, root: Path) -> None:
        content, _ = written(root, record())
        width = 0
        for line in content.splitlines():
            cells = len(re.findall(r"(?<!\\)\|", line)) if line.startswith("|") else 0
            assert not (cells and width) or cells == width, line
            width = cells
        assert "ResNet, `tp=2`, refused: no attention \\| nothing to cut" in content

    def test_readme_has_the_numbers(self, root: Path) -> None:
        _, readme = written(root, record())
        assert readme.startswith(
            "Newest full run on a GPU (NVIDIA T1000, 2026-11-28): 1 of 3 proofs equal, 1 not equal"
        )
        for number in ("0.981 times", "47.0 % MFU", "9.9 % off", "30.0 % at most", "5.0 % off", "12.0 % at most"):
            assert number in readme


class TestPartOfARecord:
    def test_nulls_are_dashes(self, root: Path) -> None:
        content = record()
        for one in content["steps"]:
            one["rows"] = [{key: _emptied(key, value) for key, value in row.items()} for row in one["rows"]]
            one["facts"] = dict.fromkeys(one["facts"])
            one["seconds"] = math.nan  # json writes NaN for it
        page_text, readme = written(root, content)
        for name in ("overhead", "checkpoint", "calibrate", "trace", *TRAINING):
            cells = rows_of(page_text, f"### {STEPS[name].title}")[2:]
            assert cells
            assert {cell for row in cells for cell in row if re.search(r"\b0\b|nan|None|inf", cell)} == set(), name
        assert not re.search(r"\bnan\b|\bNone\b", page_text)
        assert "The 1 B Llama was not measured. No forecast was compared" in readme
        assert list(root.rglob("*.svg")) == []


def _emptied(key: str, value: Any) -> Any:
    if key == "forecast":
        return value and dict.fromkeys(value)
    return [None, None] if key == "rounds" else None if isinstance(value, int | float) else value


class TestSmallRecords:
    @pytest.mark.parametrize("change", [{"device": "cpu"}, {"small": True}, {"device": "cpu", "small": True}])
    def test_they_never_reach_readme_or_glance(self, root: Path, change: dict[str, Any]) -> None:
        content, readme = written(root, record(**change))
        assert readme.startswith("No run on a GPU is on record yet.")
        assert "At a glance" not in content
        assert ("they show that the programme works, not how fast Phalanx is") in content
        assert (SMALL in content) == (change.get("device") == "cpu")
        assert "small versions" in (root / "docs" / "project" / "gpu-time.svg").read_text()

    def test_the_gpu_record_is_taken_where_a_newer_small_one_is_there(self, root: Path) -> None:
        newer = record(device="cpu", small=True, started="2026-12-24T10:00:00Z")
        newer["steps"][3]["rows"][2]["ratio"] = 1.5
        content, readme = written(root, record(), newer)
        assert "2026-11-28" in readme
        assert "1.5" not in readme
        assert "1.500" not in str(rows_of(content, "## At a glance"))
        assert "small" not in (root / "docs" / "project" / "gpu-time.svg").read_text()


class TestNewerRecordOfTwoSteps:
    """A record of ``--only environment lora_8b``, newer than the full one."""

    def partial(self, gpu: str) -> dict[str, Any]:
        content = record(started="2026-12-01T08:00:00Z")
        content["steps"] = [one for one in content["steps"] if one["name"] in ("environment", "lora_8b")]
        content["steps"][0]["facts"]["gpu"] = gpu
        content["steps"][1]["rows"][0]["mfu"] = 0.123
        return content

    @pytest.mark.parametrize("gpu", ["NVIDIA T1000", "NVIDIA T2000"])
    def test_the_full_record_keeps_readme_and_glance(self, root: Path, gpu: str) -> None:
        _, alone = written(root, record())
        content, readme = written(root, record(), self.partial(gpu))
        assert readme == alone
        assert readme.startswith("Newest full run on a GPU (NVIDIA T1000, 2026-11-28): 1 of 3 proofs")
        glance = rows_of(content, "## At a glance")
        assert len(glance) == 9
        assert "12.3 %" not in str(glance)
        again = "Measured again on 2026-12-01, below: LoRA on 8 B parameters." in content
        assert again == (gpu == "NVIDIA T1000")


def test_a_record_without_a_newer_column_is_read(root: Path) -> None:
    for *path, key in [
        ("steps", 3, "rows", 2, "mfu"),
        ("steps", 3, "rows", 2, "forecast", "blame"),
        ("steps", 3, "rows", 2, "forecast"),
        ("steps", 1, "rows", 0, "host_waits_per_step"),
        ("steps", 2, "limit"),
        ("seconds",),
    ]:
        assert written(root, without(record(), *path, key)) == written(root, changed(record(), None, *path, key)), key


def scale_of(drawn: ElementTree.Element, axis: str) -> Callable[[float], float]:
    """Return the map from a value to its place on an axis, from two labelled ticks."""
    at = {"x": "x", "y": "y"}[axis]
    ticks = [
        (float(str(each.text).split()[0]), float(each.attrib[at])) for each in drawn.iter() if each.get("class") == axis
    ]
    (low, begin), (high, end) = ticks[0], ticks[-1]
    shift = -4 if axis == "y" else 0  # a label's baseline is below the middle of its digits
    return lambda value: begin + shift + (end - begin) * math.log(value / low) / math.log(high / low)


@pytest.mark.parametrize(
    ("file", "key", "unit"), [("gpu-time.svg", "step_seconds", 1e-3), ("gpu-memory.svg", "peak_bytes", 1e9)]
)
def test_each_row_has_a_point_at_its_place(root: Path, file: str, key: str, unit: float) -> None:
    content = record()
    written(root, content)
    drawn = ElementTree.parse(root / "docs" / "project" / file).getroot()
    across, up = scale_of(drawn, "x"), scale_of(drawn, "y")
    points = {str(each[0].text): each for each in drawn.iter(f"{SVG}circle")}
    rows = [row for one in content["steps"] if one["name"] in TRAINING for row in one["rows"] if row["forecast"]]
    assert len(points) == len(rows) == 6
    for row in rows:
        (point,) = (each for label, each in points.items() if label.startswith(f"{row['model']}, {row['method']}:"))
        assert float(point.attrib["cx"]) == pytest.approx(across(row[key] / unit), abs=0.3)
        assert float(point.attrib["cy"]) == pytest.approx(up(row["forecast"][key] / unit), abs=0.3)


def without(content: dict[str, Any], *path: str | int) -> dict[str, Any]:
    inner: Any = content
    for key in path[:-1]:
        inner = inner[key]
    del inner[path[-1]]
    return content


def changed(content: dict[str, Any], value: Any, *path: str | int) -> dict[str, Any]:
    inner: Any = content
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    return content


BAD: list[tuple[str | dict[str, Any], str]] = [
    ("{half", "not JSON"),
    (record(schema=2), "schema 2"),
    (without(record(), "phalanx", "commit"), "'commit'"),
    (without(record(), "steps", 4, "rows", 0, "model"), "gpt2_124m, rows[0] has no key 'model'"),
    (changed(record(), "fast", "steps", 4, "rows", 0, "rate"), "rows[0], rate is 'fast'"),
    (changed(record(), "fine", "steps", 4, "status"), "status is 'fine'"),
    (changed(record(), "trace", "steps", 0, "name"), "step trace is there twice"),
    (changed(record(), "noon", "started"), "started is no time"),
]


def test_bad_files_are_named(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good, bad = root / "good.json", root / "bad.json"
    good.write_text(json.dumps(record()))
    before = (root / "README.md").read_text()
    for content, wrong in BAD:
        bad.write_text(content if isinstance(content, str) else json.dumps(content))
        assert main([str(good), str(bad)], root) == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1
        assert str(bad) in error
        assert wrong in error
    assert (root / "README.md").read_text() == before
    assert list((root / "docs" / "project").iterdir()) == []


def test_a_readme_without_markers_is_said_after_the_page_is_written(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (root / "README.md").write_text("# Top\n")
    assert main([], root) == 1
    assert "README.md has no line '<!-- generated: gpu -->'" in capsys.readouterr().err
    assert (root / "docs" / "project" / "gpu.md").exists()
    assert (root / "README.md").read_text() == "# Top\n"


def test_writing_twice_changes_nothing(root: Path) -> None:
    assert written(root, copy.deepcopy(record())) == written(root)


def test_the_committed_page_and_readme_are_those_of_the_records() -> None:
    records = read_records(sorted((ROOT / "tools" / "published" / "gpu").glob("*.json")))
    content, plots = page(records)
    again = "try: python tools/gpu_record/page.py"
    assert (ROOT / "docs" / "project" / "gpu.md").read_text() == content, again
    drawn = {path.name: path.read_text() for path in (ROOT / "docs" / "project").glob("gpu-*.svg")}
    assert drawn == plots, again
    readme = (ROOT / "README.md").read_text()
    assert f"<!-- generated: gpu -->\n\n{paragraph(records)}\n\n<!-- end -->" in readme, again
