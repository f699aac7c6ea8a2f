"""Measure Phalanx on this machine's GPU: ``python tools/gpu_record/run.py --minutes 9 --out gpu_record.json``.

Only the standard library is needed to start it. Every step is a process of its own with a time limit, and the record
is written after each row: a kill at any moment loses only the row in work. Without Phalanx' packages, ``gpu_pack/`` is
used (``make gpu-pack``).
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NoReturn

_TOOLS = Path(__file__).resolve().parent.parent
if str(_TOOLS) not in sys.path:
    sys.path.insert(0, str(_TOOLS))

from gpu_record.pack_install import PackError, install  # noqa: E402
from gpu_record.recorder import SCHEMA, PlannedStep, Record, run_steps  # noqa: E402

_CLONE = _TOOLS.parent
_MINUTES = 9.0  # that the limits are made for
_LEAST_LIMIT = 60.0  # seconds that a scaled limit keeps: starting torch and compiling do not shrink
_OLDEST = (2, 11)
# The most valuable evidence first. Name, time limit, seconds it needs at least, GiB of device memory.
# 22 GiB: cards sold with 24 GB, at which the steps halve their batch if memory runs out.
STEPS = (
    ("environment", 20.0, 8.0, 1.0),
    ("overhead", 40.0, 10.0, 1.0),
    ("llama_1b", 150.0, 40.0, 22.0),
    ("proof", 120.0, 15.0, 2.0),
    ("trace", 45.0, 20.0, 22.0),
    ("gpu_tests", 60.0, 15.0, 4.0),
    ("lora_8b", 60.0, 30.0, 22.0),
    ("gpt2_124m", 45.0, 25.0, 22.0),
    ("checkpoint", 30.0, 15.0, 8.0),
    ("calibrate", 60.0, 15.0, 4.0),
    ("bert_base", 45.0, 25.0, 22.0),
    ("resnet50", 45.0, 25.0, 20.0),
)
_NAMES = tuple(step[0] for step in STEPS)
# The dependencies in pyproject.toml but torch, as Python and as pip call them.
_NEEDED = {
    "numpy": "numpy",
    "safetensors": "safetensors",
    "isal": "isal",
    "fsspec": "fsspec",
    "click": "click",
    "rich": "rich",
    "tomli_w": "tomli-w",
}
_PROBE = """
import importlib.util, json, sys
found = {"torch": "", "devices": [], "problem": "", "phalanx": "", "missing": []}
try:
    import torch
    found["torch"] = torch.__version__
    if sys.argv[1] == "cuda" and torch.cuda.is_available():
        every = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
        found["devices"] = [[one.name, one.total_memory] for one in every]
except Exception as error:
    found["problem"] = f"{type(error).__name__}: {error}"
for name in json.loads(sys.argv[2]):
    if importlib.util.find_spec(name) is None:
        found["missing"].append(name)
try:
    import phalanx, phalanx.api
    from importlib.metadata import version
    found["phalanx"] = "?"
    found["phalanx"] = version("phalanx")
except Exception as error:
    found["problem"] = found["problem"] or f"{type(error).__name__}: {error}"
