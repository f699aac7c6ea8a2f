"""What a forecast of replicas kept together in another way, or of unlike devices, takes for granted, in words."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from phalanx.spec import Cluster, Plan


def assumed(plan: Plan, cluster: Cluster, samples: Sequence[float]) -> tuple[str, ...]:
    """Sentences for the reader; ``samples`` are those of a rank of ``dp`` on each kind of device of ``cluster``."""
    return tuple(_assumed(plan, cluster, samples))


def _assumed(plan: Plan, cluster: Cluster, samples: Sequence[float]) -> Iterator[str]:
    if plan.exact_note:
        yield plan.exact_note
    if plan.sync != "each":
        yield from _averaged(plan)
    if plan.server:
        yield (
            "Servers are processes on the hosts, spread over the nodes; they take no device, and how fast the hosts' "
            "processors step parameters is assumed. Workers and servers of a node share its adapters."
        )
    if plan.backup:
        yield "Nobody is foretold to be late, so that not waiting for the slowest saves nothing here."
    yield from _by_kind(plan, cluster, samples)


def _averaged(plan: Plan) -> Iterator[str]:
    if plan.fragments > 1:
        yield (
            f"Of {plan.fragments} fragments each is averaged while the next steps compute; what is left is spread over "
            f"{plan.every} steps."
        )
    elif plan.every > 1:
        yield (
            f"Averaging parameters, which nothing hides, is spread over {plan.every} steps: that which does it takes "
            "longer, the others less."
        )
    if plan.after:
        yield f"The first {plan.after} steps, which sum gradients, take longer."
    copies = "a copy of the parameters"
    if plan.outer == "nesterov":
        copies += " and the outer momentum"
    yield f"Each rank keeps {copies} in fp32 in host memory."


def _by_kind(plan: Plan, cluster: Cluster, samples: Sequence[float]) -> Iterator[str]:
    unlike = len(samples) > 1
    if plan.shares and unlike:
        each = [
            f"{count:g} on {group.device.name}" for group, count in zip(cluster.groups, samples, strict=True) if count
        ]
        yield f"Samples of a rank of dp: {', '.join(each)}. The step is that of the kind that takes longest."
    elif plan.shares == "auto":
        yield "Devices are alike, so that shares=auto is even."
    elif unlike:
        yield "Shares are even: every device is as slow as the slowest, and holds what the smallest has room for."
