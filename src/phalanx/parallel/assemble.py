"""Assembly of a plan: the one place that knows every technique. A new one adds its lines here."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import nn

from phalanx.comm import Mesh, Place, share_timeout
from phalanx.config import Job, Plan
from phalanx.config.batching import global_batch_problems
from phalanx.config.fields import plan_problem
from phalanx.config.losses import counts_problems
from phalanx.config.optimizing import average_problems, clip_problems
from phalanx.config.plan_rules import stage_problems
from phalanx.device_kinds import host, kind_for, kind_named, kind_of
from phalanx.errors import Problem
from phalanx.hardware import keep_freed_memory, return_freed_memory
from phalanx.parallel import (
    activation_checkpointing,
    compression,
    parameter_server,
    phase_layouts,
    threads,
    torch_compile,
)
from phalanx.parallel.ddp import DdpLayout
from phalanx.parallel.global_batch_norm import join, open_layers
from phalanx.parallel.layout import Layout, SingleLayout
from phalanx.parallel.offload import OptimizerOnHost
from phalanx.parallel.survey import Example
from phalanx.parallel.threads import ThreadsLayout
from phalanx.placement.batch_split import micro_batches
from phalanx.placement.limits import returns_freed_memory


def check(job: Job, plan: Plan, here: int | None = None) -> list[Problem]:
    """Return every problem of ``plan`` with ``job`` on this machine, without starting a process or building.

    ``here`` is the number of the plan's devices on this machine; by default all.
    """
    kind = device_kind(plan, here)
    found = [
        *global_batch_problems(job, plan),
        *_check_device(plan, here),
        *threads.check(plan, kind),
        *torch_compile.check(plan, kind),
        *stage_problems(plan),
        *compression.check(job, plan),
        *parameter_server.check(plan),
        *_coupled_problems(job, plan, kind),
        *(one for loss in (job.loss, *(phase.loss for phase in job.phases)) for one in counts_problems(loss, plan)),
        *average_problems(job.average, plan),
        *clip_problems(job.clipping, plan),
        *phase_layouts.check(job, plan),
    ]
    if plan.precision in ("tf32", "fp8"):
        given = f"precision={plan.precision}, which can be forecast but not run yet"
        found.append(Problem(where="plan.precision", given=given, allowed="fp32, bf16, fp16", fix="precision=bf16"))
    return found


def device_kind(plan: Plan, here: int | None = None) -> str:
    """Return the device kind of ``plan``: ``device=auto`` takes a kind with a device for every replica."""
    return kind_for(plan.device, here or plan.devices).name


def devices_here(plan: Plan, place: Place) -> int:
    """Return the number of replicas that compute on the machine of ``place``; servers need no device."""
    return min(place.workers_here, plan.world_size) * plan.threads


def assemble(
    module: nn.Module,
    job: Job,
    plan: Plan,
    rank: int,
    device: torch.device,
    example: Callable[[], Example] | None = None,
) -> Layout:
    """Lay ``module`` out for ``plan`` on this rank's device; a plan that splits the model needs an ``example``."""
    mesh = Mesh(plan, rank) if plan.world_size > 1 else None
    joined = job.batch_statistics == "global" and open_layers(module, compiles=plan.compile)
    seen = example() if example and (plan.kind == "split" or plan.zero == 3 or plan.recompute != "none") else None
    if seen is not None:
        from phalanx.parallel.unwrapped_blocks import open_unwrapped

        open_unwrapped(module, plan, seen)
    if plan.kind == "split":
        from phalanx.parallel.split import SplitLayout

        assert seen is not None
        assert mesh is not None
        layout: Layout = SplitLayout(module, device, job, plan, mesh, seen)
        if not returns_freed_memory(plan.fsdp):
            keep_freed_memory()  # building the model had it returned
    else:
        module = activation_checkpointing.apply(module, plan)
        module = torch_compile.apply(module, plan)
        layout = _lay_out(module, job, plan, device)
    laid_out = OptimizerOnHost(layout) if plan.offload == "optimizer" else layout
    if joined:
        laid_out.statistics = layout.statistics = join(layout.modules, plan, mesh)
    share_timeout()
    return laid_out


