"""Models of the record, in plain PyTorch: Llama, GPT-2, BERT, ResNet-50, and Llama with LoRA.

Values are tiled from one small random block: billions of random numbers would take longer than the measurement.

Shapes: B samples, T tokens, D width, H heads, K width of a head, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_BLOCK = 1_000_003  # random values that are tiled: a prime, so that rows of a weight differ


@dataclass(frozen=True, kw_only=True)
class Size:
    """A transformer's size.

    Attributes:
        key_heads: heads of keys and values; fewer than ``heads`` with grouped-query attention.
        inner: width between the two products of a feed-forward network.
        context: tokens of a sample.
        rank: of LoRA; 0 trains all weights.
        half: True if LoRA's frozen weights are bf16; else fp32.
    """

    layers: int
    width: int
    heads: int
    key_heads: int
    inner: int
    vocabulary: int
    context: int
    rank: int = 0
    half: bool = True

    @property
    def dtype(self) -> torch.dtype:
        """Type of all weights but the adapters'."""
        return torch.bfloat16 if self.rank and self.half else torch.float32


def make(build: Callable[[], nn.Module]) -> nn.Module:
    """Build a model on the host with cheap values, the same at every call; without values on the meta device."""
    on_meta = torch.get_default_device().type == "meta"
    with torch.device("meta"):
        model = build()
    return model if on_meta else fill(model.to_empty(device="cpu"))


