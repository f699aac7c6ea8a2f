"""What a run needs of each host: memory by its forecast for the devices there, and room for a checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from phalanx.config import Cluster, Group, Host, Job, Plan, RunSpec
from phalanx.device_kinds import on_host
from phalanx.hardware import entry
from phalanx.hardware.probe import Gpu, matched, measured
from phalanx.launch.check_hosts import CheckTime, HostAnswer, Needs
from phalanx.launch.side_process import Send, SideProcess
from phalanx.preflight.machine_forecast import cluster_for, one_line
from phalanx.train.build_model import size_of

_LEAST = 2.0  # seconds that a forecast is given in any case
_STATE = 12.0  # bytes of a parameter and Adam's state in a checkpoint


def host_needs(job: Job, run: RunSpec, answers: Sequence[HostAnswer], time: CheckTime) -> tuple[Needs, str]:
    """What each worker needs there, and why its memory is not known, or asked for; empty where it is."""
    plan = run.plan
    gpu = _smallest(answers) if not on_host(plan.device) else None
    with SideProcess(lambda send: _send_needs(job, plan, gpu, send)) as side:
        message = side.next(max(_LEAST, time.left))
    if message is None:
        return Needs(plan=plan), "its forecast took too long"
    needs = Needs(plan=plan, memory=message.get("memory", 0.0), state=message["state"])
    if run.forecast != "refuse":
        return replace(needs, memory=0.0), "the run is to begin whatever its forecast says"
    return needs, message.get("missing", "")


def replicas_on(answers: Sequence[HostAnswer], job: Job | None) -> Plan:
    """Plain replicas on all devices, as far as a batch goes round; a process for each host that has none."""
    places = sum(one.processes or len(one.devices) for one in answers) or len(answers)
    return Plan(dp=max(1, min(places, job.batch if job else places)))


def _smallest(answers: Sequence[HostAnswer]) -> Gpu | None:
    devices = [device for one in answers for device in one.whole_devices]
    least = min(devices, key=lambda device: device["total"], default=None)
    return Gpu(name=least["name"], memory=least["total"]) if least else None


def _send_needs(job: Job, plan: Plan, gpu: Gpu | None, send: Send) -> None:
    told: dict[str, Any] = {"state": _STATE * (size_of(job) or 0)}
    try:
        send({**told, "memory": _memory(job, plan, gpu)})
    except Exception as error:  # a job of any make
        send({**told, "missing": one_line(error)})


def _memory(job: Job, plan: Plan, gpu: Gpu | None) -> float:
    from phalanx.forecast import forecast
    from phalanx.train.traced_job import work_of

    work = work_of(job)
    if gpu is None:
        cluster = cluster_for(replace(plan, device="cpu"))
        return forecast(work, plan, cluster).reserved + cluster.groups[0].device.kept
    known = matched(gpu)
    group = Group(
        device=measured(gpu, known), link=known.link, host=Host(name="a host"), nodes=1, per_node=plan.devices
    )
    # what CUDA itself takes is not free there any more
    return forecast(work, plan, Cluster(groups=(group,), network=entry("cpu").network(1))).reserved
