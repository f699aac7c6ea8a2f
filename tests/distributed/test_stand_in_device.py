"""A kind of device without a file in Phalanx: its first run proves a plan, once, and computes what one device does."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import small
import torch
from click.testing import CliRunner
from test_torchrun import torchrun

import phalanx as px
from longer import longer
from phalanx import verify
from phalanx.cli import main
from phalanx.device_kinds import registered
from phalanx.errors import RefusedError
from phalanx.hardware import proven
from phalanx.parallel.ddp import DdpLayout
from phalanx.report.summary import summarise
from stand_in_kind import KIND, StandIn

JOB = """
import small

def job():
    return small.job(epochs=1)
"""


def _change(by: Callable[[torch.Tensor], Any]) -> None:
    """From now on this process gets other sums of gradients."""
    own = DdpLayout.finish

    def finish(self: DdpLayout) -> None:
        own(self)
        for parameter in self.parameters.values():
            assert parameter.grad is not None
            by(parameter.grad)

    DdpLayout.finish = finish


def _loses(index: int) -> None:
    """On the second device a thousandth of every sum is lost."""
    if index == 1:
        _change(lambda grad: grad.mul_(1 - 1e-3))


def _averages(index: int) -> None:
    """All devices divide a sum once more."""
    _change(lambda grad: grad.div_(2))


def _computes(index: int) -> None:
    """The second device errs by a hundredth in a function."""
    own = torch.relu
    if index == 1:
        torch.relu = lambda x: own(x) * 1.01


class Faulty(StandIn):
    """A stand-in of which a worker's device brings a fault into that worker's process."""

    name, hardware = "faulty", ("faulty",)

    def __init__(self, fault: Callable[[int], None]) -> None:
        self._fault = fault

    def device(self, index: int) -> torch.device:
        self._fault(index)
        return super().device(index)


@pytest.fixture(autouse=True)
def _standin() -> Iterator[None]:
    with registered(KIND):
        yield


@pytest.fixture(params=[_averages, *longer(_loses, _computes)])
def faulty(request: pytest.FixtureRequest) -> Iterator[str]:
    """A plan of two devices of a kind that does not compute what one device does."""
    with registered(Faulty(request.param)):
        yield "dp=2 device=faulty"


@pytest.fixture
def loses() -> Iterator[str]:
    with registered(Faulty(_loses)):
        yield "dp=2 device=faulty"


PROOFS: dict[str, Any] = {}


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The plans of which a proof is made in this process; of a plan each proof after the first is that one."""
    plans: list[str] = []
    own = verify.prove

    def counted(job: px.Job, plan: px.Plan, **how: Any) -> Any:
        plans.append(str(plan))
        if (key := f"{plan} {how.get('steps')}") not in PROOFS:
            PROOFS[key] = own(job, plan, **how)
        return PROOFS[key]

    monkeypatch.setattr(verify, "prove", counted)
    return plans


def given() -> px.Job:
    return small.job(steps=2, epochs=None, shuffle=False)


def fit(plan: str, folder: str, **how: Any) -> px.Run:
    return px.fit(given(), plan, folder=folder, forecast="none", **how)


def plain(steps: int) -> list[float]:
    """What plain PyTorch on one device has, of rows in their order."""
    rows = [range(n * small.BATCH, (n + 1) * small.BATCH) for n in range(steps)]
    return small.plain_losses(small.batches_of(small.table().columns, map(list, rows)))


def test_a_proven_kind_is_asked_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify, "prove", None)
    monkeypatch.setattr(proven, "store", None)
    monkeypatch.setattr(proven, "stored", None)
    assert len(fit("dp=2", "run").losses) == 2


def test_it_is_asked_once_whatever_the_sizes(asked: list[str], caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "phalanx"):
        run = fit("dp=2 device=standin", "first")
    (line,) = (one.getMessage() for one in caplog.records if "never proven" in one.getMessage())
    assert line.startswith("dp was never proven on standin")
    assert f"torch {torch.__version__}" in line
    assert asked == ["dp=2 device=standin"]
    assert run.losses == pytest.approx(plain(2), rel=1e-5)
    fit("dp=3 device=standin", "second")
    fit("device=standin", "third")  # replicas of something show that something alone
    assert asked == ["dp=2 device=standin"]
    assert not list(run.events("warning"))