def assemble_phases(
    module: nn.Module,
    job: Job,
    plan: Plan,
    device: torch.device,
    parameters: Sequence[Mapping[str, nn.Parameter]],
    examples: Callable[[], Iterable[Example]],
) -> phase_layouts.AllPhases:
    """Lay ``module`` out for the phases of ``job``, which own these ``parameters``; each phase has an example."""
    if plan.zero == 3:
        from phalanx.parallel.unwrapped_blocks import open_unwrapped

        for example in examples():
            open_unwrapped(module, plan, example)
    laid_out = phase_layouts.lay_out_phases(module, plan, parameters, lambda: _lay_out(module, job, plan, device))
    share_timeout()
    return phase_layouts.AllPhases(laid_out)


def _lay_out(module: nn.Module, job: Job, plan: Plan, device: torch.device) -> Layout:
    if plan.kind == "threads":
        devices = [kind_of(device).device(index) for index in range(plan.threads)]
        return ThreadsLayout(module, devices)
    if plan.kind == "replicate":
        return DdpLayout(module, device, job, plan.world_size, plan.compress)
    if plan.kind == "shard":
        # Sharding loads torch's DTensor, which takes half as long as torch itself.
        from phalanx.parallel.fsdp import FsdpLayout
        from phalanx.parallel.zero import ShardedRows

        return_freed_memory()
        return FsdpLayout(module, device, plan) if plan.zero == 3 else ShardedRows(module, device, job, plan)
    return SingleLayout(module, device)


def _check_device(plan: Plan, here: int | None) -> list[Problem]:
    if plan.device == "auto" or (kind := kind_named(plan.device)).on_host:
        return []
    on_host = str(replace(plan, device=host().name))
    if missing := kind.missing():
        allowed = f"device={kind.name} where it is installed, or device={host().name}"
        return [plan_problem("device", f"device={kind.name}; {missing}", allowed, on_host)]
    if kind.most is not None and plan.devices > kind.most:
        given = f"device={kind.name} for {plan.devices} replicas: {kind.label} devices have no backend for collectives"
        return [plan_problem("device", given, f"a plan for one device, or device={host().name}", on_host)]
    if plan.threads > 1 and not kind.shared:
        given = f"threads={plan.threads} on {kind.label} devices, of which a process has one"
        processes = str(replace(plan, threads=1, dp=plan.threads))
        return [plan_problem("threads", given, "processes, each with a device of its own", processes)]
    if plan.precision not in kind.precisions and plan.precision in host().precisions:
        given = f"precision={plan.precision} on {kind.label} devices"
        return [plan_problem("precision", given, ", ".join(kind.precisions), f"precision={kind.precisions[-1]}")]
    there, needed = kind.count(), here or plan.devices
    if there >= needed:
        return []
    replicas = f"{needed} replica{'s' if needed > 1 else ''}"
    given = f"device={kind.name} for {replicas} on this machine; {kind.label} devices here: {there}"
    allowed = f"as many replicas as {kind.label} devices, or device={host().name}"
    return [plan_problem("device", given, allowed, on_host)]


def _coupled_problems(job: Job, plan: Plan, kind: str) -> list[Problem]:
    if job.loss_over == "samples":
        return []
    coupled = 'loss_over="batch", whose loss needs the outputs of the whole global batch'
    found: list[Problem] = []
    if plan.pp > 1:
        given = f"a pipeline for {coupled}: it begins backward before the last micro-batch's forward"
        whole = {"pp": 1, "fsdp": plan.fsdp * plan.pp, "schedule": "1f1b", "stages": 1}
        fix = replace(plan, **whole, zero=plan.zero if plan.fsdp > 1 else 3)  # pyrefly: ignore[bad-argument-type]
        found.append(plan_problem("pp", given, "dp, fsdp, ep, tp, cp or threads", str(fix)))
    if plan.server:
        given = f"servers for {coupled}: workers compute pieces of it one by one, each when it is free"
        found.append(plan_problem("server", given, "plans without servers", f"dp={plan.dp}"))
    elif plan.sync != "each":
        given = f"sync={plan.sync} for {coupled}: replicas step by themselves, each on its own share"
        found.append(plan_problem("sync", given, "sync=each", "sync=each"))
    if plan.threads > 1 and kind_named(kind).on_host and micro_batches(plan, job.batch) > 1:
        given = (
            f"threads and micro={plan.micro} on a CPU for {coupled}: forward then runs twice, and threads that share "
            "one stream of random numbers would not draw the same ones again"
        )
        fix = replace(plan, threads=1, dp=plan.threads)
        found.append(plan_problem("micro", given, "threads without micro, or processes", str(fix)))
    return found
