"""Functions of a job's own that are called with the events of its run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from small import fit, job

import phalanx as px
from phalanx.errors import SpecError

Event = dict[str, Any]


@pytest.mark.parametrize("plan", ["single", "dp=2", "dp=2 server=1"])
def test_they_are_called_once_a_run_with_every_event_of_their_name(plan: str, tmp_path: Path) -> None:
    steps, ends = list[Event](), list[Event]()
    run = fit(plan, tmp_path / "run", callbacks={"step": steps.append, "end": ends.append})
    assert steps == list(run.events("step"))
    assert len(steps) == 8
    assert ends == list(run.events("end"))


def test_what_an_earlier_part_of_the_run_did_is_no_news(tmp_path: Path) -> None:
    fit("dp=2", tmp_path / "run", epochs=None, steps=3)
    steps = list[int]()
    fit("dp=2", tmp_path / "run", resume=True, callbacks={"step": lambda event: steps.append(event["step"])})
    assert steps == [3, 4, 5, 6, 7]


def test_one_that_raises_is_named_and_left_out_and_the_run_goes_on(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "__stderr__", sys.stderr)
    calls, others = list[int](), list[int]()

    def raises(event: Event) -> None:
        calls.append(event["step"])
        raise KeyError("accuracy")

    callbacks = {"step": raises, "checkpoint": lambda event: others.append(event["step"])}
    run = fit("dp=2", tmp_path / "run", checkpoint_every=4, callbacks=callbacks)
    assert (calls, others) == ([0], [4, 8])
    assert len(run.losses) == 8
    said = capfd.readouterr().err
    assert said.count("the callback of step") == 1
    assert f"{__file__}:" in said
    assert "KeyError: 'accuracy'" in said


@pytest.mark.parametrize(
    ("callbacks", "said"),
    [
        ({"evaluation": print}, r"job\.callbacks: given 'evaluation'(.|\n)*callbacks=\{'evaluate': print\}"),
        ({"step": "print"}, r"job\.callbacks: (.|\n)*names of events"),
        ([print], r"job\.callbacks: (.|\n)*names of events"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_starts(callbacks: Any, said: str, tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=said):
        px.fit(job(callbacks=callbacks), "dp=2", folder=tmp_path / "run")
    assert not (tmp_path / "run").exists()


JOB = """
import sys
sys.path.insert(0, {small!r})
import small

def job():
    return small.job(callbacks={{"end": lambda event: open("called", "a").write(f"{{event['step']}} ")}})
"""


@pytest.mark.parametrize("more", [[], ["--launcher", "torchrun"]])
def test_the_command_calls_them_too(more: list[str], tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(JOB.format(small=str(Path(__file__).parent)))
    command = [sys.executable, "-m", "phalanx", "train", "job.py", "--plan", "dp=2", "--quiet", "--no-forecast", *more]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "called").read_text() == "8 "
