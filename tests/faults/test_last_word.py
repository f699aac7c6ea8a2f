"""The worker that says for all how they failed is not kept from it by the end of another."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

import phalanx as px
from phalanx.comm import Place
from phalanx.launch import worker
from phalanx.launch.worker import WorkerStatus


def test_an_error_is_recorded_though_the_agent_ends_its_worker_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The agent's SIGTERM comes as soon as another worker has ended, which left the word to this one."""

    def claim(place: Place, key: str) -> bool:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.1)
        return True

    monkeypatch.setattr(worker, "claim", claim)
    (tmp_path / "run").mkdir()
    pid = os.fork()
    if pid == 0:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        try:
            status = WorkerStatus(Place(rank=1, world_size=2, store="env://", local_rank=1, local_world_size=2))
            status.folder = tmp_path / "run"
            status.report_failure(ValueError("no such loss"))
            assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
            os._exit(7)
        finally:
            os._exit(1)
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 7
    (event,) = px.Run(folder=tmp_path / "run").events("error")
    assert "no such loss" in event["message"]
    assert (event["rank"], event["lost"]) == (1, False)


def test_an_error_is_printed_though_the_agent_ends_its_worker_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def visible(text: str) -> str:
        os.kill(os.getpid(), signal.SIGTERM)
        return text

    place = Place(rank=1, world_size=2, store="env://", local_rank=1, local_world_size=2)
    monkeypatch.setattr(worker, "visible", visible)
    monkeypatch.setattr(worker, "claim", lambda *_: True)
    monkeypatch.setattr(worker, "place_of_this_process", lambda: place)
    printed = tmp_path / "printed"
    pid = os.fork()
    if pid == 0:
        try:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.dup2(os.open(printed, os.O_WRONLY | os.O_CREAT), 2)
            monkeypatch.setattr("sys.stderr", os.fdopen(2, "w"))
            os._exit(worker.main(tmp_path / "no such run.toml"))
        finally:
            os._exit(1)
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 2
    assert "no such run.toml" in printed.read_text()
