"""A model's costs: counted products, what autograd keeps, how both grow, what tensor parallelism cuts."""

from __future__ import annotations

import json
import resource
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from law_rows import in_one_test
from phalanx.demo.jobs import gpt
from phalanx.errors import MissingExtraError, ProfileError, SpecError
from phalanx.parallel import Example
from phalanx.parallel.tensor import dry, find
from phalanx.trace import ModelCall, ModelPart, Profile, Shape, SizeLaw, flops, trace
from phalanx.trace.standard_models import from_config, known_architectures, standard

IDS = torch.arange(24).view(2, 12) % 60
GPT = Shape(family="gpt", layers=24, hidden=2048, heads=16, vocabulary=51200, length=2048, tied=True, dropout=0.1)
LLAMA_70B = Shape(
    family="llama", layers=80, hidden=8192, heads=64, kv_heads=8, ffn=28672, vocabulary=128256, length=4096
)


def block(profile: Profile) -> ModelPart:
    return next(part for part in profile.parts if part.role == "block")


def saved_bytes(part: ModelPart, samples: int, length: int, itemsize: int) -> float:
    """What a part keeps, with what enters it."""
    each = [one.elements.at(samples, length) * (one.itemsize or itemsize) for one in part.saved]
    return sum(each) + part.entry.at(samples, length) * itemsize


def summed(output: Any, batch: Any) -> torch.Tensor:
    return output.sum()


class TestWork:
    def test_flops_of_a_gpt(self) -> None:
        profile = GPT.profile()
        s, h, layers = GPT.length, GPT.hidden, GPT.layers
        positions = GPT.length * GPT.hidden
        # 6 for each parameter and token; causal attention 2 s s h forward, and 5/2 of that backward.
        expected = 6 * (profile.parameters - positions) * s + layers * 2 * s * s * h * 3.5
        assert profile.flops(1) == pytest.approx(expected, rel=0.01)
        assert profile.flops(8) == pytest.approx(8 * profile.flops(1))

    @in_one_test("name", ["demo", "convolutions"])
    def test_products_are_those_that_torch_counts(self, name: str) -> None:
        if name == "demo":
            module: nn.Module = gpt.gpt_job(layers=2, width=64, heads=4, context=32).model()
            x, batch = torch.zeros(4, 32, dtype=torch.int64), torch.zeros(4, 32, dtype=torch.int64)
        else:
            module = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), nn.ConvTranspose2d(8, 6, 3, 2), nn.Conv2d(6, 9, 3))
            x, batch = torch.zeros(4, 3, 16, 16), None
        loss = _tokens if name == "demo" else summed
        with FlopCounterMode(display=False) as counter:
            loss(module(x), batch).backward()
        profile = trace(ModelCall(module=module, args=(x,), batch=batch, loss=loss))
        products = [part.count * flops(op, 4, 32) for part, op in profile.operations() if op.kind != "attention"]
        assert sum(products) == counter.get_total_flops()


class TestMemory:
    def test_saved_by_a_gpt_block_is_34_bytes_a_token_and_width(self) -> None:
        # Korthikanti et al. 2022, section 4.1, without the scores, which fused attention does not keep.
        part = block(GPT.profile())
        assert saved_bytes(part, 4, 2048, 2) == pytest.approx(34 * 4 * 2048 * GPT.hidden, rel=0.01)

    @in_one_test("recompute", ["whole", "cheap"])
    def test_saved_is_what_autograd_keeps(self, recompute: str) -> None:
        model = gpt.gpt_job(layers=2, width=64, heads=4, context=32).model()
        tokens = torch.zeros(4, 32, dtype=torch.int64)
        parameters = {one.untyped_storage().data_ptr() for one in model.parameters()}
        kept: dict[int, int] = {}

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in parameters:
                kept[storage.data_ptr()] = storage.nbytes()
            return tensor

        first = model.blocks[0]
        x = torch.zeros(4, 32, 64, requires_grad=True)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            output = first(x)
        assert output.requires_grad
        part = block(trace(ModelCall(module=model, args=(tokens,), batch=tokens, loss=_tokens)))
        cheap = sum(one.elements.at(4, 32) * (one.itemsize or 4) for one in part.saved if one.cheap)
        if recompute == "whole":
            assert saved_bytes(part, 4, 32, 4) == pytest.approx(sum(kept.values()), rel=0.01)
        else:  # two norms with their sums, the stream in between, what follows the gelu
            assert cheap == pytest.approx(4 * 32 * (3 * 64 + 4 * 64 + 4) * 4, rel=0.01)