def test_other_techniques_and_versions_ask_again(asked: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    fit("dp=2 device=standin", "first")
    fit("micro=4 device=standin", "second")
    monkeypatch.setattr(proven, "torch_version", lambda: "9.2.0")
    fit("dp=2 device=standin", "third")
    fit("dp=2", "fourth")  # nor has anybody tried the host's cores with that
    fit("dp=2", "fifth")
    assert asked == ["dp=2 device=standin", "micro=4 device=standin", "dp=2 device=standin", "dp=2"]


def test_nothing_is_stored_of_what_differs(asked: list[str], faulty: str) -> None:
    for begin in (px.fit, px.start):
        with pytest.raises(RefusedError, match="not equal to one device") as refused:
            begin(given(), faulty, folder="run", forecast="none")
        assert "unproven=True" in str(refused.value)
    assert not px.prove(small.job(), faulty, steps=2).equal
    assert not Path("run").exists()
    assert not Path("proofs").exists()
    assert asked == [faulty] * 2  # that of ``start`` is made in the run's own process


def test_it_goes_on_where_it_is_told_to_and_says_so(asked: list[str], loses: str) -> None:
    run = fit(loses, "run", unproven=True)
    assert len(run.losses) == 2
    assert asked == []
    (told,) = run.events("warning")
    assert told["message"].startswith("not proven: dp on faulty")
    assert any(one.startswith("not proven: dp on faulty") for one in summarise(run.folder).warnings)
    assert px.RunSpec.from_toml((run.folder / "run.toml").read_text()).unproven
    with pytest.raises(RefusedError, match="not equal"):
        fit(loses, "run", resume=True)


def test_the_command_line(loses: str) -> None:
    Path("job.py").write_text(JOB)
    words = ["train", "job.py", "--plan", loses, "--run", "run", "--no-forecast", "--steps", "2"]
    result = CliRunner().invoke(main, words)
    assert result.exit_code == RefusedError.exit_code, result.output
    assert "--unproven trains all the same" in result.output
    assert "phalanx prove JOB" in result.output
    result = CliRunner().invoke(main, [*words, "--unproven"])
    assert result.exit_code == 0, result.output
    assert "not proven: dp on faulty" in result.output


def test_prove_stores_what_it_finds_equal(asked: list[str]) -> None:
    assert px.prove(small.job(), "dp=2 device=standin", steps=2).equal  # which is too few
    assert not Path("proofs").exists()
    px.prove(small.job(), "dp=2", steps=3)  # which ships proven
    assert not Path("proofs").exists()
    px.prove(small.job(), "dp=2 device=standin", steps=3)
    fit("dp=2 device=standin", "run")
    assert asked == ["dp=2 device=standin", "dp=2", "dp=2 device=standin"]  # those of ``px.prove``


def test_a_plan_that_is_not_one_device_s_is_asked_for_the_word(asked: list[str]) -> None:
    plan = "dp=2 device=standin server=1 staleness=2"
    with pytest.raises(RefusedError, match="no proof can be had") as refused:
        fit(plan, "run")
    assert "unproven=True" in str(refused.value)
    run = fit(plan, "run", unproven=True)
    told = next(run.events("warning"))
    assert told["message"].startswith("not proven: dp server staleness on standin")
    assert asked == []


def test_runs_that_prove_at_once(asked: list[str]) -> None:
    runs = [px.start(given(), "dp=2 device=standin", folder=f"run{n}", forecast="none") for n in range(2)]
    for run in runs:
        run.wait(200)
    assert len(list(Path("proofs").iterdir())) == 2  # of dp and of single
    fit("dp=2 device=standin", "after")
    assert asked == []


@pytest.mark.parametrize(
    ("how", "then"), [({}, "px.prove(job, plan)"), ({"unproven": True}, "told to go on without a proof")]
)
def test_a_loop_of_ones_own_is_told(how: dict[str, Any], then: str, caplog: pytest.LogCaptureFixture) -> None:
    spec = px.RunSpec(job="mine", plan=px.Plan.parse("device=standin"), folder=Path("run"), forecast="none", **how)
    with caplog.at_level(logging.WARNING, "phalanx"):
        step, loader = px.build(given(), run=spec)
        for batch in loader:
            step(batch)
    told = [one.getMessage() for one in caplog.records if "not proven: single on standin" in one.getMessage()]
    assert len(told) == 1
    assert then in told[0]
    assert [one["message"] for one in px.load("run").events("warning")] == told


SCRIPT = f"""
sys.path.insert(0, {str(Path(__file__).resolve().parents[1])!r})
from pathlib import Path
import test_stand_in_device as kinds
from phalanx import verify
from phalanx.device_kinds import registered
from phalanx.errors import RefusedError
from phalanx.hardware import proven

asked, own, losses = [], verify.prove, []

def counted(job, plan, **how):
    asked.append(str(plan))
    return own(job, plan, **how)

verify.prove = counted
proven._folder = lambda: Path("proofs")
with registered(kinds.KIND), registered(kinds.Faulty(kinds._loses)):
    try:
        px.fit(kinds.given(), "dp=2 device=faulty", folder="refused", forecast="none")
    except RefusedError as error:
        (refused,) = error.problems
    for folder in ("first", "second"):
        losses.append(px.fit(kinds.given(), "dp=2 device=standin", folder=folder, forecast="none").losses)
say("end", refused=refused.given, made=os.path.exists("refused"), asked=asked, losses=losses)
"""


def test_rank_0_of_torchruns_workers_proves_for_all(tmp_path: Path) -> None:
    first, second = torchrun(SCRIPT, tmp_path)
    assert "not equal to one device over 3 steps" in first["refused"]
    assert first["refused"] == second["refused"]
    assert not first["made"]
    assert first["asked"] == ["dp=2 device=faulty", "dp=2 device=standin"]  # and not for the second run of it
    assert second["asked"] == []
    assert first["losses"] == second["losses"] == [pytest.approx(plain(2), rel=1e-5)] * 2


def test_a_run_that_may_lose_devices_proves_the_plans_on_fewer(asked: list[str]) -> None:
    fit("dp=2 device=standin", "first", devices="1:2")
    assert asked == ["dp=2 device=standin", "micro=16 device=standin"]  # one device takes the batch in two
    fit("dp=2 device=standin", "second", devices="1:2")
    assert len(asked) == 2


@pytest.mark.parametrize(
    "plan", ["tp=2 pp=2 micro=4", *longer("dp=2 micro=3", "fsdp=2 zero=3", "fsdp=2 zero=2", "threads=2")]
)
def test_it_computes_what_one_device_computes(plan: str) -> None:
    how: dict[str, Any] = {"model": small.Blocks, "inputs": lambda batch: batch["x"]}
    run = px.fit(small.job(**how), f"{plan} device=standin", folder="run", forecast="none", unproven=True)
    assert run.losses == pytest.approx(small.fit("single", "one", **how).losses, rel=2e-5)
    assert [event["device"] for event in run.events("start")] == ["standin"]


@pytest.mark.parametrize("changed", [{"most": 1}, {"forks": False}, {"precisions": ("fp32",)}])
def test_what_a_kind_cannot_is_refused_before_a_folder_is_made(changed: dict[str, Any], tmp_path: Path) -> None:
    kind = type("Limited", (StandIn,), {"name": "limited", "hardware": ("limited",), "on_host": False, **changed})()
    with registered(kind), pytest.raises(RefusedError) as caught:
        px.fit(given(), "dp=2 device=limited precision=bf16", folder=tmp_path / "run", unproven=True)
    text = str(caught.value)
    assert "stand-in devices" in text
    assert not (tmp_path / "run").exists()


PACKAGE = """
import os
from stand_in_kind import StandIn

class Elsewhere(StandIn):
    forks = False

    def before_workers(self, machines, workers):
        os.environ["STAND_IN_WORKERS"] = f"{machines} {workers}"

    def device(self, index):
        assert os.environ["STAND_IN_WORKERS"] == "1 2", "nobody got this process ready"
        return super().device(index)

KIND = Elsewhere()
"""


def test_an_installed_package_brings_a_kind_to_every_process(tmp_path: Path) -> None:
    """Its workers are processes of their own: they find it as the command does, and are got ready by it."""
    (tmp_path / "stand_in_package.py").write_text(PACKAGE)
    info = tmp_path / "stand_in_package-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: stand-in-package\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[phalanx.device_kinds]\nstandin = stand_in_package:KIND\n")
    (tmp_path / "job.py").write_text(JOB)
    there = [tmp_path, Path(__file__).parent, Path(__file__).parents[1], os.environ.get("PYTHONPATH", "")]
    how = ("--plan", "dp=2 device=standin", "--run", "started", "--launcher", "torchrun", "--unproven")
    done = subprocess.run(
        [sys.executable, "-m", "phalanx", "train", "job.py", *how],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, there))},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    run = px.load(tmp_path / "started")
    assert [event["device"] for event in run.events("start")] == ["standin"]