print(json.dumps(found))
"""


def main(given: list[str] | None = None) -> int:
    """Read the command line, look at the machine, and record."""
    begun = time.monotonic()
    asked = _parse(given)
    with tempfile.TemporaryDirectory(prefix="gpu-record-packages-") as scratch:
        environment, found = _prepare(asked, Path(scratch))
        devices = found["devices"]
        if asked.device == "cuda" and not devices:
            _refuse("no CUDA device: torch.cuda sees none here. Try: --device cpu for the small versions")
        small = asked.device == "cpu"
        header = {
            "schema": SCHEMA,
            "started": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
            "minutes": asked.minutes,
            "device": asked.device,
            "small": small,
            "phalanx": {"version": found["phalanx"].replace("?", ""), "commit": _commit()},
        }
        record = Record(path=asked.out, header=header, until=begun + 60 * asked.minutes, begun=begun)
        memory = devices[0][1] if devices else None
        code = run_steps(record, planned(asked.only, asked.device, asked.minutes), memory, environment)
    for step in record.steps:
        print(f"{step['name']:12} {step['status']:10} {step['seconds']:6.1f} s  {step['reason']}"[:160])
    print(f"{record.path}: {time.monotonic() - begun:.0f} s")
    return code


def planned(only: list[str], device: str, minutes: float) -> list[PlannedStep]:
    """Return the steps to run, in their order; limits shrink with the minutes."""
    scale = min(1.0, minutes / _MINUTES)
    made: list[PlannedStep] = []
    for name, limit, least, gib in STEPS:
        if only and name not in only:
            continue
        command = [sys.executable, "-m", "gpu_record.steps", name, "--device", device]
        command += ["--messages", "{messages}", "--record", "{record}", "--limit", "{limit}"]
        made.append(
            PlannedStep(
                name=name,
                limit=min(limit, max(_LEAST_LIMIT, limit * scale)),
                least=least if device == "cuda" else 5.0,
                gib=gib if device == "cuda" else 0.0,
                command=tuple(command),
            )
        )
    return made


def _parse(given: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="run.py", description="Measure Phalanx on this machine's GPU.")
    parser.add_argument("--minutes", default="9", help="time for everything [9]")
    parser.add_argument("--out", type=Path, default=Path("gpu_record.json"), help="the record [gpu_record.json]")
    parser.add_argument("--only", nargs="+", default=[], metavar="STEP", help=f"some of: {', '.join(_NAMES)}")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu runs small versions [cuda]")
    parser.add_argument("--pack", type=Path, default=_CLONE / "gpu_pack", help="packages to install [gpu_pack]")
    asked = parser.parse_args(given)
    try:
        asked.minutes = float(asked.minutes)
    except ValueError:
        asked.minutes = math.nan
    if not 0 < asked.minutes < math.inf:
        _refuse("--minutes: not a number above 0. Try: --minutes 9")
    if unknown := [name for name in asked.only if name not in _NAMES]:
        _refuse(f"--only: no step {unknown[0]!r}. Steps: {', '.join(_NAMES)}")
    if not asked.out.parent.is_dir() or asked.out.is_dir():
        _refuse(f"--out: {asked.out} is not a file in a folder that exists. Try: --out gpu_record.json")
    if not os.access(asked.out.absolute().parent, os.W_OK):
        _refuse(f"--out: {asked.out.absolute().parent} cannot be written to. Try: --out /path/to/gpu_record.json")
    return asked


def _prepare(asked: argparse.Namespace, scratch: Path) -> tuple[dict[str, str], dict[str, Any]]:
    """Find torch, and Phalanx in this clone; install missing packages from the pack.

    Returns:
        The environment of the steps, and the facts of the probe.
    """
    environment = _with_path(_with_path(dict(os.environ), _CLONE / "src"), _TOOLS)
    found = _probe(asked.device, environment)
    if not found["torch"]:
        _refuse(f"torch is not installed in {sys.executable}. Try: another Python, or pip install torch")
    if _numbers(found["torch"]) < _OLDEST:
        _refuse(f"torch {found['torch']} is too old: 2.11 or newer is needed. Try: pip install --upgrade torch")
    if not _is_complete(found) and asked.pack.is_dir():
        try:
            install(asked.pack, scratch)
        except (PackError, OSError) as error:
            _refuse(f"{asked.pack}: cannot be installed: {' '.join(str(error).split())}")
        environment = _with_path(_with_path(_with_path(dict(os.environ), scratch), _CLONE / "src"), _TOOLS)
        found = _probe(asked.device, environment)
    if not _is_complete(found):
        missing = ", ".join(_NEEDED[name] for name in found["missing"])
        why = f"missing {missing}" if missing else found["problem"]
        _refuse(f"Phalanx cannot be imported: {why}. Try: make gpu-pack, on a machine with a network")
    return environment, found


def _is_complete(found: dict[str, Any]) -> bool:
    # phalanx.api imports its packages late: an import of it alone does not show that all are installed.
    return bool(found["phalanx"]) and not found["missing"]


def _probe(device: str, environment: dict[str, str]) -> dict[str, Any]:
    asked = [sys.executable, "-c", _PROBE, device, json.dumps(list(_NEEDED))]
    try:
        done = subprocess.run(asked, capture_output=True, text=True, env=environment, timeout=120, check=False)
        return json.loads(done.stdout.splitlines()[-1])
    except (OSError, subprocess.SubprocessError, ValueError, IndexError) as error:
        _refuse(f"{sys.executable} cannot be asked for torch: {type(error).__name__}. Try: python -c 'import torch'")


def _numbers(version: str) -> tuple[int, int]:
    parts = version.split("+")[0].split(".")
    numbers = ["".join(filter(str.isdigit, part)) for part in (*parts, "0", "0")[:2]]
    return int(numbers[0] or 0), int(numbers[1] or 0)


def _with_path(environment: dict[str, str], folder: Path) -> dict[str, str]:
    before = environment.get("PYTHONPATH")
    return {**environment, "PYTHONPATH": os.pathsep.join(filter(None, [str(folder), before]))}


def _commit() -> str:
    try:
        asked = ["git", "-C", str(_CLONE), "rev-parse", "--short=8", "HEAD"]
        return subprocess.run(asked, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


def _refuse(why: str) -> NoReturn:
    print(f"run.py: {why}", file=sys.stderr)
    raise SystemExit(2)


if __name__ == "__main__":
    sys.exit(main())
