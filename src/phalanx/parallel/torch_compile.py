"""``torch.compile``, block by block: equal blocks are compiled once, and sharding sees the same modules as without."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from dataclasses import replace
from importlib import import_module
from typing import Any

from torch import nn

from phalanx.config import Plan
from phalanx.device_kinds import kind_named
from phalanx.errors import Problem
from phalanx.trace.blocks import blocks


def slice_problems(plan: Plan) -> list[Problem]:
    """Return a problem for compiled slices, whose rules a compiler does not see, on any device."""
    if not plan.compile or not plan.splits_blocks:
        return []
    return [
        Problem(
            where="plan.compile",
            given=f"compile=true and blocks split over ranks ({replace(plan, compile=False)})",
            allowed="compile=true where a rank runs its blocks whole: single, dp, fsdp, pp",
            fix=str(replace(plan, compile=False)),
        )
    ]


def check(plan: Plan, kind: str) -> list[Problem]:
    """Return the problems of compiling; CPUs also need a C++ compiler on the machine."""
    if problems := slice_problems(plan):
        return problems
    if not plan.compile or kind_named(kind).compiles or shutil.which("g++") or shutil.which("clang++"):
        return []
    return [
        Problem(
            where="plan.compile",
            given="compile=true, but there is no C++ compiler here",
            allowed="compile=true where g++ or clang++ is installed",
            fix=str(replace(plan, compile=False)),
        )
    ]


def apply(module: nn.Module, plan: Plan, each: Iterable[nn.Module] | None = None) -> nn.Module:
    """Compile ``each`` in place; by default the repeated blocks, or the whole model if it has none."""
    if plan.compile:
        parts = list(blocks(module) or [module] if each is None else each)
        _allow_versions(_VERSIONS * len(parts))
        for part in parts:
            part.compile()
    return module


def _allow_versions(count: int) -> None:
    # torch counts the versions of all modules together, and beyond its limit of 8 runs a module without compiling it
    config: Any = import_module("torch._dynamo").config
    config.recompile_limit = max(config.recompile_limit, count)


_VERSIONS = 4  # of a block: for training, without gradient, and each once more with sizes that vary
