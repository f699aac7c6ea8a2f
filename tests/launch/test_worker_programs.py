"""Workers that are programs of their own: torchrun's agents, the run's secret, and what a process loads."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.run
from torch.distributed.elastic.multiprocessing.api import _terminate_process_handler
from torch.distributed.elastic.rendezvous.api import RendezvousConnectionError

from law_rows import longer
from phalanx.comm import Place
from phalanx.comm.handshake import SECRET
from phalanx.config import Plan, RunSpec
from phalanx.errors import RunError
from phalanx.events import EventLog
from phalanx.launch import run_secret
from phalanx.launch.local import launch
from phalanx.launch.reaper import SAVED, fork
from phalanx.launch.run_secret import share_secret
from phalanx.launch.targets.node_agent import NodePlace, be_agent

RAISED = 9


def exit_code(folder: Path, run: Callable[[object], None]) -> int:
    """Of a process that is the agent, asked to stop once more when ``run`` has come to its end in place of torchrun."""
    spec = RunSpec(job="train.py", plan=Plan.parse("dp=2"), folder=folder)
    pid = fork()
    if pid == 0:
        code = RAISED
        try:
            torch.distributed.run.run = run
            code = be_agent(spec, NodePlace(name="n1", nodes=2, cores=1, options={}), ["true"])
            os.kill(os.getpid(), signal.SIGTERM)
        except BaseException:
            code = RAISED
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_a_signal_that_comes_when_the_run_has_ended_changes_nothing(tmp_path: Path) -> None:
    """Nodes are asked to stop one after the other, and the last as the others have saved and it has with them."""

    def run(asked: object) -> None:
        signal.signal(signal.SIGTERM, _terminate_process_handler)  # as torch has it from the first worker on

    assert exit_code(tmp_path, run) == 0


@pytest.mark.parametrize(
    ("before", "since", "code"),
    [([], ["stopped"], SAVED), (["stopped"], [], RAISED), ([], ["stopped", "resume"], RAISED), ([], [], RAISED)],
)
def test_agents_whose_place_to_meet_is_gone_have_saved_where_the_run_has(
    tmp_path: Path, before: list[str], since: list[str], code: int
) -> None:
    """The agent that serves it has been asked to stop and has ended; this one would start its worker again."""
    fields: dict[str, dict[str, Any]] = {
        "stopped": {"step": 3, "signal": "SIGTERM"},
        "resume": {"step": 3, "path": "checkpoints/step-3"},
    }

    def note(words: list[str]) -> None:
        with EventLog(tmp_path / "events.jsonl") as log:
            for word in words:
                log.write(word, **fields[word])

    def run(asked: object) -> None:
        note(since)
        raise RendezvousConnectionError("the connection to the C10d store has failed")

    note(before)
    assert exit_code(tmp_path, run) == code


def test_every_rank_has_it_and_the_file_is_gone(tmp_path: Path) -> None:
    (tmp_path / ".secret").write_bytes(b"of a run that was killed")

    def work(place: Place, report: Callable[[int], None]) -> list[object]:
        secret = share_secret(place, tmp_path)
        return [len(secret), hashlib.sha256(secret).hexdigest()]

    first, *others = launch(work, 3)
    assert first[0] == SECRET
    assert others == [first, first]
    assert list(tmp_path.iterdir()) == []


def test_each_run_of_the_same_workers_has_its_own(tmp_path: Path) -> None:
    def work(place: Place, report: Callable[[int], None]) -> list[str]:
        runs = (replace(place, number=number) for number in range(3))
        return [hashlib.sha256(share_secret(run, tmp_path)).hexdigest() for run in runs]

    first, *others = launch(work, 2)
    assert others == [first]
    assert len(set(first)) == 3


def test_only_this_user_reads_it(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        run_secret._write(tmp_path / "s", b"x")
    finally:
        os.umask(before)
    assert (tmp_path / "s").stat().st_mode & 0o777 == 0o600


def test_neither_a_link_in_its_place_nor_another_file_is_believed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere").write_bytes(b"mine")
    (tmp_path / "s").symlink_to(tmp_path / "elsewhere")
    run_secret._write(tmp_path / "s", b"x")
    assert (tmp_path / "elsewhere").read_bytes() == b"mine"
    (tmp_path / "s").unlink()
    (tmp_path / "s").symlink_to(tmp_path / "elsewhere")
    monkeypatch.setattr(run_secret, "_SEEN_AFTER", 0.0)
    with pytest.raises(RunError, match="storage that all machines share"):
        run_secret._read(tmp_path / "s", hashlib.sha256(b"mine").hexdigest())
    (tmp_path / "s").unlink()
    (tmp_path / "s").write_bytes(b"a stranger's")
    with pytest.raises(RunError, match="does not see"):
        run_secret._read(tmp_path / "s", hashlib.sha256(b"ours").hexdigest())


def test_a_file_system_without_permissions_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.fstat
    open_to_all = lambda descriptor: os.stat_result([0o100777, *list(real(descriptor))[1:]])  # noqa: E731
    monkeypatch.setattr(os, "fstat", open_to_all)
    with pytest.raises(RunError, match=r"keeps no permissions(?s:.*)try: a run folder on another"):
        run_secret._write(tmp_path / "s", b"x")


def test_workers_have_what_their_plan_needs_and_the_launcher_keeps_torch_as_it_is() -> None:
    code = """
import sys
import torch
import phalanx as px
from phalanx.launch.local import launch
from phalanx.launch.torch_warmup import leave_compiler_out, make_ready

known, torch.__version__ = torch.__version__, "2.14.0"
leave_compiler_out()
assert "_dynamo" not in vars(torch), "torch of an unknown version is left alone"
torch.__version__ = known
make_ready(px.Plan(dp=2))
changed = launch(lambda place, report: "_dynamo" in vars(torch), 2)
assert changed == [True, True], changed
assert "_dynamo" not in vars(torch)
assert "torch._dynamo" not in sys.modules
make_ready(px.Plan.parse("dp=2 compile=true"))
assert "torch._dynamo" in sys.modules
leave_compiler_out()
assert torch.compile(lambda x: x + 1, backend="eager")(torch.ones(1)).item() == 2
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=100)


TRAINS = """
import sys
from dataclasses import replace
import phalanx as px
from phalanx.demo.jobs.gpt import gpt_job

job = gpt_job(layers=2, width=16, heads=2, context=8, batch=4, steps=2)

def loss(output, batch):
    assert "torch._dynamo.eval_frame" not in sys.modules, "the compiler is loaded"
    return job.loss(output, batch)

px.fit(replace(job, loss=loss), sys.argv[1])
"""


@pytest.mark.parametrize("plan", ["pp=2 fsdp=2 tp=2", *longer("dp=2", "cp=2")])
def test_no_rank_of_a_run_loads_the_compiler(tmp_path: Path, plan: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", TRAINS, plan], cwd=tmp_path, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
