"""What of this machine counts for a queue, which runs on others: its packages and data, or those of an image."""

from __future__ import annotations

import json
import os
import sys
import time
import venv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from launched import write_job
from test_target_laws import CASES, QUEUES, own_words, submission

from phalanx.cli import main
from phalanx.launch.check_hosts import CheckTime
from phalanx.launch.targets import QueueTarget, find_target, target_class
from phalanx.preflight import launch_check

WHY_NOT = {name: target_class(name).why_not for name in QUEUES}  # type: ignore[attr-defined]
IMAGES = {"kubernetes", "sagemaker"}


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    write_job(tmp_path)
    for name in QUEUES:
        monkeypatch.setattr(target_class(name), "why_not", lambda self, prepared, patience: "")
    yield
    sys.modules.pop("train", None)


def check(name: str, *words: str) -> tuple[int, dict[str, Any]]:
    argv = ["check", "train.py", "--to", CASES[name].to, "--run", "run", *own_words(name), *words, "--json"]
    plan = () if "-n" in CASES[name].run else ("--plan", "dp=2")
    result = CliRunner().invoke(main, [*argv, *(plan or CASES[name].run)])
    assert result.exit_code in (0, 1), result.output
    return result.exit_code, json.loads(result.stdout)


@pytest.mark.parametrize("name", QUEUES)
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


@pytest.mark.parametrize("name", QUEUES)
def test_a_target_says_what_image_its_machines_run(name: str) -> None:
    target = find_target(CASES[name].to)
    assert isinstance(target, QueueTarget)
    assert target.image({"image": "registry/train:1"}) == ("registry/train:1" if name in IMAGES else "")
    assert bool(target.image({})) == (name in IMAGES)


def test_an_interpreter_that_is_not_here_is_named() -> None:
    code, answer = check("slurm", "--python", "/no/such/python", "--grace", "10")
    (finding,) = answer["findings"]
    assert (code, finding["kind"], finding["fails"]) == (0, "packages", False)
    assert finding["what"].startswith("/no/such/python is not on this machine")


def test_packages_are_those_of_the_interpreter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONPATH", raising=False)
    venv.create(tmp_path / "empty", symlinks=True)
    other = tmp_path / "empty" / "bin" / "python"
    code, answer = check("slurm", "--python", str(other), "--grace", "10")
    assert code == 1
    said = {one["what"] for one in answer["findings"] if one["kind"] == "packages" and one["fails"]}
    assert {"torch is not installed", "phalanx is not installed"} <= said


def test_the_interpreter_of_an_image_is_not_looked_for_here() -> None:
    code, answer = check("kubernetes", "--python", "/opt/conda/bin/python")
    assert (code, answer["findings"]) == (0, [])


def test_a_queue_that_does_not_answer_in_time_has_refused_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    target, given = submission("slurm")
    assert isinstance(target, QueueTarget)
    monkeypatch.setattr(launch_check, "_OF_QUEUE", 0.2)
    monkeypatch.setattr(type(target), "why_not", lambda self, prepared, patience: time.sleep(patience) or "too late")
    told = "whether slurm would take it: it has not answered in time"
    assert launch_check._asked_of(target, given, CheckTime(0.0)) == ([], told)


@pytest.mark.parametrize(("name", "program"), [("slurm", "sbatch"), ("kubernetes", "kubectl")])
def test_asking_a_queue_takes_no_longer_than_it_may(
    name: str, program: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(target_class(name), "why_not", WHY_NOT[name])
    silent = tmp_path / "bin" / program
    silent.parent.mkdir()
    silent.write_text("#!/bin/sh\nexec sleep 300\n")
    silent.chmod(0o755)
    monkeypatch.setenv("PATH", f"{silent.parent}:{os.environ['PATH']}")
    target, given = submission(name)
    assert isinstance(target, QueueTarget)
    began = time.monotonic()
    assert "does not answer" in str(target.why_not(target.prepare(given), 0.5))
    assert time.monotonic() - began < 30
