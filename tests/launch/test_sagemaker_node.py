"""A run on SageMaker from command to end: trained as on one device, interrupted, stopped, and gone on with."""

from __future__ import annotations

import json
import logging
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from launched import NEEDED, SHARED, await_none_left, await_steps, by_hand, submission, write_job

import phalanx as px
from phalanx.cli import main as phalanx_main
from phalanx.launch.reaper import SAVED, fork
from phalanx.launch.runfile import newest_step
from phalanx.launch.targets import sagemaker_node, write_ticket
from phalanx.launch.targets.sagemaker import SageMakerTarget
from phalanx.launch.targets.sagemaker_node import main
from phalanx.report.run_standing import run_standing

boto3 = pytest.importorskip("boto3")
moto = pytest.importorskip("moto.server")
from moto.sagemaker.responses import SageMakerResponse  # noqa: E402
from sagemaker_service import SETTINGS, Containers, Service  # noqa: E402

pytestmark = [
    pytest.mark.timeout(240),
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning"),
]
REQUIRED = {**NEEDED["sagemaker"], "instance": "ml.m5.large"}
STEPS = 30

Start = Callable[..., Containers]


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """Of moto's servers."""
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture
def service(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hosts: Callable[..., px.Hosts]
) -> Iterator[Service]:
    """SageMaker, with a bucket; no container outlives the test."""
    for name, value in {**SETTINGS, "AWS_ENDPOINT_URL": address}.items():
        monkeypatch.setenv(name, value)
    boto3.client("s3").create_bucket(Bucket="bucket")
    made = Service(tmp_path, hosts)
    monkeypatch.setattr(
        SageMakerResponse, "stop_training_job", lambda asked: made.stop_training_job(asked), raising=False
    )
    with ExitStack() as up:
        up.callback(made.close)
        yield made
    await_none_left(tmp_path)


@pytest.fixture
def start(service: Service, tmp_path: Path) -> Start:
    """Hands a job of so many steps, each of so many seconds, to SageMaker for so many hosts, and starts it there."""

    def begin(plan: str, *, steps: int, count: int = 1, pause: float = 0.0, **run: Any) -> Containers:
        code = tmp_path / "job"
        code.mkdir(exist_ok=True)
        job = code / "train.py"
        if not job.exists():
            write_job(code, pause=pause, steps=steps)
        settings: dict[str, Any] = {"job": str(job), "grace": 20.0, **run}
        options = {**REQUIRED, "nodes": str(count), **(SHARED if count > 1 else {})}
        target = SageMakerTarget("")
        given = replace(submission("sagemaker", tmp_path, plan, run=settings, **options), python=target.python)
        ticket = target.submit(target.prepare(given))
        write_ticket(given, "sagemaker", ticket)
        return service.start(ticket["job"])

    return begin


def test_hosts_train_what_one_device_does(start: Start, tmp_path: Path) -> None:
    count = 2
    job = start("pp=2 tp=2", steps=6, count=count)
    assert job.wait() == [0] * count, job.said()
    assert px.load(job.run).losses == pytest.approx(by_hand(6), rel=1e-5)
    assert [job.failure(number) for number in range(count)] == [""] * count
    assert "Traceback" not in job.said()
    found = run_standing(tmp_path / "run")
    assert (found.state, found.step, found.loss) == ("ended", 5, pytest.approx(by_hand(6)[-1], rel=1e-5))


def test_two_hosts_that_are_taken_back_save_and_go_on(start: Start, service: Service) -> None:
    job = start("dp=2", steps=STEPS, count=2, pause=0.3)
    await_steps(job.run, 3)
    job.signal_in_turn()
    assert job.wait(taken_back=True) == [SAVED, SAVED], job.said()
    (stopped,) = px.load(job.run).events("stopped")
    assert newest_step(job.run) == stopped["step"] < STEPS
    assert [job.failure(number) for number in range(2)] == ["", ""]
    again = service.start(job.job)
    assert again.wait() == [0, 0], again.said()
    assert_undisturbed(again.run, STEPS, stopped["step"])


def assert_undisturbed(folder: Path, steps: int, *stops: int) -> None:
    """No sample was lost or taken twice, and losses are those of one device that nobody has stopped."""
    run = px.load(folder)
    assert [event["step"] for event in run.events("resume")] == [*stops]
    assert [event["step"] for event in run.events("step")] == [*range(steps)], "none was taken twice"
    assert run.losses == pytest.approx(by_hand(steps), rel=1e-5)


