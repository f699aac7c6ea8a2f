"""What counts as a block where models take their blocks apart."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from phalanx.config import Plan
from phalanx.parallel import Example
from phalanx.parallel.pipeline import cut
from phalanx.parallel.unwrapped_blocks import look_inside
from phalanx.trace.blocks import blocks, parts


class Gate(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide, self.thin = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.wide(x) * self.thin(x)


class Model(nn.Module):
    """Four gates, of which ``how`` decides what is called."""

    def __init__(self, how: Any) -> None:
        super().__init__()
        self.gates = nn.ModuleList(Gate() for _ in range(4))
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        for gate in self.gates:
            x = self.how(gate, x)
        return x


def names(module: nn.Module) -> list[str]:
    known = {child: name for name, child in module.named_modules()}
    return [known[block] for block in blocks(module)]


def example() -> Example:
    return Example(args=(torch.randn(2, 4),), kwargs={}, batch=None, loss=lambda output, _: output)


def looked_at(how: Any) -> list[str]:
    module = Model(how)
    look_inside(module, example())
    return names(module)


def test_blocks_that_are_called_stay_blocks() -> None:
    assert looked_at(lambda gate, x: gate(x)) == [f"gates.{index}" for index in range(4)]


def test_of_a_block_that_is_not_called_what_is_inside_counts() -> None:
    inside = [f"gates.{index}.{name}" for index in range(4) for name in ("wide", "thin")]
    assert looked_at(lambda gate, x: gate.wide(x) * gate.thin(x)) == inside


def test_a_block_that_is_sometimes_called_is_none() -> None:
    inside = [f"gates.{index}.{name}" for index in range(4) for name in ("wide", "thin")]
    assert looked_at(lambda gate, x: gate(x) + gate.wide(x)) == inside


def test_a_weight_that_is_read_from_outside_stays_with_the_model() -> None:
    assert looked_at(lambda gate, x: F.linear(x, gate.wide.weight) * gate.thin(x)) == [
        f"gates.{index}.thin" for index in range(4)
    ]


def test_what_fakes_cannot_run_is_looked_at_with_values() -> None:
    def how(gate: Any, x: Tensor) -> Tensor:
        return gate.wide(x) if float(x.sum()) > 1e9 else gate.thin(x)

    assert looked_at(how) == [f"gates.{index}.{name}" for index in range(4) for name in ("wide", "thin")]


def test_a_model_that_does_not_run_keeps_its_blocks() -> None:
    def how(gate: Any, x: Tensor) -> Tensor:
        raise ValueError

    assert looked_at(how) == [f"gates.{index}" for index in range(4)]


def test_containers_without_forward_are_no_blocks() -> None:
    module = nn.Module()
    module.cells = nn.ModuleList(
        nn.ModuleDict({"norm": nn.LayerNorm(4), "gates": nn.ModuleList([Gate(), Gate()])}) for _ in range(2)
    )
    module.named = nn.ModuleDict({"left": Gate(), "right": Gate()})
    module.mixed = nn.ModuleDict({"table": nn.Embedding(3, 4), "gate": Gate(), "empty": nn.ReLU()})
    cells = [f"cells.{index}.{name}" for index in range(2) for name in ("norm", "gates.0", "gates.1")]
    assert names(module) == [*cells, "named.left", "named.right"]
    assert len(parts(module)) == len(blocks(module))


def test_a_pipeline_cuts_where_the_model_calls() -> None:
    module = Model(lambda gate, x: gate.wide(x) * torch.tanh(gate.thin(x)))
    pipeline = cut(module, example(), Plan(pp=4, schedule="gpipe"))
    assert [pipeline.names(stage) for stage in range(4)] == [
        [f"gates.{stage}.wide", f"gates.{stage}.thin"] for stage in range(4)
    ]
