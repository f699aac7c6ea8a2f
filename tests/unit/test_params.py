"""Values that a job declares and its caller overrides: read in their types, kept with the run, and none ignored."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import phalanx as px
from phalanx.config.run import RunSpec
from phalanx.errors import SpecError
from phalanx.launch.jobfile import Reference, declared_values, going_on, load_job, with_values

JOB = """
import torch
import phalanx as px

WIDTH = px.param("width", 4)

def job():
    lr = px.param("lr", 0.1)
    bias = px.param("bias", True)
    name = px.param("name", "mine")
    return px.Job(
        model=lambda: torch.nn.Linear(4, WIDTH, bias=bias),
        data=lambda: px.Table(input=torch.arange(64.0).reshape(16, 4) / 64),
        loss=lambda output, batch: output.square().mean(),
        optimizer=lambda params: torch.optim.SGD(params, lr=lr),
        batch=4, steps=2, name=name,
    )
"""


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / f"declares_{abs(hash(tmp_path))}.py"
    path.write_text(JOB)
    return str(path)


def values(reference: str) -> dict[str, object]:
    load_job(reference)
    return {one.name: one.value for one in declared_values(reference)}


def error(reference: str) -> str:
    with pytest.raises(SpecError) as raised:
        load_job(reference)
    return str(raised.value)


def test_values_are_of_the_type_of_their_default_also_at_the_top_level_of_a_loaded_file(file: str) -> None:
    assert values(file) == {"width": 4, "lr": 0.1, "bias": True, "name": "mine"}
    given = with_values(file, {"width": "8", "lr": "1e-3", "bias": "false", "name": "a&b = c?d"})
    assert values(given) == {"width": 8, "lr": 1e-3, "bias": False, "name": "a&b = c?d"}
    assert load_job(given).model().out_features == 8
    assert values(given) == {"width": 8, "lr": 1e-3, "bias": False, "name": "a&b = c?d"}
    assert load_job(file).model().out_features == 4
    assert str(Reference.parse(str(Reference.parse(given)))) == given.replace(file, str(Path(file).resolve()))


def test_what_nothing_declares_and_what_is_of_another_type_is_one_error(file: str) -> None:
    assert "bias, lr, name, width" in error(f"{file}?lrr=1")
    assert "a whole number" in error(f"{file}?width=2.5")
    assert "a number" in error(f"{file}?lr=fast")
    assert "true or false" in error(f"{file}?bias=maybe")


def test_in_python_a_block_overrides_and_tells_of_what_it_did_not_read() -> None:
    with px.params(lr=1, name="x"):
        assert (px.param("lr", 0.5), px.param("name", "y"), px.param("other", 3)) == (1.0, "x", 3)
    assert px.param("lr", 0.5) == 0.5
    with pytest.raises(SpecError, match="does not declare"), px.params(lr=1.0):
        pass
    with pytest.raises(SpecError, match="whole number"), px.params(n=True):
        px.param("n", 3)
    with px.params():
        px.param("n", 3)
        with pytest.raises(SpecError, match="one default"):
            px.param("n", 4)


def test_a_run_that_goes_on_has_the_values_it_began_with(file: str) -> None:
    began = with_values(str(Path(file).resolve()), {"lr": "0.5"})
    assert going_on(file, began) == f"{file}?lr=0.5"
    assert going_on(f"{file}?lr=2", began) == f"{file}?lr=2"
    assert going_on("another.py", began) == "another.py"


def phalanx(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "phalanx", *words], capture_output=True, text=True, check=False)


@pytest.mark.parametrize("plan", ["dp=2"])
def test_train_keeps_the_values_in_the_run_file_and_resumes_with_them(file: str, plan: str, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    common = ["train", file, "--run", str(folder), "--no-forecast"]
    began = phalanx(*common, "--plan", plan, "--set", "lr=0.5", "--set", "width=8")
    assert began.returncode == 0, began.stderr
    kept = Reference.parse(RunSpec.from_toml((folder / "run.toml").read_text()).job).values
    assert kept == (("lr", "0.5"), ("width", "8"))
    went_on = phalanx(*common, "--resume", "--steps", "3", "--explain")
    assert went_on.returncode == 0, went_on.stderr
    rows = [line.split() for line in went_on.stderr.splitlines() if "set width" in line]
    assert rows == [["set", "width", "8", "run", "file"]]
    state = px.load(folder).state_dict()
    assert state["weight"].shape == (8, 4)


@pytest.mark.parametrize("bad", [["--set", "lr"], ["--set", "lr=1", "--set", "lr=2"]])
def test_a_refused_override_names_the_option(file: str, bad: list[str]) -> None:
    refused = phalanx("show", file, *bad)
    assert refused.returncode == 2
    assert "--set" in refused.stderr
