"""A kind of device without a file in Phalanx computes what one device does; what does not, the first step shows."""

from __future__ import annotations

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

import phalanx as px
from law_rows import longer
from phalanx.cli import main
from phalanx.device_kinds import registered
from phalanx.errors import RefusedError, RunError
from phalanx.parallel.ddp import DdpLayout
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


@pytest.fixture(params=[_loses, *longer(_averages, _computes)])
def faulty(request: pytest.FixtureRequest) -> Iterator[str]:
    """A plan of two devices of a kind that does not compute what one device does."""
    with registered(Faulty(request.param)):
        yield "dp=2 device=faulty"


def given() -> px.Job:
    return small.job(steps=2, epochs=None, shuffle=False)


def fit(plan: str, folder: str, **how: Any) -> px.Run:
    return px.fit(given(), plan, folder=folder, forecast="none", **how)


def test_a_run_stops_at_a_first_step_that_differs(faulty: str) -> None:
    with pytest.raises(RunError, match="the first step differs from one device: ") as stopped:
        fit(faulty, "run")
    assert "to find the cause" in str(stopped.value)
    assert not list(Path("run").glob("checkpoints/*"))
    run = fit(faulty, "off", check="off")
    assert len(run.losses) == 2
    assert not list(run.events("check"))
    assert px.RunSpec.from_toml((run.folder / "run.toml").read_text()).check == "off"


def test_the_command_line(faulty: str) -> None:
    Path("job.py").write_text(JOB)
    words = ["train", "job.py", "--plan", faulty, "--run", "run", "--no-forecast", "--steps", "2"]
    result = CliRunner().invoke(main, words)
    assert result.exit_code == RunError.exit_code, result.output
    assert "differs from one device" in result.output
    assert f'--plan "{faulty}" to find the cause; --check off' in " ".join(result.output.split())
    result = CliRunner().invoke(main, [*words[:-4], "other", *words[-3:], "--check", "off"])
    assert result.exit_code == 0, result.output


@pytest.mark.parametrize(
    "plan", ["tp=2 pp=2 micro=4", *longer("dp=2 micro=3", "fsdp=2 zero=3", "fsdp=2 zero=2", "threads=2")]
)
def test_it_computes_what_one_device_computes(plan: str) -> None:
    how: dict[str, Any] = {"model": small.Blocks, "inputs": lambda batch: batch["x"]}
    run = px.fit(small.job(**how), f"{plan} device=standin", folder="run", forecast="none")
    assert run.losses == pytest.approx(small.fit("single", "one", **how).losses, rel=2e-5)
    assert [event["device"] for event in run.events("start")] == ["standin"]
    (said,) = run.events("check")
    assert said["equal"]
    assert said["message"].startswith("first step equals one device (")


@pytest.mark.parametrize("changed", [{"most": 1}, {"forks": False}, {"precisions": ("fp32",)}])
def test_what_a_kind_cannot_is_refused_before_a_folder_is_made(changed: dict[str, Any], tmp_path: Path) -> None:
    kind = type("Limited", (StandIn,), {"name": "limited", "hardware": ("limited",), "on_host": False, **changed})()
    with registered(kind), pytest.raises(RefusedError) as caught:
        px.fit(given(), "dp=2 device=limited precision=bf16", folder=tmp_path / "run")
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
    (tmp_path / "run.toml").write_text('job = "job.py"\nplan = "dp=2 device=standin"\nfolder = "started"\n')
    worker = ("--no-python", sys.executable, "-m", "phalanx", "worker", "run.toml")
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *worker],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, there))},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    run = px.load(tmp_path / "started")
    assert [event["device"] for event in run.events("start")] == ["standin"]
