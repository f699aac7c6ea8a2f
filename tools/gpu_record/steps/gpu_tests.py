"""Step ``gpu_tests``: the tests that need a CUDA device."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

from gpu_record.report import Step

_CLONE = Path(__file__).resolve().parents[3]
_NEEDED = ("pytest", "psutil")
_COUNTED: tuple[str, ...] = ("passed", "failed", "skipped", "errors")
_TAIL = 4000  # characters


def run(step: Step) -> None:
    """Run pytest, with what pyproject.toml asks of plugins switched off, and count outcomes."""
    if not (_CLONE / "tests" / "gpu").is_dir():
        step.skip("tests/gpu is not beside tools/")
        return
    if missing := [name for name in _NEEDED if importlib.util.find_spec(name) is None]:
        step.skip(f"not installed: {', '.join(missing)}")
        return
    asked = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-x", "tests/gpu", "-p", "no:cacheprovider"]
    asked += ["-o", "addopts=", "-o", "filterwarnings=default"]
    if importlib.util.find_spec("transformers") is None:
        asked += ["-k", "not HF"]
    try:
        done = subprocess.run(
            asked,
            cwd=_CLONE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=max(5.0, step.left - 2),
            text=True,
            errors="replace",
            check=False,
        )
        output, code = done.stdout, done.returncode
    except subprocess.TimeoutExpired as error:
        given = error.stdout or b""
        output, code = given.decode(errors="replace") if isinstance(given, bytes) else given, 0
        step.note("Time ran out before the last test.")
    step.facts(**counts(output), tail=output[-_TAIL:])
    if code not in (0, 1, 5):  # passed, failed, none collected
        raise RuntimeError(f"pytest: exit code {code}")


def counts(output: str) -> dict[str, int]:
    """Return how many tests had which outcome, by pytest's last line; zeros if there is none."""
    found: dict[str, int] = dict.fromkeys(_COUNTED, 0)
    for line in output.splitlines()[-3:]:
        for number, word in re.findall(r"(\d+) (passed|failed|skipped|errors?)", line):
            found["errors" if word.startswith("error") else word] = int(number)
    return found
