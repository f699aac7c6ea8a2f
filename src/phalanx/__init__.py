"""Phalanx: write the training step for one device; run it on any number, proven to compute the same."""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from phalanx.api import Run, build, fit, forecast, load, plan, prove, start
    from phalanx.config import (
        Average,
        Best,
        Clip,
        Cluster,
        Job,
        Loss,
        Metric,
        Phase,
        Plan,
        Pretrained,
        RunSpec,
        Sampler,
        Schedule,
        TokenBatch,
    )
    from phalanx.config.losses import Losses
    from phalanx.config.params import param, params
    from phalanx.data import (
        Curriculum,
        Mixture,
        ParquetFiles,
        Table,
        TarFiles,
        TokenFile,
        buckets,
        document_mask,
        weighted,
    )
    from phalanx.errors import PhalanxError
    from phalanx.report.run_results import to_keras
    from phalanx.sweep import sweep
    from phalanx.train.batch_scaling import linear_scaling
    from phalanx.train.keras.keras_job import from_keras
    from phalanx.train.loss import accuracy, cross_entropy, load_balancing_loss, mse, next_token_loss, router_z_loss
    from phalanx.train.optimizers import LAMB, LARS
    from phalanx.train.own_loss import model_loss
    from phalanx.train.param_groups import groups, no_decay
    from phalanx.train.ray_train import ray_report
    from phalanx.train.torchmetrics_state import torchmetric

__version__ = "0.1.0"

_WHERE = {
    **dict.fromkeys(("Run", "build", "fit", "forecast", "load", "plan", "prove", "start"), "phalanx.api"),
    **dict.fromkeys(("Average", "Best", "Clip", "Cluster", "Job", "Loss", "Metric", "Phase"), "phalanx.config"),
    **dict.fromkeys(("Plan", "Pretrained", "RunSpec"), "phalanx.config"),
    **dict.fromkeys(("Sampler", "Schedule", "TokenBatch"), "phalanx.config"),
    **dict.fromkeys(("accuracy", "cross_entropy", "mse", "next_token_loss"), "phalanx.train.loss"),
    **dict.fromkeys(("load_balancing_loss", "router_z_loss"), "phalanx.train.loss"),
    **dict.fromkeys(("LAMB", "LARS"), "phalanx.train.optimizers"),
    **dict.fromkeys(("groups", "no_decay"), "phalanx.train.param_groups"),
    "Losses": "phalanx.config.losses",
    "model_loss": "phalanx.train.own_loss",
    **dict.fromkeys(("param", "params"), "phalanx.config.params"),
    "sweep": "phalanx.sweep",
    "PhalanxError": "phalanx.errors",
    **dict.fromkeys(("Curriculum", "Mixture", "ParquetFiles", "Table", "TarFiles", "TokenFile"), "phalanx.data"),
    **dict.fromkeys(("buckets", "document_mask", "weighted"), "phalanx.data"),
    "torchmetric": "phalanx.train.torchmetrics_state",
    "linear_scaling": "phalanx.train.batch_scaling",
    "ray_report": "phalanx.train.ray_train",
    "from_keras": "phalanx.train.keras.keras_job",
    "to_keras": "phalanx.report.run_results",
}

__all__ = [
    "LAMB",
    "LARS",
    "Average",
    "Best",
    "Clip",
    "Cluster",
    "Curriculum",
    "Job",
    "Loss",
    "Losses",
    "Metric",
    "Mixture",
    "ParquetFiles",
    "PhalanxError",
    "Phase",
    "Plan",
    "Pretrained",
    "Run",
    "RunSpec",
    "Sampler",
    "Schedule",
    "Table",
    "TarFiles",
    "TokenBatch",
    "TokenFile",
    "accuracy",
    "buckets",
    "build",
    "cross_entropy",
    "document_mask",
    "fit",
    "forecast",
    "from_keras",
    "groups",
    "linear_scaling",
    "load",
    "load_balancing_loss",
    "model_loss",
    "mse",
    "next_token_loss",
    "no_decay",
    "param",
    "params",
    "plan",
    "prove",
    "ray_report",
    "router_z_loss",
    "start",
    "sweep",
    "to_keras",
    "torchmetric",
    "weighted",
]


def __getattr__(name: str) -> Any:
    # Torch takes a second to import; a name that needs it is fetched when first used.
    if name not in _WHERE:
        raise AttributeError(f"module 'phalanx' has no attribute {name!r}")
    value = getattr(import_module(_WHERE[name]), name)
    globals()[name] = value
    return value


class _Package(ModuleType):
    def __setattr__(self, name: str, value: Any) -> None:
        # Importing the folder forecast must not hide the function of that name.
        if name not in _WHERE or not isinstance(value, ModuleType):
            super().__setattr__(name, value)

    def __reduce__(self) -> tuple[Any, ...]:
        # What sends functions elsewhere, as Ray does, takes a module by its name only where it is a plain one.
        return import_module, (__name__,)


sys.modules[__name__].__class__ = _Package


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
