"""Plans that keep replicas together in other ways, and uneven shares: their text, and what is wrong in it."""

from __future__ import annotations

import pytest

from phalanx.config import Plan
from phalanx.config.plan_rules import share_problems
from phalanx.config.sync import split_by_weight, weights
from phalanx.errors import SpecError
from phalanx.planner.explain import plan_and_keys

pytestmark = pytest.mark.quick


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("dp=4 sync=local every=32", "dp=4 sync=local every=32"),
        ("dp=4 sync=diloco every=100 outer=nesterov", "dp=4 sync=diloco every=100"),
        ("dp=4,sync=diloco,every=100,outer=sgd", "dp=4 sync=diloco every=100 outer=sgd"),
        ("server=1 dp=4 staleness=0", "dp=4 server=1"),
        ("server=2 dp=4 staleness=4", "dp=4 server=2 staleness=4"),
        ("dp=2,shares=3,1,micro=2", "dp=2 micro=2 shares=3,1"),
        ("dp=2 shares=3, 1", "dp=2 shares=3,1"),
        ("dp=4 sync=local every=32 after=100", "dp=4 sync=local every=32 after=100"),
        (
            "dp=4 sync=diloco every=9 fragments=4 outer=sgd outer_lr=0.5",
            "dp=4 sync=diloco every=9 outer=sgd fragments=4 outer_lr=0.5",
        ),
        ("dp=4 server=2 staleness=unbounded compensate=delay", "dp=4 server=2 staleness=unbounded compensate=delay"),
        ("dp=4 server=2 staleness=2 after=9", "dp=4 after=9 server=2 staleness=2"),
        ("dp=2 compress=topk:0.02", "dp=2 compress=topk:0.02"),
        ("dp=2 fsdp=4 shares=auto", "dp=2 fsdp=4 shares=auto"),
    ],
)
def test_plans_round_trip(text: str, told: str) -> None:
    plan = Plan.parse(text)
    assert str(plan) == told
    assert Plan.parse(told) == plan == Plan.from_toml(plan.to_toml())


def test_what_is_not_given_follows_from_what_is() -> None:
    assert (Plan().sync, Plan().every, Plan().outer, Plan().server, Plan().staleness, Plan().shares) == (
        "each",
        1,
        "none",
        0,
        None,
        "",
    )
    assert Plan(dp=2, sync="diloco").outer == "nesterov"
    assert Plan(dp=2, server=1).staleness == 0


