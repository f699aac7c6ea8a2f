"""Cases that a proof cannot hold: loops of one's own, held against plain PyTorch written beside them."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from case_grid import Came
from case_table import EQUAL, PLANS, Expected, refused, where

SCRIPT = Path(__file__).with_name("own_loop.py")
WITHIN = 1e-4
"""Relative difference of numbers after a few steps of Adam: rounding of 6e-8, as often amplified as there are steps."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Loop:
    """What a loop shows, and what must come of it under each plan."""

    shows: str
    expected: Mapping[str, Expected]


LOOPS: dict[str, Loop] = {
    "two builds": Loop(
        shows="a GAN in a loop of one's own: two builds in turn, one of which calls the other's model",
        expected=where(["pp=2", "pp=2 micro=4"], refused("a pipeline has cut", "job.inputs")),
    ),
    "gradients left behind": Loop(
        shows="`px.build`: gradients of something else lie where a step begins", expected=dict.fromkeys(PLANS, EQUAL)
    ),
}


def looped(name: str, plan: str, folder: Path) -> Came:
    """Run a loop on two ranks of torchrun."""
    torchrun = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run([*torchrun, str(SCRIPT), name, plan], capture_output=True, text=True, cwd=folder)
    if done.returncode:
        return Came(outcome="crashed", said=done.stderr.strip()[-2000:])
    told = json.loads(done.stdout.strip().splitlines()[-1])
    if "refused" in told:
        return Came(outcome="refused", said=told["refused"], where=tuple(told["where"]))
    far = max(abs(one - other) / abs(other) for one, other in zip(told["found"], told["plain"], strict=True))
    near = math.isfinite(far) and far <= WITHIN
    return Came(outcome="equal" if near else "unequal", said="" if near else f"numbers differ by {far:.2g}")
