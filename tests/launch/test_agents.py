"""Agents of torchrun on two hosts, each of which counts by itself how often it has started workers again."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from launched import by_hand, free_ports, write_job

import phalanx as px
from phalanx.report.samples_seen import samples_seen

STEPS = 8
STRIKE = '''
import os
import signal
from pathlib import Path

CALLS = []


def strike():
    """In the fourth step rank 0 is killed while rank 1 is away from where it would notice, until its agent ends it."""
    import os, signal
    from pathlib import Path
    if not torch.distributed.is_initialized():  # the look at the job before the run
        return
    here, rank = Path(__file__).parent, os.environ["RANK"]
    if (here / "struck").exists() and not CALLS:
        (here / f"again-{rank}-{os.environ['TORCHELASTIC_RESTART_COUNT']}").touch()
    CALLS.append(1)
    if len(CALLS) == 4 and not (here / "struck").exists():
        if rank == "1":
            asked, before = [], signal.getsignal(signal.SIGTERM)
            signal.signal(signal.SIGTERM, lambda *given: (asked.append(1), before(*given)))
            (here / "away").touch()
            until = time.monotonic() + 60
            while not asked and time.monotonic() < until:
                time.sleep(0.05)
        else:
            while not (here / "away").exists():
                time.sleep(0.05)
            (here / "struck").touch()
            os.kill(os.getpid(), signal.SIGKILL)


def loss('''

RUN = """
job = "train.py"
plan = "dp=2"
folder = "run"
resume = "auto"
forecast = "none"
checkpoint_every = 1
grace = 5.0
"""


@pytest.mark.timeout(240)
@pytest.mark.usefixtures("_nothing_left")
def test_workers_meet_whose_agents_have_counted_differently(tmp_path: Path) -> None:
    job = write_job(tmp_path, steps=STEPS)
    job.write_text(job.read_text().replace("\ndef loss(", STRIKE).replace("time.sleep(PAUSE)", "strike()"))
    (tmp_path / "run.toml").write_text(RUN)
    (port,) = free_ports(1)
    agents = [_agent(tmp_path, number, port) for number in range(2)]
    try:
        codes = [agent.wait(timeout=200) for agent in agents]
    finally:
        for agent in agents:
            agent.kill()
            agent.wait()
    said = "\n".join(file.read_text() for file in sorted(tmp_path.glob("agent-*.txt")))
    assert codes == [0, 0], said
    again = sorted(file.name.split("-")[1:] for file in tmp_path.glob("again-*"))
    assert [rank for rank, _ in again] == ["0", "1"], said
    assert sorted(count for _, count in again) == ["0", "1"], "the agents have counted alike: nothing was tried"
    run = px.load(tmp_path / "run")
    assert run.losses == pytest.approx(by_hand(STEPS), rel=1e-5)
    assert samples_seen(run.folder).once


def _agent(folder: Path, number: int, port: int) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1"]
    command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", "counts"]
    command += ["--rdzv-conf", f"is_host={int(number == 0)}", "--local-addr", "127.0.0.1"]
    command += ["--max-restarts", "3", "--no-python", sys.executable, "-m", "phalanx", "worker", "run.toml"]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    env.pop("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", None)
    with (folder / f"agent-{number}.txt").open("ab") as said:
        return subprocess.Popen(command, cwd=folder, env=env, stdout=said, stderr=said)
