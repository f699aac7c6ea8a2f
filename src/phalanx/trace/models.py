"""The modules of the standard models.

Shapes: B samples, T tokens, D width, H heads, K width of a head, V vocabulary."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from phalanx.errors import Problem, SpecError
from phalanx.trace.fake_tensors import NothingDrawn
from phalanx.trace.standard_models import ModelCall, Shape


def described(shape: Shape) -> ModelCall:
    """Return the model of ``shape`` on the meta device with inputs of one sample.

    Raises:
        SpecError: if numbers are missing or do not go together.
    """
    if problems := _problems(shape):
        raise SpecError(problems)
    with torch.device("meta"), NothingDrawn():
        if shape.family == "resnet50":
            images, labels = torch.empty(1, 3, shape.image, shape.image), torch.empty(1, dtype=torch.int64)
            module = ResNet50(shape.vocabulary)
            return ModelCall(module=module, args=(images,), batch=labels, loss=F.cross_entropy, meta=True)
        tokens = torch.empty(1, shape.length, dtype=torch.int64)
        if shape.family == "bert":
            batch = (torch.empty(1, shape.length, dtype=torch.int64), torch.empty(1, dtype=torch.int64))
            args = (tokens, tokens.clone())
            return ModelCall(module=Bert(shape), args=args, batch=batch, loss=_two_losses, meta=True)
        batch = torch.empty(1, shape.length, dtype=torch.int64)
        return ModelCall(module=Decoder(shape), args=(tokens,), batch=batch, loss=_next_token, meta=True)


def _next_token(logits_BTV: Tensor, tokens_BT: Tensor) -> Tensor:
    return F.cross_entropy(logits_BTV.flatten(0, 1).float(), tokens_BT.flatten())


def _two_losses(outputs: tuple[Tensor, Tensor], batch: tuple[Tensor, Tensor]) -> Tensor:
    return _next_token(outputs[0], batch[0]) + F.cross_entropy(outputs[1], batch[1])


def _problems(shape: Shape) -> list[Problem]:
    needed = (
        ("vocabulary", "image") if shape.family == "resnet50" else ("layers", "hidden", "heads", "vocabulary", "length")
    )
    found = [
        Problem(where=f"shape.{name}", given=str(value), allowed="a positive whole number", fix=f"{name}=...")
        for name in needed
        if (value := getattr(shape, name)) < 1
    ]
    if found or shape.family == "resnet50":
        return found
    if not shape.head_width and shape.hidden % shape.heads:
        found.append(_uneven("hidden", shape.hidden, shape.heads))
    if shape.kv_heads and shape.heads % shape.kv_heads:
        found.append(_uneven("heads", shape.heads, shape.kv_heads))
    return found


def _uneven(name: str, value: int, of: int) -> Problem:
    return Problem(
        where=f"shape.{name}", given=str(value), allowed=f"a multiple of {of}", fix=f"{name}={-(-value // of) * of}"
    )


def _norm(shape: Shape) -> nn.Module:
    if shape.family == "llama":
        return nn.RMSNorm(shape.hidden)
    return nn.LayerNorm(shape.hidden, bias=shape.family != "mpt")


class StandardAttention(nn.Module):
    """Attention of every kind of standard model; fused projections, except for llama."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads, self.kv_heads = shape.heads, shape.kv_heads or shape.heads
        self.width = shape.head_width or shape.hidden // shape.heads
        self.causal = shape.family != "bert"
        self.split = shape.family == "llama"
        self.grouped = self.kv_heads != self.heads
        queries, keys = self.heads * self.width, self.kv_heads * self.width
        biases = shape.biases if self.split else shape.family != "mpt"
        if self.split:
            self.query = nn.Linear(shape.hidden, queries, bias=biases)
            self.key = nn.Linear(shape.hidden, keys, bias=biases)
            self.value = nn.Linear(shape.hidden, keys, bias=biases)
        else:
            self.query_key_value = nn.Linear(shape.hidden, queries + 2 * keys, bias=biases)
        self.output = nn.Linear(queries, shape.hidden, bias=not self.split and biases)
        self.dropout = nn.Dropout(shape.dropout)

    def forward(self, x_BTD: Tensor, around: tuple[Tensor, ...]) -> Tensor:
        """Attend from each position to others; ``around`` are rotations, or a bias of distances."""
        if self.split:
            each = (self.query(x_BTD), self.key(x_BTD), self.value(x_BTD))
        else:
            keys = self.kv_heads * self.width
            each = self.query_key_value(x_BTD).split((self.heads * self.width, keys, keys), dim=-1)
        q_BHTK, k_BHTK, v_BHTK = (one.unflatten(-1, (-1, self.width)).transpose(1, 2) for one in each)
        if len(around) == 2:
            q_BHTK, k_BHTK = _rotated(q_BHTK, *around), _rotated(k_BHTK, *around)
        bias = around[0] if len(around) == 1 else None
        causal = self.causal
        gathered_BHTK = F.scaled_dot_product_attention(
            q_BHTK, k_BHTK, v_BHTK, attn_mask=bias, is_causal=causal, enable_gqa=self.grouped
        )
        return self.dropout(self.output(gathered_BHTK.transpose(1, 2).flatten(2)))


