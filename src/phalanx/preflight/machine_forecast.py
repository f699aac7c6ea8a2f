"""What a job under a plan is forecast to take on this machine: devices, seconds and bytes, and whether it fits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import nn

from phalanx.config import Cluster, Group, Host, Job, Plan
from phalanx.device_kinds import kind_named, kind_of_hardware
from phalanx.errors import PhalanxError, SpecError
from phalanx.files import read_text
from phalanx.hardware import cores, memory_bytes, this_machine
from phalanx.hardware.calibrate import default_path
from phalanx.hardware.probe import cpu_group, cpu_processes
from phalanx.launch.side_process import Send, take_spare_time
from phalanx.launch.worker_process import threads_each
from phalanx.parallel import device_kind
from phalanx.train.build_model import size_of
from phalanx.train.findings import Findings

_LIGHT = 0.05  # of the room: what a plan may hold without activations for its run to begin at once
_GPU = 4 * 2**30  # bytes that any accelerator in use for training has
_STATE = 16.0  # bytes of a parameter, its gradient and Adam's state in fp32


def send_forecast(job: Job, plan: Plan, threads: int | None, found: Findings, send: Send) -> None:
    """Tell ``light`` where the run may begin while this goes on in spare time, then the forecast or why there is none.

    The forecast is of the model that the look has left, where it has left one.
    """
    try:
        if _light(found.size or size_of(job), plan):
            send({"light": True})
            take_spare_time()
        send(forecast_of(job, plan, threads, found.module))
    except Exception as error:  # a job of any make: a run never fails for want of a forecast
        send({"missing": one_line(error)})


def one_line(error: Exception) -> str:
    """What went wrong, in one line."""
    said = (error.problems[0].given if hasattr(error, "problems") else str(error)).strip()  # pyrefly: ignore
    text = said.splitlines()[0] if said else type(error).__name__
    return text if isinstance(error, PhalanxError) else f"{type(error).__name__}: {text}" if said else text


def _light(size: int | None, plan: Plan) -> bool:
    """Return True if what is there without activations is so little that only they could be too much."""
    room = memory_bytes() // plan.devices if kind_named(device_kind(plan)).on_host else _GPU
    return size is not None and size * _STATE < _LIGHT * room


def forecast_here(job: Job, plan: Plan) -> dict[str, Any]:
    """``forecast_of`` for a run that is over: where there is none, why it is ``missing``."""
    try:
        return forecast_of(job, plan)
    except Exception as error:  # a job of any make
        return {"missing": one_line(error)}


def forecast_of(job: Job, plan: Plan, threads: int | None = None, module: nn.Module | None = None) -> dict[str, Any]:
    """The ``forecast`` of ``job`` under ``plan`` here, as JSON, and the plan to take ``instead`` where it does not fit.

    ``module`` is the job's model, where it has been built already.

    ``parts`` of the forecast are those of memory, each at its own peak; ``memory`` has them when all together are most.

    Raises:
        ProfileError: if the model's operations or shapes depend on values.
    """
    from phalanx.forecast import forecast
    from phalanx.planner import Question, shortfall
    from phalanx.planner.scale import forecast_to_dict
    from phalanx.train.traced_job import steps_of, work_of

    work, cluster = work_of(job, module=module), cluster_for(plan, threads)
    found = forecast(work, plan, cluster)
    answer: dict[str, Any] = {"forecast": {**forecast_to_dict(found), "parts": found.parts}, "instead": ""}
    if not found.fits:
        question = Question(work=work, cluster=cluster, precision=plan.precision, steps=steps_of(job) or 0)
        missing = shortfall(question, plan)
        changes = missing.changes if missing else ()
        # a CPU's own memory is the host's: nothing is gained by moving there
        useful = [one for one in changes if one.plan.offload == "none" or cluster.groups[0].device.kind != "cpu"]
        answer["instead"] = next((one.words for one in useful if one.words.startswith("--plan")), "")
    return answer


def cluster_for(plan: Plan, threads: int | None = None) -> Cluster:
    """As many devices as ``plan`` uses, each with what one of its replicas gets here.

    On CPUs that is an equal share of the memory and of the cores, which may be less than one core or several; with the
    constants of ``machine.toml`` in the working directory, which ``phalanx calibrate`` writes.

    ``threads``: that each replica computes with; its share of the cores where not given.
    """
    kind = kind_named(device_kind(plan))
    there = this_machine() if plan.device == "auto" or kind.on_host else this_machine(kind)
    if not kind.on_host and kind_of_hardware(there.groups[0].device.kind) is kind:
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
        found = Cluster.from_toml(read_text(path, where="cluster", fix="phalanx calibrate", below=0))
    except (ValueError, SpecError):  # a file of somebody else's
        return None
    return found if found.groups[0].device.kind == "cpu" and len(found.groups) == 1 else None


def _share(group: Group, plan: Plan, threads: int | None) -> Group:
    each = threads or max(1, threads_each(plan.world_size) // plan.threads)
    had = min(float(each), cores() / plan.devices)
    if group.device.measured:
        had = max(1.0, had)  # what was measured says itself what processes that share a core take
    host = replace(group.host, slots=plan.devices, cores=cores(), memory=memory_bytes())
    return cpu_processes(group, plan.devices, had, host)
