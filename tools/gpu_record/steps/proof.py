"""Step ``proof``: plans against a plain loop on one device, for small models; on CUDA all models at once."""

from __future__ import annotations

import subprocess
import sys
import time

from gpu_record.report import Step, first_line
from gpu_record.workloads import proof_job

MODELS = ("GPT", "LoRA", "ResNet")
_STEPS = 3
# The cheapest first. Compiling takes longest; half precision needs a run on one device of its own.
_ONE = (
    "single",
    "fsdp=1 zero=1",
    "fsdp=1 zero=2",
    "fsdp=1 zero=3",
    "offload=parameters",
    "micro=3",
    "recompute=full",
    "recompute=selective",
    "offload=optimizer",
    "threads=1",
    "precision=bf16",
    "precision=fp16",
    "compile=true",
)
_TWO = ("dp=2", "fsdp=2", "tp=2", "pp=2", "cp=2", "ep=2")
_MARGIN = 3.0  # seconds before the limit by which the step ends
_COMPILES = 20.0  # seconds that compiling takes at least
_SMALL = 40.0  # seconds of the small version


def run(step: Step) -> None:
    """Prove each plan, as far as time goes; name the pairs that were left out."""
    if step.device == "cuda" and not step.part:
        _each_in_a_process(step)
        return
    models = (step.part,) if step.part else MODELS
    proofs = Proofs(step)
    pairs = [(model, plan) for plan in _plans(step) for model in models]
    longest, ends = 0.0, time.monotonic() + (min(step.left, _SMALL) if step.small else step.left) - _MARGIN
    for index, (model, plan) in enumerate(pairs):
        needed = max(1.5 * longest, _COMPILES if "compile" in plan and not step.small else 0.0)
        if time.monotonic() + needed > ends:
            left = ", ".join(f"{model} {plan}" for model, plan in pairs[index:])
            step.note(f"No time was left for: {left}.")
            return
        begun = time.monotonic()
        proofs.prove(model, plan)
        longest = max(longest, time.monotonic() - begun)


def _plans(step: Step) -> tuple[str, ...]:
    if step.device != "cuda":
        return _ONE
    from phalanx.device_kinds import kind_named

    return _ONE if kind_named("cuda").count() < 2 else (*_ONE[:-1], *_TWO, _ONE[-1])


def _each_in_a_process(step: Step) -> None:
    """Start one process a model: a proof waits for processes to start more than for the device."""
    command = [sys.executable, "-m", "gpu_record.steps", step.name, "--device", step.device]
    command += ["--messages", str(step.messages), "--record", str(step.record)]
    command += ["--limit", f"{step.left - 1:.1f}", "--part"]
    running = [subprocess.Popen([*command, model]) for model in MODELS]
    codes = [process.wait() for process in running]
    if any(codes):
        raise RuntimeError(f"exit codes of {', '.join(MODELS)}: {codes}")


class Proofs:
    """Proofs of small jobs; one device is run once for each model and precision."""

    def __init__(self, step: Step) -> None:
        from phalanx.verify import OneDevice

        self.step = step
        self.jobs = {model: proof_job(model) for model in MODELS}
        self.known: dict[tuple[str, str], OneDevice] = {}

    def prove(self, model: str, text: str) -> None:
        """Compare the plan with one device and record the row."""
        from phalanx.errors import RefusedError, SpecError

        begun = time.monotonic()
        row = {"model": model, "plan": text, "result": "failed", "difference": None, "where": "", "reason": ""}
        try:
            row |= self._compared(model, text)
        except (SpecError, RefusedError) as error:  # pyrefly: ignore[unreachable-except-clause]
            row |= {"result": "refused", "reason": first_line(error)}
        except Exception as error:  # a proof that fails is a result
            row |= {"result": "failed", "reason": first_line(error)}
        self.step.row(model, text, **row, seconds=round(time.monotonic() - begun, 2))

    def _compared(self, model: str, text: str) -> dict[str, object]:
        from phalanx.config import Plan
        from phalanx.verify import OneDevice, ReferenceRun

        plan = Plan.parse(f"{text} device={self.step.device}")
        key = (model, plan.precision)
        if key not in self.known:
            how = ReferenceRun(precision=plan.precision, device=plan.device)
            self.known[key] = OneDevice.run(self.jobs[model], _STEPS, how)
        proof = self.known[key].prove(plan)
        return {
            "result": "equal" if proof.equal else "not equal",
            "difference": max(proof.largest.values()),
            "where": proof.first,
            "reason": proof.cause,
        }
