"""The workloads as Phalanx jobs: ``bench/jobs.py:gpt`` and the like."""

from __future__ import annotations

from dataclasses import replace

import phalanx as px
from workloads import CLIP, WORKLOADS, loss


def _job(name: str) -> px.Job:
    workload = WORKLOADS[name]
    return px.Job(
        model=workload.model,
        data=workload.data,
        loss=lambda output, batch: loss(output, batch[1]),
        optimizer=workload.optimizer,
        batch=workload.batch,
        epochs=1,
        name=name,
    )


def mlp() -> px.Job:
    """64-256-10, batch 32."""
    return _job("mlp")


def convnet() -> px.Job:
    """0.4 M parameters, batch 128."""
    return _job("convnet")


def gpt() -> px.Job:
    """10.8 M parameters, batch 16 of 64 bytes."""
    return _job("gpt")


def gpt_split() -> px.Job:
    """6.4 M parameters in 8 blocks of 8 heads, which divide over ranks; every step sees the same 16 samples."""
    return replace(_job("gpt-split"), clip=CLIP)


def gpt_100m() -> px.Job:
    """100 M parameters in 12 blocks."""
    return replace(_job("gpt-100m"), clip=CLIP)


def gpt_limit() -> px.Job:
    """136 M parameters, which with gradients and AdamW's state take 2 GiB."""
    return _job("gpt-limit")


def stack_8() -> px.Job:
    """8 equal blocks, 16.8 M parameters."""
    return _job("stack-8")


def stack_24() -> px.Job:
    """24 equal blocks, 50.4 M parameters."""
    return _job("stack-24")