def _rotated(x_BHTK: Tensor, cos_TK: Tensor, sin_TK: Tensor) -> Tensor:
    first, second = x_BHTK.chunk(2, dim=-1)
    return x_BHTK * cos_TK + torch.cat((-second, first), dim=-1) * sin_TK


class FeedForward(nn.Module):
    """Two layers at each position; three with a gate for llama."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        inner = shape.ffn or 4 * shape.hidden
        self.gated = shape.family == "llama"
        biases = shape.family in ("gpt", "bert")
        self.gate = nn.Linear(shape.hidden, inner, bias=False) if self.gated else None
        self.up = nn.Linear(shape.hidden, inner, bias=biases)
        self.down = nn.Linear(inner, shape.hidden, bias=biases)
        self.dropout = nn.Dropout(shape.dropout)

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Return a new vector of the same width."""
        if self.gate is not None:
            return self.down(F.silu(self.gate(x_BTD)) * self.up(x_BTD))
        return self.dropout(self.down(F.gelu(self.up(x_BTD))))


class StandardBlock(nn.Module):
    """Attention and feed-forward network, each added to the stream; norms come before, for bert after."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.after = shape.family == "bert"
        self.norm_1, self.norm_2 = _norm(shape), _norm(shape)
        self.attention, self.feed_forward = StandardAttention(shape), FeedForward(shape)

    def forward(self, x_BTD: Tensor, *around: Tensor) -> Tensor:
        """Return the stream after this block."""
        if self.after:
            x_BTD = self.norm_1(x_BTD + self.attention(x_BTD, around))
            return self.norm_2(x_BTD + self.feed_forward(x_BTD))
        x_BTD = x_BTD + self.attention(self.norm_1(x_BTD), around)
        return x_BTD + self.feed_forward(self.norm_2(x_BTD))


class Decoder(nn.Module):
    """A language model: embedding, blocks, norm, head."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        own = {"gpt": "learned", "llama": "rotary", "mpt": "alibi"}
        self.positions = shape.positions or own[shape.family]
        self.width, self.heads = shape.head_width or shape.hidden // shape.heads, shape.heads
        self.token = nn.Embedding(shape.vocabulary, shape.hidden)
        rows = max(shape.places, shape.length)
        self.position = nn.Embedding(rows, shape.hidden) if self.positions == "learned" else None
        self.dropout = nn.Dropout(shape.dropout)
        self.blocks = nn.ModuleList(StandardBlock(shape) for _ in range(shape.layers))
        self.norm = _norm(shape)
        self.head = nn.Linear(shape.hidden, shape.vocabulary, bias=False)
        if shape.tied:
            self.head.weight = self.token.weight

    def forward(self, tokens_BT: Tensor) -> Tensor:
        """Return logits (B, T, V)."""
        x_BTD = self.token(tokens_BT)
        positions_T = torch.arange(tokens_BT.shape[1])
        if self.position is not None:
            x_BTD = x_BTD + self.position(positions_T)
        x_BTD = self.dropout(x_BTD)
        around = self._around(positions_T, x_BTD.dtype)
        for block in self.blocks:
            x_BTD = block(x_BTD, *around)
        return self.head(self.norm(x_BTD))

    def _around(self, positions_T: Tensor, dtype: torch.dtype) -> tuple[Tensor, ...]:
        if self.positions == "rotary":
            steps_K = 10000.0 ** (-torch.arange(0, self.width, 2, dtype=torch.float32) / self.width)
            angles_TK = torch.outer(positions_T.float(), steps_K).repeat(1, 2)
            return angles_TK.cos().to(dtype), angles_TK.sin().to(dtype)
        if self.positions == "alibi":
            slopes_H = 2.0 ** (-8.0 * torch.arange(1, self.heads + 1) / self.heads)
            # One row for all queries: softmax does not see what a row has in common (Press et al. 2022, section 3).
            return ((slopes_H[:, None, None] * positions_T).to(dtype),)
        return ()


