"""The devices of this machine as a plan would use them."""

from __future__ import annotations

from dataclasses import replace

from phalanx.hardware import cores, memory_bytes, this_machine
from phalanx.hardware.probe import cpu_group
from phalanx.launch.child import threads_each
from phalanx.parallel import device_kind
from phalanx.spec import Cluster, Device, Group, Host, Plan


def cluster_for(plan: Plan, threads: int | None = None) -> Cluster:
    """As many devices as ``plan`` uses, each with what one of its replicas gets here.

    On CPUs that is an equal share of the memory and of the cores, which may be less than one core or several.

    Args:
        plan: it.
        threads: that each replica computes with; its share of the cores where not given.
    """
    there = this_machine()
    if device_kind(plan) == "cuda" and there.groups[0].device.kind == "cuda":
        return Cluster(groups=(replace(there.groups[0], nodes=1, per_node=plan.devices),), network=there.network)
    host = Host(name="this machine", cores=cores(), memory=memory_bytes())
    return Cluster(groups=(_share(cpu_group(host), host, plan, threads),), network=there.network)


def _share(group: Group, host: Host, plan: Plan, threads: int | None) -> Group:
    each = threads or max(1, threads_each(plan.world_size) // plan.threads)
    had = min(float(each), (host.cores or 1) / plan.devices)
    core = group.device
    memory = (host.memory or core.memory) // plan.devices
    device: Device = replace(
        core,
        peak={name: had * peak for name, peak in core.peak.items()},
        bandwidth=had * core.bandwidth,
        memory=memory,
        kept=min(core.kept, memory),
    )
    return replace(group, device=device, host=replace(host, slots=plan.devices), per_node=plan.devices)
