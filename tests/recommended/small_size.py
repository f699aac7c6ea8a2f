"""A recommended plan and its model at a size that runs here: by rule, with every key of the plan."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations
from typing import Any

import torch
import transformers
from torch import nn
from well_known import Config

import phalanx as px
from phalanx.config import Job, Plan

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
        "pp": {"schedule": "1f1b", "stages": None, "split": ""},
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
    """The model of a configuration."""
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
    """A job of the small model of ``config``."""
    return job_of(config, batch=BATCH, length=LENGTH, group_norm=group_norm)


def _next_token(output: Any, batch: Any) -> Any:
    return px.cross_entropy(output.logits, batch["tokens"][:, 1:], ignore_index=None)


def _class_of_tokens(output: Any, batch: Any) -> Any:
    return px.cross_entropy(output.logits, batch["tokens"][:, 0] % output.logits.shape[-1])
