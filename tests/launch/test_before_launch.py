"""Before ``phalanx launch`` starts anything: the plan for what is there, the check of hosts and of a queue."""

from __future__ import annotations

import json
import sys
import time
import venv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from launched import Queue, StandIn, StandIns, by_hand, shared, write_job
from ssh_hosts import SshServers, ssh_servers
from test_target_laws import CASES, QUEUES, SAGEMAKER, own_words, submission

import phalanx as px
from phalanx.cli import main
from phalanx.config import Plan
from phalanx.hardware import cluster
from phalanx.launch.check import CheckTime
from phalanx.launch.targets.find_target import TARGETS, find_target, target_class
from phalanx.launch.targets.offer import Offer
from phalanx.launch.targets.target import QueueTarget
from phalanx.preflight import launch_check

IMAGES = {"kubernetes", "sagemaker"}


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    write_job(tmp_path)
    for name in QUEUES:
        monkeypatch.setattr(target_class(name), "why_not", lambda self, prepared, patience: "")
    monkeypatch.setitem(TARGETS, "stand-ins", "launched:StandIns")
    monkeypatch.setitem(TARGETS, "queue", "launched:Queue")
    monkeypatch.setattr(StandIns, "sized", True)
    for kind, name in ((StandIns, "made"), (StandIn, "asked"), (Queue, "taken")):
        monkeypatch.setattr(kind, name, [])
    yield
    sys.modules.pop("train", None)


def check(name: str, *words: str) -> tuple[int, dict[str, Any]]:
    argv = ["check", "train.py", "--to", CASES[name].to, "--run", "run", *own_words(name), *words, "--json"]
    plan = () if "-n" in CASES[name].run else ("--plan", "dp=2")
    result = CliRunner().invoke(main, [*argv, *(plan or CASES[name].run)])
    assert result.exit_code in (0, 1), result.output
    return result.exit_code, json.loads(result.stdout)


@pytest.mark.parametrize("name", ["slurm", "sagemaker"])
def test_data_that_only_its_machines_have_are_no_reason_to_fail(name: str) -> None:
    path = Path("train.py")
    text = path.read_text()
    data = "data=lambda: px.Table(x=x, y=x[:, :4].argmax(1))"
    path.write_text(text.replace(data, "data=lambda: open('/opt/ml/input/data/data/none')"))
    assert path.read_text() != text
    code, answer = check(name, "--grace", "10")
    said = [(one["kind"], one["fails"]) for one in answer["findings"]]
    if name in IMAGES:
        assert (code, said) == (0, [])
        told = [one for one in answer["not_looked_at"] if one.startswith("the image ")]
        assert len(told) == 1
        assert "packages, and the data" in told[0]
        assert "the model by a step of its own: the job's data could not be read" in answer["not_looked_at"]
    else:
        assert (code, said) == (1, [("data", True)])


def test_a_target_says_what_image_its_machines_run() -> None:
    for name in QUEUES:
        target = find_target(CASES[name].to)
        assert isinstance(target, QueueTarget)
        assert target.image({"image": "registry/train:1"}) == ("registry/train:1" if name in IMAGES else "")
        assert bool(target.image({})) == (name in IMAGES)


def test_packages_are_those_of_the_interpreter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONPATH", raising=False)
    venv.create(tmp_path / "empty", symlinks=True)
    other = tmp_path / "empty" / "bin" / "python"
    code, answer = check("slurm", "--python", str(other), "--grace", "10")
    assert code == 1
    said = {one["what"] for one in answer["findings"] if one["kind"] == "packages" and one["fails"]}
    assert any("No module named 'phalanx'" in one for one in said), said


def test_a_queue_that_does_not_answer_in_time_has_refused_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    target, given = submission("slurm")
    assert isinstance(target, QueueTarget)
    monkeypatch.setattr(launch_check, "_OF_QUEUE", 0.2)
    monkeypatch.setattr(type(target), "why_not", lambda self, prepared, patience: time.sleep(patience) or "too late")
    told = "whether slurm would take it: it has not answered in time"
    assert launch_check._asked_of(target, given, CheckTime(0.0)) == ([], told)
    monkeypatch.setattr(type(target), "why_not", lambda self, prepared, patience: None)
    assert launch_check._asked_of(target, given, CheckTime(0.0)) == ([], "whether slurm would take it")


RATE = 8e8  # bit/s
BEGINS = "the run would begin now"


def launch(to: str, *words: str) -> Result:
    return CliRunner().invoke(main, ["launch", "train.py", "--to", to, "--run", "run", *words])


