"""Shards: how they share parameters out, what becomes of gradients, and that what is read stays as it is."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

import pytest
import torch

from phalanx.config import Plan
from phalanx.parallel.parameter_server import Flat, Pushed, Rule, Shard, Update, cut_out, partition, starved


def weights(**shapes: tuple[int, ...]) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {name: torch.randn(shape) for name, shape in shapes.items()}


def shard(rule: Rule | None = None, lr: float = 0.5, **optimizer: Any) -> Shard:
    def make(named: Mapping[str, torch.Tensor]) -> torch.optim.Optimizer:
        return torch.optim.SGD(named.values(), lr=lr, **optimizer)

    return Shard(weights(a=(3, 2), b=(4,)), make, rule or Rule())


def gradient(of: Shard, value: float) -> Flat:
    flat = of.blank()
    for one in flat.whole:
        one.fill_(value)
    return flat


def values(of: Shard) -> torch.Tensor:
    return torch.cat([one.detach().reshape(-1).clone() for one in of.parameters.values()])


class TestPartition:
    SHAPES = weights(embedding=(500, 16), block=(64, 16), bias=(64,), head=(16, 500), gain=())

    @pytest.mark.parametrize("servers", [1, 2, 3, 5])
    def test_every_row_is_on_one_server_and_loads_are_even(self, servers: int) -> None:
        found = partition(self.SHAPES, servers, cut=True)
        for name, tensor in self.SHAPES.items():
            parts = sorted((one for mine in found for one in mine if one.name == name), key=lambda one: one.start)
            whole = torch.cat([cut_out(tensor, one) for one in parts]) if tensor.dim() else tensor
            assert torch.equal(whole, tensor)
        loads = [sum(cut_out(self.SHAPES[one.name], one).nbytes for one in mine) for mine in found]
        even = sum(loads) / servers
        assert max(loads) <= max(1.25 * even, even + 500 * 4)

    def test_an_optimizer_of_whole_tensors_gets_them_whole(self) -> None:
        found = partition(self.SHAPES, 2, cut=False)
        assert all(one.whole for mine in found for one in mine)
        assert sorted(one.name for mine in found for one in mine) == sorted(self.SHAPES)

    def test_a_server_that_would_hold_nothing_is_a_problem(self) -> None:
        few = weights(a=(3, 2), b=(4,))
        assert starved(few, Plan.parse("server=2 dp=2"), cut=False) == []
        (problem,) = starved(few, Plan.parse("server=3 dp=2"), cut=False)
        assert (problem.where, problem.fix) == ("plan.server", "server=2 dp=2")


def test_pieces_add_up_once_each() -> None:
    one = shard()
    before = values(one)
    assert one.push(Pushed(step=0, part=0, version=0), gradient(one, 1.0))
    assert not one.push(Pushed(step=0, part=0, version=0), gradient(one, 9.0))
    assert one.push(Pushed(step=0, part=1, version=0), gradient(one, 2.0))
    assert one.prepare(0, [0, 1]) == pytest.approx(10 * 9.0)
    one.apply(Update(step=0, scale=0.5, rate=0.1))
    assert torch.allclose(values(one), before - 0.5 * 0.1 * 1.5)
    assert not one.push(Pushed(step=0, part=1, version=0), gradient(one, 2.0)), "its step is applied"
    assert one.version == 1


def test_a_parameter_that_no_piece_used_is_left_alone() -> None:
    one = shard(weight_decay=0.5)
    before = {name: tensor.detach().clone() for name, tensor in one.parameters.items()}
    for part, without in ((0, [0, 1]), (1, [0])):
        one.push(Pushed(step=0, part=part, version=0, without=without), gradient(one, 1.0))
    one.prepare(0, [0, 1])
    one.apply(Update(step=0, scale=1.0))
    assert torch.equal(one.parameters["a"], before["a"])
    assert not torch.equal(one.parameters["b"], before["b"])


def test_the_rate_falls_with_staleness() -> None:
    one = shard(Rule(compensate="rate"), lr=1.0)
    for step in range(3):
        one.push(Pushed(step=step, part=0, version=0), gradient(one, 6.0))
    moved = []
    for step in range(3):
        before = values(one)
        one.prepare(step, [0])
        one.apply(Update(step=step, scale=1.0))
        moved.append(float((before - values(one)).mean()))
    assert moved == pytest.approx([6.0, 6.0, 3.0])


@pytest.mark.parametrize("memory", [0.0, 0.9])
def test_delay_is_compensated_to_first_order(memory: float) -> None:
    rule = Rule(compensate="delay", strength=0.25, memory=memory)
    one = shard(rule, lr=1.0)
    then = values(one)
    one.push(Pushed(step=0, part=0, version=0, count=2.0), gradient(one, 4.0))
    one.push(Pushed(step=1, part=0, version=0, count=2.0), gradient(one, 6.0))
    one.prepare(0, [0])
    one.apply(Update(step=0, scale=0.5, oldest=0))
    now = values(one)
    assert torch.allclose(now, then - 2.0)
    one.prepare(1, [0])
    one.apply(Update(step=1, scale=0.5))
    strength = 0.25 / (0.9 * 4.0 + 0.1 * 9.0 + 1e-7) ** 0.5 if memory else 0.25
    assert torch.allclose(values(one), now - (3.0 + strength * 9.0 * (now - then)), atol=1e-6)


def test_pieces_left_out_of_a_step_change_nothing() -> None:
    one = shard(Rule(keeps_each_gradient=True), lr=1.0)
    before = values(one)
    for part in range(3):
        one.push(Pushed(step=0, part=part, version=0), gradient(one, 10.0**part))
    one.prepare(0, [0, 1])
    one.apply(Update(step=0, scale=1.0))
    assert torch.allclose(before - values(one), torch.tensor(11.0))


@pytest.mark.parametrize("ahead", [False, True])
def test_what_is_being_read_stays_as_it_is(ahead: bool) -> None:
    one = shard(Rule(ahead=ahead))
    with one.values() as (version, flat):
        before = [each.clone() for each in flat.whole]
        one.push(Pushed(step=0, part=0, version=0), gradient(one, 1.0))
        one.prepare(0, [0])
        one.apply(Update(step=0, scale=1.0))
        assert version == 0
        assert all(torch.equal(each, then) for each, then in zip(flat.whole, before, strict=True))
    with one.values() as (version, flat):
        assert version == 1
        assert torch.equal(torch.cat([flat.named[name].reshape(-1) for name in one.parameters]), values(one))


@pytest.mark.parametrize("ahead", [False, True])
def test_who_reads_while_it_goes_back_gets_what_it_goes_back_to(ahead: bool) -> None:
    one, found = shard(Rule(ahead=ahead)), list[tuple[int, bool]]()

    def read() -> None:
        with one.values() as (version, flat):
            found.append((version, bool((flat.named["a"] == 7.0).all())))

    reader = threading.Thread(target=read)
    with one.restoring(5, 1, 5):
        reader.start()
        reader.join(0.1)
        one.parameters["a"].fill_(7.0)
    reader.join()
    assert found == [(5, True)]


def test_going_back_forgets_what_was_on_its_way() -> None:
    one = shard()
    one.push(Pushed(step=0, part=0, version=0), gradient(one, 1.0))
    with one.restoring(5, 1, 5):
        one.parameters["a"].fill_(7.0)
    assert not one.push(Pushed(step=5, part=0, version=0, term=0), gradient(one, 1.0)), "dealt before"
    assert one.push(Pushed(step=5, part=0, version=5, term=1), gradient(one, 1.0))
    with one.values() as (version, flat):
        assert version == 5
        assert torch.equal(flat.named["a"], torch.full((3, 2), 7.0))
