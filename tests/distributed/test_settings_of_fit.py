"""Settings that ``px.fit`` and ``px.start`` take by name, the runs a folder may go on with, and fits in notebooks."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from small import BATCH, LENGTH, Net, batches_of, job, plain_losses, table
from torch import nn

import phalanx as px
from longer import longer
from phalanx.cli import main
from phalanx.errors import SpecError
from phalanx.launch import local


def batches(steps: int) -> Any:
    ids = [slice(first, first + BATCH) for first in range(0, LENGTH, BATCH)]
    return batches_of(table().columns, (ids * steps)[:steps])


IN_FILE = """
from small import job as made, table

def ok():
    return made(shuffle=False)

def other():
    return made(shuffle=False, batch=16)

def fewer():
    return made(shuffle=False, data=lambda: table(99))
"""


@pytest.fixture
def shop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., px.Run]:
    """Trains the job for so many steps in the folder ``run`` of an empty working directory."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "shop.py").write_text(IN_FILE)

    def fit(plan: str, begin: Callable[..., px.Run] = px.fit, **settings: Any) -> px.Run:
        return begin(job(shuffle=False), plan, folder="run", forecast="none", **settings)

    return fit


@pytest.mark.parametrize("plan", ["fsdp=2 zero=3", *longer("threads=2")])
def test_a_run_goes_on_as_if_it_had_not_ended(plan: str, shop: Callable[..., px.Run]) -> None:
    shop(plan, steps=5, resume="auto", checkpoint_every=2, keep=9)
    run = shop("dp=2", px.start, steps=9, resume="auto").wait()
    assert run.losses == pytest.approx(plain_losses(batches(9)), rel=1e-5)
    assert [event["step"] for event in run.events("checkpoint")][:3] == [2, 4, 5]
    assert next(run.events("resume"))["step"] == 5


def test_a_run_of_a_script_and_of_the_command_line_are_one(shop: Callable[..., px.Run]) -> None:
    shop("single", steps=2)
    words = ["--run", "run", "--resume", "--no-forecast", "--steps"]
    done = CliRunner().invoke(main, ["train", "shop.py:ok", *words, "3"])
    assert done.exit_code == 0, done.output
    run = shop("single", steps=4, resume=True)
    assert run.losses == pytest.approx(plain_losses(batches(4)), rel=1e-5)
    assert "shop.py:ok" in Path("run/run.toml").read_text()  # what the command line may go on with
    other = CliRunner().invoke(main, ["train", "shop.py:other", *words, "5"])
    assert other.exit_code == 2


def test_only_two_names_that_were_given_are_two_jobs(shop: Callable[..., px.Run]) -> None:
    shop("single", steps=2)
    named = px.RunSpec(job="j", plan=px.Plan(), folder=Path("run"), forecast="none")
    assert len(px.fit(job(shuffle=False), run=named, steps=3, resume=True).losses) == 3
    with pytest.raises(SpecError, match=r"holds a run of j.* for the job k"):
        px.fit(job(shuffle=False, name="k"), folder="run", resume=True)
    with pytest.raises(SpecError, match="belongs to another job"):
        px.fit(job(shuffle=False, batch=16), folder="run", resume=True)


class Wider(Net):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(9, 7)
        self.extra = nn.Linear(7, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.extra(super().forward(x))


OTHERS = {
    r"extra.weight, extra.bias.* head.weight \[7, 9\] now, \[5, 9\] there": {"model": Wider},
    "103 there, 99 now": {"data": lambda: table(99)},
}


@pytest.mark.parametrize(("words", "plan"), list(zip(OTHERS, ("pp=2", "dp=2"), strict=True)))
def test_another_model_and_other_data_are_refused_before_a_worker_starts(
    words: str, plan: str, shop: Callable[..., px.Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    shop("dp=2", steps=2)
    before = Path("run/events.jsonl").read_bytes()
    started = list[Any]()
    monkeypatch.setattr(local.LocalLauncher, "start", lambda *given: started.append(given))
    with pytest.raises(SpecError, match=words) as refused:
        px.fit(job(shuffle=False, **OTHERS[words]), plan, folder="run", forecast="none", steps=4, resume=True)
    assert 'folder="run-anew"' in str(refused.value)
    assert not started
    assert Path("run/events.jsonl").read_bytes() == before
    done = CliRunner().invoke(main, ["train", "shop.py:fewer", "--run", "run", "--resume", "--plan", plan])
    assert (done.exit_code, started) == (2, [])
    assert "103 there, 99 now" in done.output
    assert "--run run-anew" in done.output


def test_settings_that_there_are_none_of(shop: Callable[..., px.Run]) -> None:
    with pytest.raises(SpecError, match=r"checkpoint_evry: given 5(?s:.*)try: checkpoint_every"):
        shop("single", checkpoint_evry=5)
    with pytest.raises(SpecError, match="resume: given 'auto' without a folder"):
        px.fit(job(), "single", resume="auto")
    with pytest.raises(SpecError, match=r"run\.resume: given 'yes'"):
        shop("single", resume="yes")
    assert not Path("run").exists()


STOPPED = """
import os, signal, sys
sys.path.insert(0, {small!r})
import phalanx as px
from small import job

seen = []

def interrupt():
    if os.path.exists("run/events.jsonl") and '"step"' in open("run/events.jsonl").read() and not seen:
        seen.append(1)
        os.kill(os.getpid(), signal.SIGINT)

px.fit(job(epochs=3000), "dp=2", folder="run", forecast="none", watch=interrupt)
"""


def test_a_script_that_is_stopped_by_hand_says_where_it_stands(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(STOPPED.format(small=str(Path(__file__).parent)))
    done = subprocess.run([sys.executable, "script.py"], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    step = px.Run(folder=tmp_path / "run").checkpoint().name.removeprefix("step-").lstrip("0")
    assert done.returncode == -signal.SIGINT
    assert f"KeyboardInterrupt: run folder: run, newest checkpoint: step {step}\n" in done.stderr
    assert done.stderr.endswith('try: folder="run", resume=True\n')
    assert done.stderr.count('  File "') == 2


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


@pytest.mark.filterwarnings("ignore")  # of Jupyter's own
def test_an_interrupt_in_a_notebook_leaves_no_process(kernel: Kernel) -> None:
    kernel.run(JOB)
    said = kernel.run(FIT)
    *_, last = said.split()
    assert float(last) == pytest.approx(plain_losses(batches(8))[-1], rel=1e-5)
    assert "step 8/8" in said
    assert said.count("[display_data]") == 1
    kernel.begin(LONG)
    deadline = time.monotonic() + 60
    while not (Path("long/events.jsonl").exists() and px.load("long").losses) and time.monotonic() < deadline:
        time.sleep(0.05)
    kernel.manager.interrupt_kernel()
    assert kernel.ended_by() == "KeyboardInterrupt"
    assert kernel.run("import psutil; print(len(psutil.Process().children()))").strip() == "0"
    (stopped,) = px.load("long").events("stopped")
    assert px.load("long").checkpoint().name == f"step-{stopped['step']:08d}"


SCRIPT = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
import phalanx as px
from small import job
px.fit(job(), "single", folder="run", {{}})
"""


@pytest.mark.parametrize(("how", "shown"), [("", True), ("watch=lambda: None", False), *longer(("watch=False", False))])
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
