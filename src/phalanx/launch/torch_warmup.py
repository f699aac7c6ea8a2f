"""Imports that torch makes at first use: made before workers are forked, or left out if nothing needs them.

torch's optimizers, DistributedDataParallel, DTensor and fake tensors import ``torch._dynamo``, the front end of
``torch.compile``, to ask it small questions. Loaded in the launcher, it made a command to its first step take 0.99 of
torchrun's time in place of 0.61 (2026-11-29, 2 cores, torch 2.13, ``bench/startup.py``; the bar is 0.75).

So workers, which are processes of ours, have a stand-in that answers these questions and becomes the real package when
more is asked of it. Only in the torch versions known here; others load the package.
"""

from __future__ import annotations

import importlib
import sys
import threading
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.util import spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from phalanx.config import Plan

_KNOWN = (2, 11), (2, 14)  # from the first, before the second


def make_ready(plan: Plan) -> None:
    """Import the modules that training under ``plan`` needs, in the launcher: once for all workers."""
    importlib.import_module("phalanx.train.parameter_server" if plan.server else "phalanx.train.mesh_stepper")
    if plan.compile:
        importlib.import_module("torch._dynamo")
    make_ready_to_look(plan)
    if plan.compile or plan.kind in ("shard", "split"):
        importlib.import_module("phalanx.parallel.zero")
        importlib.import_module("phalanx.parallel.fsdp")
        importlib.import_module("phalanx.checkpoint.store")


def make_ready_to_look(plan: Plan) -> None:
    """Import the modules that a look at a model needs, too."""
    if plan.kind in ("shard", "split"):
        importlib.import_module("torch.fx.experimental.symbolic_shapes")
    if plan.kind == "split":
        importlib.import_module("phalanx.parallel.split")


def leave_compiler_out() -> None:
    """Have torch load its compiler only when something asks for more than the stand-in has. Call it in a worker."""
    version = tuple(int(part) for part in torch.__version__.split(".")[:2])
    if "torch._dynamo" in sys.modules or not _KNOWN[0] <= version < _KNOWN[1]:
        return
    folder = Path(torch.__file__).parent / "_dynamo"
    spec = spec_from_file_location(_COMPILER, folder / "__init__.py", submodule_search_locations=[str(folder)])
    if spec is not None:
        _Deferred.put_in_place(spec)


_COMPILER = "torch._dynamo"
_lock = threading.RLock()


def _module(name: str, **attributes: Any) -> ModuleType:
    made = ModuleType(name)
    vars(made).update(attributes)
    return made


_STANDING_IN: dict[str, Any] = {
    "disable": lambda function=None, *_, **__: function,
    "graph_break": lambda *_, **__: None,
    "utils": _module("utils", get_optimize_ddp_mode=lambda: "ddp_optimizer"),
    "trace_rules": _module("trace_rules", clear_lru_cache=lambda: None),
}


class _Deferred(ModuleType):
    """``torch._dynamo`` with its options alone, until more is asked of it; then its own code runs in it."""

    @classmethod
    def put_in_place(cls, spec: ModuleSpec) -> None:
        package = cls(_COMPILER)
        vars(package).update(
            __spec__=spec,
            __loader__=spec.loader,
            __file__=spec.origin,
            __package__=_COMPILER,
            __path__=spec.submodule_search_locations,
            _loading=False,
        )
        sys.modules[_COMPILER] = torch._dynamo = package  # pyrefly: ignore[bad-assignment]
        importlib.import_module(f"{_COMPILER}.config")
        del package.__path__  # whoever imports another of its modules asks for it
        vars(package).update(_STANDING_IN)
        sys.modules[_Sources.NAME] = vars(package)["source"] = _Sources(_Sources.NAME)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name != "__path__":
            raise AttributeError(name)
        mine = vars(self)
        with _lock:
            if name not in mine and not mine["_loading"]:
                self._load()
        if name not in mine:
            raise AttributeError(f"module {_COMPILER!r} has no attribute {name!r}")
        return mine[name]

    def _load(self) -> None:
        mine, loader = vars(self), self.__loader__
        assert isinstance(loader, SourceFileLoader)
        mine["_loading"] = True
        for name in (*_STANDING_IN, "source"):
            mine.pop(name, None)
        del sys.modules[_Sources.NAME]
        mine["__path__"] = [str(Path(loader.path).parent)]
        loader.exec_module(self)
        self.__class__ = ModuleType  # pyrefly: ignore


class _Sources(ModuleType):
    """``torch._dynamo.source``: fakes of tensors get names of its kinds, which only a compiler reads."""

    NAME = f"{_COMPILER}.source"
    ConstantSource = str
    AttrSource = "{}.{}".format
    RandomValueSource = type("RandomValueSource", (), {})

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        package: Any = vars(torch)["_dynamo"]
        vars(package).pop("source", None)
        return getattr(package.source, name)  # loads the package, which then has its own
