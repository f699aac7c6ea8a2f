"""Step ``checkpoint``: seconds that training waits for a save, and seconds until it is written."""

from __future__ import annotations

import tempfile
import time
from dataclasses import replace
from pathlib import Path

from gpu_record.measure import Memory, synchronize
from gpu_record.report import Step
from gpu_record.workloads import checkpoint_work

_EVERY, _STEPS = 5, 10


def run(step: Step) -> None:
    """Train with a run folder that saves in the background, and read the run's ``checkpoint`` events."""
    import phalanx as px

    work = checkpoint_work(step.small)
    job = replace(work.job(), steps=_STEPS)
    device, host = Memory(step.device), Memory("cpu")
    pause = 0.3 if step.small else 2.0  # for the first save to end before the second begins
    with tempfile.TemporaryDirectory(prefix="gpu-record-run-") as name:
        folder = Path(name, "run")
        taken, loader = px.build(job, f"precision=bf16 device={step.device}", run=folder, checkpoint_every=_EVERY)
        before = host_before = 0
        for index, batch in enumerate(loader, start=1):
            taken(batch)
            if index == _EVERY - 1:
                synchronize(step.device)
                before, host_before = device.peak(), host.held()
                device.reset()
                host.reset()
            elif index > _EVERY:
                synchronize(step.device)
                time.sleep(pause)
                _report(step, folder, device, host, (before, host_before))
        taken.close()
        _report(step, folder, device, host, (before, host_before))


def _report(step: Step, folder: Path, device: Memory, host: Memory, before: tuple[int, int]) -> None:
    """Add a row for each save that is whole; ``before``: bytes at the peak of the device, and held by the host."""
    import phalanx as px

    for event in [one for one in px.load(folder).events() if one["event"] == "checkpoint"]:
        step.row(
            str(event["step"]),
            bytes=event["bytes"],
            standstill_seconds=event["standstill"],
            seconds=event["seconds"],
            peak_bytes_before=before[0],
            peak_bytes_during=device.peak(),
            host_bytes=max(0, host.peak() - before[1]),
        )