@pytest.mark.parametrize(
    ("text", "bound", "exactness"),
    [
        ("dp=4", "", "yes"),
        ("dp=4 precision=bf16", "", "within the rounding of bf16"),
        ("dp=4 server=1", "", "yes"),
        ("dp=2 shares=3,1", "", "yes"),
        ("dp=4 server=1 staleness=3", "3 updates", "no"),
        ("dp=4 server=1 staleness=3 compress=int8", "3 updates", "no"),
        ("dp=4 server=1 staleness=unbounded", "any number", "no"),
        ("dp=4 server=1 backup=1", "the slowest worker", "no"),
        ("dp=2 compress=int8", "int8", "within the rounding of int8"),
        ("dp=2 compress=bf16", "bf16", "within the rounding of bf16"),
        ("dp=2 compress=bf16 precision=bf16", "bf16", "within the rounding of bf16"),
        ("dp=2 compress=int8 precision=bf16", "int8", "within the rounding of int8 and bf16"),
        ("dp=2 compress=topk:0.01", "topk:0.01", "no"),
        ("dp=2 compress=powersgd:4", "powersgd:4", "no"),
        ("dp=4 sync=local every=32", "32 steps", "no"),
        ("dp=4 sync=diloco every=100 compress=int8", "100 steps", "no"),
    ],
)
def test_what_gives_up_one_devices_result_says_what_bounds_it(text: str, bound: str, exactness: str) -> None:
    plan = Plan.parse(text)
    assert plan.exact == (bound == "")
    assert bound in plan.bound
    assert plan.exactness == exactness
    assert plan.exact_note.startswith(f"exact: {exactness}. " if bound else "")
    assert bool(plan.exact_note) == bool(bound)


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ("every=3", "plan.every"),
        ("dp=2 sync=local every=0", "plan.every"),
        ("dp=2 outer=sgd", "plan.outer"),
        ("dp=2 sync=diloco outer=none", "plan.outer"),
        ("dp=2 sync=lokal", "plan.sync"),
        ("fsdp=2 sync=local every=2", "plan.sync"),
        ("dp=2 staleness=1", "plan.staleness"),
        ("dp=2 compress=gzip", "plan.compress"),
        ("dp=2 compress=topk:2", "plan.compress"),
        ("dp=2 compress=int8:4", "plan.compress"),
        ("dp=2 fsdp=2 compress=int8", "plan.compress"),
        ("dp=2 server=1 compress=powersgd", "plan.compress"),
        ("compress=int8", "plan.compress"),
        ("dp=2 backup=1", "plan.backup"),
        ("dp=2 server=1 backup=2", "plan.backup"),
        ("dp=3 server=1 backup=1 staleness=2", "plan.backup"),
        ("dp=2 server=1 compensate=rate", "plan.compensate"),
        ("dp=2 fragments=3", "plan.fragments"),
        ("dp=2 sync=diloco every=2 fragments=4", "plan.fragments"),
        ("dp=2 after=9", "plan.after"),
        ("dp=2 server=1 after=9", "plan.after"),
        ("dp=2 outer_lr=0.5", "plan.outer_lr"),
        ("dp=2 sync=diloco outer_momentum=1.5", "plan.outer_momentum"),
        ("dp=2 server=1 staleness=-1", "plan.staleness"),
        ("dp=2 server=-1", "plan.server"),
        ("server=1 fsdp=2", "plan.server"),
        ("server=1 tp=2 dp=2", "plan.server"),
        ("server=1 threads=2", "plan.server"),
        ("server=1 dp=2 sync=local every=2", "plan.server"),
        ("server=1 dp=2 offload=optimizer", "plan.offload"),
        ("dp=2 shares=1", "plan.shares"),
        ("dp=2 shares=3,0", "plan.shares"),
        ("dp=2 shares=much", "plan.shares"),
        ("dp=2 shares=1.5,1", "plan.shares"),
        ("shares=auto", "plan.shares"),
        ("dp=2 pp=2 shares=auto", "plan.shares"),
        ("dp=2,3", "plan.dp"),
    ],
)
def test_what_is_wrong_names_a_plan_that_is_right(text: str, where: str) -> None:
    with pytest.raises(SpecError) as raised:
        Plan.parse(text)
    assert [problem.where for problem in raised.value.problems] == [where]
    for problem in raised.value.problems:
        Plan.parse(problem.fix if "dp" in problem.fix else f"dp=2 {problem.fix}")


def test_a_text_is_a_text() -> None:
    with pytest.raises(SpecError, match="a text"):
        Plan(dp=2, shares=(3, 1))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("total", "each", "counts"),
    [
        (8, (3, 1), (6, 2)),
        (7, (1, 1), (4, 3)),
        (256, (1, 1, 1), (86, 85, 85)),
        (10, (2.5, 1.0), (7, 3)),
        (10, (1.0, 2.0), (3, 7)),
        (1, (3, 1), (1, 0)),
        (30, (0.1, 0.1, 0.1), (10, 10, 10)),
    ],
)
def test_samples_are_dealt_by_the_largest_remainder(total: int, each: tuple[float, ...], counts: tuple[int]) -> None:
    assert split_by_weight(total, each) == counts
    assert sum(counts) == total


def test_weights_are_whole_numbers() -> None:
    assert weights("3,1") == (3, 1)
    assert weights("auto") == weights("") == ()
    with pytest.raises(ValueError, match="whole numbers"):
        weights("3;1")
    with pytest.raises(ValueError, match="nothing"):
        split_by_weight(3, (0, 0))


def test_shares_give_each_rank_a_sample() -> None:
    assert list(share_problems(Plan.parse("dp=2 shares=3,1"), 8)) == []
    (problem,) = share_problems(Plan.parse("dp=2 shares=100,1"), 8)
    assert (problem.where, problem.fix) == ("plan.shares", "dp=2 shares=auto")
    assert "8,0" in problem.given
    (problem,) = share_problems(Plan.parse("dp=2 fsdp=4 shares=5,1"), 16)
    assert "13,3" in problem.given
    assert "4 samples" in problem.allowed


def test_the_keys_that_a_text_states_are_found_beside_shares() -> None:
    assert plan_and_keys("dp=2,shares=3,1,micro=2")[1] == ("dp", "shares", "micro")