class TestLaws:
    def test_powers_are_exact(self) -> None:
        part = block(LLAMA_70B.profile())
        attention = next(op for op in part.forward if op.kind == "attention")
        assert attention.dims[3] == attention.dims[4] == SizeLaw(1.0, 0.0, 1.0)
        assert part.entry == SizeLaw(8192.0, 1.0, 1.0)
        product = next(op for op in part.forward if op.kind == "matmul")
        assert product.dims == (SizeLaw(1.0), SizeLaw(1.0, 1.0, 1.0), SizeLaw(8192.0), SizeLaw(8192.0))

    def test_other_sizes_are_what_a_trace_of_them_gives(self) -> None:
        small = Shape(family="llama", layers=2, hidden=64, heads=4, vocabulary=128)
        at = {length: replace(small, length=length).profile() for length in (64, 256)}
        assert at[64].flops(3, 256) == pytest.approx(at[256].flops(3, 256), rel=1e-6)
        both = [saved_bytes(block(one), 3, 256, 2) for one in at.values()]
        assert both[0] == pytest.approx(both[1], rel=1e-3)

    def test_a_model_of_one_length_is_not_lawful(self) -> None:
        class Fixed(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.token, self.place = nn.Embedding(9, 8), nn.Parameter(torch.zeros(6, 8))

            def forward(self, tokens: torch.Tensor) -> torch.Tensor:
                return self.token(tokens) + self.place

        profile = trace(ModelCall(module=Fixed(), args=(torch.zeros(2, 6, dtype=torch.int64),), loss=summed))
        assert not profile.lawful
        assert "6 tokens only" in profile.notes[0]

    def test_a_batch_may_hold_one_token_more_than_the_model_reads(self) -> None:
        model = gpt.gpt_job(layers=2, width=32, heads=4, context=12).model()
        batch = torch.zeros(2, 13, dtype=torch.int64)

        def loss(output: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
            return F.cross_entropy(output.flatten(0, 1), batch[:, 1:].flatten())

        profile = trace(ModelCall(module=model, args=(batch[:, :-1],), batch=batch, loss=loss))
        assert profile.lawful
        assert profile.length == 12

    def test_70_billion_parameters_take_no_memory(self) -> None:
        profile = standard(LLAMA_70B).profile()
        assert profile.parameters == 70_553_706_496
        assert [part.count for part in profile.parts] == [1, 80, 1]
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 < 2 * 2**30


def _tokens(output: Any, batch: torch.Tensor) -> torch.Tensor:
    logits = getattr(output, "logits", output)
    return F.cross_entropy(logits.flatten(0, -2), batch.flatten()[: logits.flatten(0, -2).shape[0]])


def _hugging(name: str) -> tuple[nn.Module, dict[str, Any]]:
    import transformers as hf

    more: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    more |= {"vocab_size": 64, "intermediate_size": 48}
    if name == "gpt2":
        return hf.GPT2LMHeadModel(hf.GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=64, n_positions=12)), {}
    if name == "llama":
        return hf.LlamaForCausalLM(hf.LlamaConfig(num_key_value_heads=2, **more)), {}
    config = hf.T5Config(d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, vocab_size=64)
    return hf.T5ForConditionalGeneration(config), {"decoder_input_ids": IDS}


class TestShares:
    @in_one_test("name", ["demo", "gpt2", "llama", "t5"])
    def test_weights_that_can_be_cut_are_those_that_training_cuts(self, name: str) -> None:
        if name == "demo":
            module, kwargs = gpt.gpt_job(layers=2, width=32, heads=4, context=12).model(), {}
            args: tuple[Any, ...] = (IDS,)
        else:
            (module, kwargs), args = _hugging(name), ()
            kwargs = {"input_ids": IDS, **kwargs}
        profile = trace(ModelCall(module=module, args=args, kwargs=kwargs, batch=IDS, loss=_tokens))
        with dry(module, Example(args=args, kwargs=kwargs, batch=IDS, loss=_tokens)) as model:
            cuts = find(model, 2).cuts
        elements = {key: one.numel() for key, one in module.named_parameters()}
        cut = sum(part.count * w.elements for part in profile.parts for w in part.weights if w.share == "inner")
        assert cut == sum(elements[key] for key in cuts)
        assert profile.parameters == sum(elements.values())
        assert profile.lawful
        assert profile.heads == (2 if name == "llama" else 4)

    def test_a_product_that_leaves_its_block_divided_stays_whole(self) -> None:
        blocks = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(3)))
        profile = trace(ModelCall(module=blocks, args=(torch.zeros(2, 8),), loss=summed))
        assert {op.share for _, op in profile.operations() if op.kind == "matmul"} == {"whole"}

    def test_experts(self) -> None:
        import transformers as hf

        config = hf.MixtralConfig(
            hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
            vocab_size=64, num_local_experts=4, num_experts_per_tok=2,
        )  # fmt: skip
        described = ModelCall(module=hf.MixtralForCausalLM(config), kwargs={"input_ids": IDS}, batch=IDS, loss=_tokens)
        profile = trace(described)
        assert profile.experts == 4
        part = block(profile)
        products = [op for op in part.forward if op.expert and op.kind == "matmul"]
        assert [flops(op, 2, 12) for op in products] == [2.0 * 48 * 96 * 32, 2.0 * 48 * 32 * 48]
        assert sum(w.elements for w in part.weights if w.expert) == 4 * 3 * 48 * 32
        assert sum(one.elements.at(1, 1) for one in part.saved if one.expert) >= 2 * (96 + 48)


