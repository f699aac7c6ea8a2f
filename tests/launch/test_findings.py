"""What the launcher has found of a job, workers that are programs of their own need not look for again."""

from __future__ import annotations

from pathlib import Path

import pytest
from launched import by_hand, write_job

import phalanx as px
from phalanx.launch import load_job


def test_a_job_is_looked_at_once(tmp_path: Path) -> None:
    path = write_job(tmp_path)
    text = path.read_text().replace(
        "def model():\n", 'def model():\n    open(f"{__file__}.{os.getpid()}", "w").close()\n'
    )
    path.write_text(f"import os\n{text}")
    spec = px.RunSpec(job=str(path), plan=px.Plan(dp=2), folder=tmp_path / "run", forecast="none")
    run = px.fit(load_job(str(path)), run=spec, launcher="torchrun", watch=False)
    assert run.losses == pytest.approx(by_hand(6), rel=1e-5)
    built = list(tmp_path.glob("train.py.*"))
    assert len(built) == 3, "the process that looks, and two workers"
