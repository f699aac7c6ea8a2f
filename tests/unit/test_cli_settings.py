"""Where the values of a run come from: argument, run file, job, default."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from phalanx.cli.settings import Given, earlier_run, settle
from phalanx.config import Job, Plan, RunSpec
from phalanx.errors import RefusedError, SpecError

pytestmark = pytest.mark.quick


def job(**changes: Any) -> Job:
    given: dict[str, Any] = dict.fromkeys(("model", "data", "loss", "optimizer"), print)
    return Job(**{**given, "batch": 64, "epochs": 3, "name": "toy", **changes})


def given(**changes: Any) -> Given:
    none: dict[str, Any] = {"plan": None, "devices": None, "folder": None, "resume": False, "values": {}}
    return Given(**{**none, "job": "toy.py", **changes})


def sources(settings: Any) -> dict[str, tuple[str, str]]:
    return {one.name: (one.value, one.source) for one in settings}


def test_job_and_defaults() -> None:
    run, settings = settle(given(plan=Plan()), None, job())
    assert (run.batch, run.epochs, run.steps) == (None, None, None)
    found = sources(settings)
    assert found["batch"] == ("64", "job")
    assert found["epochs"] == ("3", "job")
    assert found["keep"] == ("2", "default")
    assert found["plan"] == ("single", "argument")
    assert found["run"][1] == "default"
    assert "steps" not in found


def test_arguments_win(tmp_path: Path) -> None:
    earlier = RunSpec(job="toy.py", plan=Plan(dp=4), folder=tmp_path, batch=32, epochs=7, lr_scale=2.0, keep=5)
    values = {"steps": 10, "keep": 1, "batch": None}
    run, settings = settle(given(devices=2, folder=tmp_path, resume=True, values=values), earlier, job())
    assert (run.plan, run.steps, run.epochs, run.batch, run.lr_scale, run.keep) == (Plan(dp=2), 10, None, 32, 2.0, 1)
    found = sources(settings)
    assert found["steps"] == ("10", "argument")
    assert found["batch"] == ("32", "run file")
    assert found["lr-scale"] == ("2.0", "run file")
    assert found["plan"] == ("dp=2", "argument")
    assert found["keep"] == ("1", "argument")


def test_the_run_file_stands_where_nothing_is_given(tmp_path: Path) -> None:
    earlier = RunSpec(job="toy.py", plan=Plan(fsdp=2), folder=tmp_path, epochs=7)
    run, settings = settle(given(folder=tmp_path, resume=True), earlier, job())
    assert (run.plan, run.epochs) == (Plan(fsdp=2), 7)
    assert sources(settings)["epochs"] == ("7", "run file")


def test_a_resume_takes_each_setting_of_the_run_file(tmp_path: Path) -> None:
    """Else the command that a run prints as it dies, such as one begun with --anyway, would be refused."""
    changed: dict[str, Any] = {
        "lr_scale": 2.0,
        "checkpoint_every": 7,
        "checkpoint": "trainable",
        "keep": 5,
        "keep_every": 3,
        "mirror": "s3://a/b",
        "grace": 5.0,
        "restarts": 9,
        "log_every": 4,
        "on_nonfinite": "skip",
        "spike": 8.0,
        "on_spike": "skip",
        "timeout": 90.0,
        "drift": "warn",
        "drift_every": 6,
        "forecast": "anyway",
        "unproven": True,
        "snapshot_every": 2,
        "devices": "1:2",
        "grow_after": "9m",
    }
    asked_anew = {"job", "plan", "asked_plan", "folder", "resume", "from_step", "batch", "epochs", "steps"}
    assert {field.name for field in fields(RunSpec)} == {*changed, *asked_anew}
    for plan, lacking in (
        (Plan(dp=2), {"snapshot_every"}),
        (Plan(dp=2, server=1), {"devices", "grow_after", "checkpoint"}),
    ):
        kept = {name: value for name, value in changed.items() if name not in lacking}
        earlier = RunSpec(job="toy.py", plan=plan, folder=tmp_path, **kept)
        run, settings = settle(given(folder=tmp_path, resume=True), earlier, job())
        assert {name: getattr(run, name) for name in kept} == kept
        assert {sources(settings)[name.replace("_", "-")][1] for name in kept} == {"run file"}


def test_only_a_resume_reads_the_run_file(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(RunSpec(job="toy.py", plan=Plan(dp=2), folder=tmp_path).to_toml())
    assert earlier_run(given(folder=tmp_path)) is None
    read = earlier_run(given(folder=tmp_path, resume=True))
    assert read is not None
    assert read.plan == Plan(dp=2)


def test_threads_count_as_devices() -> None:
    given(plan=Plan(threads=2), devices=2)
    with pytest.raises(RefusedError, match="threads = n"):
        given(plan=Plan(threads=2), devices=4)


def test_wrong_values_are_named() -> None:
    with pytest.raises(SpecError, match="epochs and steps"):
        settle(given(plan=Plan(), values={"steps": 3, "epochs": 3}), None, job())
    with pytest.raises(SpecError, match="lr_scale"):
        settle(given(plan=Plan(), values={"lr_scale": 0.0}), None, job())
