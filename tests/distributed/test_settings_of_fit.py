"""Settings of px.fit and px.start, the runs a folder may go on with, notebooks, the best evaluation and callbacks."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from small import BATCH, LENGTH, Net, batches_of, fit, job, plain_losses, table
from torch import nn

import phalanx as px
from law_rows import longer
from phalanx.cli import main
from phalanx.errors import SpecError
from phalanx.launch.worker_pool import WorkerPool


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


@pytest.mark.parametrize("plan", ["threads=2", *longer("fsdp=2 zero=3")])
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
    monkeypatch.setattr(WorkerPool, "start", lambda *given: started.append(given))
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


JOB = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
import phalanx as px, torch
from small import job
torch.set_num_threads(1)
"""
FIT = """
run = px.fit(job(shuffle=False), "dp=2", folder="run")
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
    assert re.search(r"step +8/8 ", said)
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


@pytest.mark.parametrize(("how", "shown"), [("", True), *longer(("watch=lambda: None", False), ("watch=False", False))])
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


# Labels are random, so that what is learned of 103 samples is soon worse for others.
HOW: dict[str, Any] = {
    "evaluate": lambda: table(64, seed=1),
    "evaluate_every": 4,
    "metrics": lambda output, batch: {"accuracy": px.accuracy(output, batch["y"])},
    "optimizer": lambda params: torch.optim.AdamW(params, lr=3e-2),
    "epochs": 30,
}


def evaluated(run: px.Run) -> dict[int, float]:
    return {event["step"]: event["loss"] for event in run.events("evaluate")}


def loss_of(model: torch.nn.Module) -> float:
    """Of the evaluation data, by plain PyTorch."""
    columns = table(64, seed=1).columns
    with torch.no_grad():
        return torch.nn.functional.cross_entropy(model(columns["x"]), columns["y"]).item()


@pytest.mark.parametrize(
    "plan", ["pp=2", "dp=2 server=1", *longer("dp=2 sync=local every=4", "single", "dp=2", "fsdp=2")]
)
def test_a_run_ends_early_and_keeps_the_best(plan: str, tmp_path: Path) -> None:
    run = fit(plan, tmp_path / "run", best=px.Best(patience=3), **HOW)
    losses = evaluated(run)
    best = min(losses, key=lambda step: losses[step])
    (early,) = run.events("ended_early")
    assert early["step"] == max(losses) == best + 3 * 4 < 120
    assert (early["best"], early["evaluations"], early["value"]) == (best, 3, losses[best])
    (end,) = run.events("end")
    assert end["step"] == early["step"]
    steps = sorted(int(path.name.removeprefix("step-")) for path in (tmp_path / "run/checkpoints").iterdir())
    assert steps == [best, early["step"]], "the best and the last"
    assert loss_of(run.model(step="best")) == pytest.approx(losses[best], rel=1e-5)
    assert loss_of(run.model()) == pytest.approx(losses[early["step"]], rel=1e-5)


def test_a_resumed_run_ends_where_it_would_have(tmp_path: Path) -> None:
    best = px.Best("accuracy", mode="max", patience=4)
    whole = fit("dp=2", tmp_path / "whole", best=best, **HOW)
    (end,) = whole.events("ended_early")
    first = {**HOW, "epochs": None, "steps": end["step"] - 8}
    fit("dp=2", tmp_path / "parts", best=best, **first)
    told = json.loads((tmp_path / "parts/best.json").read_text())
    assert told["evaluations"].pop()[0] == end["step"] - 8  # as if it had ended between its save and its evaluation
    (tmp_path / "parts/best.json").write_text(json.dumps(told))
    parts = fit("single", tmp_path / "parts", resume=True, best=best, **HOW)
    assert list(parts.events("ended_early"))[-1]["step"] == end["step"]
    assert evaluated(parts) == pytest.approx(evaluated(whole), rel=1e-5)
    assert json.loads((tmp_path / "parts/best.json").read_text())["step"] == end["best"]
    again = fit("single", tmp_path / "parts", resume=True, best=best, **HOW)
    assert list(again.events("end"))[-1]["step"] == end["step"], "it has ended, and takes no further step"
    assert len(again.losses) == end["step"]


def test_without_patience_it_runs_to_its_end_and_keeps_the_best(tmp_path: Path) -> None:
    run = fit("single", tmp_path / "run", best=px.Best(), **{**HOW, "epochs": 10})
    losses = evaluated(run)
    best = min(losses, key=lambda step: losses[step])
    assert list(run.events("ended_early")) == []
    assert best < 40 == max(losses)
    assert loss_of(run.model(step="best")) == pytest.approx(losses[best], rel=1e-5)
    prune = ["checkpoint", "prune", str(run.folder), "--keep", "1"]
    pruned = CliRunner().invoke(main, prune)
    assert pruned.exit_code == 0, pruned.output
    assert run.checkpoint("best").name == f"step-{best:08d}"
    (tmp_path / "run/best.json").write_text('{"step": 1}')
    with pytest.raises(SpecError, match=r"best\.json"):
        run.checkpoint("best")
    refused = CliRunner().invoke(main, prune)
    assert refused.exit_code == 2, refused.output
    assert "best.json" in refused.stderr
    assert run.checkpoint(best).is_dir(), "nothing is deleted where it is not known what is the best"


@pytest.mark.parametrize(
    ("made", "where"),
    [
        (lambda: job(**{**HOW, "best": "loss"}), "job.best"),
        (lambda: job(**{**HOW, "best": px.Best(patience=2), "evaluate_every": 0}), "best.patience"),
        (lambda: job(best=px.Best()), "job.best"),
        (lambda: px.Best(metric=""), "best.metric"),
        (lambda: px.Best(mode="largest"), "best.mode"),
        (lambda: px.Best(patience=0), "best.patience"),
        (lambda: px.Best(min_delta=-1.0), "best.min_delta"),
    ],
)
def test_what_cannot_be(made: Callable[[], Any], where: str) -> None:
    with pytest.raises(SpecError) as caught:
        made()
    (problem,) = caught.value.problems
    assert problem.where == where
    assert problem.fix


CALLED_JOB = """
import sys
sys.path.insert(0, {small!r})
import phalanx as px
import small

