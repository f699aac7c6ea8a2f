"""Training steps of one model: plain PyTorch and Phalanx, three rounds in turn if memory suffices, in one process."""

from __future__ import annotations

import gc
import statistics
import traceback
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Any

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

if TYPE_CHECKING:
    import phalanx as px

PLAIN, EAGER, COMPILED = "plain PyTorch", "phalanx eager", "phalanx compiled"
_ROUNDS = 3
_ROUND_SECONDS = 2.0  # of a round, about
_WARM_UP = 3  # steps
_STATE = 16  # bytes of fp32 parameters, gradients and both moments of AdamW, a parameter
_WORK = 10 * 2**30  # bytes of activations and logits, about


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


@dataclass(kw_only=True)
class Results:
    """Rows by method, and tracebacks of the methods that could not be built."""

    failed: dict[str, str]
    rows: dict[str, dict[str, Any]] = field(default_factory=dict[str, dict[str, Any]])


def run(step: Step) -> None:
    """Measure, with half the batch if memory runs out; then forecast each row."""
    work = workload(step.name, small=step.small, memory_gib=device_memory_gib(step.device))
    _set_up_torch()
    step.facts(note=_note(step, work))
    batch, failed = work.batch, dict[str, str]()
    while True:
        facts = _facts(step, work, batch)
        try:
            rows = _measured(step, work, facts, failed)
            break
        except Exception as error:
            if batch == 1 or not _out_of_memory(error):
                raise
            batch //= 2
        step.note(f"Memory ran out, so the batch was halved to {batch}.")
        gc.collect()
        torch.cuda.empty_cache()
    _forecast(step, work, batch, rows)
    if failed:
        raise RuntimeError(_in_words(failed))


def _out_of_memory(error: Exception) -> bool:
    return isinstance(error, torch.OutOfMemoryError) or "out of memory" in str(error).lower()


def _in_words(failed: dict[str, str]) -> str:
    return "\n".join(f"{name}:\n{text}" for name, text in failed.items())


def _set_up_torch() -> None:
    """Set what all methods share: convolutions are tried, and ResNet's eight sizes of blocks are compiled twice."""
    torch.backends.cudnn.benchmark = True
    import_module("torch._dynamo").config.recompile_limit = 64


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


def _measured(step: Step, work: Workload, facts: dict[str, Any], failed: dict[str, str]) -> dict[str, dict[str, Any]]:
    """Measure all methods in turn, or one after another if the device is too small to hold them together.

    A method that cannot be built is put into ``failed`` with its traceback, and the others are measured.
    """
    names, found = _methods(work), Results(failed=failed)
    groups = [names] if fits_all(step, work) else [(name,) for name in names]
    for group in groups:
        _rounds(step, work, facts, found, group)
        if len(groups) > 1:
            _free(step.device)
    if not found.rows:
        raise RuntimeError(_in_words(failed))
    return found.rows


def _methods(work: Workload) -> tuple[str, ...]:
    return (EAGER,) if work.name == "lora_8b" else (PLAIN, EAGER, COMPILED)


def fits_all(step: Step, work: Workload) -> bool:
    """Return True if the device's free memory holds all methods at once."""
    count = len(_methods(work))
    if step.device != "cuda" or count == 1:
        return True
    return torch.cuda.mem_get_info()[0] >= count * _STATE * work.parameters() + _WORK


def _free(device: str) -> None:
    import_module("torch._dynamo").reset()
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()


def _rounds(step: Step, work: Workload, facts: dict[str, Any], found: Results, group: tuple[str, ...]) -> None:
    """Build the methods of ``group``, then run rounds in turn; each method reports its row after each round."""
    memory, methods = Memory(step.device), list[Method]()
    for name in group:
        try:
            methods.append(_built(step, work, name, facts["batch"]))
        except Exception as error:  # of one method; the others are worth measuring
            if _out_of_memory(error):
                raise
            found.failed[name] = traceback.format_exc()
            step.failed(_in_words(found.failed))
    if not methods:
        return
    unmeasured = len(_methods(work)) - len(found.rows) - len(found.failed)
    count = _count(step, methods, max(len(methods), unmeasured))
    for _ in range(_ROUNDS):
        for method in methods:
            others = memory.held() - method.held
            memory.reset()
            method.seconds.append(timed(method.take, count, step.device))
            method.peak = max(method.peak, memory.peak() - others)
        for method in methods:
            plain = found.rows.get(PLAIN, {}).get("step_seconds")
            found.rows[method.name] = _row(work, method, plain, facts)
            step.row(method.name, **found.rows[method.name])


def _built(step: Step, work: Workload, name: str, batch: int) -> Method:
    """Build a method and take the steps that compile and warm up."""
    job, memory = work.job(batch=batch), Memory(step.device)
    plan = "" if name == PLAIN else _plan(step, work, name)
    gc.collect()
    before = memory.held()
    take = _plain(step, work, job) if name == PLAIN else phalanx_steps(job, plan)
    take(1 if step.small else _WARM_UP)
    synchronize(step.device)
    gc.collect()
    return Method(name=name, plan=plan, take=take, held=memory.held() - before)


def _plain(step: Step, work: Workload, job: px.Job) -> Take:
    """Return plain PyTorch compiled, or eager where it cannot be compiled: without it no row has a ratio."""
    try:
        take = plain_steps(job, work.target, step.device, compiled=True, ignored=work.ignored)
        take(1)
        return take
    except Exception as error:
        if _out_of_memory(error):
            raise
        step.note(f"Plain PyTorch is eager, as it could not be compiled: {first_line(error)}")
    return plain_steps(job, work.target, step.device, compiled=False, ignored=work.ignored)


def _plan(step: Step, work: Workload, name: str) -> str:
    compiled = "compile=true " if name == COMPILED else ""
    return f"{compiled}{work.plan} device={step.device}"


def _note(step: Step, work: Workload) -> str:
    notes = ["A round is the mean of its steps."]
    if work.name == "lora_8b":
        notes.append("Frozen weights count 4 FLOPs a token in place of 6.")
    else:
        notes.append("Plain PyTorch compiles blocks and loss, and steps a fused AdamW.")
    if not fits_all(step, work):
        notes.append("Rounds not in turn: the device is too small to hold all methods.")
    if step.small:
        notes.append("Small version: compiled blocks are traced without generating code; memory is the process's.")
    return " ".join(notes)


def _count(step: Step, methods: list[Method], unmeasured: int) -> int:
    """Return steps of a round: as many as take about two seconds, as far as the time limit allows."""
    each = max(timed(method.take, 1, step.device) for method in methods)
    wanted = 0.3 if step.small else _ROUND_SECONDS
    affordable = 0.5 * max(0.0, step.left) / (_ROUNDS * unmeasured)
    return max(2, min(200, int(min(wanted, affordable) / each)))


def _row(work: Workload, method: Method, plain: float | None, facts: dict[str, Any]) -> dict[str, Any]:
    seconds = statistics.median(method.seconds)
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
        "ratio": plain / seconds if plain and method.name != PLAIN else None,
    }


def _forecast(step: Step, work: Workload, batch: int, rows: dict[str, dict[str, Any]]) -> None:
    cluster = catalog_cluster(step.device)
    if cluster is None:
        step.note("The catalog does not know this device: no forecasts.")
        return
    job = work.job(steps=10, batch=batch)
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
