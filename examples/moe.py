"""A small mixture of experts learns English from the help texts which every Python carries.

It is the GPT of ``examples/gpt.py`` with eight small networks in place of each block's large one, of which a router
chooses two for each byte. Two small losses keep the router from choosing the same ones always; both are sums over
tokens, so that every plan computes the same. The weights of all experts are in two tensors, which is what lets
``ep`` deal them out over ranks. Run it with ``phalanx train examples/moe.py --plan ep=2``.

Shapes: B samples, T positions, D width, E experts, K chosen ones, I inner width, N rows, V vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import phalanx as px
from phalanx.demo.jobs.gpt import VOCABULARY, Attention, Size, windows

EXPERTS, CHOSEN = 8, 2
SIZE = Size(layers=2, width=96, heads=4, context=64)


class Experts(nn.Module):
    """All experts of a layer: two-layer networks."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(EXPERTS, inner, width) * (0.4 / width) ** 0.5)
        self.down = nn.Parameter(torch.randn(EXPERTS, width, inner) * (0.1 / width) ** 0.5)

    def forward(self, x_ND: Tensor, chosen_NK: Tensor, weight_NK: Tensor) -> Tensor:
        """The sum, for each row, of what its experts make of it, times their weights."""
        sum_ND = torch.zeros_like(x_ND)
        for expert, (up_ID, down_DI) in enumerate(zip(self.up, self.down, strict=True)):
            row, slot = torch.where(chosen_NK == expert)
            made = F.linear(F.gelu(F.linear(x_ND[row], up_ID)), down_DI) * weight_NK[row, slot].unsqueeze(-1)
            sum_ND = sum_ND.index_add(0, row, made.to(sum_ND.dtype))
        return sum_ND


class Block(nn.Module):
    """Attention, then each position's experts; each is normalised first and added to the stream."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.norm_1 = nn.LayerNorm(size.width)
        self.attention = Attention(size)
        self.norm_2 = nn.LayerNorm(size.width)
        self.router = nn.Linear(size.width, EXPERTS, bias=False)
        self.experts = Experts(size.width, 2 * size.width)

    def forward(self, x_BTD: Tensor) -> tuple[Tensor, Tensor]:
        """The stream after this block, and the router's logits (B, T, E)."""
        x_BTD = x_BTD + self.attention(self.norm_1(x_BTD))
        seen_BTD = self.norm_2(x_BTD)
        logits_BTE = self.router(seen_BTD)
        weight_BTK, chosen_BTK = logits_BTE.softmax(-1).topk(CHOSEN, dim=-1)
        weight_BTK = weight_BTK / weight_BTK.sum(-1, keepdim=True)
        made_ND = self.experts(seen_BTD.flatten(0, 1), chosen_BTK.flatten(0, 1), weight_BTK.flatten(0, 1))
        return x_BTD + made_ND.view(x_BTD.shape), logits_BTE


class Output(NamedTuple):
    """Logits of the next byte (B, T, V), and each layer's of its router (B, T, E)."""

    logits: Tensor
    routers: tuple[Tensor, ...]


class MoE(nn.Module):
    """Bytes in, the logits of the byte that follows each out."""

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
                nn.init.normal_(parameter, std=(2 / (5 * size.width)) ** 0.5)

    def forward(self, tokens_BT: Tensor) -> Output:
        """Logits, and what the routers chose by."""
        x_BTD = self.token(tokens_BT) + self.position(torch.arange(tokens_BT.shape[1], device=tokens_BT.device))
        routers: list[Tensor] = []
        for block in self.blocks:
            x_BTD, logits_BTE = block(x_BTD)
            routers.append(logits_BTE)
        return Output(self.head(self.norm(x_BTD)), tuple(routers))


def loss(output: Output, batch: dict[str, Tensor]) -> px.Loss:
    """Cross entropy of the next byte, and the routers' two losses beside it; all are sums over the same tokens."""
    text = px.cross_entropy(output.logits, batch["tokens"][:, 1:], ignore_index=None)
    total = text.sum
    for logits_BTE in output.routers:
        total = total + 0.01 * px.load_balancing_loss(logits_BTE, CHOSEN).sum
        total = total + 0.001 * px.router_z_loss(logits_BTE).sum
    return px.Loss(total, text.count)


def job() -> px.Job:
    """0.7 million parameters, of which each byte meets 0.3. The loss falls from 5.6 (a guess) to 2.3 in 200 steps."""
    return px.Job(
        name="moe",
        model=lambda: MoE(SIZE),
        data=lambda: windows(SIZE.context, "training"),
        inputs=lambda batch: batch["tokens"][:, :-1],
        loss=loss,
        optimizer=lambda params: torch.optim.AdamW(params, lr=6e-3, betas=(0.9, 0.95), weight_decay=0.1),
        schedule=px.Schedule(decay="cosine", warmup_steps=20, floor=0.1),
        clip=1.0,
        batch=32,
        steps=200,
        evaluate=lambda: windows(SIZE.context, "evaluation"),
        metrics=lambda output, batch: {"right": px.accuracy(output, batch["tokens"][:, 1:])},
    )
