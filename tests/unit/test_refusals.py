"""Every verb gives the same answer to a model, a plan and a machine: accepted, or refused with the same problems."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import IterableDataset

import phalanx as px
from law_rows import in_one_test
from phalanx.cli.trial_verbs import refuse_plans
from phalanx.config import Job, Plan, RunSpec
from phalanx.demo.jobs import digits, gpt
from phalanx.errors import Problem, RefusedError, SpecError
from phalanx.launch.side_process import look_ahead
from phalanx.launch.worker_pool import WorkerPool
from phalanx.planner import Question
from phalanx.planner.advise import forecast_plan
from phalanx.preflight import cluster_for
from phalanx.report.show import of_job
from phalanx.train.look_ahead import refusals
from phalanx.train.traced_job import work_of

JOBS = {
    "gpt": lambda: gpt.gpt_job(layers=2, width=24, heads=4, context=12, batch=8, steps=1),
    "digits": digits.job,
    "adafactor": lambda: small(optimizer=lambda params: torch.optim.Adafactor(params)),
    "closure": lambda: small(optimizer=lambda params: torch.optim.LBFGS(params)),
    "idle scheduler": lambda: small(optimizer=idle),
    "scheduler": lambda: small(optimizer=stepped_by_hook),
    "reading": lambda: small(model=Reading),
    "hooked": lambda: small(model=hooked),
    "stream": lambda: small(data=Stream),
    "stream of workers": lambda: small(data=Stream, workers=1),
    "evaluates a stream": lambda: small(evaluate=Stream),
    "double": lambda: small(model=lambda: nn.Linear(6, 4, dtype=torch.float64)),
    "rprop": lambda: small(optimizer=lambda params: torch.optim.Rprop(params)),
    "turned": lambda: small(model=lambda: nn.Linear(6, 3, dtype=torch.complex64)),
    "sparse": lambda: small(model=Sparse),
}
WRONG = {  # whatever is refused by more than what the plan and a mesh say
    "adafactor": ("fsdp=2", "tp=2"),
    "closure": ("single", "dp=2", "pp=2", "server=1 dp=2"),
    "evaluates a stream": ("server=1 dp=2",),
    "hooked": ("fsdp=2", "tp=2"),
    "idle scheduler": ("single", "dp=2", "server=1 dp=2"),
    "reading": ("pp=2 recompute=full", "pp=2 recompute=selective"),
    "rprop": ("dp=2 compress=topk:0.1", "server=1 dp=2 compress=topk:0.1"),
    "scheduler": ("server=1 dp=2", "server=2 dp=2"),
    "sparse": ("fsdp=2", "fsdp=2 zero=1", "dp=2 compress=int8", "server=2 dp=2"),
    "stream": ("server=1 dp=2",),
    "stream of workers": ("dp=2 shares=auto",),
    "turned": ("fsdp=2", "fsdp=2 zero=2"),
}


class Sparse(nn.Module):
    """An embedding whose gradients are sparse."""

    def __init__(self) -> None:
        super().__init__()
        self.rows, self.head = nn.Embedding(16, 8, sparse=True), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.rows(x.long().clamp(0, 15)).mean(1))


def hooked() -> nn.Module:
    layer = nn.Linear(6, 4)
    layer.weight.register_hook(lambda grad: grad * (torch.arange(4) > 1)[:, None])
    return layer


class Reading(nn.Module):
    """Blocks of which each but the first reads what the first has left beside them."""

    def __init__(self) -> None:
        super().__init__()
        self.left: dict[str, torch.Tensor] = {}
        self.first, self.head = nn.Linear(6, 8), nn.Linear(8, 4)
        self.blocks = nn.ModuleList(ReadingBlock(self.left) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.left["first"] = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class ReadingBlock(nn.Module):
    def __init__(self, left: dict[str, torch.Tensor]) -> None:
        super().__init__()
        self.left, self.inner = left, nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.inner(x)) + self.left["first"]


class Stream(IterableDataset[dict[str, torch.Tensor]]):
    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        return iter({"x": torch.ones(6), "y": torch.zeros((), dtype=torch.long)} for _ in range(16))


def stepped_by_hook(params: Any) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(params, lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    optimizer.register_step_post_hook(lambda *_: scheduler.step())
    return optimizer


def idle(params: Any) -> torch.optim.Optimizer:
    """A scheduler that nobody steps."""
    optimizer = torch.optim.SGD(params, lr=0.1)
    optimizer.scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    return optimizer


def small(**how: Any) -> Job:
    given: dict[str, Any] = {
        "model": lambda: nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 4)),
        "data": lambda: px.Table(x=torch.ones(16, 6), y=torch.zeros(16, dtype=torch.long)),
        "inputs": lambda batch: batch["x"],
        "loss": lambda output, batch: px.cross_entropy(output, batch["y"]),
        "optimizer": lambda params: torch.optim.SGD(params, lr=0.1),
        "batch": 8,
        "steps": 1,
        "name": "small",
        **how,
    }
    return Job(**given)


PLANS = (
    *("single", "dp=2", "dp=300", "fsdp=2", "fsdp=2 zero=1", "fsdp=2 zero=2 pp=2", "tp=2", "tp=3", "cp=2"),
    *("cp=2 attention=alltoall", "cp=3 attention=alltoall", "ep=2", "ep=3 dp=2", "pp=2", "pp=4"),
    *("pp=3 micro=3 schedule=zbv", "dp=2 shares=99,1", "dp=2 sync=local every=4", "dp=2 compress=int8"),
    *("pp=2 recompute=full", "tp=2 recompute=selective", "threads=2"),
)


def not_started(*_: Any) -> Any:
    raise AssertionError("a worker was started")


@cache
def job(name: str) -> Job:
    return JOBS[name]()


@cache
def question(name: str, plan: Plan) -> Question:
    given = job(name)
    return Question(
        work=work(name if name not in WRONG else "rprop"),
        cluster=cluster_for(plan),
        precision="fp32",
        look=lambda asked: refusals(given, asked),
    )


@cache
def work(name: str):
    return work_of(job(name))


def of_forecast(name: str, plan: Plan) -> list[Problem]:
    try:
        forecast_plan(question(name, plan), plan)
    except RefusedError as error:
        return list(error.problems)
    return []


def of_show(name: str, plan: Plan) -> list[Problem]:
    try:
        of_job(job(name), plan)
    except RefusedError as error:
        return list(error.problems)
    return []


@pytest.mark.parametrize(
    ("name", "text"), [*(("gpt", text) for text in PLANS), *(("digits", text) for text in PLANS[::4])]
)
def test_forecast_and_show_refuse_what_train_does(name: str, text: str) -> None:
    plan = Plan.parse(text)
    assert of_forecast(name, plan) == of_show(name, plan) == refusals(job(name), plan)


@in_one_test(("name", "text"), [(name, text) for name, plans in WRONG.items() for text in plans])
def test_forecast_and_show_refuse_what_a_model_or_an_optimizer_is_refused_for(name: str, text: str) -> None:
    plan = Plan.parse(text)
    found = of_forecast(name, plan)
    assert found
    assert found == of_show(name, plan) == refusals(job(name), plan) == of_train(name, plan)


@in_one_test(("name", "text"), [("digits", "tp=2"), ("gpt", "ep=2"), ("digits", "pp=16")])
def test_every_verb_refuses_the_same_before_a_worker_starts(
    name: str, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(WorkerPool, "start", not_started)
    given, plan = job(name), Plan.parse(text)
    found = refusals(given, plan)
    assert found
    verbs: dict[str, Callable[[], Any]] = {
        "train": lambda: px.fit(given, plan, folder=tmp_path / "run"),
        "prove": lambda: px.prove(given, plan, steps=1),
        "bench": lambda: refuse_plans(given, [Plan(), plan]),
        "forecast": lambda: px.forecast(given, plan, cluster_for(plan)),
        "show": lambda: of_job(given, plan),
    }
    for verb, asked in verbs.items():
        with pytest.raises(RefusedError) as refused:
            asked()
        assert list(refused.value.problems) == found, verb
    assert not (tmp_path / "run").exists()


@in_one_test(
    ("name", "text", "refused"),
    [
        ("gpt", "server=1 dp=2 precision=fp16", True),
        ("sparse", "server=1 dp=2", True),
        ("double", "server=1 dp=2 compress=int8", True),
        ("gpt", "tp=2 compile=true", True),
    ],
)
def test_forecast_and_show_refuse_what_a_run_does(
    name: str, text: str, refused: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class StartedError(Exception):
        """A worker would be."""

    def started(*_: Any) -> Any:
        raise StartedError

    monkeypatch.setattr(WorkerPool, "start", started)
    plan, found = Plan.parse(text), list[Problem]()
    try:
        px.fit(job(name), plan, folder=tmp_path / "run")
    except StartedError:
        pass
    except RefusedError as error:
        found = list(error.problems)
    assert bool(found) == refused
    assert of_forecast(name, plan) == of_show(name, plan) == found


@in_one_test(("how", "given"), [({"lr_scale": 0.5}, "a factor of 0.5"), ({"resume": True}, "to resume")])
@in_one_test("text", ["single", "dp=2"])
def test_how_a_run_begins_is_refused_before_a_worker_starts(
    how: dict[str, Any], given: str, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(WorkerPool, "start", not_started)
    monkeypatch.setattr("phalanx.launch.runfile.check_folder", lambda *_, **__: None)  # there is nothing to resume from
    run = RunSpec(job="scheduler", plan=Plan.parse(text), folder=tmp_path / "run", **how)
    with pytest.raises(RefusedError, match=f"StepLR on the optimizer .*{given}"):
        px.fit(job("scheduler"), run=run)
    assert not run.folder.exists()


def test_plan_says_of_each_plan_it_shows_what_train_would_say() -> None:
    given = replace(job("gpt"), optimizer=lambda params: torch.optim.Adafactor(params))
    ranking = px.plan(given, "2xH100").ranking
    refused = {str(one.plan): [problem.given for problem in refusals(given, one.plan)] for one in ranking.plans}
    assert any(refused.values())
    assert not all(refused.values())
    assert {str(one.plan): [one.unrun] if one.unrun else [] for one in ranking.plans} == {
        plan: problems[:1] for plan, problems in refused.items()
    }
    assert ranking.best is not None
    assert not ranking.best.unrun


def of_train(name: str, plan: Plan) -> list[Problem]:
    try:
        look_ahead(job(name), plan)
    except SpecError as error:
        return list(error.problems)
    return []


@pytest.mark.parametrize("name", ["SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK"])
def test_one_of_several_tasks_trains_nothing(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in (name, "SLURM_STEP_ID"):
        monkeypatch.setenv(variable, "1")
    for variable in ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE"):
        monkeypatch.setenv(variable, "2")
    with pytest.raises(SpecError, match=rf"task 1 of 2 \({name}\)"):
        px.fit(job("digits"), folder=tmp_path / "run")
    assert not (tmp_path / "run").exists()
