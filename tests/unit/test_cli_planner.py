"""``forecast``, ``plan``, ``scale`` and ``devices JOB`` from the command line: tables, JSON, pages, exit codes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

import phalanx as px
from phalanx.cli import main
from phalanx.launch.jobfile import load_job

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
GPT = str(EXAMPLES / "gpt.py")
LLAMA = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
}


def invoke(*argv: str) -> Result:
    return CliRunner().invoke(main, list(argv))


def answer(*argv: str, code: int = 0) -> dict[str, Any]:
    result = invoke(*argv, "--json")
    assert result.exit_code == code, result.output
    return json.loads(result.stdout)


@pytest.fixture
def llama() -> str:
    Path("llama").mkdir()
    Path("llama/config.json").write_text(json.dumps(LLAMA))
    return "llama/config.json"


class TestForecast:
    def test_json_adds_up(self) -> None:
        found = answer("forecast", GPT, "--plan", "fsdp=8 recompute=full", "--on", "8xA100-80GB", "--price", "2")
        assert (found["plan"], found["devices"], found["fits"]) == ("fsdp=8 recompute=full", 8, True)
        assert sum(found["seconds"].values()) == pytest.approx(found["step"])
        assert sum(found["memory"].values()) == pytest.approx(found["reserved"])
        assert found["low"] < found["step"] < found["high"]
        assert found["steps"] == 200
        assert found["bill"]["money"] == pytest.approx(200 * found["step"] * 8 * 2 / 3600)

    def test_the_table_shows_parts_and_bounds(self) -> None:
        shown = invoke("forecast", GPT, "--on", "2xH100").stdout
        assert "under dp=2 precision=bf16 on 2xH100" in shown
        assert all(word in shown for word in ("time per step", "MFU", "activations", "bringing replicas together"))
        assert "cost" not in shown

    def test_what_does_not_fit_ends_with_one_and_changes(self, llama: str) -> None:
        argv = ("forecast", llama, "--batch", "64", "--plan", "dp=8 precision=bf16", "--on", "8xA100-80GB")
        found = answer(*argv, code=1)
        assert not found["fits"]
        assert found["shortfall"]["missing"] == pytest.approx(found["reserved"] - found["room"])
        assert found["shortfall"]["changes"]
        result = invoke(*argv)
        assert result.exit_code == 1
        assert "too little on each device" in result.stdout

    def test_a_page_holds_its_charts(self) -> None:
        pytest.importorskip("plotly")
        assert invoke("forecast", GPT, "--on", "2xH100", "--html", "page.html").exit_code == 0
        page = Path("page.html").read_text()
        assert "Plotly.newPlot" in page
        assert "memory of the rank that needs most" in page

    def test_batch_replaces_that_of_the_job(self) -> None:
        assert answer("forecast", GPT, "--on", "H100", "--batch", "64")["samples"] == 64


class TestPlan:
    def test_a_configuration_is_enough(self, llama: str) -> None:
        found = answer("plan", llama, "--on", "16xH100", "--batch", "128", "--seq", "2048")
        assert found["job"] == "llama"
        steps = [one["step"] for one in found["plans"]]
        assert steps == sorted(steps)
        assert all(one["fits"] and one["tokens"] == 2048 for one in found["plans"])
        assert found["explanation"]["reasons"]

    def test_the_table_argues_a_plan(self) -> None:
        shown = invoke("plan", GPT, "--on", "8xH100", "--because", "fsdp=8").stdout
        assert "because fsdp=8" in shown
        assert "is forecast to be the fastest of" in " ".join(shown.split())

    def test_nothing_fits(self, llama: str) -> None:
        found = answer("plan", llama, "--on", "T4", "--batch", "8", code=1)
        assert found["plans"] == []
        assert found["shortfall"]["missing"] > 0
        assert "None of" in invoke("plan", llama, "--on", "T4", "--batch", "8").stdout

    def test_the_smallest_cluster_within_a_deadline(self, llama: str) -> None:
        argv = ("plan", llama, "--on", "32xH100", "--batch", "128", "--steps", "1000", "--best", "devices")
        found = answer(*argv, "--deadline", "30d")
        within = [one["devices"] for one in found["points"] if one["bill"]["seconds"] <= 30 * 86400]
        assert found["devices"] == min(within)
        assert answer(*argv, "--deadline", "1s", code=1)["met"] is False


class TestScale:
    def test_points_double_and_the_knee_is_marked(self, llama: str) -> None:
        found = answer("scale", llama, "--on", "H100", "--batch", "64", "--up-to", "64", "--steps", "100")
        assert [one["devices"] for one in found["points"]][-1] == 64
        assert found["stop"] is not None
        assert found["stop"] <= (found["knee"] or 64)

    def test_the_chart_is_drawn_and_a_page_written(self) -> None:
        pytest.importorskip("plotly")
        result = invoke("scale", GPT, "--on", "A100", "--up-to", "8", "--html", "page.html")
        assert result.exit_code == 0
        assert "ideal" in result.stdout
        assert "Stop at" in result.stdout
        assert "scaling" in Path("page.html").read_text()

    def test_a_budget_without_a_price_is_of_device_hours(self) -> None:
        found = answer("scale", GPT, "--on", "A100", "--up-to", "4", "--budget", "500")
        assert all(one["bill"]["money"] is None for one in found["points"])
        assert answer("scale", GPT, "--on", "A100", "--up-to", "4", "--budget", "1e-9", code=1)["stop"] is None


class TestDevices:
    def test_a_job_is_shown_on_every_device(self) -> None:
        found = answer("devices", GPT)
        assert {"cpu", "H100", "TPU-v4"} <= {one["device"] for one in found["devices"]}
        assert "bound by" in invoke("devices", GPT).stdout


WRONG = [
    (("devices", "H1OO"), "H100"),
    (("devices", "--batch", "3"), "--batch"),
    (("forecast", GPT, "--on", "H100", "--html", "no/page.html"), "--html"),
    (("forecast", GPT, "--on", "8xH1000"), "H100"),
    (("forecast", GPT, "--on", "8y"), "^ here"),
    (("forecast", GPT, "--on", "16xH100", "--plan", "fsdp=8"), "dp=2 fsdp=8"),
    (("forecast", GPT, "--on", "H100", "--batch", "-1"), "--batch"),
    (("forecast", str(EXAMPLES / "moe.py"), "--on", "H100"), "depends on values"),
    (("plan", GPT, "--on", "256xH100", "--batch", "2"), "--batch 256"),
    (("plan", GPT, "--on", "H100", "--because", "fdsp=2"), "fsdp=2"),
    (("plan", GPT, "--on", "8xH100", "--best", "devices"), "--deadline"),
    (("scale", GPT, "--on", "H100", "--budget", "0"), "more than 0"),
    (("scale", GPT, "--on", "H100", "--worth", "2"), "--worth 0.5"),
    (("scale", GPT, "--on", "H100", "--deadline", "soon"), "24h"),
]


def test_wrong_use_says_what_would_work() -> None:
    found = {" ".join(argv): (invoke(*argv), said) for argv, said in WRONG}
    wrong = {argv: one.output for argv, (one, said) in found.items() if one.exit_code != 2 or said not in one.stderr}
    assert wrong == {}


def test_a_configuration_needs_a_batch_and_a_known_architecture(llama: str) -> None:
    assert "--batch 1024" in invoke("plan", llama, "--on", "H100").stderr
    Path("config.json").write_text('{"model_type": "nothing-known"}')
    result = invoke("plan", "config.json", "--on", "H100", "--batch", "8")
    assert (result.exit_code, "nothing-known" in result.stderr) == (2, True)


def test_python_says_the_same() -> None:
    job = load_job(GPT)
    found = px.forecast(job, "dp=2", "2xH100")
    assert found.step == pytest.approx(answer("forecast", GPT, "--plan", "dp=2", "--on", "2xH100")["step"])
    best = px.plan(job, "8xA100").ranking.best
    assert best is not None
    assert best.plan.devices == 8
    assert callable(px.forecast)  # although a folder has that name
