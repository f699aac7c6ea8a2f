"""Plans, jobs and runs: what may be written, and that everything wrong is said at once."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import phalanx
from phalanx.config import Job, Plan, RunSpec, Schedule
from phalanx.errors import SpecError

pytestmark = pytest.mark.quick

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


@pytest.mark.parametrize(
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


def test_a_sharded_plan_shards_everything_unless_told() -> None:
    assert Plan.parse("fsdp=2").zero == 3
    assert str(Plan.parse("fsdp=2 zero=3")) == "fsdp=2"
    assert (Plan().zero, Plan(zero=0).zero, Plan.parse("dp=2 zero=0")) == (0, 0, Plan(dp=2))


@pytest.mark.parametrize(
    ("text", "where", "fix"),
    [
        ("fsd=2", "plan.fsd", "fsdp=2"),
        ("dp=0", "plan.dp", "dp=2"),
        ("dp=two", "plan.dp", "dp=2"),
        ("dp", "plan 'dp'", "dp=2"),
        ("dp=2 dp=3", "plan.dp", "dp=3"),
        ("zero=2", "plan.zero", "fsdp=2 zero=2"),
        ("dp=4 zero=1", "plan.zero", "fsdp=4 zero=1"),
        ("dp=2 tp=2 zero=2", "plan.zero", "fsdp=2 tp=2 zero=2"),
        ("dp=2 pp=2 zero=2", "plan.zero", "fsdp=2 zero=2"),
        ("threads=2 zero=3", "plan.zero", "fsdp=2 zero=3"),
        ("dpp=2", "plan.dpp", "dp=2"),
        ("fdsp=2", "plan.fdsp", "fsdp=2"),
        ("fsdp=2 zero=0", "plan.zero", "dp=2"),
        ("threads=2 dp=2", "plan.threads", "dp=2"),
        ("precision=bf61", "plan.precision", "precision=bf16"),
        ("offload=parameters", "plan.offload", "fsdp=2 zero=3 offload=parameters"),
        ("micro=0", "plan.micro", "micro=8"),
        ("compile=yes", "plan.compile", "compile=true"),
        ("tp=0", "plan.tp", "tp=2"),
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


def test_everything_wrong_in_a_plan_is_said_at_once() -> None:
    with pytest.raises(SpecError) as caught:
        Plan.parse("dq=2 zero=7 micro=a")
    assert {problem.where for problem in caught.value.problems} == {"plan.dq", "plan.zero", "plan.micro"}


def test_a_plan_in_toml_says_the_same() -> None:
    with pytest.raises(SpecError) as caught:
        Plan.from_toml('dq = 2\nprecision = "bf8"\n')
    assert {problem.where for problem in caught.value.problems} == {"plan.dq", "plan.precision"}
    with pytest.raises(SpecError):
        Plan.from_toml("dp = = 2")


RIGHT: dict[str, Any] = {
    "model": lambda: None,
    "data": lambda: None,
    "loss": lambda output, batch: None,
    "optimizer": lambda params: None,
    "batch": 8,
    "epochs": 1,
}


@pytest.mark.parametrize(
    ("change", "where"),
    [
        ({"batch": 0}, "job.batch"),
        ({"batch": 2.5}, "job.batch"),
        ({"epochs": None}, "job.epochs"),
        ({"steps": 3}, "job.epochs"),
        ({"seed": -1}, "job.seed"),
        ({"clip": 0.0}, "job.clip"),
        ({"clip": float("nan")}, "job.clip"),
        ({"unused": "ignore"}, "job.unused"),
        ({"workers": -1}, "job.workers"),
        ({"model": 3}, "job.model"),
        ({"inputs": "image"}, "job.inputs"),
        ({"schedule": None}, "job.schedule"),
        ({"shuffle": 1}, "job.shuffle"),
        ({"drop_last": "no"}, "job.drop_last"),
        ({"name": 3}, "job.name"),
        ({"clip": True}, "job.clip"),
        ({"evaluate_every": 5}, "job.evaluate_every"),
        ({"metrics": lambda output, batch: {}}, "job.metrics"),
    ],
)
def test_wrong_jobs(change: dict[str, Any], where: str) -> None:
    with pytest.raises(SpecError) as caught:
        Job(**{**RIGHT, **change})
    assert [problem.where for problem in caught.value.problems] == [where]


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


def test_a_run_takes_its_folder_as_text() -> None:
    assert RunSpec(job="a.py", plan=Plan(), folder="runs/x").folder == Path("runs/x")  # pyright: ignore[reportArgumentType]


def test_ways_out_of_a_wrong_run_can_be_copied_into_python() -> None:
    wrong: dict[str, Any] = {"keep": 0, "timeout": 0, "drift": "no", "checkpoint_every": "3", "grow_after": "5m"}
    found: list[str] = []
    for name, value in wrong.items():
        with pytest.raises(SpecError) as caught:
            RunSpec(job="a.py", plan=Plan(), folder=Path("x"), **{name: value})
        found += [problem.fix for problem in caught.value.problems]
    assert found == [
        "keep=2",
        "timeout=600",
        'drift="warn"',
        'checkpoint_every="15m"',
        "devices=\"1:4\", grow_after='5m'",
    ]


def test_a_metric_that_is_no_function_is_told_how_metrics_are_written() -> None:
    with pytest.raises(SpecError) as caught:
        Job(**RIGHT, evaluate=list, metrics={"accuracy": len})  # pyright: ignore[reportArgumentType]
    (problem,) = caught.value.problems
    assert problem.fix == "metrics=lambda output, batch: {'accuracy': px.accuracy(output, batch['label'])}"


def test_everything_wrong_in_a_job_is_said_at_once() -> None:
    with pytest.raises(SpecError) as caught:
        Job(**{**RIGHT, "batch": 0, "clip": -1, "loss": None})
    assert {problem.where for problem in caught.value.problems} == {"job.batch", "job.clip", "job.loss"}


def test_run_round_trips() -> None:
    run = RunSpec(job="a.py:job", plan=Plan(fsdp=2, zero=1), folder=Path("runs/x"), steps=5, lr_scale=2.0, resume=True)
    assert RunSpec.from_toml(run.to_toml()) == run


def test_wrong_run_files() -> None:
    with pytest.raises(SpecError) as caught:
        RunSpec.from_toml('plan = "dq=2"\ncolour = 1\n')
    assert {problem.where for problem in caught.value.problems} == {"run.colour", "run.job", "run.folder", "plan.dq"}
    with pytest.raises(SpecError):
        RunSpec(job="a", plan=Plan(), folder=Path("x"), steps=1, epochs=1)


@pytest.mark.parametrize(
    ("line", "where"),
    [
        ('steps = "5"', "run.steps"),
        ("batch = 2.5", "run.batch"),
        ("batch = true", "run.batch"),
        ('resume = "no"', "run.resume"),
        ('lr_scale = "2"', "run.lr_scale"),
        ("lr_scale = inf", "run.lr_scale"),
        ('keep = "2"', "run.keep"),
    ],
)
def test_wrong_types_in_a_run_file(line: str, where: str) -> None:
    with pytest.raises(SpecError) as caught:
        RunSpec.from_toml(f'job = "a.py"\nplan = "dp=2"\nfolder = "runs/x"\n{line}\n')
    assert [problem.where for problem in caught.value.problems] == [where]


def test_wrong_types_are_said_with_all_else_that_is_wrong() -> None:
    with pytest.raises(SpecError) as caught:
        RunSpec.from_toml("job = 1\nplan = 2\nfolder = 5\nsteps = 0\ncolour = 1\n")
    places = [problem.where for problem in caught.value.problems]
    assert sorted(places) == ["run.colour", "run.folder", "run.job", "run.plan", "run.steps"]


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


@pytest.mark.parametrize(
    ("wrong", "where"),
    [
        ({"decay": "exp"}, "decay"),
        ({"warmup_steps": -1}, "warmup_steps"),
        ({"warmup_steps": "4"}, "warmup_steps"),
        ({"warmup_steps": 1, "warmup_samples": 1}, "warmup_samples"),
        ({"decay": "step"}, "milestones"),
        ({"function": 0.5}, "function"),
        ({"function": lambda step: -1.0}, "function"),
        ({"function": lambda step: None}, "function"),
        ({"function": lambda step: 1.0, "decay": "cosine"}, "decay"),
        ({"decay": "step", "milestones": 5}, "milestones"),
        ({"decay": "cosine", "milestones": (5,)}, "milestones"),
        ({"decay": "cosine", "floor": 1.5}, "floor"),
        ({"decay": "linear", "floor": -0.1}, "floor"),
        ({"floor": 0.1}, "floor"),
        ({"decay": "step", "milestones": (5,), "gamma": 0.0}, "gamma"),
        ({"decay": "linear", "gamma": 0.5}, "gamma"),
        ({"total_steps": 5}, "total_steps"),
        ({"decay": "linear", "total_steps": "5"}, "total_steps"),
    ],
)
def test_wrong_schedules(wrong: dict[str, Any], where: str) -> None:
    with pytest.raises(SpecError) as caught:
        Schedule(**wrong)
    assert [problem.where for problem in caught.value.problems] == [f"schedule.{where}"]
    eval(caught.value.problems[0].fix, {"px": phalanx})


def test_a_refusal_is_the_same_on_the_rank_it_is_sent_to() -> None:
    with pytest.raises(SpecError) as caught:
        Plan.parse("tp=0 micro=0")
    again = pickle.loads(pickle.dumps(caught.value))
    assert type(again) is SpecError
    assert again.problems == caught.value.problems
