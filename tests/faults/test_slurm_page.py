"""The batch script of the page for Slurm, with stand-ins for Slurm's commands that put two nodes on this machine."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

import phalanx as px
from phalanx.launch import load_job

PAGE = Path(__file__).resolve().parents[2] / "docs" / "how-to" / "slurm.md"
SRUN = """#!/bin/bash
# Starts the command once for each node, passes SIGUSR1 on, and ends with the worst exit code.
pids=""
for node in $(seq "$SLURM_NNODES"); do "$@" & pids="$pids $!"; done
trap 'kill -USR1 $pids' USR1
trap 'kill -KILL $pids' TERM
worst=0
for pid in $pids; do
    while wait "$pid"; code=$?; kill -0 "$pid" 2>/dev/null; do :; done
    [ "$code" -gt "$worst" ] && worst=$code
done
exit $worst
"""
SCONTROL = """#!/bin/bash
case "$1" in
    show) printf '127.0.0.1\\n127.0.0.2\\n' ;;
    requeue) echo "$2" >> requeued ;;
esac
"""
JOB = """
import time
from pathlib import Path

import torch
from torch import nn

import phalanx as px


def model():
    made = nn.Linear(4, 2)
    nn.init.zeros_(made.weight)
    nn.init.zeros_(made.bias)
    return made


def loss(output, batch):
    time.sleep(0.0 if Path("fast").exists() else 0.1)
    return px.cross_entropy(output, batch["y"])


def job():
    x = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
    return px.Job(
        model=model,
        data=lambda: px.Table(input=x, y=(x.sum(1) > 0).long()),
        shuffle=False,
        loss=loss,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        batch=16,
        steps=40,
    )
"""
STEPS = 40


def shown(title: str) -> str:
    """The file of that name on the page."""
    found = re.search(rf'title="{title}"\n(.*?)^```$', PAGE.read_text(), flags=re.MULTILINE | re.DOTALL)
    assert found
    return found[1]


@pytest.fixture
def cluster(tmp_path: Path) -> dict[str, str]:
    """The folder as on a cluster, with the environment of a job on two nodes of one device each."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    (tmp_path / "job.sh").write_text(shown("job.sh").replace("29500", str(port)))
    run = shown("run.toml").replace("examples/digits.py", "train.py").replace("dp=2 fsdp=8", "dp=2")
    (tmp_path / "run.toml").write_text(run)
    (tmp_path / "train.py").write_text(JOB)
    tools = tmp_path / "bin"
    tools.mkdir()
    for name, text in {"srun": SRUN, "scontrol": SCONTROL}.items():
        (tools / name).write_text(text)
        (tools / name).chmod(0o755)
    slurm = {"NNODES": "2", "JOB_NODELIST": "node[1-2]", "JOB_ID": "17", "GPUS_ON_NODE": "1"}
    path = os.pathsep.join([str(tools), str(Path(sys.executable).parent), os.environ["PATH"]])
    return {
        **os.environ,
        **{f"SLURM_{name}": value for name, value in slurm.items()},
        "PATH": path,
        "OMP_NUM_THREADS": "1",
    }


@contextmanager
def started(folder: Path, cluster: dict[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    """The script. What is left of its job where it has ended, or the block has, is ended, as Slurm does."""
    with (folder / "slurm.out").open("wb") as out:
        process = subprocess.Popen(
            ["bash", "job.sh"], cwd=folder, env=cluster, start_new_session=True, stdout=out, stderr=out
        )
    try:
        yield process
        process.wait(timeout=90)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@pytest.mark.long
@pytest.mark.timeout(200)
def test_the_script_trains_on_two_nodes_and_goes_on_after_its_time(tmp_path: Path, cluster: dict[str, str]) -> None:
    log = tmp_path / "runs" / "slurm" / "events.jsonl"
    with started(tmp_path, cluster) as process:
        deadline = time.monotonic() + 90
        while time.monotonic() < deadline and process.poll() is None:
            if log.exists() and log.read_text().count('"event": "step"') > 3:
                break
            time.sleep(0.1)
        process.send_signal(signal.SIGUSR1)
    said = (tmp_path / "slurm.out").read_text()
    assert process.returncode != 0, said
    assert (tmp_path / "requeued").read_text() == "17\n"
    run = px.load(tmp_path / "runs" / "slurm")
    assert [event["event"] for event in run.events()].count("stopped") == 1, said
    assert 3 < len(run.losses) < STEPS

    (tmp_path / "fast").touch()
    with started(tmp_path, cluster) as process:
        pass
    assert process.returncode == 0, (tmp_path / "slurm.out").read_text()
    alone = px.fit(load_job(str(tmp_path / "train.py")), "single", folder=tmp_path / "alone")
    assert run.losses == pytest.approx(alone.losses, rel=1e-5)
    steps = [event["step"] for event in run.events("step")]
    assert steps == list(range(STEPS)), "none was taken twice"
    assert (tmp_path / "requeued").read_text() == "17\n", "what has ended is not queued again"