class TestHosts:
    def test_are_asked_once_for_plan_and_check(self) -> None:
        StandIns.made[:] = [StandIn("n1"), StandIn("n2")]
        result = launch("stand-ins:")
        assert BEGINS in result.stderr
        # each by itself, and for the link both ways
        assert sorted(StandIn.asked) == ["n1", "n1", "n2", "n2"]

    def test_are_not_asked_without_a_check_and_with_a_plan(self) -> None:
        StandIns.made[:] = [StandIn("n1"), StandIn("n2")]
        assert BEGINS in launch("stand-ins:", "--plan", "dp=2", "--no-check").stderr
        assert StandIn.asked == []

    def test_what_training_would_fail_by_ends_the_launch_with_the_table_of_the_check(self) -> None:
        StandIns.made[:] = [StandIn("n1"), StandIn("n2", before=["false"])]
        result = launch("stand-ins:")
        assert result.exit_code == 1, result.output
        assert "fails  n2: " in result.stdout
        assert "training would fail: 1 thing to put right" in result.stdout
        assert not Path("run").exists()

    def test_a_plan_for_other_devices_is_refused_before_any_is_asked(self) -> None:
        StandIns.made[:] = [StandIn("n1"), StandIn("n2")]
        result = launch("stand-ins:", "--plan", "fsdp=4")
        assert result.exit_code == 2
        assert "for 2 devices (n1: 1, n2: 1)" in result.stderr
        assert "--plan fsdp=2" in result.stderr
        assert StandIn.asked == []


class TestQueue:
    def test_a_plan_is_asked_for_where_nothing_is_offered(self) -> None:
        result = launch("queue")
        assert result.exit_code == 2
        assert "which devices there are is not known here" in result.stderr

    def test_a_plan_that_does_not_fit_is_refused_with_what_is_there(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(Queue, "offered", Offer(nodes=2, devices=2, device="A100-80GB"))
        for more in ([], ["--no-check"], ["--dry-run"]):
            result = launch("queue", "--plan", "fsdp=8", *more)
            assert result.exit_code == 2
            assert "2 x 2 GPUs are 4" in result.stderr
            assert "--plan fsdp=4" in result.stderr
            assert Queue.taken == []


@pytest.mark.parametrize("to", ["ray", "kubernetes", "slurm", "sagemaker"])
def test_without_a_plan_the_planner_chooses_for_the_gpus_of_the_options(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, to: str
) -> None:
    monkeypatch.chdir(tmp_path)
    own = {"kubernetes": ["--image", "train:1", "--volume", f"data:{tmp_path}"], "sagemaker": [*SAGEMAKER]}
    shares = ["--patch", shared(tmp_path)["patch"]] if to == "sagemaker" else []
    gpus = ("--nodes", "2", "--gpus-per-node", "4", "--device", "L4")
    result = launch(to, *own.get(to, []), *shares, *gpus, "--grace", "10", "--dry-run", "--json")
    assert result.exit_code == 0, result.output
    assert "on 2x4xL4: " in result.stderr
    files = json.loads(result.stdout)["files"]
    (text,) = [text for path, text in files.items() if path.endswith("run.toml")]
    (plan,) = [line for line in text.splitlines() if line.startswith("plan = ")]
    assert Plan.parse(plan.partition('"')[2].rstrip('"')).processes == 8


def test_a_job_that_is_installed_needs_no_file_in_a_volume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def launch_package(*words: str) -> Result:
        own = ("--image", "train:1", "--volume", "data:/data", "--run", "/data/run", "--plan", "dp=2", "--dry-run")
        return CliRunner().invoke(main, ["launch", *words, "--to", "kubernetes", *own])

    result = launch_package("train.py")
    assert result.exit_code == 2
    assert "a job that is installed in the image and here is named as a module: package.train" in result.stderr
    result = launch_package("own_package.train")
    assert result.exit_code == 2
    assert "there is no module 'own_package" in result.stderr
    (tmp_path / "elsewhere" / "own_package").mkdir(parents=True)
    (tmp_path / "train.py").rename(tmp_path / "elsewhere" / "own_package" / "train.py")
    monkeypatch.syspath_prepend(tmp_path / "elsewhere")
    try:
        result = launch_package("own_package.train")
    finally:
        for name in ("own_package.train", "own_package"):
            sys.modules.pop(name, None)
    assert result.exit_code == 0, result.output
    assert 'job = "own_package.train' in result.stdout


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SshServers]:
    with ssh_servers(2, tmp_path_factory.mktemp("ssh"), rate=8e8) as made:
        yield made


@pytest.mark.realtime("the rate of a link is measured")
def test_calibrate_writes_what_is_there_and_plan_and_forecast_read_it(servers: SshServers) -> None:
    file = servers.write_hosts((2, 2))
    result = CliRunner().invoke(main, ["calibrate", "--to", f"ssh:{file}", "-o", "rack.toml", "--json"])
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout)
    found = cluster("rack.toml")
    assert (told["devices"], told["nodes"]) == (found.devices, found.nodes) == (4, 2)
    assert 0.4 * RATE / 8 < found.network.bandwidth < 1.3 * RATE / 8
    for words in (["plan", "train.py"], ["forecast", "train.py", "--plan", "dp=4"]):
        result = CliRunner().invoke(main, [*words, "--on", "rack.toml", "--json"])
        assert result.exit_code == 0, result.output


def test_a_launch_without_a_plan_trains_on_all_hosts_as_one_device_does(servers: SshServers, tmp_path: Path) -> None:
    file = servers.write_hosts((1, 1), folder=f'"{tmp_path}"')
    result = launch(f"ssh:{file}", "--json")
    assert result.exit_code == 0, result.output
    run = px.load("run")
    assert run.plan.processes == 2
    assert run.losses == pytest.approx(by_hand(6), rel=1e-4)
    assert "on 2x1xcpu@" in result.stderr
