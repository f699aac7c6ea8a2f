"""The devices of this machine as a plan would use them."""

from __future__ import annotations

from dataclasses import replace

from phalanx.errors import SpecError
from phalanx.hardware import cores, memory_bytes, this_machine
from phalanx.hardware.calibrate import default_path
from phalanx.hardware.probe import cpu_group
from phalanx.launch.child import threads_each
from phalanx.parallel import device_kind
from phalanx.spec import Cluster, Device, Group, Host, Plan


def cluster_for(plan: Plan, threads: int | None = None) -> Cluster:
    """As many devices as ``plan`` uses, each with what one of its replicas gets here.

    On CPUs that is an equal share of the memory and of the cores, which may be less than one core or several; with the
    constants of ``machine.toml`` in the working directory, which ``phalanx calibrate`` writes.

    Args:
        plan: it.
        threads: that each replica computes with; its share of the cores where not given.
    """
    there = this_machine()
    if device_kind(plan) == "cuda" and there.groups[0].device.kind == "cuda":
        return Cluster(groups=(replace(there.groups[0], nodes=1, per_node=plan.devices),), network=there.network)
    measured = _measured()
    if measured:
        there = measured
    elif there.groups[0].device.kind != "cpu":
        host = Host(name="this machine", cores=cores(), memory=memory_bytes())
        there = Cluster(groups=(cpu_group(host),), network=there.network)
    return Cluster(groups=(_share(there.groups[0], plan, threads),), network=there.network)


def _measured() -> Cluster | None:
    """What ``phalanx calibrate`` found, where its file is here and of CPUs."""
    path = default_path()
    if not path.is_file():
        return None
    try:
        found = Cluster.from_toml(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, SpecError):  # a file of somebody else's
        return None
    return found if found.groups[0].device.kind == "cpu" and len(found.groups) == 1 else None


def _share(group: Group, plan: Plan, threads: int | None) -> Group:
    each = threads or max(1, threads_each(plan.world_size) // plan.threads)
    had = min(float(each), cores() / plan.devices)
    core = group.device
    if core.measured:
        had = max(1.0, had)  # what was measured says itself what processes that share a core take
    memory = memory_bytes() // plan.devices
    device: Device = replace(
        core,
        peak={name: had * peak for name, peak in core.peak.items()},
        bandwidth=had * core.bandwidth,
        memory=memory,
        kept=min(core.kept, memory),
    )
    host = replace(group.host, slots=plan.devices, cores=cores(), memory=memory_bytes())
    return replace(group, nodes=1, device=device, host=host, per_node=plan.devices)
