"""Where nothing has proven a plan's techniques, its first run does: once, and it goes on only where it is equal."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import pytest
import small
import torch
from click.testing import CliRunner

import phalanx as px
from phalanx import verify
from phalanx.cli import main
from phalanx.errors import RefusedError, WorkerError
from phalanx.hardware import proven
from phalanx.hardware.proven import Ground
from phalanx.parallel.ddp import DdpLayout
from phalanx.report.summary import summarise


@pytest.fixture(autouse=True)
def _own_proofs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proven, "_folder", lambda: tmp_path / "proofs")


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The plans that a proof was made of, on a version of torch that nobody has tried."""
    plans: list[str] = []
    own = verify.prove

    def counted(job: px.Job, plan: px.Plan, **how: Any) -> Any:
        plans.append(str(plan))
        return own(job, plan, **how)

    monkeypatch.setattr(verify, "prove", counted)
    another_torch(monkeypatch)
    return plans


def another_torch(monkeypatch: pytest.MonkeyPatch, version: str = "9.1.0") -> None:
    monkeypatch.setattr(proven, "torch_version", lambda: version)


JOB = """
import small

def job():
    return small.job(epochs=1)
"""


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device on which what ranks add up loses a thousandth, on one of them."""
    own = DdpLayout.finish

    def finish(self: DdpLayout) -> None:
        own(self)
        if torch.distributed.get_rank() == 1:
            for parameter in self.parameters.values():
                assert parameter.grad is not None
                parameter.grad.mul_(1 - 1e-3)

    monkeypatch.setattr(DdpLayout, "finish", finish)


def plain(steps: int) -> list[float]:
    """What plain PyTorch on one device has, of rows in their order."""
    rows = [range(n * small.BATCH, (n + 1) * small.BATCH) for n in range(steps)]
    return small.plain_losses(small.batches_of(small.table().columns, map(list, rows)))


def given() -> px.Job:
    return small.job(steps=2, epochs=None, shuffle=False)


def fit(plan: str, folder: str, **how: Any) -> px.Run:
    return px.fit(given(), plan, folder=folder, forecast="none", **how)


def test_a_proven_kind_is_asked_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify, "prove", None)
    monkeypatch.setattr(proven, "store", None)
    assert len(fit("dp=2", "run").losses) == 2


def test_it_is_asked_once_whatever_the_sizes(asked: list[str], caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "phalanx"):
        run = fit("dp=2", "first")
    (line,) = (one.getMessage() for one in caplog.records if "never proven" in one.getMessage())
    assert line.startswith("dp was never proven on cpu")
    assert "torch 9.1.0" in line
    assert asked == ["dp=2"]
    assert run.losses == pytest.approx(plain(2), rel=1e-5)
    fit("dp=3", "second")
    fit("single", "third")  # replicas of something show that something alone
    assert asked == ["dp=2"]
    assert not list(run.events("warning"))


def test_other_techniques_and_versions_ask_again(asked: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    fit("dp=2", "first")
    fit("fsdp=2", "second")
    another_torch(monkeypatch, "9.2.0")
    fit("dp=2", "third")
    assert asked == ["dp=2", "fsdp=2", "dp=2"]


def test_what_is_not_equal_is_refused_before_there_is_a_step(
    asked: list[str], broken: None, capfd: pytest.CaptureFixture[str]
) -> None:
    for _ in range(2):  # nothing is stored of it
        with pytest.raises(RefusedError, match="not equal to one device over 3 steps") as refused:
            fit("dp=2", "run")
        assert "unproven=True" in str(refused.value)
        assert not Path("run/events.jsonl").exists()
        assert not Path("run/run.toml").exists()
    with pytest.raises(RefusedError, match="not equal to one device"):
        px.start(given(), "dp=2", folder="run", forecast="none")
    assert not Path("run/events.jsonl").exists()
    assert not list(Path().glob("proofs/*"))
    assert len(asked) == 2  # the third is asked in the run's own process


def test_it_goes_on_where_it_is_told_to_and_says_so(asked: list[str], broken: None) -> None:
    run = fit("dp=2", "run", unproven=True)
    assert len(run.losses) == 2
    assert asked == []
    (told,) = run.events("warning")
    assert told["message"].startswith("not proven: dp on cpu")
    assert any(one.startswith("not proven: dp on cpu") for one in summarise(run.folder).warnings)
    assert px.RunSpec.from_toml((run.folder / "run.toml").read_text()).unproven
    with pytest.raises(RefusedError, match="not equal"):
        fit("dp=2", "run", resume=True)


def test_the_command_line(asked: list[str], broken: None) -> None:
    Path("job.py").write_text(JOB)
    words = ["train", "job.py", "--plan", "dp=2", "--run", "run", "--no-forecast", "--steps", "2"]
    result = CliRunner().invoke(main, words)
    assert result.exit_code == RefusedError.exit_code, result.output
    assert "--unproven trains all the same" in result.output
    assert "phalanx prove JOB" in result.output
    result = CliRunner().invoke(main, [*words, "--unproven"])
    assert result.exit_code == 0, result.output
    assert "not proven: dp on cpu" in result.output


def test_prove_stores_what_it_finds_equal(asked: list[str]) -> None:
    px.prove(small.job(), "dp=2", steps=2)
    fit("dp=2", "run")
    assert asked == ["dp=2"]  # that one


def test_prove_stores_nothing_that_differs(asked: list[str], broken: None) -> None:
    assert not px.prove(small.job(), "dp=2", steps=2).equal
    assert not list(Path().glob("proofs/*"))


def test_a_plan_that_is_not_one_device_s_is_asked_for_the_word(asked: list[str]) -> None:
    with pytest.raises(RefusedError, match="no proof can be had: no step of it is one device's") as refused:
        fit("dp=2 server=1 staleness=2", "run")
    assert "unproven=True" in str(refused.value)
    run = fit("dp=2 server=1 staleness=2", "run", unproven=True)
    told = next(run.events("warning"))
    assert told["message"].startswith("not proven: dp server staleness on cpu")
    assert asked == []


def test_a_job_that_no_proof_can_run_is_asked_for_the_word(asked: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def too_large(*given: Any, **how: Any) -> None:
        raise WorkerError("rank 0: out of memory", rank=0, step=0, kind="OutOfMemoryError", traceback="")

    monkeypatch.setattr(verify, "prove", too_large)
    with pytest.raises(RefusedError, match="no proof can be had: rank 0: out of memory"):
        fit("dp=2", "run")


def test_a_damaged_proof_is_asked_for_again(asked: list[str]) -> None:
    fit("dp=2", "first")
    for path in Path("proofs").iterdir():
        path.write_bytes(path.read_bytes()[:40])
    fit("dp=2", "second")
    fit("dp=2", "third")
    assert asked == ["dp=2", "dp=2"]


def test_a_proof_that_cannot_be_kept_is_said(asked: list[str], caplog: pytest.LogCaptureFixture) -> None:
    Path("proofs").write_text("a file where the folder is to be")
    with caplog.at_level(logging.WARNING, "phalanx"):
        assert len(fit("dp=2", "run").losses) == 2
    assert any("cannot be kept" in one.getMessage() for one in caplog.records)


def test_runs_that_prove_at_once(asked: list[str]) -> None:
    runs = [px.start(given(), "dp=2", folder=f"run{n}", forecast="none") for n in range(2)]
    for run in runs:
        run.wait(200)
    assert len(list(Path("proofs").iterdir())) == 2  # of dp and of single
    fit("dp=2", "after")
    assert asked == []  # those in processes of their own aside


def test_many_write_the_same_proof(tmp_path: Path) -> None:
    """Whoever reads meanwhile finds a whole one."""
    ground = Ground.of(px.Plan(dp=2), "cpu")
    assert proven.store(ground, {}) == ""
    children: list[int] = []
    for _ in range(4):
        if (child := os.fork()) == 0:
            os._exit(any(proven.store(ground, {"n": "x" * 4000}) for _ in range(50)))
        children.append(child)
    while children:
        assert proven.stored(ground) is not None
        done, status = os.waitpid(children[-1], os.WNOHANG)
        if done:
            assert status == 0
            children.pop()
    assert sorted(path.suffix for path in (tmp_path / "proofs").iterdir()) == [".json", ".json"]
