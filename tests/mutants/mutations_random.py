"""Faults of random streams and of half precision, which one device's fp32 without dropout does not show."""

from __future__ import annotations

from mutation import Mutation

STEP = "train/step.py"
ACCUMULATION = "train/grad_accumulation.py"
_STREAM = "stream(self._job.seed, step.progress.step, index, step.first_part + part, *step.streams)"
_HELD = "        nothing = self._nothing_here(batch, totals)\n"
_TWO_PERCENT = f"{_HELD}        scale(local_gradients(list(held.parameters.values())[%s]), 1.02)\n"

RANDOM: tuple[Mutation, ...] = (
    Mutation(
        "ranks with unlike samples drop the same",
        ACCUMULATION,
        _STREAM,
        "stream(self._job.seed, step.progress.step, index, 0, *step.streams)",
        ("prove drops dp=2",),
    ),
    Mutation(
        "micro-batches drop the same",
        ACCUMULATION,
        _STREAM,
        "stream(self._job.seed, step.progress.step, 0, step.first_part + part, *step.streams)",
        ("prove drops dp=2 micro=2",),
    ),
    Mutation(
        "stages of a pipeline drop the same",
        "parallel/pipeline/stage.py",
        "branch(values[0].device, self.index)",
        "pass",
        ("prove drops pp=2",),
    ),
    Mutation(
        "stages of a pipeline differ in bits of the seed that nothing reads",
        "parallel/rng_streams.py",
        "(generator(device).initial_seed() ^ (index * 0x9E3779B97F4A7C15)) % 2**63",
        "generator(device).initial_seed() ^ (index << 32)",
        ("prove drops pp=2",),
    ),
    Mutation(
        "recompute drops other elements than forward did",
        "parallel/activation_checkpointing.py",
        "use_reentrant=False, **extra",
        "use_reentrant=False, preserve_rng_state=False, **extra",
        ("prove drops recompute=full",),
    ),
    Mutation(
        "an evaluation leaves dropout off",
        "train/evaluate.py",
        "            part.training = True\n",
        "            part.training = any(True for _ in part.parameters())\n",
        ("fit noisy single",),
    ),
    Mutation(
        "servers: pieces drop the same",
        "train/parameter_server/gradient_worker.py",
        "reseed(device, stream(self._job.seed, step, index, part))",
        "reseed(device, stream(self._job.seed, step, index, 0))",
        ("prove drops server=1 dp=2",),
    ),
    Mutation(
        "bf16: all gradients are 2 % too large", STEP, _HELD, _TWO_PERCENT % ":", ("prove rich dp=2 precision=bf16",)
    ),
    Mutation(
        "bf16: one parameter's gradient is 5 % too large",
        STEP,
        _HELD,
        (_TWO_PERCENT % ":1").replace("1.02", "1.05"),
        ("prove rich dp=2 precision=bf16",),
    ),
    Mutation(
        "fp16: all gradients are 2 % too large",
        STEP,
        _HELD,
        _TWO_PERCENT % ":",
        ("prove rich fsdp=2 zero=2 precision=fp16",),
    ),
)
