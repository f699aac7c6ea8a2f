"""Where models are cut into stages, what passes the cuts, what cannot be cut, and what counts as a block."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from in_one_test import in_one_test
from phalanx.config import Plan
from phalanx.demo.jobs.gpt import GPT, Size
from phalanx.errors import RefusedError
from phalanx.parallel import Example
from phalanx.parallel.pipeline import CutPipeline, cut
from phalanx.parallel.pipeline.backward import input_half
from phalanx.parallel.unwrapped_blocks import look_inside
from phalanx.placement.stages import balanced
from phalanx.trace.blocks import blocks, parts


def looked_at(module: nn.Module, plan: Plan, *args: Any) -> CutPipeline:
    return cut(module, Example(args=args, kwargs={}, batch=None, loss=lambda output, _: output), plan)


def gpt(layers: int = 4) -> tuple[nn.Module, Tensor]:
    return GPT(Size(layers=layers, width=16, heads=2, context=8)), torch.randint(256, (2, 8))


class TestBalance:
    def test_the_dearest_stage_is_as_cheap_as_can_be(self) -> None:
        assert balanced([1, 1, 1, 9, 1, 1], 3, [True] * 6) == [0, 3, 4]
        assert balanced([1, 1, 1, 1], 2, [True] * 4) == [0, 2]

    def test_cuts_that_are_not_allowed_are_not_made(self) -> None:
        assert balanced([1, 1, 1, 1], 2, [True, True, False, True]) in ([0, 1], [0, 3])
        assert balanced([1, 1], 2, [True, False]) is None


class TestSplit:
    def test_names_begin_stages(self) -> None:
        module, tokens = gpt()
        pipeline = looked_at(module, Plan(pp=3, split="blocks.1/norm"), tokens)
        assert [pipeline.names(stage)[0] for stage in range(3)] == ["token", "blocks.1", "norm"]

    def test_a_name_inside_a_block_takes_it_apart(self) -> None:
        module, tokens = gpt()
        pipeline = looked_at(module, Plan(pp=2, split="blocks.1.up"), tokens)
        assert pipeline.names(1)[:2] == ["blocks.1.up", "blocks.1.down"]

    @in_one_test(
        ("split", "says"),
        [
            ("blokcs.1", "try: split=blocks.1"),
            ("token", "first part"),
            ("blocks.2/blocks.1", "not after"),
            ("blocks.1/blocks.2", "2 names for 2 stages|3 stages"),
        ],
    )
    def test_names_that_cannot_begin_stages_are_refused(self, split: str, says: str) -> None:
        module, tokens = gpt()
        with pytest.raises(RefusedError, match=says):
            looked_at(module, Plan(pp=2, split=split), tokens)


def test_more_stages_than_parts_are_refused() -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    with pytest.raises(RefusedError, match="at most 2 for this model"):
        looked_at(module, Plan(pp=3), torch.randn(2, 4))


def test_models_are_left_as_they_were() -> None:
    module, tokens = gpt()
    before, state = dict(module.named_parameters()), torch.get_rng_state()
    looked_at(module, Plan(pp=2), tokens)
    assert all(before[name] is tensor for name, tensor in module.named_parameters())
    assert torch.equal(state, torch.get_rng_state())
    assert module(tokens).grad_fn is not None
    assert not any("_compiled_call_impl" in vars(child) for child in module.modules())


class Looking(nn.Module):
    """Decides by the values between its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.one(x)
        if x.sum() > 0:
            x = -x
        return self.two(x)


class Choosing(nn.Module):
    """The same inside a block, where it is nobody else's business."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Inner() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        chosen = (x > 0).nonzero()
        return self.linear(x) * len(chosen)


class Keeping(nn.Module):
    """A layer that keeps to itself what is read in the end."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Kept() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x + self.layers[0].kept


class Kept(Inner):
    kept: Tensor

    def forward(self, x: Tensor) -> Tensor:
        self.kept = self.linear(x)
        return F.relu(self.kept)


