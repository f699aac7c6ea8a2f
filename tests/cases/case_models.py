"""Small models as people write them: each has one habit that plans must cope with."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

FEATURES, WIDTH, CLASSES, WORDS = 12, 16, 4, 30


class Branch(nn.Sequential):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__(nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))


class Residual(nn.Module):
    def __init__(self, layers: int = 4) -> None:
        super().__init__()
        self.stem = nn.Linear(FEATURES, WIDTH)
        self.branches = nn.ModuleList([Branch() for _ in range(layers)])
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for branch in self.branches:
            x = x + self.add(branch, x)
        return self.head(x)

    def add(self, branch: Any, x: Tensor) -> Tensor:
        return branch(x)


class ByKeyword(Residual):
    def forward(self, **given: Tensor) -> Tensor:
        return super().forward(given["x"])


class Tempered(Residual):
    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.temperature.exp()


class ManyOutputs(Residual):
    def forward(self, x: Tensor) -> tuple[Tensor, dict[str, Tensor], list[Tensor | None]]:
        logits = super().forward(x)
        return logits, {"penalty": logits.square().mean(-1)}, [logits, None]


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.memory = nn.LSTM(3, WIDTH, 2, batch_first=True, dropout=0.2)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.memory(x.unflatten(-1, (4, 3)))[0][:, -1])


class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(FEATURES, WIDTH)
        self.stages = nn.ModuleDict(
            {name: nn.ModuleDict({"mix": Branch(), "gate": nn.Linear(WIDTH, WIDTH)}) for name in ("low", "mid", "high")}
        )
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        stage: Any
        for stage in self.stages.values():
            x = x + stage["mix"](x) * torch.sigmoid(stage["gate"](x))
        return self.head(x)


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 2 * ctx.saved_tensors[0] * grad


square: Any = Square.apply


class Opened(Residual):
    """Calls what is inside its branches, and a function with its own backward between."""

    def add(self, branch: Any, x: Tensor) -> Tensor:
        norm, up, _, down = branch
        return down(0.1 * square(up(norm(x))))


class Recomputing(Residual):
    def __init__(self, *, reentrant: bool = False) -> None:
        super().__init__()
        self.reentrant = reentrant

    def add(self, branch: Any, x: Tensor) -> Tensor:
        return checkpoint(branch, x, use_reentrant=self.reentrant)


class Taught(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.teacher, self.student = Residual(6), Residual(2)
        self.teacher.requires_grad_(False).eval()

    def train(self, mode: bool = True) -> Taught:
        super().train(mode)
        self.teacher.eval()
        return self

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        with torch.no_grad():
            taught = self.teacher(x)
        return {"taught": taught, "found": self.student(x)}


class Adapted(nn.Module):
    """A frozen layer beside a product of two thin ones, of which the second begins at zero."""

    def __init__(self, layer: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.into = nn.Linear(layer.in_features, rank, bias=False)
        self.out = nn.Linear(rank, layer.out_features, bias=False)
        nn.init.zeros_(self.out.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + 2.0 * self.out(self.into(x))


class Adapters(Residual):
    """Frozen but for adapters, each of which has a half without gradient in the first step."""

    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)
        for branch in self.branches:
            for at in (1, 3):
                branch[at] = Adapted(branch[at])


class FrozenTable(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.branches = nn.ModuleList([Branch() for _ in range(4)])
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.words.weight
        self.words.weight.requires_grad_(False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids)
        for branch in self.branches:
            x = x + branch(x)
        return self.head(x)


class Encoder(nn.Module):
    """A masked language model: attention under a padding mask, recomputed layers, a head tied to the table."""

    def __init__(self, *, layers: int = 2, heads: int = 2) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH, padding_idx=0), nn.Embedding(16, WIDTH)
        self.layers = nn.ModuleList([EncoderLayer(heads) for _ in range(layers)])
        self.last = nn.LayerNorm(WIDTH)
        self.decoder = nn.Linear(WIDTH, WORDS)
        self.decoder.weight = self.words.weight

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        x = self.words(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
        seen = mask[:, None, None, :].bool()
        for layer in self.layers:
            x = checkpoint(layer, x, seen, use_reentrant=False)
        return self.decoder(self.last(x))


class EncoderLayer(nn.Module):
    def __init__(self, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.out = nn.Linear(WIDTH, WIDTH)
        self.branch = Branch()

    def forward(self, x: Tensor, seen: Tensor) -> Tensor:
        q, k, v = (
            part(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in (self.query, self.key, self.value)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=seen)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.branch(x)


class Tabled(Residual):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("ramp", torch.linspace(-0.1, 0.1, FEATURES))
        self.register_buffer("ones", torch.ones(FEATURES), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * self.ones + self.ramp)


class Centred(Residual):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("centre", torch.zeros(FEATURES))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.centre.lerp_(x.detach().mean(0), 0.2)
        return super().forward(x - self.centre)


class Normed(Residual):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(FEATURES)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.norm(x))


class Jittered(Residual):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + 0.05 * torch.randn_like(x) if self.training else x)


class Views(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = Residual(2), Residual(2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.left(x), self.right(x.flip(-1))


class Bags(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH, sparse=True)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.words(ids).mean(1))


class LeftOver(Residual):
    def __init__(self) -> None:
        super().__init__()
        self.forgotten = nn.Linear(3, 3)
