"""A metric of the torchmetrics package as a ``px.Metric``: its own states, added up or joined over all samples."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from phalanx.config import Metric
from phalanx.errors import LossError


def torchmetric(metric: Any, *args: Any, **kwargs: Any) -> Metric:
    """Return a metric of ``torchmetrics`` over all samples of an evaluation, for ``job.metrics``.

    Args:
        metric: such as ``torchmetrics.F1Score(task="binary")``. Its states must be added up or joined over batches.
        args: arguments of its ``update``, for the samples at hand.
        kwargs: likewise.

    Raises:
        LossError: if it is no such metric, or has a state that is neither added up nor joined.
    """
    reductions: dict[str, Any] | None = getattr(metric, "_reductions", None)
    if reductions is None or not hasattr(metric, "update"):
        raise LossError(
            f"px.torchmetric takes a metric of torchmetrics, not a {type(metric).__name__}.\n"
            '    try: px.torchmetric(torchmetrics.F1Score(task="binary"), output, batch["label"])'
        )
    metric = metric.clone()
    metric.sync_on_compute = metric._to_sync = False  # ranks are brought together here, not by torch.distributed
    sums, rows = dict[str, Tensor](), dict[str, Tensor]()
    for tensor in (one for one in (*args, *kwargs.values()) if isinstance(one, Tensor)):
        metric = metric.to(tensor.device)
    metric.reset()
    metric.update(*args, **kwargs)
    for name, reduction in reductions.items():
        how, value = getattr(reduction, "__name__", "none"), getattr(metric, name)
        if how == "dim_zero_sum" and isinstance(value, Tensor):
            sums[name] = value
        elif how == "dim_zero_cat":
            rows[name] = torch.cat([torch.atleast_1d(one) for one in value]) if isinstance(value, list) else value
        else:
            raise LossError(
                f"the state {name!r} of {type(metric).__name__} is neither added up nor joined over batches "
                f"({how.removeprefix('dim_zero_')}): parts of the data do not give the whole's.\n"
                "    try: another metric, or a px.Metric of your own"
            )
    kinds = {name: value.dtype for name, value in {**sums, **rows}.items()}

    def compute(**states: Tensor) -> Any:
        metric.reset()
        metric.to("cpu")
        for name, value in states.items():
            own = value.to(kinds[name])
            setattr(metric, name, [own] if isinstance(metric._defaults[name], list) else own)
        metric._update_count = 1
        metric._computed, metric._to_sync = None, False
        return metric.compute()

    return Metric(compute=compute, sums=sums, rows=rows)
