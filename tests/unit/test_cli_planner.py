"""Clusters and devices, and the verbs that plan for them: ``forecast``, ``plan``, ``scale``, ``devices``."""

from __future__ import annotations

import json
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

import phalanx as px
from phalanx import hardware
from phalanx.cli import main
from phalanx.config import Cluster, Device, Group, Host, Link, Network
from phalanx.config.cluster import DTYPES
from phalanx.errors import SpecError
from phalanx.hardware.catalog import nearest
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

    def test_what_does_not_fit_ends_with_one_and_changes(self, llama: str) -> None:
        argv = ("forecast", llama, "--batch", "64", "--plan", "dp=8 precision=bf16", "--on", "8xA100-80GB")
        found = answer(*argv, code=1)
        assert not found["fits"]
        assert found["shortfall"]["missing"] == pytest.approx(found["reserved"] - found["room"])
        assert found["shortfall"]["changes"]
        result = invoke(*argv)
        assert result.exit_code == 1
        assert "too little on each device" in result.stdout

    def test_batch_replaces_that_of_the_job(self) -> None:
        assert answer("forecast", GPT, "--on", "H100", "--batch", "64")["samples"] == 64


class TestPlan:
    def test_a_configuration_is_enough(self, llama: str) -> None:
        found = answer("plan", llama, "--on", "16xH100", "--batch", "128", "--seq", "2048", "--html", "page.html")
        assert found["job"] == "llama"
        steps = [one["step"] for one in found["plans"]]
        assert steps == sorted(steps)
        assert all(one["fits"] and one["tokens"] == 2048 for one in found["plans"])
        assert found["explanation"]["reasons"]
        plain = found["explanation"]["neighbours"][0]
        assert (plain["forecast"]["plan"], plain["why"][:10]) == ("fsdp=16 precision=bf16", "plain FSDP")
        page = Path("page.html").read_text()
        assert all(one in page for one in ("4 of 5 within", "4 of 5 by", found["plans"][0]["basis"]))

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
        assert {"cpu", "H100", "TPU-v4"} <= {one["device"] for one in answer("devices", GPT)["devices"]}


def without_data() -> px.Job:
    return replace(load_job(GPT), data=lambda: Path("nowhere").read_text())


