"""Where models are cut: into stages, what passes and what cannot; and which weights tensor parallelism shares out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import phalanx as px
from law_rows import in_one_test
from phalanx.config import Plan
from phalanx.demo.jobs.gpt import GPT, Size, gpt_job
from phalanx.errors import RefusedError
from phalanx.parallel import Example
from phalanx.parallel.pipeline import CutPipeline, cut
from phalanx.parallel.tensor import Split, dry, find
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


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (Looking, r"control flow that depends on data across a split.*x.sum\(\) > 0"),
        (Keeping, r"layers\.0 computes and keeps to itself"),
    ],
)
def test_what_cannot_pass_a_cut_is_refused(model: type[nn.Module], words: str) -> None:
    with pytest.raises(RefusedError, match=words):
        looked_at(model(), Plan(pp=2), torch.randn(2, 4))


def test_decisions_by_data_inside_a_block_are_not() -> None:
    pipeline = looked_at(Choosing(), Plan(pp=3), torch.randn(2, 4))
    assert [pipeline.names(stage) for stage in range(3)] == [["layers.0"], ["layers.1"], ["layers.2"]]


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
    module.mixed = nn.ModuleDict({"table": nn.Sequential(nn.Embedding(3, 4)), "gate": Gate(), "empty": nn.ReLU()})
    cells = [f"cells.{index}.{name}" for index in range(2) for name in ("norm", "gates.0", "gates.1")]
    assert names(module) == [*cells, "named.left", "named.right"]
    assert len(parts(module)) == len(blocks(module))


def test_a_pipeline_cuts_where_the_model_calls() -> None:
    module = Gates(lambda gate, x: gate.wide(x) * torch.tanh(gate.thin(x)))
    pipeline = cut(module, example(), Plan(pp=4, schedule="gpipe"))
    assert [pipeline.names(stage) for stage in range(4)] == [
        [f"gates.{stage}.wide", f"gates.{stage}.thin"] for stage in range(4)
    ]


IDS = torch.arange(24).view(2, 12) % 60
SIZES: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 64}


def found(module: nn.Module, ranks: int, *args: Any, told: dict[str, Any] | None = None, **kwargs: Any) -> Split:
    def loss(output: Any, batch: torch.Tensor) -> Any:
        logits = getattr(output, "logits", output)
        return px.next_token_loss(logits, batch) if logits.dim() == 3 else logits.sum()

    example = Example(args=args, kwargs=kwargs, batch=IDS, loss=loss, tensor_parallel=told or {})
    with dry(module, example) as model:
        return find(model, ranks)


def shared(split: Split, ending: str) -> tuple[int, int, tuple[int, ...]]:
    """Dimension, repeats, and elements on each rank of the first weight that ends so."""
    dim, how = next(value for name, value in split.cuts.items() if name.endswith(ending))
    return dim, how.outer, how.lengths


@in_one_test("layers", [1, 2])
def test_fused_projections_are_cut_in_each_part_and_between_heads(layers: int) -> None:
    split = found(gpt_job(layers=layers, width=32, heads=4, context=12).model(), 2, IDS)
    assert shared(split, "query_key_value.weight") == (0, 3, (48, 48))
    assert shared(split, "attention.output.weight") == (1, 1, (16, 16))
    assert shared(split, "up.weight")[0] == 0
    assert shared(split, "up.bias")[0] == 0
    assert shared(split, "down.weight")[0] == 1
    assert shared(split, "token.weight")[0] == shared(split, "head.weight")[0] == 0
    assert split.whole == ["position.weight"]


def test_transposed_weights_and_a_tied_embedding() -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    split = found(GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=1, n_head=4, vocab_size=64, n_positions=12)), 2, IDS)
    assert shared(split, "c_attn.weight") == (1, 3, (48, 48))
    assert shared(split, "attn.c_proj.weight") == (0, 1, (16, 16))
    assert shared(split, "wte.weight")[0] == 0


@in_one_test(("ranks", "keys"), [(2, True), (4, False), (3, False)])
def test_grouped_heads_go_with_their_queries_or_stay_whole(ranks: int, keys: bool) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(num_key_value_heads=2, intermediate_size=48, max_position_embeddings=12, **SIZES)
    split = found(LlamaForCausalLM(config), ranks, input_ids=IDS)
    for layer in range(2):
        name = f"model.layers.{layer}.self_attn"
        assert split.cuts[f"{name}.q_proj.weight"][0] == 0
        assert split.cuts[f"{name}.o_proj.weight"][0] == 1
        for projection in ("k_proj", "v_proj"):
            assert (f"{name}.{projection}.weight" in split.cuts) == keys
            assert (f"{name}.{projection}.weight" in split.whole) == (not keys)
    assert shared(split, "layers.0.mlp.gate_proj.weight") == shared(split, "layers.0.mlp.up_proj.weight")


def test_the_model_is_left_as_it_was() -> None:
    module = gpt_job(layers=1, width=32, heads=4, context=12).model()
    before = {name: (type(child), child.__dict__.get("forward")) for name, child in module.named_modules()}
    values = dict(module.named_parameters())
    found(module, 2, IDS)
    assert before == {name: (type(child), child.__dict__.get("forward")) for name, child in module.named_modules()}
    assert all(values[name] is tensor for name, tensor in module.named_parameters())


def own_gpt() -> nn.Module:
    return gpt_job(layers=2, width=32, heads=4, context=12).model()


def test_what_the_job_says_of_cuts_counts() -> None:
    told = {"blocks.*.attention.*": "whole", "blocks.1.up": "rowwise", "token": "colwise", "position.weight": 0}
    split = found(own_gpt(), 2, IDS, told=told)
    assert not any("attention" in name for name in split.cuts)
    assert shared(split, "0.up.weight")[0] == 0
    assert shared(split, "1.up.weight")[0] == 1
    assert shared(split, "token.weight")[0] == 1
    assert shared(split, "position.weight")[0] == 0


@in_one_test(
    ("told", "words"),
    [
        ({"blocks.0.upp": "colwise"}, "blocks.0.up.weight"),
        ({"*.up.bias": "colwise"}, "two dimensions"),
        ({"position.weight": 0}, "position.weight"),
    ],
)
def test_cuts_that_cannot_be_are_refused(told: dict[str, Any], words: str) -> None:
    with pytest.raises(RefusedError, match=words.replace(".", r"\.")):
        found(own_gpt(), 16, IDS, told=told)


def test_a_plan_of_the_models_own_is_followed_where_it_goes_well() -> None:
    class Own(nn.Module):
        def __init__(self, plan: dict[str, str]) -> None:
            super().__init__()
            self.tp_plan = plan
            linears = nn.Linear(12, 40), nn.Linear(40, 40), nn.Linear(40, 12)
            self.layers = nn.Sequential(linears[0], nn.ReLU(), linears[1], nn.ReLU(), linears[2])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layers(x)

    x = torch.ones(2, 12)
    inferred = found(Own({}), 2, x)
    assert (shared(inferred, "0.weight")[0], shared(inferred, "2.weight")[0]) == (0, 1)
    late = found(Own({"layers.2": "colwise", "layers.4": "rowwise"}), 2, x)
    assert (shared(late, "2.weight")[0], shared(late, "4.weight")[0]) == (0, 1)
    assert "layers.0.weight" in late.whole
    nothing_pairs_up = found(Own({"layers.0": "rowwise", "layers.2": "rowwise", "layers.4": "colwise"}), 2, x)
    assert nothing_pairs_up.cuts == inferred.cuts