def test_decisions_by_data_across_a_split_are_refused() -> None:
    with pytest.raises(RefusedError, match=r"control flow that depends on data across a split.*x.sum\(\) > 0"):
        looked_at(Looking(), Plan(pp=2), torch.randn(2, 4))


def test_decisions_by_data_inside_a_block_are_not() -> None:
    pipeline = looked_at(Choosing(), Plan(pp=3), torch.randn(2, 4))
    assert [pipeline.names(stage) for stage in range(3)] == [["layers.0"], ["layers.1"], ["layers.2"]]


def test_what_a_layer_keeps_to_itself_cannot_pass_a_cut() -> None:
    with pytest.raises(RefusedError, match=r"layers\.0 computes and keeps to itself"):
        looked_at(Keeping(), Plan(pp=2), torch.randn(2, 4))


class TestHalves:
    class Net(nn.Module):
        """Shared, normalised, recurrent, and parameters used outside layers."""

        def __init__(self) -> None:
            super().__init__()
            self.a, self.n = nn.Linear(8, 8), nn.LayerNorm(8)
            self.b = nn.utils.parametrizations.weight_norm(nn.Linear(8, 8))
            self.rnn = nn.GRU(8, 8, batch_first=True)
            self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
            self.p, self.q = nn.Parameter(torch.randn(8)), nn.Parameter(torch.randn(8))

        def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
            h = self.n(self.a(x) * y + self.p)
            h = self.a(h + self.b(h).relu())
            h, _ = self.rnn(h)
            h = h + self.attention(h, h, h)[0]
            return self.b(h) * self.q.exp(), self.q * 2, x * 1

    def test_both_together_are_one_backward(self) -> None:
        torch.manual_seed(0)
        net = self.Net()
        x, y, unused = (torch.randn(2, 5, 8, requires_grad=True) for _ in range(3))
        outputs = net(x, y)
        grads = [torch.randn_like(output) for output in outputs]
        torch.autograd.backward(outputs, grads)
        expected = {name: tensor.grad for name, tensor in net.named_parameters()}
        inputs = [x.grad, y.grad, None]
        for tensor in (*net.parameters(), x, y):
            tensor.grad = None
        found, weights = input_half(net(x, y), grads, [x, y, unused])
        assert all(tensor.grad is None for tensor in net.parameters())
        torch.testing.assert_close(found, inputs)
        weights.run()
        torch.testing.assert_close({name: tensor.grad for name, tensor in net.named_parameters()}, expected)


class Gate(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide, self.thin = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.wide(x) * self.thin(x)


class Gates(nn.Module):
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


def blocks_after_a_look(how: Any) -> list[str]:
    module = Gates(how)
    look_inside(module, example())
    return names(module)


def test_blocks_that_are_called_stay_blocks() -> None:
    assert blocks_after_a_look(lambda gate, x: gate(x)) == [f"gates.{index}" for index in range(4)]


def test_of_a_block_that_is_not_called_what_is_inside_counts() -> None:
    inside = [f"gates.{index}.{name}" for index in range(4) for name in ("wide", "thin")]
    assert blocks_after_a_look(lambda gate, x: gate.wide(x) * gate.thin(x)) == inside


def test_a_weight_that_is_read_from_outside_stays_with_the_model() -> None:
    assert blocks_after_a_look(lambda gate, x: F.linear(x, gate.wide.weight) * gate.thin(x)) == [
        f"gates.{index}.thin" for index in range(4)
    ]


def test_what_fakes_cannot_run_is_looked_at_with_values() -> None:
    def how(gate: Any, x: Tensor) -> Tensor:
        return gate.wide(x) if float(x.sum()) > 1e9 else gate.thin(x)

    assert blocks_after_a_look(how) == [f"gates.{index}.{name}" for index in range(4) for name in ("wide", "thin")]


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
    module = Gates(lambda gate, x: gate.wide(x) * torch.tanh(gate.thin(x)))
    pipeline = cut(module, example(), Plan(pp=4, schedule="gpipe"))
    assert [pipeline.names(stage) for stage in range(4)] == [
        [f"gates.{stage}.wide", f"gates.{stage}.thin"] for stage in range(4)
    ]
