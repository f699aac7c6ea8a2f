"""Small jobs of every kind of model the parity table holds for. B samples, T tokens, C classes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn

import phalanx as px
from phalanx.demo.jobs import gpt

BATCH = 14  # 7 + 7, 5 + 5 + 4 and 4 + 4 + 3 + 3 on 2, 3 and 4 ranks
LENGTH = 40  # the last batch of an epoch has 12


def job(model: Callable[[], nn.Module], data: Any, loss: Callable[[Any, Any], Any], **how: Any) -> px.Job:
    given: dict[str, Any] = {
        "optimizer": lambda params: torch.optim.AdamW(params, lr=1e-3),
        "batch": BATCH,
        "steps": 20,
        "clip": 0.3,  # below the norm of every model's gradients, so that it takes hold
        **how,
    }
    return px.Job(model=model, data=lambda: data, loss=loss, **given)


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(16, 19), nn.Linear(19, 19), nn.Linear(19, 16)])
        self.gain = nn.Parameter(torch.ones(()))  # no dimension: nothing to shard
        self.head = nn.Linear(16, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.head(x * self.gain)


class Row(MLP):
    """The same without the parameter that has no dimension, which ZeRO-3 cannot shard."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(1))


def rows() -> px.Table:
    generator = torch.Generator().manual_seed(1)
    return px.Table(x=torch.randn(LENGTH, 16, generator=generator), y=torch.randint(5, (LENGTH,), generator=generator))


def mlp() -> px.Job:
    return job(Row, rows(), lambda output, batch: nn.functional.cross_entropy(output, batch["y"]))


def convnet() -> px.Job:
    generator = torch.Generator().manual_seed(2)
    images = torch.randn(LENGTH, 1, 8, 8, generator=generator)
    table = px.Table(x=images, y=torch.randint(5, (LENGTH,), generator=generator))

    def model() -> nn.Module:
        widths = ((1, 6), (6, 8))
        stages = [nn.Sequential(nn.Conv2d(a, b, 3, padding=1), nn.GroupNorm(2, b), nn.ReLU()) for a, b in widths]
        return nn.Sequential(nn.Sequential(*stages), nn.Flatten(), nn.Linear(8 * 64, 5))

    loss = lambda output, batch: px.cross_entropy(output, batch["y"])  # noqa: E731
    return job(model, table, loss, inputs=lambda batch: batch["x"])


def _sentences() -> px.Table:
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(1, 64, (LENGTH, 12), generator=generator)
    mask = torch.arange(12)[None] < 3 + torch.arange(LENGTH)[:, None] % 10
    return px.Table(input_ids=ids * mask, attention_mask=mask.long(), labels=torch.where(mask, ids, -100))


def own_gpt() -> px.Job:
    shape = gpt.gpt_job(layers=2, width=32, heads=2, context=12, batch=BATCH, steps=20)
    return job(
        shape.model,
        _sentences(),
        lambda output, batch: px.cross_entropy(output[:, :-1], batch["labels"][:, 1:]),
        inputs=lambda batch: batch["input_ids"],
    )


def of_tokens(kind: str, head: str, *, ahead: bool = True, **sizes: Any) -> px.Job:
    """A model of transformers over padded sentences; ``ahead``: it tells the next token, and else each."""
    import transformers

    config = getattr(transformers, f"{kind}Config")(vocab_size=64, **sizes)

    def loss(output: Any, batch: Any) -> px.Loss:
        logits, labels = output.logits, batch["labels"]
        return px.cross_entropy(logits[:, :-1], labels[:, 1:]) if ahead else px.cross_entropy(logits, labels)

    inputs = lambda batch: {name: batch[name] for name in ("input_ids", "attention_mask")}  # noqa: E731
    return job(lambda: getattr(transformers, f"{kind}{head}")(config), _sentences(), loss, inputs=inputs)


def gpt2() -> px.Job:
    return of_tokens("GPT2", "LMHeadModel", n_positions=12, n_embd=32, n_layer=2, n_head=2)


SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "max_position_embeddings": 12}


def bert() -> px.Job:
    return of_tokens("Bert", "ForMaskedLM", ahead=False, **SIZES, num_attention_heads=2, intermediate_size=64)


GROUPED = {**SIZES, "num_attention_heads": 4, "intermediate_size": 48}


def llama() -> px.Job:
    """transformers' Llama: grouped-query heads, gated layers, rotary positions, padding."""
    return of_tokens("Llama", "ForCausalLM", **GROUPED, num_key_value_heads=2)


def mixtral() -> px.Job:
    return of_tokens("Mixtral", "ForCausalLM", **GROUPED, num_key_value_heads=2, num_local_experts=4)


def t5() -> px.Job:
    """transformers' T5: encoder and decoder of unequal lengths, positions as a bias of attention, tied embedding."""
    from transformers import T5Config, T5ForConditionalGeneration

    sizes: dict[str, Any] = {"vocab_size": 64, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
    # Smooth and gated, as since version 1.1: a ReLU whose input is within rounding of zero has either gradient.
    config = T5Config(**sizes, feed_forward_proj="gated-gelu", dropout_rate=0.0)
    table = _sentences()
    generator = torch.Generator().manual_seed(4)
    targets = torch.randint(1, 64, (LENGTH, 7), generator=generator)

    class Pairs(torch.utils.data.Dataset[Any]):
        def __len__(self) -> int:
            return LENGTH

        def __getitem__(self, index: int) -> Any:
            return {**table[index], "decoder_input_ids": targets[index]}

    names = ("input_ids", "attention_mask", "decoder_input_ids")
    return job(
        lambda: T5ForConditionalGeneration(config),
        Pairs(),
        lambda output, batch: px.cross_entropy(output.logits[:, :-1], batch["decoder_input_ids"][:, 1:]),
        inputs=lambda batch: {name: batch[name] for name in names},
    )


def vit() -> px.Job:
    from transformers import ViTConfig, ViTForImageClassification

    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
    config = ViTConfig(image_size=8, patch_size=2, num_channels=1, num_labels=5, **sizes)
    generator = torch.Generator().manual_seed(5)
    images = torch.randn(LENGTH, 1, 8, 8, generator=generator)
    table = px.Table(pixel_values=images, y=torch.randint(5, (LENGTH,), generator=generator))
    return job(
        lambda: ViTForImageClassification(config),
        table,
        lambda output, batch: px.cross_entropy(output.logits, batch["y"]),
        inputs=lambda batch: {"pixel_values": batch["pixel_values"]},
        unused="allow",
    )


class Irregular(nn.Module):
    """Two branches, a module used twice, a connection that skips, and no repeated blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 24)
        self.left = nn.Sequential(nn.Linear(24, 40), nn.GELU(), nn.Linear(40, 24))
        self.right = nn.Linear(24, 24, bias=False)
        self.shared = nn.Linear(24, 24)
        self.norm = nn.LayerNorm(24)
        self.head = nn.Linear(48, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        start = torch.relu(self.first(x))
        both = self.left(start) + torch.sigmoid(self.right(start))
        once = torch.tanh(self.shared(both))
        twice = self.shared(self.norm(once))
        return self.head(torch.cat((twice, start), dim=-1))


def irregular() -> px.Job:
    return job(Irregular, rows(), lambda output, batch: nn.functional.cross_entropy(output, batch["y"]))


def plain(one: px.Job) -> px.Job:
    return replace(one, optimizer=lambda params: torch.optim.SGD(params, lr=0.05), clip=None)


MODELS: dict[str, Callable[[], px.Job]] = {
    "ConvNet": convnet,
    "MLP": mlp,
    "irregular": irregular,
    "own GPT": own_gpt,
    "HF GPT-2": gpt2,
    "HF Llama": llama,
    "HF BERT, padded": bert,
    "HF T5": t5,
    "HF ViT": vit,
    "HF Mixtral": mixtral,
}
