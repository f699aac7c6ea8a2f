"""Speed held without a clock: calls and operations of a step and of a search, modules and files of a start.

Each limit is what was counted when it was set, and a little more. It may only be lowered.
"""

from __future__ import annotations

import gc
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import cycle
from pathlib import Path
from typing import Any

import torch
from test_planner import LARGE, question
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import phalanx as px
from phalanx.planner.search import search

_WARM = 5  # steps in which optimizer state, caches and choices are made


class Operations(TorchDispatchMode):
    """Counts the operations that torch dispatches."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def calls(action: Callable[[], object]) -> int:
    """Return how many Python functions ``action`` calls, itself and this file's included."""
    count = 0

    def profile(frame: Any, event: str, _: Any) -> None:
        nonlocal count
        count += event == "call"

    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        action()
    finally:
        sys.setprofile(before)
    return count


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))


def table() -> px.Table:
    generator = torch.Generator().manual_seed(0)
    return px.Table(x=torch.randn(512, 64, generator=generator), y=torch.arange(512) % 10)


def optimizer(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-3, fused=True)


def a_step(step: Callable[[Any], object], batches: Iterator[Any]) -> tuple[int, int]:
    """Return the Python calls and the operations of one step and of reading its batch, after a few others."""
    for _ in range(_WARM):
        step(next(batches))
    called = calls(lambda: step(next(batches)))
    with Operations() as operations:
        step(next(batches))
    return called, operations.count


def test_a_step_takes_little_more_than_a_loop_by_hand() -> None:
    module, data = model(), table()
    by_hand = optimizer(module.parameters())

    def hand(batch: tuple[torch.Tensor, torch.Tensor]) -> None:
        by_hand.zero_grad()
        loss = nn.functional.cross_entropy(module(batch[0]), batch[1])
        loss.backward()
        by_hand.step()
        loss.item()

    rows = torch.arange(512).split(32)
    expected = a_step(hand, cycle([(data[part]["x"], data[part]["y"]) for part in rows]))
    job = px.Job(
        model=model,
        data=table,
        inputs=lambda batch: batch["x"],
        loss=lambda output, batch: nn.functional.cross_entropy(output, batch["y"]),
        optimizer=optimizer,
        batch=32,
        steps=20,
    )
    step, loader = px.build(job, px.Plan())
    found = a_step(lambda batch: step(batch).loss, iter(loader))
    step.close()
    assert found[0] <= 1.15 * expected[0] + 85, f"Python calls: {found[0]}, by hand {expected[0]}"
    assert found[1] <= 1.15 * expected[1] + 4, f"operations: {found[1]}, by hand {expected[1]}"


def test_a_first_search_takes_few_calls_a_plan() -> None:
    found = search(question("32x8xH100", 256, **LARGE))  # loads what a search loads
    for one in gc.get_objects():
        if type(one).__name__ == "_lru_cache_wrapper" and one.__module__.startswith("phalanx."):
            one.cache_clear()
    asked = question("32x8xH100", 256, **LARGE)
    called = calls(lambda: search(asked))
    assert found.considered <= 31_000
    assert called <= 134_000, f"{called} calls, {called / found.considered:.1f} a plan"


_COUNTED = """
import json, os, sys
from pathlib import Path
files = set()

def note(event, given):
    if event == "open" and isinstance(given[0], str) and not given[0].endswith((".py", ".pyc", ".so")):
        files.add(given[0])

def write(*code):
    mine = [name for name in sys.modules if name.partition(".")[0] == "phalanx"]
    read = [name for name in files if not name.startswith(("/proc/", "/sys/", "/dev/")) and ".dist-info" not in name]
    Path(sys.argv[1], f"{os.getpid()}.counts").write_text(json.dumps([len(mine), len(sys.modules), len(read)]))
    code and leave(*code)

leave, os._exit = os._exit, write
sys.addaudithook(note)
from phalanx.cli import main
main(sys.argv[2:], standalone_mode=False)
write()
"""


def counted(folder: Path, *words: str) -> list[int]:
    """Return modules of Phalanx, all modules and files that a command and its workers have at their ends, added up."""
    command = [sys.executable, "-c", _COUNTED, str(folder), *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return [sum(each) for each in zip(*(json.loads(path.read_text()) for path in folder.glob("*.counts")), strict=True)]


def test_help_loads_few_modules(tmp_path: Path) -> None:
    mine, every, files = counted(tmp_path, "--help")
    assert (mine <= 66, every <= 240, files <= 5) == (True,) * 3, (mine, every, files)


def test_a_run_loads_few_modules(tmp_path: Path) -> None:
    job = Path(px.__file__).parent / "demo" / "jobs" / "digits.py"
    mine, every, files = counted(tmp_path, "train", str(job), "--steps", "2", "--run", str(tmp_path / "run"))
    assert (550 < mine <= 600, every <= 3190, files <= 40) == (True,) * 3, (mine, every, files)
