"""Results of a step for Ray Train: for a user's own loop inside the workers of a ``TorchTrainer``."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

from phalanx.errors import MissingExtraError
from phalanx.train.evaluate import Evaluation
from phalanx.train.metrics import Metrics


def ray_report(metrics: Metrics, evaluation: Evaluation | None = None, **how: Any) -> None:
    """Report a step's and an evaluation's results by ``ray.train.report``. Collective over all workers.

    Ray Train then has ``loss`` (of the global batch, the same on all ranks), ``step``, ``epoch``, ``samples``, ``lr``,
    ``grad_norm`` if it was computed, ``loss/NAME`` of several losses; and ``evaluation/loss`` and ``evaluation/NAME``
    of an evaluation. ``how``: further arguments of ``ray.train.report``, such as ``checkpoint``.

    Raises:
        MissingExtraError: Ray is not installed.
    """
    if find_spec("ray") is None:
        raise MissingExtraError("ray", "ray")
    from ray import train

    train.report(_numbers(metrics, evaluation), **how)


def _numbers(metrics: Metrics, evaluation: Evaluation | None) -> dict[str, float]:
    found: dict[str, float | None] = {
        "loss": metrics.loss,
        "step": metrics.step,
        "epoch": metrics.epoch,
        "samples": metrics.samples,
        "lr": metrics.lr,
        "grad_norm": metrics.grad_norm,
        **{f"loss/{name}": loss for name, loss in metrics.losses.items()},
    }
    if evaluation:
        named = {"loss": evaluation.loss, **evaluation.metrics}
        found |= {f"evaluation/{name}": value for name, value in named.items()}
    return {name: value for name, value in found.items() if value is not None}
