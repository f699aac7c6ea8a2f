"""Models that people train and what ``phalanx plan`` is asked of them; and, by rule, model and plan at small size."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

import torch
import transformers
from torch import nn

import phalanx as px
from phalanx.config import Job, Plan

Config = Mapping[str, Any]  # of a config.json of transformers


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """A model on a cluster.

    Attributes:
        name: as people call it.
        config: as the model's publisher has it.
        on: the cluster.
        batch: samples in a step.
        length: tokens of a sample; 0 for images.
    """

    name: str
    config: Config
    on: str
    batch: int
    length: int = 0

    @property
    def asked(self) -> tuple[str, ...]:
        """Arguments of ``phalanx plan`` beside the configuration."""
        length = ("--seq", str(self.length)) if self.length else ()
        return ("--on", self.on, "--batch", str(self.batch), *length)


def _llama(width: int, layers: int, heads: int, inner: int, context: int = 8192) -> Config:
    return {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        "intermediate_size": inner,
        "vocab_size": 128256,
        "max_position_embeddings": context,
    }


def _gpt2(width: int, layers: int, heads: int) -> Config:
    return {
        "model_type": "gpt2",
        "architectures": ["GPT2LMHeadModel"],
        "n_embd": width,
        "n_layer": layers,
        "n_head": heads,
        "n_positions": 1024,
        "vocab_size": 50257,
    }


_LLAMA_8B = _llama(4096, 32, 32, 14336)
_LLAMA_13B: Config = {**_llama(5120, 40, 40, 13824, 4096), "num_key_value_heads": 40, "vocab_size": 32000}
_MIXTRAL: Config = {
    **_llama(4096, 32, 32, 14336, 32768),
    "model_type": "mixtral",
    "architectures": ["MixtralForCausalLM"],
    "vocab_size": 32000,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
}
_BERT_LARGE: Config = {
    "model_type": "bert",
    "architectures": ["BertForSequenceClassification"],
    "hidden_size": 1024,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "intermediate_size": 4096,
    "vocab_size": 30522,
    "max_position_embeddings": 512,
}
_VIT_LARGE: Config = {
    "model_type": "vit",
    "architectures": ["ViTForImageClassification"],
    "hidden_size": 1024,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "intermediate_size": 4096,
    "image_size": 224,
    "patch_size": 16,
    "num_labels": 1000,
}
_RESNET_50: Config = {
    "model_type": "resnet",
    "architectures": ["ResNetForImageClassification"],
    "embedding_size": 64,
    "hidden_sizes": [256, 512, 1024, 2048],
    "depths": [3, 4, 6, 3],
    "layer_type": "bottleneck",
    "image_size": 224,
    "num_labels": 1000,
}

SETTINGS = (
    Setting(name="GPT-2 small, a server", config=_gpt2(768, 12, 12), on="8xA100-40GB", batch=512, length=1024),
    Setting(name="Llama 8B, a server", config=_LLAMA_8B, on="8xH100", batch=128, length=8192),
    Setting(name="Llama 70B, 8 servers", config=_llama(8192, 80, 64, 28672), on="8x8xH100", batch=512, length=8192),
    Setting(
        name="Llama 405B, 128 servers", config=_llama(16384, 126, 128, 53248), on="128x8xH100", batch=2048, length=8192
    ),
    Setting(name="Mixtral 8x7B, 4 servers", config=_MIXTRAL, on="4x8xH100", batch=512, length=4096),
    Setting(
        name="Llama 8B, 128k tokens", config=_llama(4096, 32, 32, 14336, 131072), on="4x8xH100", batch=32, length=131072
    ),
    Setting(name="ViT-L, a server", config=_VIT_LARGE, on="8xA100-80GB", batch=4096),
    Setting(name="ResNet-50, a server", config=_RESNET_50, on="8xV100-16GB", batch=1024),
    Setting(name="BERT large, consumer cards", config=_BERT_LARGE, on="4xRTX-3090", batch=32, length=384),
    Setting(name="GPT-2 small, processors", config=_gpt2(768, 12, 12), on="2x16xcpu", batch=64, length=1024),
    Setting(name="Llama 13B, slow network", config=_LLAMA_13B, on="4x8xA100-80GB@10Gb/s", batch=512, length=4096),
    Setting(
        name="GPT-2 XL, unequal servers",
        config=_gpt2(1600, 48, 25),
        on="8xA100-40GB+8xV100-32GB",
        batch=512,
        length=1024,
    ),
    Setting(name="Llama 8B, a TPU pod", config=_LLAMA_8B, on="64xTPU-v5p", batch=512, length=8192),
)

AXES = ("dp", "fsdp", "tp", "pp", "cp", "ep")
MOST_AXES = 3  # of 2 ranks each: 8 processes
MOST_MICROS = 4
FEWEST_LAYERS = 4
BATCH, LENGTH, SAMPLES, STEPS = 16, 16, 40, 2

_SIZES: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "n_embd"), 32),
    **dict.fromkeys(("num_attention_heads", "n_head"), 4),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "vocab_size"), 64),
    "intermediate_size": 48,
    "num_local_experts": 4,
    "image_size": 16,
    "patch_size": 4,
    "num_labels": 5,
    "embedding_size": 8,
    "hidden_sizes": [16, 32],
    "depths": [2, 2],
}


def small_plans(plan: Plan, batch: int) -> list[Plan]:
    """``plan`` with 2 ranks where it has more, in fp32; every three of its axes where it has more than three.

    Micro-batches are as many as for a batch of ``batch``, at most four.
    """
    wide = [axis for axis in AXES if getattr(plan, axis) > 1]
    each = combinations(wide, MOST_AXES) if len(wide) > MOST_AXES else [wide]
    return [_small(plan, batch, axes) for axes in each]


def _small(plan: Plan, batch: int, axes: Any) -> Plan:
    gone = {axis: 1 for axis in AXES if axis not in axes}
    without: dict[str, Any] = {
        "fsdp": {"zero": 0},
        "tp": {"sequence": False},
        "pp": {"schedule": "1f1b", "stages": None},
        "cp": {"attention": "ring"},
        "dp": {"shares": ""},
    }
    for axis in gone:
        gone = {**gone, **without.get(axis, {})}
    micro = None
    if plan.micro is not None:
        replicas = 2 ** len({"dp", "fsdp", "ep"} & set(axes))
        share, small_share = -(-batch // plan.replicas), BATCH // replicas
        micro = small_share // min(-(-share // plan.micro), MOST_MICROS, small_share)
    return replace(plan, **dict.fromkeys(axes, 2), **gone, micro=micro, precision="fp32")


def small_config(config: Config, plan: Plan) -> Config:
    """``config`` with every size small; heads of keys stay fewer than those of queries where they are.

    Layers are four, or as many as the plan's stages.
    """
    layers = max(FEWEST_LAYERS, plan.pp * plan.stages)
    sizes = {**_SIZES, "num_hidden_layers": layers, "n_layer": layers}
    small = {key: sizes.get(key, value) for key, value in config.items()}
    if "num_key_value_heads" in config:
        grouped = config["num_key_value_heads"] < config["num_attention_heads"]
        small["num_key_value_heads"] = 2 if grouped else 4
    return small


def built(config: Config) -> nn.Module:
    made = transformers.AutoConfig.for_model(**config)
    return getattr(transformers, config["architectures"][0])(made)


def grouped_norms(module: nn.Module) -> nn.Module:
    """``module`` with group norms where it has batch norms."""
    for name, child in module.named_children():
        if isinstance(child, nn.BatchNorm2d):
            setattr(module, name, nn.GroupNorm(4, child.num_features))
        else:
            grouped_norms(child)
    return module


def job_of(config: Config, *, batch: int, length: int, group_norm: bool = False) -> Job:
    """A job of made-up samples for the model of ``config``."""
    how: dict[str, Any] = {
        "optimizer": lambda params: torch.optim.AdamW(params, lr=1e-3),
        "batch": batch,
        "steps": 1000,
        "clip": 1.0,
    }
    generator = torch.Generator().manual_seed(0)
    if "vocab_size" in config:
        tokens = torch.randint(config["vocab_size"], (SAMPLES, length + 1), generator=generator)
        causal = "Causal" in config["architectures"][0] or "LMHead" in config["architectures"][0]
        how |= {
            "data": lambda: px.Table(tokens=tokens),
            "inputs": lambda batch: {"input_ids": batch["tokens"][:, :-1]},
            "loss": _next_token if causal else _class_of_tokens,
        }
    else:
        channels, side = config.get("num_channels", 3), config["image_size"]
        images = torch.randn(SAMPLES, channels, side, side, generator=generator)
        classes = torch.randint(config["num_labels"], (SAMPLES,), generator=generator)
        how |= {
            "data": lambda: px.Table(pixel_values=images, label=classes),
            "inputs": lambda batch: {"pixel_values": batch["pixel_values"]},
            "loss": lambda output, batch: px.cross_entropy(output.logits, batch["label"]),
            "unused": "allow",  # such models hold a parameter for training by masks
        }
    return px.Job(model=lambda: grouped_norms(built(config)) if group_norm else built(config), **how)


def small_job(config: Config, *, group_norm: bool = False) -> Job:
    return job_of(config, batch=BATCH, length=LENGTH, group_norm=group_norm)


def _next_token(output: Any, batch: Any) -> Any:
    return px.cross_entropy(output.logits, batch["tokens"][:, 1:], ignore_index=None)


def _class_of_tokens(output: Any, batch: Any) -> Any:
    return px.cross_entropy(output.logits, batch["tokens"][:, 0] % output.logits.shape[-1])
