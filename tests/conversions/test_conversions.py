"""What other tools train and the Phalanx job of it come to the same: a script as people write it, and the job.

Both see the same samples in each step and begin with the same values, so what remains is rounding: a gradient that
is a sum over ``batch`` samples is off by ``batch`` roundings of 2⁻²⁴ at most, and ``steps`` of them add up.
"""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import sklearn.datasets  # noqa: F401  here: it sets environment variables

import phalanx as px
from longer import longer
from phalanx.launch.jobfile import load_job

FOLDER = Path(__file__).parent
ROUNDING = 2**-24
GENERATE: dict[str, Any] = runpy.run_path(str(FOLDER.parents[1] / "tools" / "generate.py"))
_TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


@dataclass(frozen=True, kw_only=True, slots=True)
class Conversion:
    """A script of another tool, by the words before its path, and what has to be installed for it."""

    name: str
    start: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()

    @property
    def missing(self) -> str:
        return ", ".join(one for one in self.needs if find_spec(one) is None)


CONVERSIONS = {
    one.name: one
    for one in (
        Conversion(name="from_ddp", start=_TORCHRUN),
        Conversion(name="from_transformers_trainer", needs=("transformers", "accelerate")),
        Conversion(name="from_accelerate", start=_TORCHRUN, needs=("accelerate",)),
        Conversion(name="from_lightning", needs=("lightning",)),
    )
}
PLANS = ("single", "dp=2", "fsdp=2 zero=3", "tp=2")
TRIED = [
    *(("from_ddp", plan) for plan in PLANS),
    *longer(*(("from_transformers_trainer", plan) for plan in ("single", "fsdp=2 zero=3"))),
    *(("from_transformers_trainer", plan) for plan in ("dp=2", "tp=2")),
    *((name, "dp=2") for name in ("from_accelerate", "from_lightning")),
    *longer(*((name, "fsdp=2 zero=3") for name in ("from_accelerate", "from_lightning"))),
]


def python(*words: str, folder: Path) -> str:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *words], cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=110
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@cache
def before(name: str, folder: Path) -> dict[str, float]:
    """What the script prints at its end."""
    folder.mkdir(exist_ok=True)
    printed = python(*CONVERSIONS[name].start, str(FOLDER / name / "before.py"), folder=folder)
    found = re.search(r"accuracy ([\d.]+) loss ([\d.]+)", printed)
    assert found, printed
    return {"accuracy": float(found[1]), "loss": float(found[2])}


@pytest.mark.parametrize(("name", "plan"), TRIED)
def test_job_comes_to_what_the_script_comes_to(
    name: str, plan: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    if missing := CONVERSIONS[name].missing:
        pytest.skip(f"not installed: {missing}")
    there = before(name, tmp_path_factory.getbasetemp() / name)
    job = load_job(str(GENERATE["conversion_files"](name)[1]))
    run = px.fit(job, plan, folder=tmp_path / "run")
    evaluation = run.evaluation
    assert evaluation
    tolerance = len(run.losses) * job.batch * ROUNDING
    assert evaluation["loss"] == pytest.approx(there["loss"], rel=tolerance)
    assert evaluation["metrics"]["accuracy"] == pytest.approx(there["accuracy"], abs=1e-6), "printed with 6 decimals"


@pytest.mark.quick
@pytest.mark.parametrize("name", CONVERSIONS)
def test_job_is_not_longer_than_the_script(name: str) -> None:
    script, job = map(GENERATE["lines_of"], GENERATE["conversion_files"](name))
    assert job <= script
