"""Puts a plan together: the one place that knows every technique. A new one adds a line to each table here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import nn

from phalanx.comm import Mesh, Place
from phalanx.errors import Problem
from phalanx.hardware import cuda_devices, return_freed_memory
from phalanx.parallel import compiled, recompute, threads
from phalanx.parallel.example import Example
from phalanx.parallel.layout import Layout
from phalanx.parallel.offload import OptimizerOnHost
from phalanx.parallel.replicate import Replicate
from phalanx.parallel.single import Single
from phalanx.parallel.threads import Threads
from phalanx.spec import Job, Plan


def check(job: Job, plan: Plan, here: int | None = None) -> list[Problem]:
    """Everything that keeps ``plan`` from serving ``job`` on this machine; no process is started, nothing is built.

    ``here`` is how many of the plan's devices this machine holds; all of them where it is not given.
    """
    kind = device_kind(plan, here)
    return [
        *_check_batch(job, plan),
        *_check_device(plan, here),
        *threads.check(plan, kind),
        *compiled.check(plan, kind),
        *_check_stages(plan),
    ]


def device_kind(plan: Plan, here: int | None = None) -> str:
    """``cuda`` or ``cpu``: what ``device=auto`` comes to. CUDA where every replica can have a device of its own.

    ``here`` is how many of the plan's devices this machine holds; all of them where it is not given.
    """
    if plan.device != "auto":
        return plan.device
    return "cuda" if cuda_devices() >= (here or plan.devices) else "cpu"


def assemble(
    module: nn.Module, job: Job, plan: Plan, place: Place, example: Callable[[], Example] | None = None
) -> Layout:
    """Lay ``module`` out as ``plan`` says, on this rank's device; a plan that splits the model needs an ``example``."""
    kind = device_kind(plan, place.workers_here * plan.threads)
    device = torch.device(kind, place.local_rank) if kind == "cuda" else torch.device(kind)
    if plan.kind == "split":
        from phalanx.parallel.split import Split

        assert example is not None
        layout: Layout = Split(module, device, job, plan, Mesh(plan, place.rank), example())
    else:
        module = recompute.apply(module, plan)
        module = compiled.apply(module, plan)
        layout = _lay_out(module, job, plan, device)
    return OptimizerOnHost(layout) if plan.offload == "optimizer" else layout


def _lay_out(module: nn.Module, job: Job, plan: Plan, device: torch.device) -> Layout:
    if plan.kind == "threads":
        devices = [torch.device("cuda", index) if device.type == "cuda" else device for index in range(plan.threads)]
        return Threads(module, devices)
    if plan.kind == "replicate":
        return Replicate(module, device, job, plan.world_size)
    if plan.kind == "shard":
        # Sharding loads torch's DTensor, which takes half as long as torch itself.
        from phalanx.parallel.shard import FullyShard
        from phalanx.parallel.zero import ShardedRows

        return_freed_memory()
        return FullyShard(module, device, plan) if plan.zero == 3 else ShardedRows(module, device, job, plan)
    return Single(module, device)


def _check_batch(job: Job, plan: Plan) -> list[Problem]:
    if job.batch >= plan.replicas:
        return []
    return [
        Problem(
            where="plan",
            given=f"{plan.replicas} replicas for a global batch of {job.batch}",
            allowed=f"at most {job.batch} replicas: each needs a sample in every full batch",
            fix=f"dp={job.batch}" if job.batch > 1 else "single",
        )
    ]


def _check_stages(plan: Plan) -> list[Problem]:
    if plan.pp == 1 or plan.zero != 2:
        return []
    # The stages of a rank run backward at different times, so that no moment has all gradients of a micro-batch.
    return [
        Problem(
            where="plan.zero",
            given=f"zero=2 with pp={plan.pp}",
            allowed="zero=1 or zero=3 in a pipeline: gradients of several micro-batches are under way at once",
            fix=str(replace(plan, zero=1)),
        )
    ]


def _check_device(plan: Plan, here: int | None) -> list[Problem]:
    if plan.device != "cuda":
        return []
    there, needed = cuda_devices(), here or plan.devices
    if there >= needed:
        return []
    given = f"device=cuda for {needed} replicas on this machine; CUDA devices here: {there}"
    return [
        Problem(
            where="plan.device",
            given=given,
            allowed="as many replicas as CUDA devices, or device=cpu",
            fix=str(replace(plan, device="cpu")),
        )
    ]