@torch.no_grad()
def fill(model: nn.Module) -> nn.Module:
    """Give every parameter and buffer a value: weights have a standard deviation of 0.02, less before a residual."""
    block = torch.randn(_BLOCK, generator=torch.Generator("cpu").manual_seed(0)) * 0.02
    depth = max([len(part) for part in model.modules() if isinstance(part, nn.ModuleList)] or [1])
    made: dict[tuple[str, torch.dtype], Tensor] = {}
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1:
            parameter.fill_(0.0 if name.endswith("bias") else 1.0)
            continue
        key = (str(parameter.device), parameter.dtype)
        source = made.setdefault(key, block.to(parameter.device, parameter.dtype))
        flat, size = parameter.view(-1), parameter.numel()
        whole = size // _BLOCK * _BLOCK
        flat[:whole].view(-1, _BLOCK).copy_(source.expand(whole // _BLOCK, -1))
        flat[whole:].copy_(source[: size - whole])
        if parameter.ndim == 4:  # a convolution: He et al. 2015
            parameter.mul_(50 * (2 / parameter[0].numel()) ** 0.5)
        elif ".last" in name:
            parameter.mul_((2 * depth) ** -0.5)
    for name, buffer in model.named_buffers():
        buffer.fill_(1 if name.endswith("running_var") else 0)
    return model


def linear(size: Size, inputs: int, outputs: int, *, bias: bool = False) -> nn.Module:
    """Return a linear layer, or a frozen one in bf16 with an adapter if ``size`` has a LoRA rank."""
    return Adapted(size, inputs, outputs) if size.rank else nn.Linear(inputs, outputs, bias=bias)


class Adapted(nn.Module):
    """Linear layer of LoRA (Hu et al. 2021): a frozen weight plus a trained product of two thin ones in fp32.

    Both thin weights begin at random, so that every gradient of the first step differs from 0.
    """

    def __init__(self, size: Size, inputs: int, outputs: int) -> None:
        super().__init__()
        self.base = nn.Linear(inputs, outputs, bias=False, dtype=size.dtype).requires_grad_(False)
        self.down = nn.Linear(inputs, size.rank, bias=False)
        self.up = nn.Linear(size.rank, outputs, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        base = F.linear(x.to(self.base.weight.dtype), self.base.weight)
        return base + self.up(self.down(x)).to(base.dtype)


class RMSNorm(nn.Module):
    """Division by the root mean square (Zhang and Sennrich 2019), computed in fp32."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size.width, dtype=size.dtype), requires_grad=not size.rank)

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5)).to(x.dtype) * self.weight


def rotated(x_BHTK: Tensor, cos_TK: Tensor, sin_TK: Tensor) -> Tensor:
    """Rotate pairs of features by the token's position (Su et al. 2021)."""
    first, second = x_BHTK.chunk(2, dim=-1)
    return x_BHTK * cos_TK.to(x_BHTK.dtype) + torch.cat((-second, first), dim=-1) * sin_TK.to(x_BHTK.dtype)


class LlamaBlock(nn.Module):
    """Attention with rotary positions and grouped queries, then SwiGLU; each after an RMSNorm."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.head = size.width // size.heads
        self.grouped = size.heads != size.key_heads
        self.norm_1, self.norm_2 = RMSNorm(size), RMSNorm(size)
        self.query = linear(size, size.width, size.width)
        self.key, self.value = (linear(size, size.width, size.key_heads * self.head) for _ in range(2))
        self.last_1 = linear(size, size.width, size.width)
        self.gate, self.up = (linear(size, size.width, size.inner) for _ in range(2))
        self.last_2 = linear(size, size.inner, size.width)

    def forward(self, x_BTD: Tensor, cos_TK: Tensor, sin_TK: Tensor) -> Tensor:
        h_BTD = self.norm_1(x_BTD)
        q, k, v = (
            one(h_BTD).unflatten(-1, (-1, self.head)).transpose(1, 2) for one in (self.query, self.key, self.value)
        )
        q, k = rotated(q, cos_TK, sin_TK), rotated(k, cos_TK, sin_TK)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.grouped)
        x_BTD = x_BTD + self.last_1(mixed.transpose(1, 2).flatten(2))
        h_BTD = self.norm_2(x_BTD)
        return x_BTD + self.last_2(F.silu(self.gate(h_BTD)) * self.up(h_BTD))


class Llama(nn.Module):
    """Decoder of Touvron et al. 2023 with an untied head."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.pairs = size.width // size.heads // 2
        frozen, dtype = size.rank > 0, size.dtype
        self.token = nn.Embedding(size.vocabulary, size.width, dtype=dtype).requires_grad_(not frozen)
        self.blocks = nn.ModuleList(LlamaBlock(size) for _ in range(size.layers))
        self.norm = RMSNorm(size)
        self.out = nn.Linear(size.width, size.vocabulary, bias=False, dtype=dtype).requires_grad_(not frozen)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        """Logits of shape (B, T, V)."""
        place = torch.arange(tokens_BT.shape[1], device=tokens_BT.device, dtype=torch.float32)
        pace = torch.arange(self.pairs, device=tokens_BT.device, dtype=torch.float32) / self.pairs
        angle_TK = (place[:, None] * torch.exp(-9.210340371976184 * pace)).repeat(1, 2)  # 10,000 ** -pace
        cos_TK, sin_TK = angle_TK.cos(), angle_TK.sin()
        x_BTD = self.token(tokens_BT)
        for block in self.blocks:
            x_BTD = block(x_BTD, cos_TK, sin_TK)
        x_BTD = self.norm(x_BTD)
        return F.linear(x_BTD.to(self.out.weight.dtype), self.out.weight)


class Block(nn.Module):
    """Transformer block of GPT-2 (norms first, causal) or of BERT (norms last, both directions)."""

    def __init__(self, size: Size, *, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal = size.heads, causal
        self.norm_1, self.norm_2 = nn.LayerNorm(size.width), nn.LayerNorm(size.width)
        self.query_key_value = nn.Linear(size.width, 3 * size.width)
        self.last_1 = nn.Linear(size.width, size.width)
        self.up, self.last_2 = nn.Linear(size.width, size.inner), nn.Linear(size.inner, size.width)

    def attend(self, x_BTD: Tensor) -> Tensor:
        q, k, v = (
            one.unflatten(-1, (self.heads, -1)).transpose(1, 2) for one in self.query_key_value(x_BTD).chunk(3, dim=-1)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return self.last_1(mixed.transpose(1, 2).flatten(2))

    def forward(self, x_BTD: Tensor) -> Tensor:
        if self.causal:
            x_BTD = x_BTD + self.attend(self.norm_1(x_BTD))
            return x_BTD + self.last_2(F.gelu(self.up(self.norm_2(x_BTD))))
        x_BTD = self.norm_1(x_BTD + self.attend(x_BTD))
        return self.norm_2(x_BTD + self.last_2(F.gelu(self.up(x_BTD))))


class Transformer(nn.Module):
    """GPT-2 (Radford et al. 2019) or BERT with its head for masked tokens (Devlin et al. 2018); heads are tied."""

    def __init__(self, size: Size, *, causal: bool) -> None:
        super().__init__()
        self.token = nn.Embedding(size.vocabulary, size.width)
        self.place = nn.Embedding(size.context, size.width)
        self.blocks = nn.ModuleList(Block(size, causal=causal) for _ in range(size.layers))
        self.norm = nn.LayerNorm(size.width)
        self.transform = nn.Identity() if causal else nn.Sequential(nn.Linear(size.width, size.width), nn.GELU())

    def forward(self, tokens_BT: Tensor) -> Tensor:
        """Logits of shape (B, T, V)."""
        places_T = torch.arange(tokens_BT.shape[1], device=tokens_BT.device)
        x_BTD = self.token(tokens_BT) + self.place(places_T)
        for block in self.blocks:
            x_BTD = block(x_BTD)
        return F.linear(self.norm(self.transform(x_BTD)), self.token.weight)


def norm(channels: int, *, groups: int) -> nn.Module:
    """Return BatchNorm, or GroupNorm, which computes the same under every plan."""
    return nn.GroupNorm(groups, channels) if groups else nn.BatchNorm2d(channels)


class Bottleneck(nn.Module):
    """1 x 1, 3 x 3 and 1 x 1 convolutions around a shortcut; the stride is in the 3 x 3."""

    def __init__(self, channels: int, width: int, stride: int, groups: int) -> None:
        super().__init__()
        self.residual = nn.Sequential(
            nn.Conv2d(channels, width, 1, bias=False),
            norm(width, groups=groups),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, stride, padding=1, bias=False),
            norm(width, groups=groups),
            nn.ReLU(),
            nn.Conv2d(width, 4 * width, 1, bias=False),
            norm(4 * width, groups=groups),
        )
        self.shortcut = nn.Sequential()
        if stride > 1 or channels != 4 * width:
            self.shortcut = nn.Sequential(
                nn.Conv2d(channels, 4 * width, 1, stride, bias=False), norm(4 * width, groups=groups)
            )

    def forward(self, x_BCHW: Tensor) -> Tensor:
        return F.relu(self.residual(x_BCHW) + self.shortcut(x_BCHW))


class ResNet(nn.Module):
    """Residual network of He et al. 2015, v1.5; ``stages`` are pairs of width and blocks, ``groups`` of GroupNorm."""

    def __init__(self, stages: tuple[tuple[int, int], ...], classes: int, groups: int = 0) -> None:
        super().__init__()
        first = stages[0][0]
        self.stem = nn.Sequential(
            nn.Conv2d(3, first, 7, 2, padding=3, bias=False),
            norm(first, groups=groups),
            nn.ReLU(),
            nn.MaxPool2d(3, 2, padding=1),
        )
        channels, self.blocks = first, nn.ModuleList()
        for stage, (width, depth) in enumerate(stages):
            for index in range(depth):
                self.blocks.append(Bottleneck(channels, width, 2 if stage and not index else 1, groups))
                channels = 4 * width
        self.classify = nn.Linear(channels, classes)

    def forward(self, image_BCHW: Tensor) -> Tensor:
        """Logits of shape (B, classes)."""
        x_BCHW = self.stem(image_BCHW.contiguous(memory_format=torch.channels_last))
        for block in self.blocks:
            x_BCHW = block(x_BCHW)
        return self.classify(x_BCHW.mean(dim=(2, 3)))
