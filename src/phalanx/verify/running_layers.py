"""Which layer of a model runs, on which samples, in which step: followed by hooks, in every thread of a process.

A layer is told by its *path*: the modules that run, outermost first, each with the number of times that the module
around it has called it before in this forward, such as ``blocks.0*0/blocks.0.drop*1``. A module that is used twice thus
has two paths, and a path is the same however a model is split.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from phalanx.data.loader import BatchPieces
from phalanx.parallel.pipeline import stage as stages
from phalanx.train import grad_accumulation
from phalanx.train.parameter_server.gradient_worker import Computer


@dataclass(slots=True)
class Layer:
    """A module that runs.

    Attributes:
        path: from the model inwards; empty for the model itself.
        called: how often it has called each module, by name.
        drawn: how many masks it has drawn itself.
    """

    path: str = ""
    called: Counter[str] = field(default_factory=Counter[str])
    drawn: int = 0

    def call(self, name: str) -> Layer:
        """The module ``name``, which it now calls."""
        path = f"{self.path}/{name}*{self.called[name]}".lstrip("/")
        self.called[name] += 1
        return Layer(path)

    def draw(self) -> str:
        """The name of the next mask that it draws."""
        self.drawn += 1
        return f"{self.path}:{self.drawn - 1}"


@dataclass(slots=True)
class RunningState:
    """What one thread computes on.

    Attributes:
        step: the optimizer step.
        ids: the samples.
        layers: that are running, the model itself the first.
    """

    step: int = -1
    ids: tuple[int, ...] = ()
    layers: list[Layer] = field(default_factory=lambda: [Layer()])


class RunningLayers:
    """Follows one job in this process, from ``install`` on."""

    def __init__(self) -> None:
        self._names: dict[int, str] = {}
        self._here = threading.local()

    @property
    def here(self) -> RunningState:
        """What this thread computes on; in backward what it last did."""
        if not hasattr(self._here, "running"):
            self._here.running = RunningState()
        return self._here.running

    def install(self) -> None:
        """Follow every step and module of this process."""
        register_module_forward_pre_hook(self._begins)
        register_module_forward_hook(self._ends, always_call=True)
        work_of_a_step: Any = grad_accumulation.GradAccumulation
        forward = work_of_a_step.forward

        def followed(work: Any, module: Any, device: torch.device, micro: Any) -> Any:
            self._starts(work._step.progress.step, micro.ids)
            self._know(work._step.layout.module)
            self._know(module)
            return forward(work, module, device, micro)

        work_of_a_step.forward = followed
        self._follow_stages()
        self._follow_workers()

    def _starts(self, step: int, ids: tuple[int, ...]) -> None:
        here = self.here
        here.step, here.ids, here.layers = step, ids, [Layer()]

    def _follow_workers(self) -> None:
        """Those of servers compute pieces by themselves."""
        computers: Any = Computer
        data: Any = BatchPieces
        gradients, micros = computers.gradients, data.micros

        def known(computer: Any, *rest: Any) -> Any:
            self._know(computer._layout.module)
            return gradients(computer, *rest)

        def one_by_one(pieces: BatchPieces, step: int, part: int) -> Iterator[Any]:
            for micro in micros(pieces, step, part):
                self._starts(step, micro.ids)
                yield micro

        computers.gradients, data.micros = known, one_by_one

    def _follow_stages(self) -> None:
        """A block that another stage runs counts as called."""
        run_of_a_stage: Any = stages._StageRun
        called = run_of_a_stage.called

        def counted(run: Any, unit: nn.Module, *rest: Any) -> Any:
            outermost, before = not run.inside, self._called(unit)
            result = called(run, unit, *rest)
            if outermost and not run.real and self._called(unit) == before:
                self.here.layers[-1].called[self._names.get(id(unit), "")] += 1
            return result

        run_of_a_stage.called = counted

    def _called(self, unit: nn.Module) -> int:
        return self.here.layers[-1].called[self._names.get(id(unit), "")]

    def _know(self, module: Any) -> None:
        if isinstance(module, nn.Module) and id(module) not in self._names:
            for name, child in module.named_modules():
                self._names.setdefault(id(child), name)

    def _begins(self, module: nn.Module, _: Any) -> None:
        layers, name = self.here.layers, self._names.get(id(module))
        if name == "":
            layers[:] = [Layer()]
        # What has no name of its own, such as a wrapper, is a part of what calls it.
        layers.append(layers[-1].call(name) if name else layers[-1])

    def _ends(self, *_: Any) -> None:
        if len(self.here.layers) > 1:
            self.here.layers.pop()
