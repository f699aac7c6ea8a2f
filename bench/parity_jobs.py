"""Small jobs of the five model kinds that the parity table holds for, with batches that do not divide evenly.

Shapes: B samples, T tokens. Sizes are small because equality does not depend on them and the table is long.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

import phalanx as px
from workloads import GPT, convnet

BATCH = 14  # 7 + 7 on two ranks, 5 + 5 + 4 on three, 4 + 4 + 3 + 3 on four


class Sentences(Dataset[dict[str, Tensor]]):
    """Tokens of unequal length, padded to 12; -100 in the labels marks padding."""

    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        ids = torch.randint(1, 64, (12,), generator=torch.Generator().manual_seed(index))
        mask = torch.arange(12) < 3 + index % 10
        return {"input_ids": ids * mask, "attention_mask": mask.long(), "labels": torch.where(mask, ids, -100)}


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3)


def mlp() -> px.Job:
    """Vectors to classes."""
    generator = torch.Generator().manual_seed(0)
    data = TensorDataset(torch.randn(100, 16, generator=generator), torch.randint(4, (100,), generator=generator))
    return px.Job(
        model=lambda: nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)),
        data=lambda: data,
        loss=lambda output, batch: px.cross_entropy(output, batch[1]),
        optimizer=adamw,
        batch=BATCH,
        epochs=3,
        name="MLP",
    )


def conv() -> px.Job:
    """Images to classes."""
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(100, 1, 28, 28, generator=generator)
    data = TensorDataset(images, torch.randint(10, (100,), generator=generator))
    return px.Job(
        model=convnet,
        data=lambda: data,
        loss=lambda output, batch: px.cross_entropy(output, batch[1]),
        optimizer=adamw,
        batch=BATCH,
        epochs=3,
        name="ConvNet",
    )


def _language(name: str, model: Callable[[], nn.Module], **how: Any) -> px.Job:
    return px.Job(model=model, data=Sentences, optimizer=adamw, batch=BATCH, epochs=3, clip=1.0, name=name, **how)


def own_gpt() -> px.Job:
    """A GPT of our own, next token, padding left out of the loss."""
    return _language(
        "own GPT",
        lambda: GPT(layers=2, width=32, heads=2, context=12),
        inputs=lambda batch: batch["input_ids"],
        loss=lambda output, batch: px.cross_entropy(output[:, :-1], batch["labels"][:, 1:]),
    )


def hf_gpt2() -> px.Job:
    """transformers' GPT-2, next token."""

    def model() -> nn.Module:
        from transformers import GPT2Config, GPT2LMHeadModel

        return GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=12, n_embd=32, n_layer=2, n_head=2))

    return _language(
        "HF GPT-2",
        model,
        inputs=lambda batch: {name: batch[name] for name in ("input_ids", "attention_mask")},
        loss=lambda output, batch: px.cross_entropy(output.logits[:, :-1], batch["labels"][:, 1:]),
    )


def hf_bert() -> px.Job:
    """transformers' BERT, every real token to itself, padded sentences."""

    def model() -> nn.Module:
        from transformers import BertConfig, BertForMaskedLM

        sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
        return BertForMaskedLM(BertConfig(vocab_size=64, max_position_embeddings=12, **sizes))

    return _language(
        "HF BERT, padded",
        model,
        inputs=lambda batch: {name: batch[name] for name in ("input_ids", "attention_mask")},
        loss=lambda output, batch: px.cross_entropy(output.logits, batch["labels"]),
    )


JOBS: dict[str, Callable[[], px.Job]] = {
    "ConvNet": conv,
    "MLP": mlp,
    "own GPT": own_gpt,
    "HF GPT-2": hf_gpt2,
    "HF BERT, padded": hf_bert,
}
