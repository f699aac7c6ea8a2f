"""Every verb gives the same answer to a model, a plan and a machine: accepted, or refused with the same problems."""

from __future__ import annotations

from functools import cache

import pytest

from phalanx.demo.jobs import digits, gpt
from phalanx.errors import Problem, RefusedError
from phalanx.foresight import cluster_for
from phalanx.observe.show import of_job
from phalanx.planner import Question
from phalanx.planner.single import foretell
from phalanx.spec import Job, Plan
from phalanx.train.outlook import refusals
from phalanx.train.work import work_of

JOBS = {
    "gpt": lambda: gpt.gpt_job(layers=2, width=24, heads=4, context=12, batch=8, steps=1),
    "digits": digits.job,
}
PLANS = (
    "single",
    "dp=2",
    "dp=9",
    "dp=300",
    "fsdp=2",
    "fsdp=2 zero=1",
    "fsdp=2 zero=2 pp=2",
    "fsdp=2 zero=1 pp=2",
    "tp=2",
    "tp=3",
    "tp=5",
    "tp=2 sequence=true",
    "tp=4 dp=2",
    "cp=2",
    "cp=3",
    "cp=5",
    "cp=2 attention=alltoall",
    "cp=3 attention=alltoall",
    "cp=2 attention=gather",
    "ep=2",
    "ep=3 dp=2",
    "pp=2",
    "pp=2 micro=1 schedule=interleaved",
    "pp=4",
    "pp=7",
    "pp=2 split=nonsense",
    "pp=2 split=blocks.0",
    "pp=2 split=head/norm",
    "pp=3 micro=3 schedule=zbv",
    "dp=2 shares=3,1",
    "dp=2 shares=99,1",
    "dp=2 sync=local every=4",
    "dp=2 compress=int8",
    "dp=2 compress=powersgd:2",
    "dp=2 recompute=full",
    "pp=2 recompute=full",
    "tp=2 recompute=selective",
    "threads=2",
)


@cache
def job(name: str) -> Job:
    return JOBS[name]()


@cache
def question(name: str, plan: Plan) -> Question:
    given = job(name)
    return Question(
        work=work(name), cluster=cluster_for(plan), precision="fp32", look=lambda asked: refusals(given, asked)
    )


@cache
def work(name: str):
    return work_of(job(name))


def of_forecast(name: str, plan: Plan) -> list[Problem]:
    try:
        foretell(question(name, plan), plan)
    except RefusedError as error:
        return list(error.problems)
    return []


def of_show(name: str, plan: Plan) -> list[Problem]:
    try:
        of_job(job(name), plan)
    except RefusedError as error:
        return list(error.problems)
    return []


@pytest.mark.parametrize("name", JOBS)
@pytest.mark.parametrize("text", PLANS)
def test_forecast_and_show_refuse_what_train_does(name: str, text: str) -> None:
    plan = Plan.parse(text)
    assert of_forecast(name, plan) == of_show(name, plan) == refusals(job(name), plan)
