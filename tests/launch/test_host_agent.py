"""The agent on a host whose launcher says nothing more: nothing of the run stays there."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

SILENCE = 4.0
AGENT = f"""
from phalanx.launch.targets import host_agent, host_folder

host_agent.HostFiles = host_folder.HostFiles  # whose text is sent before the agent's
host_agent.SILENCE = {SILENCE}
host_agent.Agent().run()
"""


@pytest.mark.timeout(120)
def test_it_ends_with_its_workers_where_its_launcher_is_silent(tmp_path: Path) -> None:
    agent = subprocess.Popen([sys.executable, "-c", AGENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        load: dict[str, Any] = {"folder": "", "named": False, "environment": {}, "argv": ["sleep", "600"], "count": 2}
        tell(agent, do="load", **load)
        until = time.monotonic() + 60
        while len(workers := psutil.Process(agent.pid).children()) < 2:
            assert time.monotonic() < until
            time.sleep(0.05)
        heard = time.monotonic()
        while time.monotonic() < heard + 2 * SILENCE:  # it is not its age that ends it
            tell(agent, do="still")
            time.sleep(0.2)
        assert agent.poll() is None
        assert all(worker.is_running() for worker in workers)
        agent.wait(timeout=60)  # its standard input is still open, at which Python may abort as it ends
        assert not any(worker.is_running() for worker in workers)
    finally:
        agent.kill()
        agent.communicate()


def tell(agent: subprocess.Popen[bytes], **asked: Any) -> None:
    assert agent.stdin
    agent.stdin.write(json.dumps(asked).encode() + b"\n")
    agent.stdin.flush()
