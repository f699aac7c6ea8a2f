"""What ``px.fit`` and ``px.start`` say of a run where nobody looks on: all that differs from one device."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path

import pytest
from small import Net, job
from torch import nn

import phalanx as px

SCRIPT = """
import sys
sys.path.insert(0, {small!r})
import phalanx as px
from small import Net, job
from torch import nn

made = job(model=lambda: nn.Sequential(nn.Dropout(0.5), Net()), inputs=lambda batch: batch["x"], epochs=1)
run = {begin}(made, "dp=2 micro=64", folder="run", forecast="none", keep=1)
getattr(run, "wait", lambda: run)()
print(len(run.losses))
"""


@pytest.mark.parametrize("begin", ["px.fit", "px.start"])
def test_a_script_whose_output_is_no_terminal_says_what_differs(begin: str, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT.format(small=str(Path(__file__).parent), begin=begin))
    done = subprocess.run([sys.executable, "script.py"], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "4", done.stderr
    assert "differs from one device: dropout draws other random numbers" in done.stderr
    assert done.stderr.count("micro=64 splits nothing") == 1


def test_a_function_that_looks_on_is_called_and_told_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    looks = list[int]()
    made = job(model=lambda: nn.Sequential(nn.Dropout(0.5), Net()), inputs=lambda batch: batch["x"], epochs=1)
    with caplog.at_level(logging.WARNING, "phalanx"):
        px.fit(made, "dp=2", folder=tmp_path / "run", forecast="none", watch=lambda: looks.append(1))
        said = [record.message for record in caplog.records]
        px.fit(made, "dp=2", folder=tmp_path / "quiet", forecast="none", watch=False)
    assert looks
    assert any("differs from one device: dropout draws other" in one for one in said)
    assert len(caplog.records) == len(said)
