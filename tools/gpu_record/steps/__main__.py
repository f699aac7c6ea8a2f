"""Entry point of a step's process: ``python -m gpu_record.steps NAME --device cuda --messages FILE ...``."""

from __future__ import annotations

import argparse
import ctypes
import signal
import sys
import traceback
from importlib import import_module
from pathlib import Path

from gpu_record.recorder import TRAINING
from gpu_record.report import Step


def main() -> int:
    """Run one step; tell a traceback if it fails."""
    _die_with_parent()
    parser = argparse.ArgumentParser()
    parser.add_argument("name")
    parser.add_argument("--device", choices=("cuda", "cpu"), required=True)
    parser.add_argument("--messages", type=Path, required=True)
    parser.add_argument("--record", type=Path, required=True)
    parser.add_argument("--limit", type=float, required=True)
    parser.add_argument("--part", default="")
    given = parser.parse_args()
    step = Step(
        name=given.name,
        messages=given.messages,
        record=given.record,
        device=given.device,
        limit=given.limit,
        part=given.part,
    )
    try:
        if step.small:
            _compile_cheaply()
        module = "training" if step.name in TRAINING else step.name
        import_module(f"gpu_record.steps.{module}").run(step)
    except BaseException:
        step.failed(traceback.format_exc())
        raise
    return 0


def _die_with_parent() -> None:
    """Have the kernel kill this process when ``run.py`` dies, so that no step holds a device after it."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def _compile_cheaply() -> None:
    """Have ``torch.compile`` trace without generating C++, which takes minutes on few cores."""
    import torch

    compile_as = torch.compile

    def compile_without_code(*given: object, **how: object) -> object:
        return compile_as(*given, **{**how, "backend": "aot_eager"})  # pyrefly: ignore

    torch.compile = compile_without_code  # pyrefly: ignore


if __name__ == "__main__":
    sys.exit(main())
