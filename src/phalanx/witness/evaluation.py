"""An evaluation in a plain loop: the data in order, sums over counts, and metrics that are computed once."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from phalanx.config import Job, Metric
from phalanx.config.losses import Losses, NamedLosses, in_evaluation
from phalanx.witness import samples
from phalanx.witness.parts import Part


def evaluated(
    job: Job, model: nn.Module, part: Part, data: Any, *, device: torch.device, half: torch.dtype | None
) -> dict[str, Any]:
    """Return ``loss``, ``samples`` and ``metrics`` over ``data``, with the loss of ``part``."""
    sums: dict[str, list[float]] = {}
    once: dict[str, list[Metric]] = {}
    seen = 0
    training = {each: each.training for each in model.modules()}
    model.eval()
    for ids, loaded in samples.in_order(data, job):
        batch = on_device(loaded, device)
        seen += len(ids)
        with torch.no_grad(), torch.autocast(device.type, dtype=half, enabled=half is not None):
            output = part.call(model, batch)
            loss = part.loss(output, batch, **in_evaluation(part.loss))
            found: dict[str, Any] = {
                name: sum_and_count([(one, len(ids))]) for name, one in (by_name(loss) or {"loss": loss}).items()
            }
            found |= dict(job.metrics(output, batch)) if job.metrics else {}
        for name, given in found.items():
            if isinstance(given, Metric):
                once.setdefault(name, []).append(given)
                continue
            entry = sums.setdefault(name, [0.0, 0.0])
            entry[0], entry[1] = entry[0] + float(given[0]), entry[1] + float(given[1])
    for each, was in training.items():
        each.training = was
    means = {name: total / count if count else math.nan for name, (total, count) in sums.items()}
    loss = _total(part.loss, means)
    for name, metrics in once.items():
        means |= _computed(name, metrics)
    return {"loss": loss, "samples": seen, "metrics": dict(sorted(means.items()))}


def _computed(name: str, metrics: list[Metric]) -> dict[str, float]:
    whole: dict[str, Tensor] = {}
    for key in metrics[0].sums:
        each = torch.stack([torch.as_tensor(one.sums[key]).detach().cpu() for one in metrics])
        whole[key] = each.sum(0, dtype=torch.float64 if each.is_floating_point() else torch.int64)
    for key in metrics[0].rows:
        whole[key] = torch.cat([one.rows[key].detach().cpu() for one in metrics])
    found: Any = metrics[0].compute(**whole)
    return (
        {f"{name}.{key}": float(one) for key, one in found.items()} if hasattr(found, "items") else {name: float(found)}
    )


def sum_and_count(results: Sequence[tuple[Any, int]]) -> tuple[Any, Any]:
    """Return the sum of a loss and its count, from each micro-batch's result and samples.

    A plain mean over the samples is a sum over them divided by their number. For several losses, their weighted means
    add up, with the first one's count.
    """
    first = results[0][0]
    if named := by_name(first):
        pairs = {name: sum_and_count([(by_name(one)[name], size) for one, size in results]) for name in named}
        count = next(iter(pairs.values()))[1]
        return sum(first.weights[name] * (total / own) for name, (total, own) in pairs.items()) * count, count
    sums = [one if isinstance(one, tuple) else (one * size, size) for one, size in results]
    return reduce(lambda held, more: (held[0] + more[0], held[1] + more[1]), sums)


def by_name(result: Any) -> Mapping[str, Any]:
    """Return the losses of a job by name."""
    return result.losses if isinstance(result, NamedLosses) else {}


def _total(loss: Any, means: dict[str, float]) -> float:
    if isinstance(loss, Losses):
        return sum(weight * means[name] for name, weight in loss.weights.items())
    return means.pop("loss")


def on_device(value: Any, device: torch.device) -> Any:
    """Return a batch with its tensors on ``device``."""
    if device.type == "cpu" and not isinstance(value, Tensor):
        return value
    held = dict(value) if isinstance(value, Mapping) else value  # mappings of a kind of their own are no trees
    return tree_map(lambda one: one.to(device) if isinstance(one, Tensor) else one, held)