def phalanx(*words: str, code: int = 0) -> str:
    """What the command prints, which ends with ``code``."""
    done = CliRunner().invoke(phalanx_main, words)
    assert done.exit_code == code, done.output
    return done.output if code else done.stdout


def launch(*words: str, verb: str = "launch", code: int = 0, **options: str) -> str:
    asked = [word for name, value in {**REQUIRED, **options}.items() if value for word in (f"--{name}", value)]
    run = ("train.py", "--to", "sagemaker", "--plan", "dp=2", "--run", "run")
    unlooked = ("--no-check",) if verb == "launch" else ()
    return phalanx(verb, *run, *asked, *words, *unlooked, code=code)


def standing() -> dict[str, Any]:
    return json.loads(phalanx("status", "run", "--json"))


def test_a_spot_run_is_interrupted_stopped_and_ends_as_if_it_had_not_been(
    service: Service, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the commands alone. Its folder goes from one machine to the next by way of S3."""
    (tmp_path / "job").mkdir()
    monkeypatch.chdir(tmp_path / "job")
    write_job(Path(), pause=0.5, steps=STEPS)
    Path(".env").write_text(f"KEY={SETTINGS['AWS_SECRET_ACCESS_KEY']}")
    spot = ("--time", "1h", "--spot", "2h", "--grace", "20")
    told = json.loads(launch(*spot, "--json"))
    service.stands(told["job"], "InProgress", "Starting")
    assert standing()["state"] == "waiting"
    assert "has already: waiting" in launch(code=2)
    first = service.start(told["job"])
    await_steps(first.run, 3)
    assert standing()["state"] == "running"
    first.signal()
    assert first.wait(taken_back=True) == [SAVED], first.said()
    one = newest_step(first.run)
    found = standing()
    assert (found["state"], found["step"]) == ("waiting", one - 1)
    assert int(found["checkpoint"].removeprefix("step-")) == one

    second = service.start(told["job"])
    await_steps(second.run, one + 3)
    phalanx("stop", "run", "--wait", "0")
    assert second.wait() == [SAVED], second.said()
    assert standing()["state"] == "stopped"
    two = newest_step(second.run)
    assert 0 < one < two < STEPS
    assert "whose run stands at s3://bucket/phalanx/" in launch(code=2)

    write_job(Path(), steps=STEPS)  # nothing is to come before its end any more
    again = json.loads(launch(*spot, "--resume", "--json"))
    assert again["job"] != told["job"]
    third = service.start(again["job"])
    assert third.wait() == [0], third.said()
    found = standing()
    assert (found["state"], found["step"]) == ("ended", STEPS - 1)
    assert found["loss"] == pytest.approx(by_hand(STEPS)[-1], rel=1e-5)
    assert_undisturbed(third.run, STEPS, one, two)
    assert_no_secret(Path("run"), third)


def assert_no_secret(folder: Path, job: Containers) -> None:
    """Nothing that was written here, sent or copied has one of this machine's secrets."""
    client = boto3.client("s3")
    sent = [one["Key"] for one in client.list_objects_v2(Bucket="bucket")["Contents"]]
    told = json.dumps(boto3.client("sagemaker").describe_training_job(TrainingJobName=job.job), default=str)
    texts = [told.encode(), job.said().encode()]
    texts += [client.get_object(Bucket="bucket", Key=key)["Body"].read() for key in sent]
    texts += [path.read_bytes() for root in (folder, *job.roots) for path in root.rglob("*") if path.is_file()]
    assert len(texts) > 10
    for name in ("AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"):
        assert not [text for text in texts if SETTINGS[name].encode() in text], name


def test_why_a_job_failed_is_left_for_sagemaker_and_each_line_says_its_rank(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job").mkdir()
    path = write_job(tmp_path / "job", steps=3)
    spoilt = "    print('computing')\n    raise ValueError('no such loss')"
    path.write_text(path.read_text().replace("    time.sleep(PAUSE)", spoilt))
    job = start("dp=2", steps=3, restarts=0)
    assert job.wait() == [1], job.said()
    assert "no such loss" in job.failure()
    (failed,) = re.findall(r"^rank (\d+)", job.failure())  # the other may have been ended before its own error
    assert len(job.failure()) <= 1024
    lines = job.said().splitlines()
    assert {line for line in lines if "computing" in line} <= {"[rank 0] computing", "[rank 1] computing"}
    assert any(line.startswith(("[rank 0] ", "[rank 1] ")) and "no such loss" in line for line in lines)
    told = standing()
    assert told["state"] == "failed"
    assert "no such loss" in told["detail"]
    said = phalanx("logs", "run", "--rank", failed, "--follow")
    assert "no such loss" in said
    assert "[rank" not in said


def test_a_signal_before_there_are_workers_ends_it_at_once(start: Start) -> None:
    job = start("dp=2", steps=6, pause=1.0)
    until_code_is_there(job.roots[0])
    job.stop()
    assert job.wait() == [SAVED], job.said()
    assert job.failure() == ""


def until_code_is_there(root: Path) -> None:
    until = time.monotonic() + 90
    while not (root / "phalanx" / "run.toml").exists():
        assert time.monotonic() < until
        time.sleep(0.01)


def container(root: Path, **hyperparameters: str) -> Path:
    """A root with as little as a container may have."""
    config = root / "input" / "config"
    config.mkdir(parents=True)
    (root / "input" / "data" / "code").mkdir(parents=True)
    (config / "hyperparameters.json").write_text(json.dumps(hyperparameters))
    place = {"current_host": "algo-1", "hosts": ["algo-1"], "network_interface_name": "eth0"}
    (config / "resourceconfig.json").write_text(json.dumps(place))
    return root


@pytest.fixture
def _signals_as_before() -> Iterator[None]:
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.mark.usefixtures("_signals_as_before")
class TestBeforeWorkers:
    def test_code_that_is_not_there(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        root = container(tmp_path)
        assert main(root) == 3
        assert "code.tar.gz is not there" in capsys.readouterr().err
        assert "code.tar.gz is not there" in (root / "output" / "failure").read_text()

    def test_code_that_is_another(self, tmp_path: Path) -> None:
        root = container(tmp_path, **{"code.tar.gz-sha256": "0" * 64})
        for name in ("code.tar.gz", "run.toml"):
            (root / "input" / "data" / "code" / name).write_bytes(b"another")
        assert main(root) == 3
        assert "is not what was packed" in (root / "output" / "failure").read_text()
        assert not (root / "phalanx" / "code").exists()

    def test_a_signal_ends_it_whatever_it_interrupts(self) -> None:
        """Such as an import that takes what is raised for its own failure."""
        pid = fork()
        if pid == 0:
            signal.signal(signal.SIGTERM, sagemaker_node._leave)
            try:
                os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(10)
            except BaseException:
                os._exit(9)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == SAVED

    def test_hosts_that_are_none(self, tmp_path: Path) -> None:
        root = container(tmp_path)
        (root / "input" / "config" / "resourceconfig.json").write_text('{"hosts": ["algo-1"], "current_host": "x"}')
        assert main(root) == 2
        assert "current_host, which is one of them" in (root / "output" / "failure").read_text()


_LAST_LINES = """
import os, subprocess, sys
from pathlib import Path
from phalanx.launch.reaper import adopt_orphans, await_orphans
from phalanx.launch.targets.node_agent import worker_words

adopt_orphans()
words = worker_words(Path("run.toml"), Path(sys.argv[2]), marked=True)
words[3] = sys.argv[1]  # in place of this Python
code = subprocess.run(words, env={**os.environ, "RANK": "3"}).returncode
await_orphans(20)
sys.exit(code)
"""


def test_each_line_says_its_rank_and_the_last_are_there_when_the_container_ends(tmp_path: Path) -> None:
    worker = tmp_path / "python"
    worker.write_text("#!/bin/sh\necho \"$@\"\nsleep 0.1\necho 'ValueError: no' >&2\nprintf 'no end'\nexit 3\n")
    worker.chmod(0o755)
    words = [sys.executable, "-c", _LAST_LINES, str(worker), str(tmp_path)]
    done = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 3
    assert done.stdout.splitlines() == [
        f"[rank 3] {line}" for line in ("-m phalanx worker run.toml", "ValueError: no", "no end")
    ]
    assert (tmp_path / "rank-3.log").read_text().endswith("ValueError: no\nno end")
