"""The law of launchers, for each in the table: what goes in, what comes back, and that nothing is left.

A new launcher is held by it as soon as it has its line in ``LAUNCHERS``. So is the one that CONTRIBUTING.md shows.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch
from inject import LIMIT, alive, noted, wait_until

import phalanx as px
from law_rows import longer
from phalanx.config import Plan, RunSpec
from phalanx.errors import RefusedError, RunError, SpecError, WorkerError
from phalanx.events import read
from phalanx.launch import LAUNCHERS, Launch, find_launcher, launch, load_job

JOB = """
import os
import signal
import sys
import time
from pathlib import Path
import torch
import torch.distributed as dist
import phalanx.config as px
from phalanx.errors import Problem, RefusedError

FAULT = {fault!r}
STEPS = []

def strike():
    if FAULT in ("kill once", "stop once"):
        if Path(__file__).with_name("struck").exists():
            return
        Path(__file__).with_name("struck").touch()
        os.kill(os.getpid(), signal.SIGTERM if FAULT == "stop once" else signal.SIGKILL)
    if FAULT == "raise":
        raise ValueError("the injected fault")
    if FAULT == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if FAULT == "refuse":
        raise RefusedError([Problem(where="job.data", given="nothing", allowed="something", fix="data=list")])

def loss(output, batch):
    if dist.is_initialized():  # in a worker
        STEPS.append(1)
        rank = dist.get_rank()
        if len(STEPS) == 1:
            Path(__file__).with_name(f"pid-{{os.getpid()}}").touch()
            print(f"rank {{rank}} of {{dist.get_world_size()}}, local rank {{os.environ.get('LOCAL_RANK', rank)}}")
            print(f"warning of rank {{rank}}", file=sys.stderr)
        if FAULT == "hang":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            time.sleep(600)
        if rank == 1 and len(STEPS) == 3:
            strike()
    return output.square().mean()

def model():
    Path(__file__).with_name(f"built-{{os.getpid()}}").touch()
    return torch.nn.Linear(4, 2)

def job():
    return px.Job(model=model, data=lambda: list(torch.ones(32, 4)), loss=loss,
                  optimizer=lambda params: torch.optim.SGD(params, lr=0.1), batch=4, epochs=1)
