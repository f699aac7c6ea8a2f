"""One short run whose speed is to be known: its summary."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from phalanx.spec import Job, RunSpec

if TYPE_CHECKING:
    from rich.console import Console

    from phalanx.launch.hosts import Hosts
    from phalanx.observe.summary import RunSummary


def measured(job: Job, run: RunSpec, console: Console, *, label: str = "", hosts: Hosts | None = None) -> RunSummary:
    """Train ``job`` as ``run`` says, a core a worker where it computes on CPUs, and sum it up.

    Args:
        job: what to train.
        run: how; its folder is used, and its forecast left out: cores are for what is measured.
        console: where progress is shown.
        label: of the progress; the plan where not given.
        hosts: where workers are put.
    """
    from dataclasses import replace

    from phalanx.api import fit
    from phalanx.observe.follow import Follower
    from phalanx.observe.progress import progress
    from phalanx.observe.summary import summarise
    from phalanx.parallel import device_kind

    folder: Path = run.folder
    viewer = progress(console, label=label or str(run.plan), lines=frozenset({"start", "warning"}))
    with Follower(folder / "events.jsonl", [viewer]) as follower:
        cores = 1 if hosts or device_kind(run.plan) == "cpu" else None
        fit(job, run=replace(run, forecast="none"), watch=follower, cores=cores, hosts=hosts)
    return summarise(folder)
