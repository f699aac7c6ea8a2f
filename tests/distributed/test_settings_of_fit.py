"""Settings of a run that ``px.fit`` and ``px.start`` take by their names, and which run a folder may go on with."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from small import BATCH, LENGTH, Net, job, table
from torch import nn

import phalanx as px
from phalanx.cli import main
from phalanx.errors import SpecError
from phalanx.launch import local
from phalanx.train.build_model import build_model

IN_FILE = """
from small import job as made, table

def ok():
    return made(shuffle=False)

def other():
    return made(shuffle=False, batch=16)

def fewer():
    return made(shuffle=False, data=lambda: table(99))
"""


def plain(steps: int) -> list[float]:
    """Losses of so many steps in plain PyTorch."""
    model, data, losses = build_model(job()), table(), list[float]()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(steps):
        first = step * BATCH % (LENGTH + BATCH - LENGTH % BATCH)
        batch = data.__getitems__(np.arange(first, min(first + BATCH, LENGTH)))
        loss = nn.functional.cross_entropy(model(batch["x"]), batch["y"])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.fixture
def shop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., px.Run]:
    """Trains the job for so many steps in the folder ``run`` of an empty working directory."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "shop.py").write_text(IN_FILE)

    def fit(plan: str, begin: Callable[..., px.Run] = px.fit, **settings: Any) -> px.Run:
        return begin(job(shuffle=False), plan, folder="run", forecast="none", **settings)

    return fit


@pytest.mark.parametrize("plan", ["dp=2", "fsdp=2 zero=3", "threads=2"])
def test_a_run_goes_on_as_if_it_had_not_ended(plan: str, shop: Callable[..., px.Run]) -> None:
    shop(plan, steps=5, resume="auto", checkpoint_every=2, keep=9)
    run = shop("dp=2", px.start, steps=9, resume="auto").wait()
    assert run.losses == pytest.approx(plain(9), rel=1e-5)
    assert [event["step"] for event in run.events("checkpoint")][:3] == [2, 4, 5]
    assert next(run.events("resume"))["step"] == 5


def test_a_run_of_a_script_and_of_the_command_line_are_one(shop: Callable[..., px.Run]) -> None:
    shop("single", steps=2)
    words = ["--run", "run", "--resume", "--no-forecast", "--steps"]
    done = CliRunner().invoke(main, ["train", "shop.py:ok", *words, "3"])
    assert done.exit_code == 0, done.output
    run = shop("single", steps=4, resume=True)
    assert run.losses == pytest.approx(plain(4), rel=1e-5)
    assert "shop.py:ok" in Path("run/run.toml").read_text()  # what the command line may go on with
    other = CliRunner().invoke(main, ["train", "shop.py:other", *words, "5"])
    assert other.exit_code == 2
    assert "which holds a run of" in other.output


def test_only_two_names_that_were_given_are_two_jobs(shop: Callable[..., px.Run]) -> None:
    shop("single", steps=2)
    named = px.RunSpec(job="j", plan=px.Plan(), folder=Path("run"), forecast="none")
    assert len(px.fit(job(shuffle=False), run=named, steps=3, resume=True).losses) == 3
    with pytest.raises(SpecError, match=r"holds a run of j.* for the job k"):
        px.fit(job(shuffle=False, name="k"), folder="run", resume=True)
    with pytest.raises(SpecError, match="belongs to another job"):
        px.fit(job(shuffle=False, batch=16), folder="run", resume=True)


class Wider(Net):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(9, 7)
        self.extra = nn.Linear(7, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.extra(super().forward(x))


OTHERS = {
    r"only in the model: extra.weight, extra.bias; other shapes: head.weight \[7, 9\] now, \[5, 9\] there": {
        "model": Wider
    },
    r"another job \(samples of the data: 103 there, 99 now\)": {"data": lambda: table(99)},
}


@pytest.mark.parametrize("plan", ["single", "dp=2", "pp=2"])
@pytest.mark.parametrize("words", OTHERS)
def test_another_model_and_other_data_are_refused_before_a_worker_starts(
    words: str, plan: str, shop: Callable[..., px.Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    shop("dp=2", steps=2)
    before = Path("run/events.jsonl").read_bytes()
    started = list[Any]()
    monkeypatch.setattr(local.LocalLauncher, "start", lambda *given: started.append(given))
    with pytest.raises(SpecError, match=words) as refused:
        px.fit(job(shuffle=False, **OTHERS[words]), plan, folder="run", forecast="none", steps=4, resume=True)
    assert 'folder="run-anew"' in str(refused.value)
    assert not started
    assert Path("run/events.jsonl").read_bytes() == before
    done = CliRunner().invoke(main, ["train", "shop.py:fewer", "--run", "run", "--resume", "--plan", plan])
    assert (done.exit_code, started) == (2, [])
    assert "samples of the data: 103 there, 99 now" in done.output
    assert "--run run-anew" in done.output


def test_settings_that_there_are_none_of(shop: Callable[..., px.Run]) -> None:
    with pytest.raises(
        SpecError, match=r"checkpoint_evry: given 5; allowed: settings of a run: (?s:.*)try: checkpoint_every"
    ):
        shop("single", checkpoint_evry=5)
    with pytest.raises(SpecError, match="resume: given 'auto' without a folder"):
        px.fit(job(), "single", resume="auto")
    with pytest.raises(SpecError, match=r"run\.resume: given 'yes'"):
        shop("single", resume="yes")
    assert not Path("run").exists()


STOPPED = """
import os, signal, sys
sys.path.insert(0, {small!r})
import phalanx as px
from small import job

seen = []

def interrupt():
    if os.path.exists("run/events.jsonl") and '"step"' in open("run/events.jsonl").read() and not seen:
        seen.append(1)
        os.kill(os.getpid(), signal.SIGINT)

px.fit(job(epochs=3000), "dp=2", folder="run", forecast="none", watch=interrupt)
"""


def test_a_script_that_is_stopped_by_hand_says_where_it_stands(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(STOPPED.format(small=str(Path(__file__).parent)))
    done = subprocess.run([sys.executable, "script.py"], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    step = px.Run(folder=tmp_path / "run").checkpoint().name.removeprefix("step-").lstrip("0")
    assert done.returncode == -signal.SIGINT
    assert f"KeyboardInterrupt: run folder: run, newest checkpoint: step {step}\n" in done.stderr
    assert done.stderr.endswith('try: folder="run", resume=True\n')
    assert done.stderr.count('  File "') == 2
