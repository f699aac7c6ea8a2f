"""Runs the suite in two halves side by side, and ends with one summary: ``python tests/side_by_side.py [OPTION ...]``.

One half waits for processes to start while the other computes. Options go to both.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
HALVES = (
    ("tests/unit", "tests/mutants", "tests/recommended", "tests/cases", "tests/faults", "tests/parity"),
    ("tests/distributed", "tests/gpu"),
)
_COUNT = re.compile(r"(\d+) (passed|failed|skipped|deselected|xfailed|xpassed|errors?|warnings?)")


def main() -> int:
    began, options = time.perf_counter(), sys.argv[1:]
    missing = {path.parent.name for path in (ROOT / "tests").glob("*/test_*.py")} - {
        Path(folder).name for half in HALVES for folder in half
    }
    if missing:
        raise SystemExit(f"in no half: tests/{', tests/'.join(sorted(missing))}\n    try: add it to HALVES")
    with tempfile.TemporaryFile("w+") as aside:
        first = subprocess.Popen(_pytest(0, options), cwd=ROOT, stdout=aside, stderr=subprocess.STDOUT, text=True)
        try:
            second = subprocess.Popen(_pytest(1, options), cwd=ROOT, stdout=subprocess.PIPE, text=True)
            try:
                assert second.stdout is not None
                lines = [_shown(line) for line in second.stdout]
                codes = [second.wait(), first.wait()]
            finally:
                second.terminate()
        finally:
            first.terminate()
        aside.seek(0)
        lines += [_shown(line) for line in aside]
    print(_summary(lines, time.perf_counter() - began))
    return next((code for code in codes if code), 0)


def _pytest(half: int, options: list[str]) -> list[str]:
    cache = f"cache_dir=.pytest_cache/{half}"
    return [sys.executable, "-m", "pytest", "-o", cache, *HALVES[half], *options]


def _shown(line: str) -> str:
    sys.stdout.write(line)
    sys.stdout.flush()
    return line


def _summary(lines: list[str], seconds: float) -> str:
    found: Counter[str] = Counter()
    for line in lines:
        if re.search(r"\bin \d+\.\d+s", line):
            found.update({name.removesuffix("s"): int(count) for count, name in _COUNT.findall(line)})
    order = ("failed", "error", "passed", "skipped", "deselected", "xfailed", "xpassed", "warning")
    parts = [f"{found[name]} {name}" for name in order if found[name]]
    return f"{', '.join(parts) or 'no tests ran'} in {seconds:.2f}s"


if __name__ == "__main__":
    sys.exit(main())
