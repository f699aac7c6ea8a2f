"""Step ``gpu_tests``: the tests that need a CUDA device."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from gpu_record.report import Step

_CLONE = Path(__file__).resolve().parents[3]
_NEEDED = ("pytest", "psutil")
_TAIL = 4000  # characters
_POLL = 1.0  # seconds between looks at what pytest has printed
_OUTCOME = re.compile(r"^\S+::.* (PASSED|FAILED|SKIPPED|ERROR)\b", re.MULTILINE)
_UNCOLLECTED = re.compile(r"^_+ ERROR collecting ", re.MULTILINE)


def run(step: Step) -> None:
    """Run pytest without the options of pyproject.toml that need plugins, and count outcomes."""
    if not (_CLONE / "tests" / "gpu").is_dir():
        step.skip("tests/gpu is not beside tools/")
        return
    if missing := [name for name in _NEEDED if importlib.util.find_spec(name) is None]:
        step.skip(f"not installed: {', '.join(missing)}")
        return
    asked = [sys.executable, "-m", "pytest", "-v", "-m", "gpu", "-x", "tests/gpu", "-p", "no:cacheprovider"]
    asked += ["-o", "addopts=", "-o", "filterwarnings=default", "--color=no"]
    if importlib.util.find_spec("transformers") is None:
        asked += ["-k", "not HF"]
    code = _pytest(step, asked, max(5.0, step.left - 2))
    if code not in (0, 1, 5):  # passed, failed, none collected
        raise RuntimeError(f"pytest: exit code {code}")


def _pytest(step: Step, asked: Sequence[str], limit: float) -> int:
    """Run pytest and return its exit code; once a second, record the counts of the tests so far.

    Raises:
        TimeoutError: if pytest has not ended after ``limit`` seconds.
    """
    until = time.monotonic() + limit
    with tempfile.TemporaryDirectory(prefix="gpu-record-tests-") as name:
        path = Path(name, "output")
        with path.open("wb") as file:
            process = subprocess.Popen(asked, cwd=_CLONE, stdin=subprocess.DEVNULL, stdout=file, stderr=file)
        code, said = None, None
        while code is None and time.monotonic() < until:
            with suppress(subprocess.TimeoutExpired):
                code = process.wait(min(_POLL, max(0.01, until - time.monotonic())))
            output = path.read_text(encoding="utf-8", errors="replace")
            if output != said:
                step.facts(**counts(output), tail=output[-_TAIL:])
                said = output
        if code is None:
            process.kill()
            process.wait()
            raise TimeoutError(f"timed out after {limit:.0f} s")
        return code


def counts(output: str) -> dict[str, int]:
    """Return the number of tests by outcome, counted in the lines of ``pytest -v``, also of a run that was cut."""
    words = [word.lower() for word in _OUTCOME.findall(output)]
    found = {word: words.count(word) for word in ("passed", "failed", "skipped")}
    return {**found, "errors": words.count("error") + len(_UNCOLLECTED.findall(output))}