class Bert(nn.Module):
    """An encoder with its two heads of pre-training: masked tokens, and whether one text follows another."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.token = nn.Embedding(shape.vocabulary, shape.hidden)
        self.position = nn.Embedding(max(shape.places, shape.length), shape.hidden)
        self.kind = nn.Embedding(2, shape.hidden)
        self.norm = nn.LayerNorm(shape.hidden)
        self.dropout = nn.Dropout(shape.dropout)
        self.blocks = nn.ModuleList(StandardBlock(shape) for _ in range(shape.layers))
        self.pooler = nn.Linear(shape.hidden, shape.hidden)
        self.transform = nn.Linear(shape.hidden, shape.hidden)
        self.transform_norm = nn.LayerNorm(shape.hidden)
        self.head = nn.Linear(shape.hidden, shape.vocabulary)
        self.head.weight = self.token.weight
        self.follows = nn.Linear(shape.hidden, 2)

    def forward(self, tokens_BT: Tensor, kinds_BT: Tensor) -> Any:
        """Return logits of tokens (B, T, V), and of the two answers (B, 2)."""
        positions_T = torch.arange(tokens_BT.shape[1])
        x_BTD = self.token(tokens_BT) + self.position(positions_T) + self.kind(kinds_BT)
        x_BTD = self.dropout(self.norm(x_BTD))
        for block in self.blocks:
            x_BTD = block(x_BTD)
        answers = self.follows(torch.tanh(self.pooler(x_BTD[:, 0])))
        return self.head(self.transform_norm(F.gelu(self.transform(x_BTD)))), answers


class Bottleneck(nn.Module):
    """Three convolutions, added to the input."""

    def __init__(self, channels: int, inner: int, stride: int) -> None:
        super().__init__()
        out = 4 * inner
        self.conv_1 = nn.Conv2d(channels, inner, 1, bias=False)
        self.conv_2 = nn.Conv2d(inner, inner, 3, stride, 1, bias=False)
        self.conv_3 = nn.Conv2d(inner, out, 1, bias=False)
        self.norm_1, self.norm_2, self.norm_3 = nn.BatchNorm2d(inner), nn.BatchNorm2d(inner), nn.BatchNorm2d(out)
        self.relu = nn.ReLU(inplace=True)
        changes = stride != 1 or channels != out
        projection = (nn.Conv2d(channels, out, 1, stride, bias=False), nn.BatchNorm2d(out))
        self.shortcut = nn.Sequential(*projection) if changes else None

    def forward(self, x: Tensor) -> Tensor:
        """Return the images (B, channels, height, width) after this block."""
        y = self.relu(self.norm_1(self.conv_1(x)))
        y = self.relu(self.norm_2(self.conv_2(y)))
        y = self.norm_3(self.conv_3(y))
        y += x if self.shortcut is None else self.shortcut(x)
        return self.relu(y)


class ResNet50(nn.Module):
    """Images (B, 3, height, width) to logits (B, classes)."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 64, 7, 2, 3, bias=False)
        self.norm = nn.BatchNorm2d(64)
        self.relu = nn.ReLU(inplace=True)
        self.pool = nn.MaxPool2d(3, 2, 1)
        blocks: list[nn.Module] = []
        channels = 64
        for count, inner, stride in ((3, 64, 1), (4, 128, 2), (6, 256, 2), (3, 512, 2)):
            for index in range(count):
                blocks.append(Bottleneck(4 * inner if index else channels, inner, 1 if index else stride))
            channels = 4 * inner
        self.blocks = nn.Sequential(*blocks)
        self.mean = nn.AdaptiveAvgPool2d(1)
        self.head = nn.Linear(channels, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits of the classes."""
        x = self.pool(self.relu(self.norm(self.stem(x))))
        return self.head(self.mean(self.blocks(x)).flatten(1))
