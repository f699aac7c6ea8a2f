"""What torch loads at first use, got over with before workers are forked, or left out where nothing needs it.

torch's optimizers, DistributedDataParallel, DTensor and fake tensors ask for ``torch._dynamo``, the front end of
``torch.compile``, when they are first used: to keep it out of some of their methods, to break its graphs there, to read
one of its options. In torch 2.13 loading it takes a process about half as long as ``import torch`` did. A run that
compiles nothing needs none of it.

A worker puts a package in its place that answers these few questions and becomes the real one when more is asked of it.
Only in workers: the process that calls ``phalanx.fit`` is its user's, and keeps torch as it is. And only in the torch
versions known here; elsewhere torch does as it always did, only slower to start.
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
    """Load what training under ``plan`` needs, in the launcher: once for all workers to be forked.

    Plans that compile need the compiler's front end, those that shard or split a model what fake tensors and DTensor
    load. For the others only the stepper is loaded.
    """
    importlib.import_module("phalanx.train.parameter_server" if plan.server else "phalanx.train.mesh_stepper")
    if plan.compile:
        importlib.import_module("torch._dynamo")
    make_ready_to_look(plan)
    if plan.compile or plan.kind in ("shard", "split"):
        importlib.import_module("phalanx.parallel.zero")
        importlib.import_module("phalanx.parallel.fsdp")
        importlib.import_module("phalanx.checkpoint.store")


def make_ready_to_look(plan: Plan) -> None:
    """The part of ``make_ready`` that a look at a model needs, too: what fake tensors load."""
    if plan.kind in ("shard", "split"):
        importlib.import_module("torch.fx.experimental.symbolic_shapes")
    if plan.kind == "split":
        importlib.import_module("phalanx.parallel.split")


def leave_compiler_out() -> None:
    """Have torch load its compiler only where something really asks for it: to be called in a worker.

    Nothing changes where it is loaded already, or where torch is of another version than those known here. A job that
    itself calls ``torch.compile`` still gets it.
    """
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
