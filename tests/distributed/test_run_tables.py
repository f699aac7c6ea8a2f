"""What a run in Python says of how it went, and of one that another process trains."""

from __future__ import annotations

import builtins
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from small import fit, table

import phalanx as px
from phalanx.errors import MissingExtraError, SpecError

pytest.importorskip("pandas", reason="tables are of pandas")


@pytest.mark.parametrize("plan", ["single", "dp=2", "dp=2 server=1"])
def test_a_table_has_each_step_once_as_it_went_the_last_time(plan: str, tmp_path: Path) -> None:
    # checkpoints of servers are taken as updates come in, so that a run with some is not gone on with here
    how: dict[str, Any] = {"evaluate": lambda: table(40, seed=1), "evaluate_every": 2, "best": px.Best("loss")}
    run = fit(plan, tmp_path / "run", checkpoint_every=2, **(how if "server" not in plan else {}))
    log = run.folder / "events.jsonl"
    written = [json.loads(line) for line in log.read_text().splitlines()]
    steps = [one for one in written if one["event"] == "step"]
    again = {**steps[1], "loss": 1234.0}
    with log.open("a") as file:
        file.write(json.dumps(again) + "\n")

    losses = run.metrics()["loss"]
    assert losses.index.name == "step"
    assert list(losses.index) == [one["step"] for one in steps]
    assert list(losses) == [1234.0 if one["step"] == 1 else one["loss"] for one in steps]
    assert not run.running
    if "server" in plan:
        assert run.best is None
        assert run.evaluations() == []
        assert run.metrics("evaluate").empty
        return
    evaluations = [one for one in written if one["event"] == "evaluate"]
    assert len(evaluations) > 2
    assert run.evaluations() == evaluations
    assert run.best == min(evaluations, key=lambda one: one["loss"])
    shown = run.metrics("evaluate")
    assert list(shown["loss"]) == [one["loss"] for one in evaluations]
    assert list(run.metrics("checkpoint").index)[-1] == len(steps)


def test_a_run_of_another_process_is_read_while_it_goes_on(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    script = f"""
import sys, time
sys.path.insert(0, {str(Path(__file__).parent)!r})
from small import fit
import phalanx as px
def loss(output, batch):
    time.sleep(0.05)
    return px.cross_entropy(output, batch["y"])
fit("single", {str(folder)!r}, epochs=None, steps=1000, loss=loss)
"""
    with subprocess.Popen([sys.executable, "-c", script], stderr=subprocess.DEVNULL) as other:
        try:
            until = time.monotonic() + 120
            while not (folder / "events.jsonl").exists() or len(px.load(folder).metrics()) < 2:
                assert other.poll() is None
                assert time.monotonic() < until
                time.sleep(0.05)
            run = px.load(folder)
            assert run.running
            first = len(run.metrics())
            while len(run.metrics()) == first:
                assert time.monotonic() < until
                time.sleep(0.05)
        finally:
            other.terminate()
    assert not run.running
    assert len(run.metrics().dropna(subset=["loss"])) == len(run.metrics()) > first
    assert os.listdir(run.folder / "checkpoints")  # as it was asked to stop, it saved


def test_what_cannot_be_a_table_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = fit("single", tmp_path / "run", epochs=1)
    with pytest.raises(SpecError, match=r"event: given 'memory'; allowed: step, evaluate, checkpoint"):
        run.metrics("memory")
    found = builtins.__import__

    def without(name: str, *rest: Any, **more: Any) -> Any:
        if name == "pandas":
            raise ImportError(name)
        return found(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(MissingExtraError, match=r"pip install 'phalanx\[pandas\]'"):
        run.metrics()
