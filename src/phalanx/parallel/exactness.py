"""What a plan cannot keep of one device's result, found in the model and said before the run."""

from __future__ import annotations

from torch import nn
from torch.nn.modules.batchnorm import SyncBatchNorm, _NormBase
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.modules.instancenorm import _InstanceNorm

from phalanx.config import Job, Plan
from phalanx.config.sync import AUTO
from phalanx.units import show_names

_ITSELF = "(the model itself)"


def batch_statistics(module: nn.Module) -> list[str]:
    """Names of modules that normalise by the statistics of the batch they happen to see."""
    return [
        name or _ITSELF
        for name, child in module.named_modules()
        if isinstance(child, _NormBase) and not isinstance(child, _InstanceNorm | SyncBatchNorm)
    ]


def dropouts(module: nn.Module) -> list[str]:
    """Names of modules that drop at random in training, by their type or by an attention's own rate."""
    return [
        name or _ITSELF
        for name, child in module.named_modules()
        if (isinstance(child, _DropoutNd) and child.p > 0)
        or (isinstance(child, nn.MultiheadAttention) and child.dropout > 0)
    ]


def balances(module: nn.Module) -> bool:
    """Whether the model gives a load-balancing loss of its own, as transformers' mixtures of experts do when asked."""
    return any(getattr(getattr(child, "config", None), "output_router_logits", False) for child in module.modules())


def notes(module: nn.Module, job: Job, plan: Plan) -> list[str]:
    """What differs from one device under ``plan``, one sentence each; empty where nothing does."""
    found = [plan.exact_note] if plan.exact_note else []
    split = plan.replicas > 1 or (plan.micro is not None and plan.micro < job.batch)
    if split and (names := batch_statistics(module)):
        found.append(
            f"BatchNorm takes its statistics from each micro-batch, not from the global batch: {show_names(names)}. "
            "Group or layer normalisation would make it exact."
        )
    if split and balances(module):
        found.append(
            "the model's own load-balancing loss (output_router_logits) is a product of means over each micro-batch, "
            "not over the global batch. px.load_balancing_loss of its router_logits would make it exact."
        )
    if plan.recompute != "none" and batch_statistics(module):
        found.append("BatchNorm updates its running statistics twice a step under recompute.")
    if (split or plan.tp * plan.cp > 1) and (names := dropouts(module)):
        found.append(f"dropout draws other random numbers than on one device: {show_names(names)}.")
    if plan.shares == AUTO and (dropouts(module) or batch_statistics(module)):
        found.append("shares=auto follows measured times: a run with dropout or BatchNorm does not repeat exactly.")
    if plan.threads > 1 and dropouts(module):
        found.append("dropout under threads draws from one shared stream: a run with dropout does not repeat exactly.")
    if plan.zero == 3 and job.unused == "allow":
        found.append("a parameter that only some ranks use in a step ends the run under zero=3; zero=2 allows it.")
    if plan.precision != "fp32":
        found.append(f"{plan.precision} rounds each operation; results agree within that rounding only.")
    if plan.precision == "fp16" and split:
        found.append(
            "fp16 skips updates that overflow; at the border that depends on how many samples are added at once."
        )
    if plan.sync != "each":
        found += _apart(job, plan)
    return found


def _apart(job: Job, plan: Plan) -> list[str]:
    found = [
        "loss, count and gradient norm of a step are those of the first replica's share; each averaging tells the mean "
        "loss of all replicas.",
    ]
    if job.clip is not None:
        found.append("each replica clips by the norm of its own gradient.")
    return found
