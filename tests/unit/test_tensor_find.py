"""What is found of a model's weights to share out: by operations, not by names."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import phalanx as px
from in_one_test import in_one_test
from phalanx.demo.jobs import gpt
from phalanx.errors import RefusedError
from phalanx.parallel import Example
from phalanx.parallel.tensor import Split, dry, find

IDS = torch.arange(24).view(2, 12) % 60
SIZES: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 64}


def found(module: nn.Module, ranks: int, *args: Any, told: dict[str, Any] | None = None, **kwargs: Any) -> Split:
    def loss(output: Any, batch: torch.Tensor) -> Any:
        logits = getattr(output, "logits", output)
        return px.next_token_loss(logits, batch) if logits.dim() == 3 else logits.sum()

    example = Example(args=args, kwargs=kwargs, batch=IDS, loss=loss, tensor_parallel=told or {})
    with dry(module, example) as model:
        return find(model, ranks)


def cut(split: Split, ending: str) -> tuple[int, int, tuple[int, ...]]:
    """Dimension, repeats, and elements on each rank of the first weight that ends so."""
    dim, how = next(value for name, value in split.cuts.items() if name.endswith(ending))
    return dim, how.outer, how.lengths


@in_one_test("layers", [1, 2])
def test_fused_projections_are_cut_in_each_part_and_between_heads(layers: int) -> None:
    split = found(gpt.gpt_job(layers=layers, width=32, heads=4, context=12).model(), 2, IDS)
    assert cut(split, "query_key_value.weight") == (0, 3, (48, 48))
    assert cut(split, "attention.output.weight") == (1, 1, (16, 16))
    assert cut(split, "up.weight")[0] == 0
    assert cut(split, "up.bias")[0] == 0
    assert cut(split, "down.weight")[0] == 1
    assert cut(split, "token.weight")[0] == cut(split, "head.weight")[0] == 0
    assert split.whole == ["position.weight"]


def test_heads_that_do_not_divide_are_cut_unevenly() -> None:
    split = found(gpt.gpt_job(layers=1, width=32, heads=4, context=12).model(), 3, IDS)
    assert cut(split, "query_key_value.weight") == (0, 3, (48, 24, 24))
    assert cut(split, "attention.output.weight") == (1, 1, (16, 8, 8))


def test_transposed_weights_and_a_tied_embedding() -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    split = found(GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=1, n_head=4, vocab_size=64, n_positions=12)), 2, IDS)
    assert cut(split, "c_attn.weight") == (1, 3, (48, 48))
    assert cut(split, "attn.c_proj.weight") == (0, 1, (16, 16))
    assert cut(split, "wte.weight")[0] == 0


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
    assert cut(split, "layers.0.mlp.gate_proj.weight") == cut(split, "layers.0.mlp.up_proj.weight")


def test_a_few_classes_are_not_worth_cutting() -> None:
    class Classifier(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(12, 40), nn.ReLU(), nn.Linear(40, 12))
            self.head = nn.Linear(12, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.layers(x))

    split = found(Classifier(), 2, torch.ones(2, 12))
    assert set(split.cuts) == {"layers.0.weight", "layers.0.bias", "layers.2.weight"}
    assert split.whole == ["head.weight"]


def test_the_model_is_left_as_it_was() -> None:
    module = gpt.gpt_job(layers=1, width=32, heads=4, context=12).model()
    before = {name: (type(child), child.__dict__.get("forward")) for name, child in module.named_modules()}
    values = dict(module.named_parameters())
    found(module, 2, IDS)
    assert before == {name: (type(child), child.__dict__.get("forward")) for name, child in module.named_modules()}
    assert all(values[name] is tensor for name, tensor in module.named_parameters())


def own_gpt() -> nn.Module:
    return gpt.gpt_job(layers=2, width=32, heads=4, context=12).model()


def test_what_the_job_says_of_cuts_counts() -> None:
    told = {"blocks.*.attention.*": "whole", "blocks.1.up": "rowwise", "token": "colwise", "position.weight": 0}
    split = found(own_gpt(), 2, IDS, told=told)
    assert not any("attention" in name for name in split.cuts)
    assert cut(split, "0.up.weight")[0] == 0
    assert cut(split, "1.up.weight")[0] == 1
    assert cut(split, "token.weight")[0] == 1
    assert cut(split, "position.weight")[0] == 0


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


def test_columns_of_a_layer_that_nobody_knows_are_asked_for_by_dimension() -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(n_embd=32, n_layer=1, n_head=4, vocab_size=64, n_positions=12)
    with pytest.raises(RefusedError, match="the dimension, 0 or 1"):
        found(GPT2LMHeadModel(config), 2, IDS, told={"*.c_fc": "colwise"})
    assert cut(found(GPT2LMHeadModel(config), 2, IDS, told={"*.c_fc": 0}), "c_fc.weight")[0] == 0


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
    assert (cut(inferred, "0.weight")[0], cut(inferred, "2.weight")[0]) == (0, 1)
    late = found(Own({"layers.2": "colwise", "layers.4": "rowwise"}), 2, x)
    assert (cut(late, "2.weight")[0], cut(late, "4.weight")[0]) == (0, 1)
    assert "layers.0.weight" in late.whole
    nothing_pairs_up = found(Own({"layers.0": "rowwise", "layers.2": "rowwise", "layers.4": "colwise"}), 2, x)
    assert nothing_pairs_up.cuts == inferred.cuts
