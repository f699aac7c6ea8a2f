"""The exit code of torchrun's agent on a node: what comes as it ends does not change it."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed.run
from torch.distributed.elastic.multiprocessing.api import _terminate_process_handler
from torch.distributed.elastic.rendezvous.api import RendezvousConnectionError

from phalanx.config import Plan, RunSpec
from phalanx.events import EventLog
from phalanx.launch.reaper import SAVED, fork
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