WRONG = [
    (
        ("plan", f"{__file__}:without_data", "--on", "H100"),
        "job.data: given code that fails on the first samples: File",
    ),
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
    (("scale", GPT, "--on", "H100", "--budget", "0"), "range x>0"),
    (("scale", GPT, "--on", "H100", "--worth", "2"), "range 0<x<=1"),
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


LINK = Link(name="wire", bandwidth=1e9, latency=1e-6)
DEVICE = Device(name="thing", kind="cuda", peak={"fp32": 1e12}, memory=100, bandwidth=1e9, kept=20)
GROUP = Group(device=DEVICE, link=LINK, host=Host(name="box"), per_node=2, nodes=3)
TEXTS = [
    *("H100", "8xH100", "1x16xA100", "4x8xA100-80GB@200Gb/s", "64xH100"),
    *("8xA100+8xV100", "3x2xT4+1x3xL4@25GB/s", "4xcpu", "8xcuda"),
]


def problems(call: Any, *given: Any, **named: Any) -> dict[str, str]:
    with pytest.raises(SpecError) as caught:
        call(*given, **named)
    return {problem.where: problem.fix for problem in caught.value.problems}


def test_a_cluster_says_its_text_and_its_file(tmp_path: Path) -> None:
    for text in TEXTS:
        cluster = hardware.cluster(text)
        assert hardware.cluster(str(cluster)) == cluster
        assert pickle.loads(pickle.dumps(cluster)) == cluster
        file = tmp_path / "cluster.toml"
        file.write_text(cluster.to_toml())
        assert hardware.cluster(str(file)) == cluster


SHAPES = [
    ("H100", [(1, 1, "H100")], 50e9),
    ("8xH100", [(1, 8, "H100")], 400e9),
    ("2x4xH100", [(2, 4, "H100")], 200e9),
    ("64xh100", [(8, 8, "H100")], 400e9),
    ("1x16xA100", [(1, 16, "A100-80GB")], 200e9),
    ("2x8xA100@200Gb/s", [(2, 8, "A100-80GB")], 25e9),
    ("2x8xA100@8x200Gbit/s", [(2, 8, "A100-80GB")], 200e9),
    ("2xcpu@100Mb/s", [(1, 2, "cpu")], 12.5e6),
    ("2xcpu@1.5GB/s", [(1, 2, "cpu")], 1.5e9),
    (" 8 x A100 + 8 x V100 ", [(1, 8, "A100-80GB"), (1, 8, "V100-16GB")], 50e9),
    ("96xcpu", [(1, 96, "cpu")], 1.25e9),
    ("4x4090@10Gb/s", [(1, 4, "RTX-4090")], 1.25e9),
]


def test_text() -> None:
    for text, shape, bandwidth in SHAPES:
        cluster = hardware.cluster(text)
        assert [(group.nodes, group.per_node, group.device.name) for group in cluster.groups] == shape
        assert cluster.network.bandwidth == bandwidth


WRONG_TEXTS = [
    ("", 0, "4x8xH100@8x400Gb/s"),
    ("8x", 2, "4x8xH100@8x400Gb/s"),
    ("8 H100", 2, "4x8xH100@8x400Gb/s"),
    ("0xcpu", 0, "4x8xH100@8x400Gb/s"),
    ("4x0xcpu", 2, "4x8xH100@8x400Gb/s"),
    ("8x8x8xH100", 4, "4x8xH100@8x400Gb/s"),
    ("4xx8", 2, "phalanx devices"),
    ("2x8xH1OO@1Gb/s", 4, "2x8xH100@1Gb/s"),
    ("8xH100 + ", 9, "4x8xH100@8x400Gb/s"),
    ("8xH100@fast", 7, "4x8xH100@8x400Gb/s"),
    ("8xH100@0Gb/s", 7, "4x8xH100@8x400Gb/s"),
    ("8xH100@200", 7, "4x8xH100@8x400Gb/s"),
    ("8xH100@1Gb/s today", 13, "4x8xH100@8x400Gb/s"),
]


def test_wrong_text_is_pointed_at() -> None:
    for text, caret, fix in WRONG_TEXTS:
        with pytest.raises(SpecError) as caught:
            hardware.cluster(text)
        (problem,) = caught.value.problems
        assert problem.given.splitlines()[-2:] == [f"    {text}", f"    {' ' * caret}^ here"]
        assert problem.fix == fix


def test_a_count_that_fills_no_nodes_names_the_nearest() -> None:
    with pytest.raises(SpecError, match="56 or 64"):
        hardware.cluster("60xH100")
    assert problems(hardware.cluster, "60xH100") == {"cluster": "56xH100"}


def test_files_may_name_devices(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text('[[groups]]\ndevice = "h100"\nper_node = 4\nnodes = 2\n')
    assert hardware.cluster(str(file)) == hardware.cluster("2x4xH100")
    file.write_text('[[groups]]\ndevice = "H1OO"\n')
    assert problems(hardware.cluster, str(file)) == {"device": "H100"}
    for text in ("= 3", 'colour = "red"\ngroups = 3\n[network]\nbandwidth = -1\nlatency = "no"'):
        file.write_text(text)
        assert problems(hardware.cluster, str(file))
    assert problems(hardware.cluster, str(tmp_path / "none.toml")) == {"cluster": "8xH100"}


def test_everything_wrong_in_a_file_is_said_at_once() -> None:
    text = Cluster(groups=(GROUP,), network=Network(bandwidth=1.0, latency=0.0)).to_toml()
    text = text.replace("memory = 100", 'memory = "100"').replace("nodes = 3", "nodes = 0\ncolour = 1")
    text = text.replace('name = "wire"', "").replace("latency = 0.0", "latency = -1.0")
    assert set(problems(Cluster.from_toml, text)) == {
        "groups[0].colour",
        "groups[0].nodes",
        "groups[0].device.memory",
        "groups[0].link.name",
        "network.latency",
    }
    assert set(problems(Cluster.from_toml, "price = 1")) == {"cluster.price", "cluster.groups", "cluster.network"}


def test_everything_wrong_in_a_part_is_said_at_once() -> None:
    wrong: dict[str, Any] = {"kind": "abacus", "peak": {"fp32": -1, "fp13": 2}, "memory": 1.5, "power": float("nan")}
    assert set(problems(replace, DEVICE, **wrong)) == {
        "device.kind",
        "device.peak.fp32",
        "device.peak.fp13",
        "device.memory",
        "device.power",
    }
    assert set(problems(replace, DEVICE, kept=101)) == {"device.kept"}
    assert set(problems(replace, DEVICE, peak={})) == {"device.peak"}
    assert set(problems(replace, DEVICE, bandwidth=0)) == {"device.bandwidth"}
    assert set(problems(replace, LINK, bandwidth=0)) == {"link.bandwidth"}
    assert set(problems(replace, GROUP, nodes=0, per_node=True, link=3)) == {
        "group.nodes",
        "group.per_node",
        "group.link",
    }
    network: Any = None
    assert set(problems(Cluster, groups=(), network=network)) == {"cluster.groups", "cluster.network"}


def test_every_device_of_the_catalog_is_whole() -> None:
    for name in hardware.names():
        entry = hardware.entry(name)
        device = entry.device
        assert device.name == name
        rising = [device.peak[dtype] for dtype in ("fp32", "fp16", "fp8") if dtype in device.peak]
        assert rising == sorted(rising), name
        assert set(device.peak) <= set(DTYPES), name
        assert 0.85 * device.memory < device.room < device.memory, name
        assert {"device", "link", "host", "network", "room"} <= {source.figures for source in entry.sources}, name
        assert all(source.document and 2009 < source.year < 2100 for source in entry.sources), name
        assert entry.network(1).bandwidth <= entry.network(entry.per_node).bandwidth, name


def test_an_unknown_device_is_answered_with_the_nearest() -> None:
    assert nearest("H1OO")[0] == "H100"
    assert "A100-80GB" in nearest("a100 8gb")
    assert problems(hardware.device, "abacus") == {"device": "phalanx devices"}


def printed(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[str, int]:
    with pytest.raises(SystemExit) as ended:
        main(["devices", *argv])
    code: Any = ended.value.code
    return capsys.readouterr().out, code


def test_json_carries_the_figures(capsys: pytest.CaptureFixture[str]) -> None:
    every = json.loads(printed(capsys, "--json")[0])["devices"]
    assert [one["name"] for one in every] == list(hardware.names())
    one = json.loads(printed(capsys, "H100", "--json")[0])
    assert one in every
    assert (one["peak"]["bf16"], one["network"]["bandwidth"], one["per_node"]) == (989.4e12, 400e9, 8)
    assert one["room"] == hardware.device("H100").room
    assert {source["figures"] for source in one["sources"]} >= {"device", "link", "host", "network", "room"}
