"""Jobs that a notebook's cell defines, trained from there; and what ``fit`` shows by itself."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from small import BATCH, LENGTH, job, table
from torch import nn

import phalanx as px
from phalanx.errors import SpecError

pytestmark = pytest.mark.filterwarnings("ignore")  # of Jupyter's own

JOB = """
import torch
from torch import nn
import phalanx as px

torch.set_num_threads(1)
WIDTH = 9
generator = torch.Generator().manual_seed(0)
x, y = torch.randn(103, WIDTH, generator=generator), torch.randint(5, (103,), generator=generator)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(3)])
        self.head = nn.Linear(WIDTH, 5)

    def forward(self, x):
        for layer in self.layers:
            x = torch.relu(layer(x))
        return self.head(x)

def job(**how):
    return px.Job(**{
        "model": Net, "data": lambda: px.Table(x=x, y=y), "batch": 32, "epochs": 2, "shuffle": False,
        "loss": lambda output, batch: px.cross_entropy(output, batch["y"]),
        "optimizer": lambda params: torch.optim.AdamW(params, lr=1e-2), **how,
    })
"""
FIT = """
run = px.fit(job(), "dp=2", folder="run")
print("last loss", run.losses[-1])
"""
LONG = 'px.fit(job(epochs=100_000), "dp=2", folder="long")'
LEFT = """
import psutil
print("left", [child.pid for child in psutil.Process().children() if child.status() != "zombie"])
"""


def plain_last_loss() -> float:
    from phalanx.train.build_model import build_model

    model, data, loss = build_model(job()), table(), torch.zeros(())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(2):
        for first in range(0, LENGTH, BATCH):
            batch = data.__getitems__(np.arange(first, min(first + BATCH, LENGTH)))
            loss = nn.functional.cross_entropy(model(batch["x"]), batch["y"])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return loss.item()


class Kernel:
    """A notebook's kernel in this folder, and what its cells have shown."""

    def __init__(self) -> None:
        from jupyter_client.manager import start_new_kernel

        self.manager, self._client = start_new_kernel(kernel_name="python3", cwd=os.getcwd())

    def run(self, code: str) -> str:
        """Texts that a cell shows, in order; ends the test where it fails."""
        found = list[str]()

        def take(message: dict[str, Any]) -> None:
            content = message["content"]
            if message["msg_type"] == "stream":
                found.append(content["text"])
            elif message["msg_type"] in ("display_data", "update_display_data"):
                found.append(f"[{message['msg_type']}] {content['data']['text/plain']}\n")

        reply = self._client.execute_interactive(code, output_hook=take, timeout=90)
        assert reply["content"]["status"] == "ok", reply["content"]
        return "".join(found)

    def begin(self, code: str) -> None:
        self._client.execute(code, stop_on_error=False)  # else what follows is aborted for a while

    def ended_by(self) -> str:
        """The class of the error that the cell ended by which was begun."""
        return self._client.get_shell_msg(timeout=60)["content"].get("ename", "")

    def close(self) -> None:
        self._client.stop_channels()
        self.manager.shutdown_kernel(now=True)


@pytest.fixture
def kernel() -> Iterator[Kernel]:
    pytest.importorskip("ipykernel")
    made = Kernel()
    yield made
    made.close()


def test_a_job_of_a_cell(kernel: Kernel) -> None:
    kernel.run(JOB)
    said = kernel.run(FIT)
    *_, last = said.split()
    assert float(last) == pytest.approx(plain_last_loss(), rel=1e-5)
    assert "step 8/8" in said
    assert said.count("[display_data]") == 1


def test_an_interrupt_leaves_no_process(kernel: Kernel) -> None:
    kernel.run(JOB)
    kernel.begin(LONG)
    deadline = time.monotonic() + 60
    while not (Path("long/events.jsonl").exists() and px.load("long").losses) and time.monotonic() < deadline:
        time.sleep(0.05)
    kernel.manager.interrupt_kernel()
    assert kernel.ended_by() == "KeyboardInterrupt"
    assert kernel.run(LEFT).strip() == "left []"
    (stopped,) = px.load("long").events("stopped")
    assert px.load("long").checkpoint().name == f"step-{stopped['step']:08d}"
    assert "last loss" in kernel.run(FIT)


def test_a_notebook_runs_through_nbclient() -> None:
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    cells = [nbformat.v4.new_code_cell(code) for code in (JOB, FIT, LEFT)]
    notebook = nbformat.v4.new_notebook(cells=cells)
    nbclient.NotebookClient(notebook, timeout=90, kernel_name="python3").execute()
    said = json.dumps(notebook)
    assert "last loss" in said
    assert "left []" in said


SCRIPT = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
import phalanx as px
from small import job
px.fit(job(), "single", folder="run", {{}})
"""


@pytest.mark.parametrize(("how", "shown"), [("", True), ("watch=False", False), ("watch=lambda: None", False)])
def test_on_a_terminal(how: str, shown: bool) -> None:
    ours, theirs = pty.openpty()
    with subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", SCRIPT.format(how)], stdout=theirs, stderr=theirs
    ) as done:
        os.close(theirs)
        said = b""
        try:
            while data := os.read(ours, 65536):
                said += data
        except OSError:  # the terminal is closed with its last user
            pass
    os.close(ours)
    assert done.returncode == 0, said
    assert (b"loss" in said) == shown


def test_nothing_where_nobody_looks(capfd: pytest.CaptureFixture[str]) -> None:
    px.fit(job(), "single", folder="run")
    assert capfd.readouterr() == ("", "")


def test_something_else_is_refused() -> None:
    with pytest.raises(SpecError, match="watch"):
        px.fit(job(), "single", folder="run", watch=True)  # pyright: ignore[reportArgumentType]
    assert not Path("run").exists()