def called(event):
    with open("called", "a") as file:
        file.write(f"{{event['step']}} ")

def job():
    return small.job(callbacks={{"end": called}})

def best():
    how = dict(evaluate=small.table, evaluate_every=1, best=px.Best(mode="max", patience=1))
    return small.job(callbacks={{"step": called}}, **how)
"""


@pytest.fixture
def job_file(tmp_path: Path) -> Path:
    path = tmp_path / "job.py"
    path.write_text(CALLED_JOB.format(small=str(Path(__file__).parent)))
    return path


def test_a_bench_measures_steps_alone(job_file: Path) -> None:
    argv = ["bench", f"{job_file}:best", "--plan", "single", "--steps", "4", "--json"]
    done = CliRunner().invoke(main, argv)
    assert done.exit_code == 0, done.output
    assert not Path("called").exists()


Event = dict[str, Any]


class TestCallbacks:
    @pytest.mark.parametrize("plan", ["dp=2 server=1", *longer("single", "dp=2")])
    def test_they_are_called_once_a_run_with_every_event_of_their_name(self, plan: str, tmp_path: Path) -> None:
        steps, ends = list[Event](), list[Event]()
        run = fit(plan, tmp_path / "run", callbacks={"step": steps.append, "end": ends.append})
        assert steps == list(run.events("step"))
        assert len(steps) == 8
        assert ends == list(run.events("end"))

    def test_what_an_earlier_part_of_the_run_did_is_no_news(self, tmp_path: Path) -> None:
        fit("dp=2", tmp_path / "run", epochs=None, steps=3)
        steps = list[int]()
        fit("dp=2", tmp_path / "run", resume=True, callbacks={"step": lambda event: steps.append(event["step"])})
        assert steps == [3, 4, 5, 6, 7]

    def test_one_that_raises_is_named_and_left_out_and_the_run_goes_on(
        self, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(sys, "__stderr__", sys.stderr)
        calls, others = list[int](), list[int]()

        def raises(event: Event) -> None:
            calls.append(event["step"])
            raise KeyError("accuracy")

        callbacks = {"step": raises, "checkpoint": lambda event: others.append(event["step"])}
        run = fit("dp=2", tmp_path / "run", checkpoint_every=4, callbacks=callbacks)
        assert (calls, others) == ([0], [4, 8])
        assert len(run.losses) == 8
        said = capfd.readouterr().err
        assert said.count("the callback of step") == 1
        assert f"{__file__}:" in said
        assert "KeyError: 'accuracy'" in said

    @pytest.mark.parametrize("callbacks", [{"evaluation": print}, {"step": "print"}, [print]])
    def test_what_cannot_be_is_refused_before_anything_starts(self, callbacks: Any, tmp_path: Path) -> None:
        with pytest.raises(SpecError, match=r"job\.callbacks: given"):
            px.fit(job(callbacks=callbacks), "dp=2", folder=tmp_path / "run")
        assert not (tmp_path / "run").exists()

    def test_the_command_calls_them_too(self, job_file: Path) -> None:
        argv = ["train", f"{job_file}", "--plan", "dp=2", "--quiet", "--no-forecast"]
        done = CliRunner().invoke(main, argv)
        assert done.exit_code == 0, done.output
        assert Path("called").read_text() == "8 "
