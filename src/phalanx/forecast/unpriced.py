"""What a forecast was told and does not price, in words: no input is left out without being named."""

from __future__ import annotations

from collections.abc import Iterator

from phalanx.spec import Cluster, Plan
from phalanx.spec.plan import words
from phalanx.spec.rules import unread

_LEARNING = ("outer_lr", "outer_momentum", "compensate")


def unpriced(plan: Plan, cluster: Cluster, batch: int) -> Iterator[str]:
    """A sentence for each input of ``plan`` and ``cluster`` that changes no number of the forecast of ``batch``."""
    yield from unread(plan, batch, {})
    if plan.compile:
        yield "compile is not priced: kernels are taken to be eager ones."
    if plan.split:
        yield "split is not priced: stages are taken to be balanced by their blocks."
    if plan.threads > 1:
        yield f"threads={plan.threads} is priced as dp={plan.threads}: what threads save of reductions is left out."
    learning = [name for word in words(str(plan)) if (name := word.partition("=")[0]) in _LEARNING]
    if learning:
        yield f"{', '.join(learning)}: changes what is learnt, not what a step takes."
    yield from _of_cluster(cluster)


def uncut(plan: Plan, heads: int) -> Iterator[str]:
    """A sentence where ``tp`` does not divide the ``heads`` of attention; 0 of a model without."""
    if plan.tp > 1 and heads and heads % plan.tp:
        yield (
            f"tp={plan.tp} does not divide {heads} heads: attention is priced as cut, and stays whole on each rank "
            "where queries, keys and values come of one layer; phalanx show tells which."
        )


def _of_cluster(cluster: Cluster) -> Iterator[str]:
    hosts = {
        name
        for group in cluster.groups
        for name, value in (("cores", group.host.cores), ("NUMA nodes", group.host.numa))
        if value and (group.device.kind != "cpu" or name != "cores")
    }
    if hosts:
        yield f"Of the hosts, {' and '.join(sorted(hosts))} are not priced: loading data is taken to keep up."
    for kind in sorted({group.device.kind for group in cluster.groups} - {"cpu", "cuda"}):
        yield f"Devices of kind {kind} are priced with the constants of kernels and collectives of CUDA devices."
    measured = [group for group in cluster.groups if group.device.measured]
    if any(name.endswith(".byte") for group in measured for name in group.device.measured):
        yield "Measured exchanges stand in place of the bandwidth and latency of link and network."
    if any(group.device.kind == "cpu" for group in measured):
        yield "Measured cores stand in place of launch and processors of the device."
