"""Configurations of Hugging Face models, as models to profile."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from phalanx.errors import MissingExtraError, SpecError
from phalanx.trace import Shape, from_config
from phalanx.trace.standard_models import known_architectures

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


@pytest.mark.parametrize("kind", known_architectures())
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


@pytest.mark.parametrize(
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


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="No such file"):
        from_config(tmp_path / "nowhere")


def test_the_extra_is_named_where_transformers_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(MissingExtraError, match=r"phalanx\[transformers\]"):
        from_config(written(tmp_path, {"model_type": "t5"}))
    assert from_config(written(tmp_path, {"model_type": "llama", **SMALL}), length=16).profile().blocks == 2


def test_nouns_and_shapes_need_no_torch() -> None:
    code = "import sys, phalanx.trace; print([one for one in ('torch', 'numpy') if one in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
