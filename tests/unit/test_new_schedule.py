"""A pipeline schedule is added as CONTRIBUTING says, to a copy of the source: what it takes is three files."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
NEW = '''"""Eager 1F1B: a warm-up twice as long as 1F1B's, to have something to do where messages take long."""

from __future__ import annotations

from collections.abc import Iterator

from phalanx.placement.schedules.order import Action, PipelineSchedule
from phalanx.placement.schedules.schedule_1f1b import alternating


def _actions(rank: int, ranks: int, stages: int, micros: int) -> Iterator[Action]:
    return alternating(rank, 2 * (ranks - 1 - rank), micros)


def _in_flight(place: float, ranks: int, stages: int, micros: int, ahead: float) -> float:
    return min(micros, 2 * (ranks - 1 - place) + 1)


EAGER = PipelineSchedule(name="eager", actions=_actions, in_flight=_in_flight, filling="one way", searched=(1,))
'''
EDITS = {
    "config/fields.py": [
        ('"gpipe", "1f1b",', '"gpipe", "eager", "1f1b",'),
        ('{"gpipe": 1,', '{"gpipe": 1, "eager": 1,'),
    ],
    "placement/schedules/all_schedules.py": [
        ("from phalanx.placement.schedules.gpipe", "from phalanx.placement.schedules.eager import EAGER\nOLD"),
        ("(GPIPE,", "(GPIPE, EAGER,"),
    ],
}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that holds the copy of the package."""
    folder = tmp_path_factory.mktemp("source")
    shutil.copytree(ROOT / "src/phalanx", folder / "phalanx", ignore=shutil.ignore_patterns("__pycache__"))
    for name, edits in EDITS.items():
        path = folder / "phalanx" / name
        text = path.read_text()
        for old, new in edits:
            assert text.count(old) == 1, f"{old} in {name}"
            text = text.replace(old, new.replace("OLD", old))
        path.write_text(text)
    (folder / "phalanx/placement/schedules/eager.py").write_text(NEW)
    return folder


SEVERAL = """
import json, sys
from click.testing import CliRunner
from phalanx.cli import main
done = [CliRunner().invoke(main, words) for words in json.loads(sys.argv[1])]
assert all(one.exit_code == 0 for one in done), [one.output for one in done]
print(json.dumps([one.stdout for one in done]))
"""


def run(source: Path, *commands: list[str]) -> list[str]:
    """What each command prints, one after the other in a process that has the copy."""
    done = subprocess.run(
        [sys.executable, "-c", SEVERAL, json.dumps(commands)],
        env={**os.environ, "PYTHONPATH": str(source), "OMP_NUM_THREADS": "1"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_it_is_proven(source: Path) -> None:
    plan = "pp=2 schedule=eager micro=4"
    (proven,) = run(source, ["prove", "examples/gpt.py", "--plan", plan, "--steps", "2", "--json"])
    proof = json.loads(proven)
    assert proof["equal"] is True


def test_it_is_drawn_and_forecast(source: Path) -> None:
    plan = "pp=4 schedule=eager micro=4"
    ask = ["forecast", "examples/gpt.py", "--on", "4xH100", "--json", "--plan"]
    drawn, *forecasts = run(
        source,
        ["show", "examples/gpt.py", "--plan", plan],
        [*ask, plan],
        [*ask, plan.replace("eager", "1f1b")],
    )
    assert "eager" in drawn
    one, other = (json.loads(text) for text in forecasts)
    held = [found["memory"]["activations"] for found in (one, other)]
    assert held[0] > held[1], "a longer warm-up holds more"
