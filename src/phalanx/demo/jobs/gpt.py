"""A small GPT, all in one file, that learns English from Python's own help texts (465 kB).

Text is read byte by byte: 256 tokens and no tokenizer. Run it with ``phalanx train examples/gpt.py -n 2``.

Shapes: B samples, T positions (bytes of context), D width, H heads, K width of a head, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from pydoc_data.topics import topics
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import phalanx as px

VOCABULARY = 256
HELD_OUT = 20  # every 20th window is for evaluation


@dataclass(frozen=True, kw_only=True, slots=True)
class Size:
    """The size of the model.

    Attributes:
        layers: transformer blocks.
        width: of the residual stream; a multiple of ``heads``.
        heads: of attention.
        context: bytes the model looks back on.
    """

    layers: int = 2
    width: int = 128
    heads: int = 4
    context: int = 64


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.heads = size.heads
        self.query_key_value = nn.Linear(size.width, 3 * size.width, bias=False)
        self.output = nn.Linear(size.width, size.width)

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Attend from each position to itself and those before it."""
        q_BHTK, k_BHTK, v_BHTK = (
            part_BTD.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part_BTD in self.query_key_value(x_BTD).chunk(3, dim=-1)
        )
        gathered_BHTK = F.scaled_dot_product_attention(q_BHTK, k_BHTK, v_BHTK, is_causal=True)
        return self.output(gathered_BHTK.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """Attention, then a two-layer network at each position; each is normalised first and added to the stream."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.norm_1 = nn.LayerNorm(size.width)
        self.attention = Attention(size)
        self.norm_2 = nn.LayerNorm(size.width)
        self.up = nn.Linear(size.width, 4 * size.width)
        self.down = nn.Linear(4 * size.width, size.width)

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Return the stream after this block."""
        x_BTD = x_BTD + self.attention(self.norm_1(x_BTD))
        return x_BTD + self.down(F.gelu(self.up(self.norm_2(x_BTD))))


class GPT(nn.Module):
    """Bytes in, the logits of the next byte out. No dropout, so that every plan computes the same."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, size.width)
        self.position = nn.Embedding(size.context, size.width)
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.layers))
        self.norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, VOCABULARY, bias=False)
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
            elif parameter.ndim == 2:
                # Each block adds to the stream twice; smaller last layers keep its variance from growing with depth.
                adds = name.endswith(("output.weight", "down.weight"))
                std = (2 / (5 * size.width)) ** 0.5  # "small init", Nguyen and Salazar 2019
                nn.init.normal_(parameter, std=std / (2 * size.layers) ** 0.5 if adds else std)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        """Return logits of shape (B, T, V)."""
        positions_T = torch.arange(tokens_BT.shape[1], device=tokens_BT.device)
        x_BTD = self.token(tokens_BT) + self.position(positions_T)
        for block in self.blocks:
            x_BTD = block(x_BTD)
        return self.head(self.norm(x_BTD))


def windows(context: int, part: Literal["training", "evaluation"]) -> px.Table:
    """Return the text as samples: window i holds bytes i * context to (i + 1) * context, both included.

    Neighbours share one byte, the last target of one and the first input of the next, so every byte but the first is
    predicted once an epoch.
    """
    text = "\n".join(text for _, text in sorted(topics.items()))
    tokens_NT = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8).long().unfold(0, context + 1, context)
    held_out = torch.arange(len(tokens_NT)) % HELD_OUT == HELD_OUT - 1
    return px.Table(tokens=tokens_NT[held_out if part == "evaluation" else ~held_out])


def gpt_job(
    *, layers: int = 2, width: int = 128, heads: int = 4, context: int = 64, batch: int = 32, steps: int = 200
) -> px.Job:
    """Return the job at any size; ``layers=6, width=384, heads=6`` has 10.9 million parameters.

    Args:
        layers: transformer blocks.
        width: of the residual stream.
        heads: of attention.
        context: bytes the model looks back on.
        batch: windows in one optimizer step.
        steps: optimizer steps.
    """
    lr = 0.768 / width  # Adam's best learning rate falls with the width: Yang et al. 2022
    size = Size(layers=layers, width=width, heads=heads, context=context)
    return px.Job(
        name="gpt",
        model=lambda: GPT(size),
        data=lambda: windows(context, "training"),
        inputs=lambda batch: batch["tokens"][:, :-1],
        loss=lambda output, batch: px.cross_entropy(output, batch["tokens"][:, 1:], ignore_index=None),
        optimizer=lambda params: torch.optim.AdamW(params, lr=lr, betas=(0.9, 0.95), weight_decay=0.1),
        schedule=px.Schedule(decay="cosine", warmup_steps=20, floor=0.1),
        clip=1.0,
        batch=batch,
        steps=steps,
        evaluate=lambda: windows(context, "evaluation"),
    )


def job() -> px.Job:
    """Return the demo's size: 0.47 million parameters. The loss falls from 5.8 (a guess) to 2.0 in 200 steps."""
    return gpt_job()
