"""Step ``overhead``: the cost of the loop in a step, for models so small that little else is in it."""

from __future__ import annotations

import statistics

from gpu_record.measure import profiled
from gpu_record.report import Step
from gpu_record.steps.methods import Take, phalanx_steps, plain_steps, timed
from gpu_record.workloads import overhead_job

_ROUNDS = 5
_MANY = {"MLP": 200, "GPT 10M": 60}  # steps of a round


def run(step: Step) -> None:
    """Take steps by a bare loop and by Phalanx in turn."""
    for model in ("MLP", "GPT 10M"):
        job, target = overhead_job(model, step.small)
        many = _MANY[model] // (20 if step.small else 1)
        takes: dict[str, Take] = {
            "bare loop": plain_steps(job, target, step.device, compiled=False, half=False),
            "phalanx": phalanx_steps(job, f"device={step.device}"),
        }
        for take in takes.values():
            take(max(3, many // 10))
        seconds: dict[str, list[float]] = {method: [] for method in takes}
        for _ in range(_ROUNDS):
            for method, take in takes.items():
                seconds[method].append(timed(take, many, step.device))
        found = {method: statistics.median(each) for method, each in seconds.items()}
        for method, take in takes.items():
            step.row(
                model,
                method,
                model=model,
                method=method,
                step_seconds=found[method],
                steps=_ROUNDS * many,
                host_waits_per_step=_waits(step, take),
                ratio=None if method == "bare loop" else found[method] / found["bare loop"],
            )


def _waits(step: Step, take: Take, count: int = 10) -> float | None:
    if step.device != "cuda":
        return None
    try:
        return len(profiled(lambda: take(count), step.device).waits) / count
    except Exception as error:  # the times are worth more than this count
        print(f"{type(error).__name__}: {error}")
        return None
