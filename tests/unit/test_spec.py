"""Plans, jobs and runs: what may be written, and that everything wrong is said at once and named as what it is."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import phalanx
import phalanx as px
from law_rows import in_one_test
from phalanx.checkpoint.export import refuse_target
from phalanx.config import Job, Plan, RunSpec, Schedule
from phalanx.data.map_style import is_stream
from phalanx.errors import SpecError
from phalanx.train.build_model import build_model

counts = st.integers(1, 9)
plans = st.one_of(
    st.builds(Plan, threads=counts, micro=st.none() | counts, precision=st.sampled_from(["fp32", "bf16", "fp16"])),
    st.builds(
        Plan,
        dp=counts,
        fsdp=st.integers(2, 9),
        zero=st.integers(1, 3),
        micro=st.none() | counts,
        recompute=st.sampled_from(["none", "selective", "full"]),
        offload=st.sampled_from(["none", "optimizer"]),
        compile=st.booleans(),
        device=st.sampled_from(["auto", "cpu", "cuda"]),
    ),
)


@given(plans)
def test_plans_round_trip(plan: Plan) -> None:
    assert Plan.parse(str(plan)) == plan
    assert Plan.from_toml(plan.to_toml()) == plan


@in_one_test(
    ("text", "kind", "world"),
    [
        ("single", "single", 1),
        ("", "single", 1),
        ("dp=2", "replicate", 2),
        ("threads=2", "threads", 1),
        ("fsdp=4 zero=3 micro=2 recompute=full precision=bf16", "shard", 4),
        ("dp=2 fsdp=4", "shard", 8),
    ],
)
def test_plan_text(text: str, kind: str, world: int) -> None:
    plan = Plan.parse(text)
    assert (plan.kind, plan.world_size) == (kind, world)


@in_one_test(
    ("text", "where", "fix"),
    [
        ("fsd=2", "plan.fsd", "fsdp=2"),
        ("dp=0", "plan.dp", "dp=2"),
        ("dp=two", "plan.dp", "dp=2"),
        ("dp", "plan 'dp'", "dp=2"),
        ("dp=2 dp=3", "plan.dp", "dp=3"),
        ("zero=2", "plan.zero", "fsdp=2 zero=2"),
        ("fsdp=2 zero=0", "plan.zero", "dp=2"),
        ("threads=2 dp=2", "plan.threads", "dp=2"),
        ("precision=bf61", "plan.precision", "precision=bf16"),
        ("offload=parameters", "plan.offload", "fsdp=2 zero=3 offload=parameters"),
        ("micro=0", "plan.micro", "micro=8"),
        ("compile=yes", "plan.compile", "compile=true"),
        ("sequence=true", "plan.sequence", "tp=2 sequence=true"),
        ("dp=2 schedule=zbv", "plan.schedule", "pp=2 schedule=zbv"),
        ("pp=2 stages=3", "plan.stages", "pp=2 schedule=interleaved stages=3"),
    ],
)
def test_a_wrong_plan_says_what_to_write(text: str, where: str, fix: str) -> None:
    with pytest.raises(SpecError) as caught:
        Plan.parse(text)
    (problem,) = caught.value.problems
    assert (problem.where, problem.fix) == (where, fix)
    Plan.parse(fix)


RIGHT: dict[str, Any] = {
    "model": lambda: None,
    "data": lambda: None,
    "loss": lambda output, batch: None,
    "optimizer": lambda params: None,
    "batch": 8,
    "epochs": 1,
}


def test_a_model_in_place_of_a_function_and_a_list_in_place_of_data() -> None:
    class Net:
        def named_parameters(self) -> None: ...
        def __call__(self) -> None: ...

    with pytest.raises(SpecError) as caught:
        Job(**{**RIGHT, "model": Net(), "data": [(1, 2)] * 1000})
    given = {problem.where: problem.given for problem in caught.value.problems}
    assert set(given) == {"job.model", "job.data"}
    assert given["job.data"] == "an object of type list"
    Job(**{**RIGHT, "model": Net})  # the class builds one


def test_run_round_trips() -> None:
    run = RunSpec(job="a.py:job", plan=Plan(fsdp=2, zero=1), folder=Path("runs/x"), steps=5, lr_scale=2.0, resume=True)
    assert RunSpec.from_toml(run.to_toml()) == run


AT_ONCE: list[tuple[Callable[[], Any], str]] = [
    (lambda: Plan.parse("dq=2 zero=7 micro=a schedule=zbv"), "plan.dq plan.zero plan.micro plan.schedule"),
    (lambda: wrong_job(batch="8", workers=-1, steps=3), "job.batch job.workers job.epochs"),
    (lambda: RunSpec.from_toml('plan = "dq=2"\ncolour = 1\n'), "run.colour run.job run.folder plan.dq"),
    (lambda: run_file(colour="1\nkeep = 0\nsteps = 1\nepochs = 1"), "run.colour run.keep run.epochs"),
]


def test_everything_wrong_is_said_at_once() -> None:
    for make, where in AT_ONCE:
        with pytest.raises(SpecError) as caught:
            make()
        assert [problem.where for problem in caught.value.problems] == where.split()


def test_schedules() -> None:
    def factors(schedule: Schedule, steps: int = 10) -> list[float]:
        return [round(schedule.factor(step=step, batch=4, total_steps=steps), 6) for step in range(steps)]

    assert factors(Schedule()) == [1.0] * 10
    assert factors(Schedule(warmup_steps=4))[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert factors(Schedule(warmup_samples=16)) == factors(Schedule(warmup_steps=4))
    assert factors(Schedule(decay="linear"), 4) == [1.0, 0.75, 0.5, 0.25]
    assert factors(Schedule(decay="cosine", floor=0.1), 10)[5] == 0.55
    assert factors(Schedule(decay="step", milestones=(3, 6)))[2:8] == [1.0, 0.1, 0.1, 0.1, 0.01, 0.01]
    assert factors(Schedule(function=lambda step: 0.5**step), 4) == [1.0, 0.5, 0.25, 0.125]
    assert factors(Schedule(function=lambda step: 2 + step, warmup_steps=4), 6) == [0.5, 1.5, 3.0, 5.0, 6.0, 7.0]
    with pytest.raises(SpecError, match=r"gives nan for step 3"):
        factors(Schedule(function=lambda step: float("nan") if step == 3 else 1.0))


def wrong_job(**change: Any) -> Job:
    return Job(**{**RIGHT, **change})


def run_file(**lines: str) -> RunSpec:
    (line,) = (f"{name} = {value}" for name, value in lines.items())
    return RunSpec.from_toml(f'job = "a.py"\nplan = "dp=2"\nfolder = "runs/x"\n{line}\n')


@in_one_test(
    ("make", "wrong", "where"),
    [
        (wrong_job, {"batch": 0}, "job.batch"),
        (wrong_job, {"epochs": None}, "job.epochs"),
        (wrong_job, {"clip": 0.0}, "job.clip"),
        (wrong_job, {"unused": "ignore"}, "job.unused"),
        (wrong_job, {"model": 3}, "job.model"),
        (wrong_job, {"inputs": "image"}, "job.inputs"),
        (wrong_job, {"schedule": None}, "job.schedule"),
        (wrong_job, {"shuffle": 1}, "job.shuffle"),
        (wrong_job, {"evaluate_every": 5}, "job.evaluate_every"),
        (wrong_job, {"metrics": lambda output, batch: {}}, "job.metrics"),
        (partial(RunSpec, job="a.py", plan=Plan()), {"folder": Path("a\ntouch b")}, "run.folder"),
        (run_file, {"batch": "2.5"}, "run.batch"),
        (run_file, {"resume": '"no"'}, "run.resume"),
        (run_file, {"lr_scale": '"2"'}, "run.lr_scale"),
        (Schedule, {"decay": "exp"}, "schedule.decay"),
        (Schedule, {"warmup_steps": "4"}, "schedule.warmup_steps"),
        (Schedule, {"warmup_steps": 1, "warmup_samples": 1}, "schedule.warmup_samples"),
        (Schedule, {"decay": "step"}, "schedule.milestones"),
        (Schedule, {"function": 0.5}, "schedule.function"),
        (Schedule, {"function": lambda step: -1.0}, "schedule.function"),
        (Schedule, {"function": lambda step: 1.0, "decay": "cosine"}, "schedule.decay"),
        (Schedule, {"decay": "cosine", "milestones": (5,)}, "schedule.milestones"),
        (Schedule, {"decay": "cosine", "floor": 1.5}, "schedule.floor"),
        (Schedule, {"floor": 0.1}, "schedule.floor"),
        (Schedule, {"decay": "step", "milestones": (5,), "gamma": 0.0}, "schedule.gamma"),
        (Schedule, {"decay": "linear", "gamma": 0.5}, "schedule.gamma"),
        (Schedule, {"total_steps": 5}, "schedule.total_steps"),
    ],
)
def test_what_is_wrong_is_named_with_a_way_out(make: Callable[..., Any], wrong: dict[str, Any], where: str) -> None:
    with pytest.raises(SpecError) as caught:
        make(**wrong)
    (problem,) = caught.value.problems
    assert problem.where == where
    assert problem.fix
    if make is Schedule:
        eval(problem.fix, {"px": phalanx})


def test_a_refusal_is_the_same_on_the_rank_it_is_sent_to() -> None:
    with pytest.raises(SpecError) as caught:
        Plan.parse("tp=0 micro=0")
    again = pickle.loads(pickle.dumps(caught.value))
    assert type(again) is SpecError
    assert again.problems == caught.value.problems


X, Y = torch.zeros(20, 3), torch.zeros(20, dtype=torch.long)


class Splits(dict[str, Any]):
    """As ``DatasetDict`` of datasets."""


class Columns(list[int]):
    column_names = ("a", "b")


def job(**how: Any) -> px.Job:
    given: dict[str, Any] = {
        "model": lambda: nn.Linear(3, 2),
        "data": lambda: px.Table(input=X, label=Y),
        "loss": lambda output, batch: px.cross_entropy(output, batch["label"]),
        "optimizer": lambda params: torch.optim.SGD(params, lr=0.1),
        "batch": 10,
        "epochs": 1,
    }
    return px.Job(**{**given, **how})


@in_one_test(
    ("data", "given", "fix"),
    [
        ("train.csv", "a str, 'train.csv'", "px.Table(**columns)"),
        ({"input": X, "label": Y}, "a dict of input, label", "px.Table(**columns)"),
        (Splits(train=Columns([1]), test=Columns([2])), "a Splits of train, test", "splits['train']"),
        ((X, Y), "a tuple of 2 arrays of 20 rows each", "px.Table(input=inputs, label=labels)"),
        (pandas.DataFrame({"a": [1, 2]}), "a DataFrame, whose [i] is a column", "frame[name].to_numpy()"),
    ],
)
def test_data_without_samples(data: Any, given: str, fix: str) -> None:
    with pytest.raises(SpecError) as refused:
        is_stream(data)
    (problem,) = refused.value.problems
    assert (problem.where, problem.given) == ("job.data", given)
    assert fix in problem.fix


@in_one_test("data", [[X[0], X[1]], (X[:2], Y[:2]), {0: X[0], 1: X[1]}, X, np.zeros((4, 2))])
def test_data_that_have_samples(data: Any) -> None:
    assert not is_stream(data)


def test_data_without_samples_are_named_before_a_run(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"job\.data: given a str, 'train\.csv'"):
        px.fit(job(data=lambda: "train.csv"), "dp=2", folder=tmp_path / "run")
    assert not (tmp_path / "run").exists()


@in_one_test(
    ("make", "where"),
    [
        (lambda: job(sampler=lambda epoch: [1]), "job.sampler"),
        (lambda: px.Sampler(lambda seed, epoch: [1], by_batch=True), "px.Sampler"),
        (lambda: px.Sampler(lambda epoch: [1]), "px.Sampler"),
    ],
)
def test_a_sampler_of_other_arguments(make: Callable[[], Any], where: str) -> None:
    with pytest.raises(SpecError, match="one that can be called with seed, epoch") as refused:
        make()
    assert refused.value.problems[0].where == where


def test_a_sampler_that_takes_what_it_is_called_with() -> None:
    job(sampler=lambda seed, epoch, more=0: [1])
    px.Sampler(lambda *given: [1], by_batch=True)


@pytest.mark.filterwarnings("ignore:.*script_method:DeprecationWarning")  # of torch's own import
def test_a_compiled_model() -> None:
    net = nn.Linear(3, 2)
    with pytest.raises(SpecError, match=r"a model in torch\.compile(?s:.*)compile=true in the plan"):
        build_model(job(model=lambda: torch.compile(net)))


def test_a_plan_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "plan.toml").write_text(px.Plan.parse("dp=2 micro=5").to_toml())
    run = px.fit(job(), str(tmp_path / "plan.toml"), folder=tmp_path / "run", forecast="none")
    assert str(run.plan) == "dp=2 micro=5"
    with pytest.raises(SpecError, match=r"plan: given .*none\.toml"):
        px.fit(job(), str(tmp_path / "none.toml"))


def test_what_a_model_is_written_to(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"target: given .*a\.pt, (?s:.*)try: .*a\.safetensors"):
        refuse_target(tmp_path / "a.pt")
    (tmp_path / "there").mkdir()
    with pytest.raises(SpecError) as refused:
        refuse_target(tmp_path / "there")
    (problem,) = refused.value.problems
    assert (problem.where, problem.fix) == ("target", str(tmp_path / "there-1"))


@pytest.mark.quick
@pytest.mark.parametrize(
    "make",
    [
        lambda: px.Schedule(floor=7, function=lambda: 1),
        lambda: px.Plan(schedule={}, stages=[-1]),
        lambda: RunSpec.from_toml('job = "a.py"\nplan = "dp=2"\nfolder = "r"\nstpes = 60\n'),
    ],
)
def test_a_wrong_field_keeps_others_from_failing(make: Any) -> None:
    with pytest.raises(SpecError) as caught:
        make()
    assert all(
        problem.fix.startswith(("steps=", "schedule=", "px.Schedule", "pp", "stages"))
        for problem in caught.value.problems
    )
