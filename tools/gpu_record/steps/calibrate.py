"""Step ``calibrate``: the cluster file of ``phalanx calibrate``, and forecasts of earlier rows with it."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpu_record.measure import catalog_cluster, device_memory_gib, forecasts, relative
from gpu_record.recorder import TRAINING
from gpu_record.report import Step
from gpu_record.workloads import workload

if TYPE_CHECKING:
    import phalanx as px


def run(step: Step) -> None:
    """Write the cluster file into the record, then forecast each training row with the catalog and with the file."""
    begun = time.monotonic()
    known = catalog_cluster(step.device)
    if known is None:
        step.skip("the catalog does not know this device")
        return
    found = _command(quick=step.small)
    step.facts(cluster=found.to_toml(), seconds=round(time.monotonic() - begun, 2))
    for name in TRAINING:
        rows = step.earlier(name)["rows"]
        if rows and step.left < 5:
            step.note(f"No time was left for {name}.")
        elif rows:
            _compare(step, name, rows, found)


def _compare(step: Step, name: str, rows: list[dict[str, Any]], found: px.Cluster) -> None:
    """Record the step's rows, each with its forecast by the catalog, which the step made, and by ``found``."""
    work = workload(name, small=step.small, memory_gib=device_memory_gib(step.device))
    job = work.job(steps=10, batch=step.earlier(name)["facts"].get("batch", 0))
    plans = {row["method"]: row["plan"] or f"compile=true {work.plan}" for row in rows}
    calibrated = forecasts(job, sorted(set(plans.values())), found)
    for row in rows:
        seconds, mine = row["step_seconds"], calibrated[plans[row["method"]]]["step_seconds"]
        by_catalog = (row.get("forecast") or {}).get("step_seconds")
        step.row(
            name,
            row["method"],
            model=row["model"],
            method=row["method"],
            measured_seconds=seconds,
            forecast_catalog=by_catalog,
            forecast_calibrated=mine,
            error_catalog=relative(by_catalog, seconds),
            error_calibrated=relative(mine, seconds),
        )


def _command(*, quick: bool) -> px.Cluster:
    """Run ``phalanx calibrate`` and return one device of its file."""
    from phalanx.hardware import cluster

    with tempfile.TemporaryDirectory(prefix="gpu-record-calibrate-") as name:
        path = Path(name, "machine.toml")
        asked = [sys.executable, "-m", "phalanx", "calibrate", "-o", str(path), *(["--quick"] if quick else [])]
        done = subprocess.run(asked, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(done.stderr.strip() or f"phalanx calibrate: exit code {done.returncode}")
        found = cluster(str(path))
    return replace(found, groups=(replace(found.groups[0], per_node=1),))