class _Asks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        return -y if y.sum().item() > 0 else y  # this line


class _Picks(_Asks):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        return y[y > 0]  # this line


class TestRefusals:
    @in_one_test("module", [_Asks(), _Picks()])
    def test_control_flow_of_values_names_the_line(self, module: nn.Module) -> None:
        with pytest.raises(ProfileError, match=r"test_profile\.py:\d+: .*# this line") as caught:
            trace(ModelCall(module=module, args=(torch.zeros(3, 4),), loss=summed))
        assert caught.value.exit_code == 2
        assert "--profile measure" in str(caught.value)
        assert isinstance(next(module.parameters()), nn.Parameter)
        assert torch.isfinite(module.linear.weight).all()  # the model is as it was


def test_masks_are_known_to_be_causal_by_their_values() -> None:
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
    x = torch.zeros(3, 10, 32)

    def causal(**how: Any) -> set[bool]:
        profile = trace(ModelCall(module=layer, args=(x,), kwargs=how, loss=summed))
        return {op.causal for _, op in profile.operations() if op.kind == "attention"}

    assert causal() == {False}
    assert causal(src_mask=nn.Transformer.generate_square_subsequent_mask(10)) == {True}
    assert causal(src_mask=torch.zeros(10, 10)) == {False}


_SMALL = Shape(family="gpt", layers=2, hidden=64, heads=4, vocabulary=100, length=16)
_SHAPES = {
    "gpt": replace(_SMALL, tied=True, dropout=0.1, places=32),
    "llama": replace(_SMALL, family="llama", kv_heads=2, biases=True),
    "bert": replace(_SMALL, family="bert", dropout=0.1),
    "resnet50": Shape(family="resnet50", vocabulary=10, image=64),
}


def test_forms_are_those_of_fakes() -> None:
    for shape in _SHAPES.values():
        described = standard(shape)
        assert described.meta
        assert described.profile() == replace(described, meta=False).profile()


SMALL = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "vocab_size": 99,
}
OTHER_KEYS = {
    "gpt2": {"n_embd": 64, "n_layer": 2, "n_head": 4},
    "bloom": {"n_layer": 2, "n_head": 4},
    "mpt": {"d_model": 64, "n_layers": 2, "n_heads": 4},
    "opt": {"ffn_dim": 96, "word_embed_proj_dim": 64},
    "gemma": {"head_dim": 16},
    "qwen3": {"head_dim": 16},
    "phi3": {"pad_token_id": 0},
}


def written(folder: Path, config: Any) -> Path:
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


@in_one_test("kind", known_architectures())
def test_parameters_are_those_of_the_real_model(kind: str, tmp_path: Path) -> None:
    import transformers as hf

    config = hf.AutoConfig.for_model(kind, **{**SMALL, **OTHER_KEYS.get(kind, {})})
    with torch.device("meta"):
        real = hf.BertForPreTraining(config) if kind == "bert" else hf.AutoModelForCausalLM.from_config(config)
    shape = from_config(written(tmp_path, config.to_dict()), length=16)
    assert isinstance(shape, Shape)
    own = sum(one.numel() for one in real.parameters())
    details = 1500  # norms of queries and keys, biases of a head, two more positions
    assert shape.profile().parameters == pytest.approx(own, abs=details)


def test_others_are_built_by_transformers(tmp_path: Path) -> None:
    config = {
        "model_type": "t5",
        "d_model": 32,
        "d_kv": 8,
        "d_ff": 48,
        "num_layers": 2,
        "num_heads": 4,
        "vocab_size": 64,
    }
    path = written(tmp_path, {**config, "architectures": ["T5ForConditionalGeneration"]})
    profile = from_config(path, length=16).profile()
    assert (profile.blocks, profile.length) == (4, 16)


@in_one_test(
    ("config", "says"),
    [
        ({"model_type": "lama"}, "near: llama"),
        ({"model_type": "llama", "hidden_size": 64}, "num_hidden_layers, num_attention_heads, vocab_size"),
        ({}, "no model_type"),
        ([], "no object"),
    ],
)
def test_what_is_wrong_is_said(config: Any, says: str, tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=says):
        from_config(written(tmp_path, config))


def test_the_extra_is_named_where_transformers_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(MissingExtraError, match=r"phalanx\[transformers\]"):
        from_config(written(tmp_path, {"model_type": "t5"}))
    assert from_config(written(tmp_path, {"model_type": "llama", **SMALL}), length=16).profile().blocks == 2
