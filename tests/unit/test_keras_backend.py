"""Keras is imported for those who use it alone, and on another backend than torch the error says what to set."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

JOB = """
import keras
import numpy as np
import phalanx as px

def make():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
    model.compile(optimizer="sgd", loss="mse")
    return model

def job():
    return px.from_keras(make, data=(np.zeros((8, 4)), np.zeros((8, 2))), batch=4, epochs=1)
"""
needs_keras = pytest.mark.skipif(
    find_spec("keras") is None, reason="Keras is not installed: pip install 'phalanx[keras]'"
)


def run(*command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "COLUMNS": "300", **environment}
    return subprocess.run([sys.executable, *command], env=environment, check=False, text=True, capture_output=True)


@needs_keras
@pytest.mark.parametrize("backend", ["jax", "numpy"])
def test_another_backend_is_refused_with_what_to_set(backend: str, tmp_path: Path) -> None:
    if find_spec(backend) and backend == "jax":
        pytest.skip("jax is installed, and Keras runs on it")
    (tmp_path / "keras_job.py").write_text(JOB)
    done = run("-m", "phalanx", "show", "keras_job.py", "--plan", "dp=2", KERAS_BACKEND=backend)
    assert done.returncode == 2, done.stdout + done.stderr
    assert "KERAS_BACKEND" in done.stderr
    assert "torch" in done.stderr.rpartition("try:")[2], done.stderr


def test_a_job_without_keras_imports_none_of_it(tmp_path: Path) -> None:
    """What stands in the place of Keras cannot be imported."""
    (tmp_path / "keras").mkdir()
    (tmp_path / "keras" / "__init__.py").write_text("raise AssertionError('keras was imported')")
    (tmp_path / "plain.py").write_text(
        "import phalanx as px, sys, torch\n"
        "model = lambda: torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4), torch.nn.Dropout(0.1))\n"
        "data = lambda: px.Table(x=torch.ones(8, 4), y=torch.ones(8, 4))\n"
        "loss = lambda output, batch: torch.nn.functional.mse_loss(output, batch['y'])\n"
        "job = px.Job(model=model, data=data, loss=loss, optimizer=lambda p: torch.optim.SGD(p, lr=0.1),\n"
        "             inputs=lambda batch: (batch['x'],), batch=4, epochs=1)\n"
        "px.fit(job, 'dp=2')\n"
        "print([name for name in sys.modules if name.partition('.')[0] == 'keras'])\n"
    )
    done = run("plain.py", PYTHONPATH=os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[]"
