"""Training steps of one model: plain PyTorch and Phalanx in turn, three rounds, in one process."""

from __future__ import annotations

import gc
import statistics
from dataclasses import dataclass, field
from typing import Any

import torch

from gpu_record.measure import (
    Memory,
    catalog_cluster,
    device_memory_gib,
    forecasts,
    peak_flops,
    relative,
    synchronize,
)
from gpu_record.report import Step, first_line
from gpu_record.steps.methods import Take, phalanx_steps, plain_steps, timed
from gpu_record.workloads import Workload, workload

PLAIN, EAGER, COMPILED = "plain PyTorch", "phalanx eager", "phalanx compiled"
_ROUNDS = 3
_ROUND_SECONDS = 2.0  # of a round, about
_WARM_UP = 3  # steps


@dataclass(kw_only=True)
class Method:
    """A way to train, built and warm.

    Attributes:
        held: bytes that it holds between steps.
        peak: bytes at its peak, without those of other methods.
        seconds: of one step, a mean for each round.
    """

    name: str
    plan: str
    take: Take
    held: int
    peak: int = 0
    seconds: list[float] = field(default_factory=list[float])


def run(step: Step) -> None:
    """Measure, with half the batch if memory runs out; then forecast each row."""
    work = workload(step.name, small=step.small, memory_gib=device_memory_gib(step.device))
    names = (EAGER,) if step.name == "lora_8b" else (PLAIN, EAGER, COMPILED)
    batch = work.batch
    while True:
        facts = _facts(step, work, batch)
        try:
            rows = _measured(step, work, batch, names, facts)
            break
        except torch.OutOfMemoryError:
            if batch == 1:
                raise
            rows, batch = {}, batch // 2
        step.note(f"Memory ran out, so the batch was halved to {batch}.")
        gc.collect()
        torch.cuda.empty_cache()
    _forecast(step, work, batch, rows)


def _facts(step: Step, work: Workload, batch: int) -> dict[str, Any]:
    peak = peak_flops(step.device)
    facts: dict[str, Any] = {
        "parameters": work.parameters(),
        "flops_per_step": work.flops(batch),
        "sequence": work.size.context if work.size else None,
        "batch": batch,
        "peak_tflops_used": peak / 1e12 if peak else None,
    }
    facts["tokens_per_step" if work.size else "samples_per_step"] = batch * work.units
    step.facts(**facts)
    return {**facts, "peak": peak}


def _measured(
    step: Step, work: Workload, batch: int, names: tuple[str, ...], facts: dict[str, Any]
) -> dict[str, dict[str, Any]]:
    """Build every method, then run rounds in turn; each method reports its row after each round."""
    job, memory = work.job(step.device, batch=batch), Memory(step.device)
    step.facts(note=_note(step, work))
    methods: list[Method] = []
    for name in names:
        plan = "" if name == PLAIN else _plan(step, work, name)
        gc.collect()
        before = memory.held()
        take = (
            plain_steps(job, step.device, compiled=True, ignored=work.ignored)
            if name == PLAIN
            else phalanx_steps(job, plan)
        )
        take(1 if step.small else _WARM_UP)
        synchronize(step.device)
        gc.collect()
        methods.append(Method(name=name, plan=plan, take=take, held=memory.held() - before))
    count = _count(step, methods)
    rows: dict[str, dict[str, Any]] = {}
    for _ in range(_ROUNDS):
        for method in methods:
            others = memory.held() - method.held
            memory.reset()
            method.seconds.append(timed(method.take, count, step.device))
            method.peak = max(method.peak, memory.peak() - others)
        for method in methods:
            rows[method.name] = _row(work, method, methods, facts)
            step.row(method.name, **rows[method.name])
    return rows


def _plan(step: Step, work: Workload, name: str) -> str:
    compiled = "compile=true " if name == COMPILED else ""
    return f"{compiled}{work.plan} device={step.device}"


def _note(step: Step, work: Workload) -> str:
    note = "Plain PyTorch compiles blocks and loss; a round is the mean of its steps."
    return note + (" The small version traces compiled blocks without generating code." if step.small else "")


def _count(step: Step, methods: list[Method]) -> int:
    """Return steps of a round: as many as take about two seconds, as far as the time limit allows."""
    each = max(timed(method.take, 1, step.device) for method in methods)
    wanted = 0.3 if step.small else _ROUND_SECONDS
    affordable = 0.5 * max(0.0, step.left) / (_ROUNDS * len(methods))
    return max(2, min(200, int(min(wanted, affordable) / each)))


def _row(work: Workload, method: Method, methods: list[Method], facts: dict[str, Any]) -> dict[str, Any]:
    seconds = statistics.median(method.seconds)
    plain = next((one for one in methods if one.name == PLAIN), None)
    unit_count = facts["batch"] * work.units
    return {
        "model": work.label,
        "method": method.name,
        "plan": method.plan.partition(" device=")[0],
        "rounds": list(method.seconds),
        "step_seconds": seconds,
        "rate": unit_count / seconds,
        "rate_unit": work.unit,
        "mfu": facts["flops_per_step"] / seconds / facts["peak"] if facts["peak"] else None,
        "peak_bytes": method.peak,
        "forecast": None,
        "time_error": None,
        "memory_error": None,
        "ratio": statistics.median(plain.seconds) / seconds if plain and plain is not method else None,
    }


def _forecast(step: Step, work: Workload, batch: int, rows: dict[str, dict[str, Any]]) -> None:
    cluster = catalog_cluster(step.device)
    if cluster is None:
        step.note("The catalog does not know this device: no forecasts.")
        return
    job = work.job(step.device, steps=10, batch=batch)
    plans = {name: row["plan"] or f"compile=true {work.plan}" for name, row in rows.items()}
    try:
        found = forecasts(job, sorted(set(plans.values())), cluster)
    except Exception as error:  # rows without forecasts are worth recording
        step.note(f"No forecasts: {first_line(error)}")
        return
    for name, row in rows.items():
        each = found[plans[name]]
        step.row(
            name,
            forecast=each,
            time_error=relative(each["step_seconds"], row["step_seconds"]),
            memory_error=relative(each["peak_bytes"], row["peak_bytes"]),
        )