"""

EXAMPLE = "processes"
NAMES = [*LAUNCHERS, EXAMPLE]
ROOT = Path(__file__).resolve().parents[2]

# Workers of "local" are started, ended and replaced by the other files here.
LONG = pytest.mark.parametrize("name", longer("torchrun", "local", EXAMPLE))
TORCHRUN = pytest.mark.parametrize("name", ["torchrun", *longer("local", EXAMPLE)])
pytestmark = pytest.mark.timeout(120)


@pytest.fixture(autouse=True)
def _example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = re.search(rf'```python title="{EXAMPLE}.py"\n(.*?)```', (ROOT / "CONTRIBUTING.md").read_text(), re.DOTALL)
    assert found
    (tmp_path / f"{EXAMPLE}.py").write_text(found[1])
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, EXAMPLE, raising=False)
    monkeypatch.setitem(LAUNCHERS, EXAMPLE, f"{EXAMPLE}:ProcessesLauncher")


@pytest.fixture(autouse=True)
def _nothing_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    launch(lambda place, report: None, 1)  # the first store of a process opens a pipe that torch then keeps
    descriptors, before = len(os.listdir("/proc/self/fd")), {*psutil.Process().children(recursive=True)}
    (temporary := tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    yield
    assert {*psutil.Process().children(recursive=True)} <= before
    assert wait_until(lambda: alive(noted(tmp_path)) == [], 20.0)
    assert len(os.listdir("/proc/self/fd")) <= descriptors
    # torch makes the folder of its compiler when it first asks where that is
    assert [name for name in os.listdir(temporary) if not name.startswith("torchinductor_")] == []


def spec(folder: Path, fault: str = "") -> RunSpec:
    folder.mkdir(exist_ok=True)
    file = folder / f"law_{fault.replace(' ', '_') or 'well'}.py"
    file.write_text(JOB.format(fault=fault))
    how = {"steps": 4, "forecast": "none", "grace": 1.0, "restarts": 0}
    return RunSpec(job=str(file), plan=Plan(dp=2), folder=folder / "run", **how)


def fit(run: RunSpec, name: str, watch: Callable[[], None] | None = None) -> px.Run:
    return px.fit(load_job(run.job), run=run, launcher=name, watch=watch)


@pytest.mark.parametrize("name", ["torchrun", *longer("local", EXAMPLE)])
def test_the_result_is_that_of_local(name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run = spec(tmp_path)
    done = fit(run, name)
    assert RunSpec.from_toml((run.folder / "run.toml").read_text()) == replace(run, folder=run.folder.absolute())
    assert len(done.losses) == 4
    output, errors = capfd.readouterr()
    lines = [line.removeprefix("[rank 1] ") for line in output.splitlines()]
    assert sorted(lines) == ["rank 0 of 2, local rank 0", "rank 1 of 2, local rank 1"]
    assert [f"warning of rank {rank}" in errors for rank in range(2)] == [True, True]
    if name == "torchrun":
        assert len(list(tmp_path.glob("built-*"))) == 4, "the process that looks, two workers, the one beside rank 0"
    if name != "local":
        assert done.losses == fit(replace(run, folder=tmp_path / "local"), "local").losses


@TORCHRUN
@pytest.mark.parametrize(
    ("fault", "kind", "words"),
    [
        ("kill", "signal 9", "rank 1 of 2 was ended in step 2 by SIGKILL"),
        *longer(("raise", "ValueError", "rank 1 of 2 failed in step 2: ValueError: the injected fault")),
    ],
)
def test_the_worker_that_fails_is_named_with_its_cause(
    name: str, fault: str, kind: str, words: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run = spec(tmp_path, fault)
    with pytest.raises(WorkerError) as caught:
        fit(run, name)
    assert (caught.value.rank, caught.value.step, caught.value.kind, caught.value.exit_code) == (1, 2, kind, 3)
    assert str(caught.value).startswith(words)
    assert "what to do: " in str(caught.value)
    assert ("in strike" in caught.value.traceback) == (fault == "raise")
    errors = [event for event in read(run.folder / "events.jsonl") if event["event"] == "error"]
    assert [(event["rank"], event["step"], event["message"]) for event in errors] == [(1, 2, words)]
    assert "the injected fault" not in capfd.readouterr().err  # whoever called says it, once


@TORCHRUN
def test_a_run_is_started_again_after_a_lost_worker(name: str, tmp_path: Path) -> None:
    run = replace(spec(tmp_path, "kill once"), restarts=1, grace=30.0)
    done = fit(run, name)
    (restart,) = done.events("restart")
    assert restart["source"].startswith("from ")
    assert done.losses == fit(replace(spec(tmp_path), folder=tmp_path / "other"), "local").losses


@LONG
def test_a_worker_that_is_asked_to_stop_stops_the_run_with_a_checkpoint(name: str, tmp_path: Path) -> None:
    run = replace(spec(tmp_path, "stop once"), steps=500, grace=30.0)
    if name == EXAMPLE:  # it has no word for it: the run is over for it, and goes on with resume
        fit(run, name)
    else:
        with pytest.raises(SystemExit) as stop:
            fit(run, name)
        assert stop.value.code == 75
    (stopped,) = px.Run(folder=run.folder).events("stopped")
    assert (run.folder / "checkpoints" / f"step-{stopped['step']:08d}").is_dir()
    done = fit(replace(run, resume=True, steps=stopped["step"] + 1), name)
    assert [event["step"] for event in done.events("step")] == list(range(stopped["step"] + 1))


@LONG
def test_what_a_worker_refuses_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(RefusedError, match=r"job\.data: given nothing") as caught:
        fit(spec(tmp_path, "refuse"), name)
    assert caught.value.exit_code == 2


@TORCHRUN
@pytest.mark.parametrize("number", [signal.SIGKILL, *longer(signal.SIGTERM, signal.SIGINT)])
def test_workers_end_with_their_launcher(name: str, number: int, tmp_path: Path) -> None:
    run = spec(tmp_path, "hang")
    with started(run, name, tmp_path) as process:
        try:
            assert wait_until(lambda: len(noted(tmp_path)) == 2, 100)
            process.send_signal(number)
            assert process.wait(LIMIT) == {signal.SIGTERM: 143}.get(number, -number)
            assert wait_until(lambda: alive(noted(tmp_path)) == [], LIMIT)
        finally:
            process.kill()


def started(run: RunSpec, name: str, temporary: Path) -> subprocess.Popen[bytes]:
    script = (
        "import phalanx as px; from pathlib import Path; from phalanx.launch import LAUNCHERS, load_job\n"
        f"LAUNCHERS[{name!r}] = {LAUNCHERS[name]!r}\n"
        f"run = px.RunSpec(job={run.job!r}, plan=px.Plan(dp=2), folder=Path({str(run.folder)!r}), forecast='none', "
        f"grace={run.grace}, restarts={run.restarts})\n"
        f"px.fit(load_job(run.job), run=run, launcher={name!r})"
    )
    return subprocess.Popen([sys.executable, "-c", script], env={**os.environ, "TMPDIR": str(temporary)})


@pytest.mark.parametrize("name", NAMES)
def test_what_cannot_be_started_is_refused(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kind, words = SpecError, f"{name}, for a job that only this process has"
    if name == "local":
        kind, words = RunError, "this process already uses CUDA"
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    run = spec(tmp_path)
    with pytest.raises(kind, match=words):
        px.fit(load_job(run.job), run.plan, folder=run.folder, launcher=name)
    assert not run.folder.exists()


@pytest.mark.parametrize("name", NAMES)
def test_one_that_does_not_exist_is_told_which_do(name: str, tmp_path: Path) -> None:
    run = spec(tmp_path)
    with pytest.raises(SpecError) as caught:
        fit(run, f"{name}x")
    (problem,) = caught.value.problems
    assert problem.allowed == ", ".join([*LAUNCHERS, "ssh:hosts.toml"])
    assert problem.fix == f'launcher="{name}"'
    assert not run.folder.exists()


@pytest.mark.parametrize("name", ["torchrun", EXAMPLE])
def test_a_launcher_that_does_not_fork_says_what_it_cannot_do(name: str) -> None:
    wanted = Launch(world_size=2, function=lambda place, report: None)
    with pytest.raises(SpecError) as caught:
        find_launcher(name).prepare(wanted)
    assert [problem.where for problem in caught.value.problems] == ["launcher"]
