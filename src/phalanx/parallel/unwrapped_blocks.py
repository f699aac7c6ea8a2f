"""Blocks that a model bypasses: it calls their children, or reads their weights, without calling them.

Work around a block's call, such as gathering its parameters (``shard``) or recomputing (``recompute``), does not happen
for such a block. One run on fake tensors finds them; from then on they are containers, and their children are the
blocks.
"""
# A run of its own: what records a model by its blocks, for costs or cuts, has to know first which these are.

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from phalanx.config import Plan
from phalanx.parallel.local_shards.tensor import METADATA, name_of
from phalanx.parallel.survey import Example
from phalanx.trace.blocks import blocks, leave_cache_out, open_up
from phalanx.trace.fake_tensors import Mode, Values, fake, faked, quiet


def open_unwrapped(module: nn.Module, plan: Plan, example: Example) -> tuple[str, ...]:
    """Open such blocks of ``module`` if ``plan`` does work around blocks, and return their names.

    They are those in ``example.facts``; without facts they are searched for.
    """
    if plan.zero < 3 and plan.recompute == "none":
        return ()
    if example.facts is None:
        return look_inside(module, example)
    open_up(module.get_submodule(name) for name in example.facts.opened)
    return example.facts.opened


def look_inside(module: nn.Module, example: Example) -> tuple[str, ...]:
    """Open the blocks of ``module`` whose parameters are read outside their calls; return their names."""
    names = {child: name for name, child in module.named_modules()}
    found: list[str] = []
    around = _uses(module, example)
    while opened := [block for block in blocks(module) if not _runs_whole(block, around)]:
        open_up(opened)
        found += [names[block] for block in opened]
    return tuple(found)


def _runs_whole(block: nn.Module, around: Mapping[int, set[nn.Module]]) -> bool:
    return all(block in around[id(tensor)] for tensor in block.parameters() if id(tensor) in around)


def _uses(module: nn.Module, example: Example) -> dict[int, set[nn.Module]]:
    leave_cache_out(module)
    modes: list[Mode] = [FakeTensorMode(allow_non_fake_inputs=True)]
    if not any(tensor.is_meta for tensor in module.parameters()):
        modes.append(Values())  # of what decides by values
    for mode in modes:
        try:
            with torch.random.fork_rng(devices=[]), torch.no_grad(), quiet(), faked(module, mode) as meant:
                run = _OpenedRun(meant)

                def given(leaf: Any, mode: Mode = mode) -> Any:
                    return fake(mode, leaf) if isinstance(leaf, Tensor) else leaf

                with run.following(), run:
                    module(*tree_map(given, example.args), **tree_map(given, example.kwargs))
                return run.around
        except Exception:  # whatever the model raises on fakes
            continue
    return {}


class _OpenedRun(TorchFunctionMode):
    def __init__(self, meant: Mapping[int, nn.Parameter]) -> None:
        super().__init__()
        self.around: dict[int, set[nn.Module]] = {}
        self._meant, self._running = meant, list[nn.Module]()

    @contextmanager
    def following(self) -> Iterator[None]:
        begins = register_module_forward_pre_hook(lambda module, _: self._running.append(module))
        ends = register_module_forward_hook(lambda *_: self._end(), always_call=True)
        try:
            yield
        finally:
            begins.remove()
            ends.remove()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if name_of(func) not in METADATA:
            for leaf in tree_leaves((args, kwargs)):
                if id(leaf) in self._meant:
                    known = self.around.setdefault(id(self._meant[id(leaf)]), set(self._running))
                    known.intersection_update(self._running)
        return func(*args, **(kwargs or {}))

    def _end(self) -> None:
        self._running.pop()
