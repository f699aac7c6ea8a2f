"""No input of a training run is ignored: a key of a plan, a field of a job or run, or an option of the command line,
changed by itself, gives another run, a refusal, or a sentence that names it."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping
from contextlib import chdir
from dataclasses import fields, replace
from functools import cache
from pathlib import Path
from shutil import copytree
from tempfile import TemporaryDirectory
from typing import Any

import click
import pytest
import torch
from click.testing import CliRunner
from torch import nn

import phalanx as px
from law_rows import longer
from phalanx.cli import main
from phalanx.config import Job, Plan, RunSpec
from phalanx.errors import PhalanxError, SpecError

WIDTH, TOKENS, WORDS = 8, 6, 11


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.out = nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        heads = [layer(y).unflatten(-1, (4, -1)).transpose(1, 2) for layer in (self.query, self.key, self.value)]
        seen = nn.functional.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        return x + self.down(nn.functional.gelu(self.up(x)))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Rows(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Samples that tell whether a process of the loader read them."""

    def __init__(self, length: int = 20) -> None:
        self._tokens = torch.randint(WORDS, (length, TOKENS + 1), generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self._tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        beside = torch.utils.data.get_worker_info() is not None
        return {"tokens": self._tokens[index], "weight": torch.tensor(1.5 if beside else 1.0)}


def loss(output: torch.Tensor, batch: dict[str, torch.Tensor]) -> px.Loss:
    each = nn.functional.cross_entropy(output.transpose(1, 2), batch["tokens"][:, 1:], reduction="none").mean(1)
    return px.Loss((each * batch["weight"]).sum(), len(each))


def job(**how: Any) -> Job:
    given: dict[str, Any] = {
        "model": Net,
        "data": Rows,
        "loss": loss,
        "optimizer": lambda params: torch.optim.AdamW(params, lr=1e-2),
        "inputs": lambda batch: batch["tokens"][:, :-1],
        "batch": 8,
        "steps": 3,
        **how,
    }
    return Job(**given)


Answer = tuple[Any, str]
"""What is left of a run, without times and the plan's text; and its sentences. Or its refusal, and the same."""

_TIMES = set("time seconds waited passes update peak_bytes plan exact path notes bytes standstill".split())
_RACES = {"worker", "worked", "forecast", "timing"}


def answer(given: Job, plan: str, **how: Any) -> Answer:
    with TemporaryDirectory() as folder:
        spec = {"forecast": "none", **how, "plan": Plan.parse(plan), "folder": Path(folder) / "run"}
        try:
            run = px.fit(given, run=RunSpec(job="inputs", **spec))
        except PhalanxError as error:
            return str(error), str(error)
        events = list(run.events())
        files = sorted(str(one.relative_to(run.folder).parent) for one in run.folder.rglob("*") if one.is_file())
        ledger = {one.name: one.read_text() for one in (run.folder / "ledger").glob("*.csv")}
    said = [*events[0]["notes"], *(event["message"] for event in events if event["event"] == "warning")]
    found = [_lasting(event) for event in events if event["event"] not in _RACES]
    return (found, files, ledger), " ".join(said)


def _lasting(event: Mapping[str, Any]) -> dict[str, Any]:
    kept = {name: value for name, value in event.items() if name not in _TIMES}
    if event["event"] == "timeline":
        kept["actions"] = [action[:3] for action in event["actions"]]
    return kept


def counts(before: Answer, after: Answer, name: str) -> bool:
    """Whether the second run is another, or says that it makes no difference."""
    return before[0] != after[0] or name in after[1]


PLANS: Mapping[str, tuple[str, str]] = {
    "stages": ("pp=2 micro=2 schedule=interleaved", "pp=2 micro=2 schedule=interleaved stages=3"),
    "attention": ("cp=2", "cp=2 attention=gather"),
    "backup": ("dp=2 server=1", "dp=2 server=1 backup=1"),
    "shares": ("dp=2", "dp=2 shares=3,1"),
}
SEEN_BY_OTHERS = set(
    "dp fsdp tp pp cp ep threads schedule sequence zero micro precision recompute offload"
    " device sync every after outer outer_lr outer_momentum server staleness compress compile".split()
)
"""Memory, traffic, losses or refusals of other tests tell of these."""


@cache
def base(plan: str) -> Answer:
    return answer(job(), plan)


def test_every_key_of_a_plan_is_looked_at() -> None:
    assert set(PLANS) | SEEN_BY_OTHERS == {one.name for one in fields(Plan)}


@pytest.mark.parametrize("name", PLANS)
def test_no_key_of_a_plan_is_ignored(name: str) -> None:
    before, after = PLANS[name]
    assert not isinstance(base(before)[0], str), base(before)[0]
    assert counts(base(before), answer(job(), after), name)


@pytest.mark.parametrize(
    ("plan", "each"),
    [("single", []), ("pp=2 micro=2 schedule=zbv compile=true", [2, 2]), *longer(("fsdp=2 compile=true", [4, 4]))],
)
def test_blocks_are_compiled_where_they_run_and_the_plan_says_so(
    plan: str, each: list[int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    told = tmp_path / "compiled"

    def compiled(self: nn.Module, *args: Any, **how: Any) -> None:
        with told.open("a") as file:
            file.write(f"{os.getpid()} {type(self).__name__}\n")

    monkeypatch.setattr(nn.Module, "compile", compiled)  # a worker's, too: it is forked
    answer(job(), plan)
    lines = [line.split() for line in told.read_text().splitlines()] if told.exists() else []
    assert sorted(Counter(process for process, name in lines if name == "Block").values()) == each


JOBS: Mapping[str, tuple[Mapping[str, Any], Mapping[str, Any]]] = {
    "collate": ({}, {"collate": lambda rows: torch.utils.data.default_collate([*rows[1:], rows[0]])}),
    "drop_last": ({"steps": 4}, {"drop_last": True}),
    "workers": ({}, {"workers": 1}),
    "tensor_parallel": ({}, {"tensor_parallel": {"blocks.*.up": "whole"}}),
    "name": ({}, {"name": "another"}),
}
WITH_FILES_OF_THEIR_OWN = set(
    "model data loss optimizer phases batch batch_ramp batch_tokens epochs steps seed inputs shuffle sampler schedule"
    " clip evaluate metrics evaluate_every best average unused prefetch initial callbacks loss_over"
    " batch_statistics transform".split()
)


def test_every_field_of_a_job_is_looked_at() -> None:
    assert set(JOBS) | WITH_FILES_OF_THEIR_OWN == {one.name for one in fields(Job)}


@pytest.mark.parametrize("name", JOBS)
def test_no_field_of_a_job_is_ignored(name: str) -> None:
    before, change = JOBS[name]
    plain = answer(job(**before), "single") if before else base("single")
    assert not isinstance(plain[0], str), plain[0]
    assert counts(plain, answer(replace(job(**before), **change), "single"), name)


def test_workers_load_as_far_ahead_as_asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    told = tmp_path / "ahead"

    class Seen(torch.utils.data.DataLoader[Any]):
        def __init__(self, *args: Any, **how: Any) -> None:
            told.open("a").write(f"{how.get('prefetch_factor')} ")
            super().__init__(*args, **how)

    monkeypatch.setattr("phalanx.data.worker_processes.DataLoader", Seen)
    answer(job(workers=1, prefetch=5), "single")
    assert set(told.read_text().split()) == {"5"}
    with pytest.raises(SpecError, match="only together with workers"):
        job(prefetch=5)


RUNS: Mapping[str, tuple[Mapping[str, Any], Any]] = {
    "batch": ({}, 6),
    "epochs": ({}, 2),
    "steps": ({}, 2),
    "lr_scale": ({}, 2.0),
    "checkpoint_every": ({}, 1),
    "keep": ({"checkpoint_every": 1}, 1),
    "log_every": ({}, 2),
}
ELSEWHERE = {
    *("job", "plan", "folder", "resume", "from_step", "forecast", "checkpoint", "keep_every", "mirror", "grace"),
    "restarts",
    *("on_nonfinite", "spike", "on_spike", "timeout", "drift", "drift_every", "devices", "asked_plan"),
    "check",
}
"""Where the job is and the run lies. What a resume does, what a forecast refuses, which checkpoints stay or are copied,
and what becomes of a run that is asked to stop, loses a worker, waits for one, or meets numbers or replicas that went
wrong, or whose number of devices changes, have tests of their own; so has
the check of the first step (test_stand_in_device)."""


def test_every_field_of_a_run_is_looked_at() -> None:
    assert set(RUNS) | ELSEWHERE == {one.name for one in fields(RunSpec)}


@pytest.mark.parametrize("name", ["keep", *longer(*(name for name in RUNS if name != "keep"))])
def test_no_field_of_a_run_is_ignored(name: str) -> None:
    before, value = RUNS[name]
    plain = answer(job(), "single", **before) if before else base("single")
    assert not isinstance(plain[0], str), plain[0]
    assert counts(plain, answer(job(), "single", **before, **{name: value}), name)


JOB_FILE = """
import torch

import phalanx as px

def data():
    return px.Table(x=torch.randn(24, 3, generator=torch.Generator().manual_seed(0)), y=torch.arange(24) % 2)

def job():
    return px.Job(
        model=lambda: torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Dropout(0.2), torch.nn.Linear(4, 2)),
        data=data,
        inputs=lambda batch: batch["x"],
        loss=lambda output, batch: px.cross_entropy(output, batch["y"]),
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        batch=12,
        steps=3,
        name="toy",
    )

def loop(job):
    raise SystemExit("asked for the loop of one's own")
"""
OPTIONS: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "train": {
        "--plan": ("--plan", "fsdp=2"),
        "-n": ("-n", "2"),
        "--run": ("--run", "elsewhere"),
        "--resume": ("--resume",),
        "--batch": ("--batch", "6"),
        "--lr-scale": ("--lr-scale", "2"),
        "--steps": ("--steps", "2"),
        "--epochs": ("--epochs", "3"),
        "--checkpoint-every": ("--checkpoint-every", "1"),
        "--keep": ("--checkpoint-every", "1", "--keep", "1"),
        "--log-every": ("--log-every", "2"),
        "--no-forecast": ("--no-forecast",),
        "--tensorboard": ("--tensorboard",),
        "--quiet": ("--quiet",),
        "--explain": ("--explain",),
        "--json": ("--json",),
    },
    "prove": {
        "--plan": ("--plan", "fsdp=2"),
        "--steps": ("--steps", "2"),
        "--resume": ("--no-resume",),
        "--against": ("--against", "toy.py:loop"),
        "--small": ("--small",),
        "--json": ("--json",),
    },
    "bench": {
        "-n": ("-n", "1,2"),
        "--plan": ("--plan", "dp=2"),
        "--steps": ("--steps", "3"),
        "--json": ("--json",),
    },
}
# a plan that does not fit is trained with --anyway: test_run_results; launchers and hosts have tests of their own, and
# so has what becomes of a run that stops or loses a worker: tests/faults. --set needs a job that declares: test_jobfile
SETS = {
    "train": {
        *("--set", "--anyway", "--from", "--checkpoint", "--keep-every", "--mirror", "--grace"),
        *("--restarts", "--check"),
        *("--on-nonfinite", "--spike", "--on-spike", "--timeout", "--drift", "--drift-every"),
    },
    "prove": {"--set"},
    "bench": {"--set"},
}


PLAIN = {
    "train": ("--plan", "single"),
    "prove": ("--plan", "dp=2", "--steps", "3"),
    "bench": ("-n", "1", "--steps", "2"),
}


@pytest.mark.parametrize("verb", OPTIONS)
def test_every_option_is_looked_at(verb: str) -> None:
    command = main.get_command(click.Context(main), verb)
    options = {one.opts[0] for one in command.params if isinstance(one, click.Option)}
    assert set(OPTIONS[verb]) | SETS[verb] == options


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """The folder of a run, and a proof."""
    with chdir(folder := tmp_path_factory.mktemp("made")):
        Path("toy.py").write_text(JOB_FILE)
        result = CliRunner().invoke(main, ["train", "toy.py", "--run", "made", "--quiet", "--plan", "single"])
        assert result.exit_code == 0, result.output
        return folder / "made", px.prove(job(), "dp=2", steps=1)


@pytest.fixture
def asked(made: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch) -> Asked:
    """What commands ask for; each is given the run and the proof that are there."""
    return Asked(*made, monkeypatch)


class Asked:
    """The arguments of each ``fit`` and ``prove``, which train nothing."""

    def __init__(self, made: Path, proof: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.what: list[str] = []
        self._made, self._proof = made, proof
        monkeypatch.setattr("phalanx.api.fit", self.fit)
        monkeypatch.setattr("phalanx.api.prove", self.prove)

    def fit(self, given: Job, *, run: RunSpec, watch: Any, **how: Any) -> None:
        self.what.append(f"{run} {given.steps} {sorted(how)}")
        copytree(self._made, run.folder)

    def prove(self, given: Job, plan: Plan, *, steps: int, against: Any, resume: bool | None, **how: Any) -> Any:
        self.what.append(f"{plan} {steps} {against and against.__name__} {resume}")
        return self._proof


@pytest.mark.parametrize("verb", OPTIONS)
def test_no_option_is_ignored(verb: str, asked: Asked) -> None:
    first = {"-n": PLAIN[verb][2:], "--steps": PLAIN[verb][:2], "--keep": (*PLAIN[verb], "--checkpoint-every", "1")}
    if verb != "bench":  # whose plans come beside those of -n
        first["--plan"] = ()
    before, same = (
        {name: _told(verb, first["--keep"] if name == "--keep" else PLAIN[verb], asked) for name in ("", "--keep")},
        [],
    )
    assert before[""][0] == 0, before
    for name, words in OPTIONS[verb].items():
        if _told(verb, (*first.get(name, PLAIN[verb]), *words), asked) == before["--keep" if name == "--keep" else ""]:
            same.append(name)
    assert same == []


def _told(verb: str, argv: tuple[str, ...], asked: Asked) -> Any:
    """Exit code, the form of the answer, how much is said before it, every file, and what was asked for."""
    asked.what.clear()
    with TemporaryDirectory() as folder, chdir(folder):
        Path("toy.py").write_text(JOB_FILE)
        result = CliRunner().invoke(main, [verb, "toy.py", *argv])
        files = sorted(str(one) for one in Path().rglob("*") if one.is_file() and one.suffix != ".pyc")
    form = "json" if result.stdout.startswith("{") else "table"
    return result.exit_code, form, len(result.stderr.splitlines()), files, list(asked.what)
