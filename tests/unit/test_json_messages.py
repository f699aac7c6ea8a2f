"""Values between ranks: what JSON holds arrives as it was, what it does not is named, errors of the first are all's."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from law_rows import in_one_test
from phalanx.comm import Mesh, Place, alike, default_process_group, found_by_first, from_every_rank
from phalanx.comm.json_messages import (
    as_json,
    gather_json,
    gather_json_to_first,
    receive_json,
    scatter_json,
    send_json_to_first,
    true_anywhere,
)
from phalanx.config import Plan
from phalanx.errors import Problem, RefusedError, RunError, SpecError, WorkerError, error_from_dict, error_to_dict
from phalanx.launch.local import launch

VALUES: list[Any] = [
    None,
    True,
    0.1 + 0.2,
    -0.0,
    5e-324,
    math.inf,
    1 << 70,
    "ü\n",
    [],
    {"a": [1, {"b": None}]},
    "x" * 5000,
]


@in_one_test(
    ("value", "said"),
    [
        ({"a": [1, {2, 3}]}, r"value\['a'\]\[1\] is of type set"),
        ([torch.ones(1)], r"value\[0\] is of type Tensor"),
        ({"a": {1: 2}}, r"value\['a'\] has the key 1, of type int"),
        (b"1", "value is of type bytes"),
    ],
)
def test_what_is_not_json_is_named(value: Any, said: str) -> None:
    with pytest.raises(TypeError, match=said):
        from_every_rank(value)


def test_a_single_process_gets_what_others_would() -> None:
    assert from_every_rank((1, [2, (3,)])) == [[1, [2, [3]]]]
    assert found_by_first(lambda: {"a": (1,)}) == {"a": [1]}
    assert all(repr(as_json(value)) == repr(value) for value in VALUES)


def in_ranks(world_size: int, found: Callable[[int], Any]) -> list[Any]:
    def work(place: Place, report: Callable[[int], None]) -> Any:
        with default_process_group(place, torch.device("cpu")):
            return found(place.rank)

    return launch(work, world_size)


def test_values_of_every_rank_arrive_exactly() -> None:
    """Of unlike lengths, below and beyond the first message; among all, and in a group of some."""

    def found(rank: int) -> list[Any]:
        some = dist.new_group([1, 2])
        same = [from_every_rank(value if rank else "") for value in VALUES]
        lengths = [len(one) for one in from_every_rank("y" * (1000 * rank))]
        of_some = gather_json([rank], some) if rank and isinstance(some, dist.ProcessGroup) else []
        nan = all(math.isnan(one) for one in from_every_rank(math.nan))
        return [repr(same) == repr([["", value, value] for value in VALUES]), lengths, of_some, nan]

    first, second, third = in_ranks(3, found)
    assert first == [True, [0, 1000, 2000], [], True]
    assert second == third == [True, [0, 1000, 2000], [[1], [2]], True]


def test_what_the_first_finds_or_raises_is_everyones() -> None:
    def found(rank: int) -> list[Any]:
        def refuse() -> Any:
            raise RefusedError.of(where="plan.tp", given="3", allowed="2", fix="tp=2")

        def fail() -> Any:
            raise ValueError("no such layer")

        told: list[Any] = [found_by_first(lambda: {"rank": rank, "long": "z" * 3000})["rank"]]
        for find in (refuse, fail, lambda: {1, 2}):
            try:
                found_by_first(find)
            except Exception as error:
                told.append([type(error).__name__, str(error)[:40]])
        return told

    rows = in_ranks(2, found)
    assert rows[0] == rows[1]
    assert [row if row == 0 else row[0] for row in rows[0]] == [0, "RefusedError", "ValueError", "TypeError"]


class OwnError(Exception):
    pass


@in_one_test(
    ("error", "kind"),
    [
        (SpecError([Problem(where="a", given="b", allowed="c", fix="d")]), SpecError),
        (KeyError("weight"), KeyError),
        (OwnError("mine"), RunError),
        (WorkerError("gone", rank=1, step=2, kind="x", traceback=""), RunError),
        (ExceptionGroup("two", [ValueError("1")]), RunError),
    ],
)
def test_errors_are_told_as_json(error: Exception, kind: type[Exception]) -> None:
    told = error_from_dict(as_json(error_to_dict(error)))
    assert type(told) is kind
    assert str(error).strip("'") in str(told)
    if isinstance(error, SpecError):
        assert isinstance(told, SpecError)
        assert told.problems == error.problems


def test_what_one_rank_is_told_or_tells_is_not_everybodys() -> None:
    values = VALUES[:3]

    def found(rank: int) -> dict[str, Any]:
        told = gather_json_to_first(VALUES[rank])
        own = scatter_json(values if rank == 0 else ())
        if rank == 2:
            send_json_to_first("z" * 3000)
        return {
            "gathered": told == (values if rank == 0 else []),
            "own": own == values[rank],
            "sent": receive_json(2) == "z" * 3000 if rank == 0 else True,
            "anywhere": [true_anywhere(rank == 1), true_anywhere(False)],
            "alike": [alike({"a": 1}), alike({"a": rank}), alike(math.nan)],
        }

    right = {"gathered": True, "own": True, "sent": True, "anywhere": [True, False], "alike": [True, False, True]}
    assert in_ranks(3, found) == [right] * 3


@pytest.mark.parametrize("newest", [(2, 99), (2, 10)])
def test_a_rank_makes_its_own_groups_only(newest: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Of alike size, of other ranks in the same call, and where some rank makes none: all are of the ranks they say.

    With a torch that was read and with one that was not, of which only the public function is used.
    """
    plan, public, asked = Plan(dp=2, pp=2), dist.new_group, list[Any]()
    monkeypatch.setattr("phalanx.comm.mesh._READ", newest)
    monkeypatch.setattr(dist, "new_group", lambda *ranks, **how: (asked.append(ranks), public(*ranks, **how))[1])

    def found(rank: int) -> list[Any]:
        mesh = Mesh(plan, rank)
        groups = [mesh.group("dp"), mesh.among("pp", [1]), mesh.group("pp"), dist.new_group([0, 3]), mesh.group("dp")]
        ranks = [dist.get_process_group_ranks(one) if one else None for one in groups[:3]]
        sums: list[float] = []
        for group in groups[:3]:
            value = torch.tensor([10.0**rank])
            if group is not None:
                dist.all_reduce(value, group=group)
            sums.append(value.item())
        return [ranks, sums, groups[0] is groups[4], len(dist.distributed_c10d._world.pg_names), len(asked)]

    every = in_ranks(4, found)
    for rank, (ranks, sums, same, made, times) in enumerate(every):
        assert times == (1 if newest == (2, 99) else 1 + 3 * 2)  # of three groups of each rank two are made each time
        assert ranks == [
            mesh_ranks(plan, rank, "dp"),
            [rank] if plan.coordinate(rank)["pp"] else None,
            mesh_ranks(plan, rank, "pp"),
        ]
        assert sums == [sum(10.0**one for one in some) if some else 10.0**rank for some in ranks]
        assert same
        assert made == 1 + sum(some is not None for some in ranks) + (rank in (0, 3))  # and the default one


def mesh_ranks(plan: Plan, rank: int, axis: str) -> list[int]:
    at = plan.coordinate(rank)
    every = range(plan.world_size)
    return [one for one in every if {**plan.coordinate(one), axis: 0} == {**at, axis: 0}]
