"""Hold jobs converted from other tools' scripts to what the scripts come to, which is stored in ``scripts.json``.

Script and job see the same samples in each step and begin with the same values, so what remains is rounding: a gradient
that is a sum over ``batch`` samples is off by ``batch`` roundings of 2⁻²⁴ at most, and ``steps`` of them add up.
"""

from __future__ import annotations

import json
import os
import re
import runpy
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import sklearn.datasets  # noqa: F401  here: it sets environment variables

import phalanx as px
from law_rows import longer
from phalanx.launch.jobfile import load_job

FOLDER = Path(__file__).parent
ROUNDING = 2**-24
STORED: dict[str, dict[str, float]] = json.loads((FOLDER / "scripts.json").read_text())
GENERATE: dict[str, Any] = runpy.run_path(str(FOLDER.parents[1] / "tools" / "generate.py"))
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
STARTS = {"from_ddp": TORCHRUN, "from_accelerate": TORCHRUN}
NEEDS = {
    "from_accelerate": "accelerate",
    "from_transformers_trainer": "accelerate",
    "from_lightning": "pytorch_lightning",
}
JOBS = {
    "digits_after.py": ("from_ddp", "from_accelerate", "from_lightning"),
    "from_transformers_trainer/after.py": ("from_transformers_trainer",),
}


@pytest.mark.parametrize(
    ("file", "plan"),
    [
        ("digits_after.py", "dp=2"),
        ("from_transformers_trainer/after.py", "tp=2"),
        *longer(*(("digits_after.py", plan) for plan in ("single", "fsdp=2 zero=3", "tp=2"))),
        *longer(*(("from_transformers_trainer/after.py", plan) for plan in ("single", "fsdp=2 zero=3", "dp=2"))),
    ],
)
def test_a_job_comes_to_what_the_scripts_come_to(file: str, plan: str, tmp_path: Path) -> None:
    job = load_job(str(FOLDER / file))
    run = px.fit(job, plan, folder=tmp_path / "run")
    assert run.evaluation
    for name in JOBS[file]:
        tolerance = len(run.losses) * job.batch * ROUNDING
        assert run.evaluation["loss"] == pytest.approx(STORED[name]["loss"], rel=tolerance), name
        assert run.evaluation["metrics"]["accuracy"] == pytest.approx(STORED[name]["accuracy"], abs=1e-6), name


def ended(name: str, folder: Path) -> dict[str, float]:
    """Run the script of ``name`` and return the accuracy and the loss that it prints last."""
    words = [sys.executable, *STARTS.get(name, ()), str(FOLDER / name / "before.py")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=110)
    found = re.search(r"accuracy ([\d.]+) loss ([\d.]+)", done.stdout)
    assert found, done.stdout + done.stderr
    return {"accuracy": float(found[1]), "loss": float(found[2])}


@pytest.mark.long
@pytest.mark.parametrize("name", STORED)
def test_a_script_comes_to_what_is_stored(name: str, tmp_path: Path) -> None:
    if name in NEEDS and find_spec(NEEDS[name]) is None:
        pytest.skip(f"not installed: {NEEDS[name]}")
    assert ended(name, tmp_path) == pytest.approx(STORED[name], rel=1e-4)


@pytest.mark.quick
def test_jobs_are_not_longer_than_the_scripts() -> None:
    for name in STORED:
        script, job = map(GENERATE["lines_of"], GENERATE["conversion_files"](name))
        assert job <= script, name
