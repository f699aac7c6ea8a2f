"""The agent on a host that SSH reaches: with its launcher silent, nothing of a run stays there."""

from __future__ import annotations

import base64
import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import takewhile
from typing import IO, Any

import psutil
import pytest

from phalanx.launch.targets import ssh_host

pytestmark = pytest.mark.timeout(120)
WORKER = "import os, sys, time; print(os.getpid(), flush=True); time.sleep(600)"


def asked(pipe: IO[bytes], **what: Any) -> None:
    pipe.write(json.dumps(what).encode() + b"\n")
    pipe.flush()


def first_lines(told: Iterator[dict[str, Any]], ranks: int) -> dict[int, int]:
    """The number that each rank has printed; a line may come in two parts, of a worker that holds no output back."""
    printed = dict.fromkeys(range(ranks), b"")
    while not all(text.endswith(b"\n") for text in printed.values()):
        if "output" in (one := next(told)):
            printed[one["output"]] += base64.b64decode(one["data"])
    return {rank: int(text) for rank, text in printed.items()}


def test_what_ended_a_worker_is_told_also_where_the_launcher_has_all_ended() -> None:
    """Its peers have failed as it was lost, and their launcher has not waited for more."""
    text = ssh_host._agent_text().decode()
    assert "_LOOK = 0.05" in text
    program = text.replace("_LOOK = 0.05", "_LOOK = 600.0")  # it comes to look only as it is asked
    agent = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert agent.stdin
    assert agent.stdout
    try:
        argv = [sys.executable, "-c", WORKER]
        asked(agent.stdin, do="load", named=False, folder="", environment={}, argv=argv, count=2)
        asked(agent.stdin, do="start", files={}, ranks={"0": {}, "1": {}}, folder="")
        told = map(json.loads, agent.stdout)
        worker = psutil.Process(first_lines(told, 2)[1])
        worker.kill()
        while worker.status() != psutil.STATUS_ZOMBIE:
            time.sleep(0.02)
        asked(agent.stdin, do="end")
        said = takewhile(lambda one: "over" not in one, told)
        assert [one for one in said if "ended" in one] == [{"ended": 1, "code": -signal.SIGKILL}]
    finally:
        agent.kill()
        agent.communicate()


def test_a_launcher_that_says_nothing_for_long_is_taken_to_be_gone() -> None:
    """Its connection stays open: of a machine without power, or behind a network that is cut."""
    text = ssh_host._agent_text().decode()
    assert "SILENCE = 60.0" in text
    program = text.replace("SILENCE = 60.0", "SILENCE = 3.0")
    agent = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert agent.stdin
    assert agent.stdout
    try:
        argv = [sys.executable, "-c", WORKER]
        asked(agent.stdin, do="load", named=False, folder="", environment={}, argv=argv, count=1)
        asked(agent.stdin, do="start", files={}, ranks={"0": {}}, folder="")
        worker = psutil.Process(first_lines(map(json.loads, agent.stdout), 1)[0])
        until = time.monotonic() + 6.0
        while time.monotonic() < until:  # it is not its age that ends it
            asked(agent.stdin, do="still")
            time.sleep(0.2)
        assert worker.is_running()
        assert agent.poll() is None
        assert agent.wait(60) == 0
        assert not worker.is_running() or worker.status() == psutil.STATUS_ZOMBIE
    finally:
        agent.kill()
        agent.communicate()
