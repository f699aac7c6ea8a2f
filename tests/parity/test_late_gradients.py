"""A proof goes on until each parameter has had a gradient, and compares it then; or says which never had one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from models import job, rows
from test_proof_faults import Faulty, on_rank_1
from torch import nn

import phalanx as px
from phalanx.verify import parity


class Nested(nn.Module):
    """Branches within branches, each behind a gate that starts at zero: the last has a gradient from step 3 on."""

    def __init__(self, times: float = 1.0, spare: bool = False) -> None:
        super().__init__()
        self.times = times
        self.head, self.inner = nn.Linear(16, 5), nn.Linear(16, 5)
        self.outer, self.middle = nn.Parameter(torch.randn(5)), nn.Parameter(torch.randn(5))
        self.gates = nn.ParameterList(torch.zeros(()) for _ in range(3))
        if spare:
            self.spare = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = self.inner(x)
        inner = Faulty.apply(inner, self.times) if on_rank_1() and self.training else inner
        first, second, third = self.gates
        return self.head(x) + first * (self.outer + second * (self.middle + third * inner))


def nested(**how: Any) -> px.Job:
    given = {name: how.pop(name) for name in ("times", "spare") if name in how}
    return job(
        lambda: Nested(**given),
        rows(),
        lambda output, batch: nn.functional.cross_entropy(output, batch["y"]),
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        **{"clip": None} | how,
    )


@pytest.mark.parametrize("plan", ["dp=2", "dp=2 micro=2"])
def test_more_steps_are_taken_until_every_parameter_has_had_a_gradient(plan: str) -> None:
    proof = px.prove(nested(), plan, steps=1)
    assert proof.equal, proof.first
    assert (proof.asked, proof.steps, len(proof.losses)) == (1, 4, 4)
    assert proof.late is not None
    assert proof.late[0].startswith("inner.")
    assert proof.late[1] == 3
    assert not proof.never


@pytest.mark.parametrize("times", [0.0, 2.0])
def test_a_gradient_that_comes_after_the_steps_asked_for_is_compared(times: float) -> None:
    proof = px.prove(nested(times=times), "dp=2", steps=1)
    assert not proof.equal
    assert proof.first.startswith("the gradient of inner.")
    assert " in step 3, by " in proof.first
    assert "is there from step 3 on" in proof.cause


def test_what_never_has_a_gradient_is_said_after_as_many_steps_again() -> None:
    proof = px.prove(nested(spare=True, unused="allow"), "dp=2", steps=5)
    assert proof.equal, proof.first
    assert (proof.steps, proof.never) == (10, ["spare"])
    assert proof.steps == parity.most_steps(5)


def test_rates_are_those_of_the_steps_asked_for() -> None:
    one = parity.OneDevice.run(nested(schedule=px.Schedule(decay="linear", warmup_steps=1)), 3)
    rates = [step.rates["head.weight"] for step in one._record.steps]
    assert rates == pytest.approx([0.1, 0.1, 0.05, 0.0])
    assert one.prove(px.Plan.parse("dp=2")).equal


def test_phalanx_on_one_device_goes_on_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parity, "why_not", lambda job: "for a test")
    proof = px.prove(nested(), "dp=2", steps=1)
    assert proof.reference.startswith("Phalanx on one device")
    assert proof.equal, proof.first
    assert (proof.steps, proof.never) == (5, [])


def test_a_loop_of_ones_own_takes_what_it_was_asked_for() -> None:
    def loop(steps: int, model: nn.Module, samples: Any) -> Any:
        optimizer, table = torch.optim.SGD(model.parameters(), lr=0.1), rows()
        for step in range(steps):
            ids = torch.tensor(samples[step])
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(table.columns["x"][ids]), table.columns["y"][ids])
            loss.backward()
            optimizer.step()
            yield loss
        return model

    assert px.prove(nested(), "dp=2", steps=2, against=loop).never
    proof = px.prove(nested(), "dp=2", steps=6, against=loop)
    assert proof.equal, proof.first
    assert (proof.steps, proof.never) == (6, [])
