"""Attention of one tile: some queries and some of the keys, a part of a softmax over all.

A tile's result is its queries' attention to its own keys, and the logarithm of the sum of their weights, by which the
results of several tiles are merged (Milakov & Gimelshein 2018). In backward a tile is given the result and logarithm
over *all* keys; its gradients are then those of its own keys in the whole, and add up (Dao et al. 2022, appendix B).

Shapes: queries (batch, heads, tokens, features); keys and values may have fewer heads; logarithms (batch, heads,
tokens) in float32, or in float64 for queries in float64.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from phalanx.device_kinds import kind_of

_aten = torch.ops.aten
Gradients = tuple[Tensor, Tensor, Tensor, Tensor | None]
"""Of queries, keys, values, and bias where that has one."""

_HALVES = (torch.float16, torch.bfloat16)


@dataclass(frozen=True, slots=True)
class SdpaArgs:
    """The other arguments of torch's ``scaled_dot_product_attention``."""

    mask: Any  # of booleans, or added to the scores
    dropout: float  # share of the weights that are dropped
    causal: bool  # whether a token attends to itself and earlier ones only
    scale: float | None  # of the scores; None for one over the root of the features
    grouped: bool  # whether several heads of queries read one of keys

    def masked(self, mask: Any) -> SdpaArgs:
        return replace(self, mask=mask)

    def run(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(
            q, k, v, self.mask, self.dropout, self.causal, scale=self.scale, enable_gqa=self.grouped
        )


@dataclass(frozen=True, slots=True)
class Tile:
    """Queries and their keys."""

    q: Tensor
    k: Tensor
    v: Tensor
    # Added to the scores, or booleans that say which count; broadcast over all but the last two dimensions.
    bias: Tensor | None = None
    causal: bool = False  # whether query i meets keys 0 to i only
    seed: int = 0  # of its dropout


class Kernel(Protocol):
    """An implementation of tiles."""

    def forward(self, tile: Tile) -> tuple[Tensor, Tensor]:
        """Return the result and the logarithm; 0 and minus infinity for a query without keys."""
        ...

    def backward(self, tile: Tile, grad: Tensor, out: Tensor, lse: Tensor) -> Gradients:
        """Return gradients from the gradient of the result over all keys."""
        ...


def kernel_for(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *, scale: float | None, dropout: float) -> Kernel:
    """Return the fastest kernel for these tensors, whose features must be contiguous."""
    factor = q.shape[-1] ** -0.5 if scale is None else scale
    plain = UnfusedAttention(factor, dropout)
    if dropout or q.shape[-1] != v.shape[-1] or (mask is not None and mask.requires_grad):
        return plain
    kind = kind_of(q.device)
    fused = kind.attention()
    if kind.torch_type != q.device.type:  # meta
        return plain
    if kind.on_host:
        fits = q.dtype in (torch.float32, torch.float64, *_HALVES)
        return OnCpu(factor) if fits and fused.flash else plain
    if q.shape[-1] % fused.features or q.shape[-1] > fused.most_features:
        return plain
    if fused.flash and mask is None and q.dtype in _HALVES:
        return Flash(factor)
    if q.dtype in (torch.float32, *_HALVES) and fused.efficient:
        return Efficient(factor)
    return plain


@dataclass(frozen=True, slots=True)
class UnfusedAttention:
    """Plain attention, in float32 at least, for cases without a fused kernel, such as dropout and gradients of
    masks.
    """

    scale: float
    dropout: float = 0.0

    def forward(self, tile: Tile) -> tuple[Tensor, Tensor]:
        q, k, v = _wide(tile)
        scores = self._scores(tile, q, k)
        top = scores.amax(-1, keepdim=True)
        top = top.masked_fill(top == -torch.inf, 0)
        weights = (scores - top).exp()
        total = weights.sum(-1, keepdim=True)
        kept = self._kept(tile, weights)
        out = (weights if kept is None else weights * kept) @ v / total.masked_fill(total == 0, 1)
        return out.to(tile.q.dtype), (top + total.log()).squeeze(-1)

    def backward(self, tile: Tile, grad: Tensor, out: Tensor, lse: Tensor) -> Gradients:
        q, k, v = _wide(tile)
        grad, out = grad.to(q.dtype), out.to(q.dtype)
        weights = (self._scores(tile, q, k) - lse.unsqueeze(-1)).exp()
        kept = self._kept(tile, weights)
        to_weights = grad @ v.transpose(-1, -2)
        if kept is not None:
            to_weights = to_weights * kept
        to_scores = weights * (to_weights - (grad * out).sum(-1, keepdim=True))
        bias = tile.bias
        return (
            to_scores @ k * self.scale,
            _grouped(to_scores.transpose(-1, -2) @ q * self.scale, tile.k),
            _grouped((weights if kept is None else weights * kept).transpose(-1, -2) @ grad, tile.v),
            to_scores.sum_to_size(bias.shape) if bias is not None and bias.is_floating_point() else None,
        )

    def _scores(self, tile: Tile, q: Tensor, k: Tensor) -> Tensor:
        scores = q @ k.transpose(-1, -2) * self.scale
        if tile.bias is not None:
            scores = scores + _added(tile.bias, q.dtype)
        if tile.causal:
            later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
            scores = scores.masked_fill(later, -torch.inf)
        return scores

    def _kept(self, tile: Tile, like: Tensor) -> Tensor | None:
        if not self.dropout:
            return None
        if self.dropout >= 1:
            return torch.zeros_like(like)
        generator = torch.Generator(like.device).manual_seed(tile.seed)
        drawn = torch.rand(like.shape, generator=generator, device=like.device)
        return (drawn >= self.dropout).to(like.dtype) / (1 - self.dropout)


@dataclass(frozen=True, slots=True)
class OnCpu:
    """torch's fused attention for CPUs, with grouped heads."""

    scale: float

    def forward(self, tile: Tile) -> tuple[Tensor, Tensor]:
        if tile.causal and tile.bias is not None:
            return UnfusedAttention(self.scale).forward(tile)
        bias = None if tile.bias is None else _added(tile.bias, tile.q.dtype)
        out, lse = _aten._scaled_dot_product_flash_attention_for_cpu(
            tile.q, tile.k, tile.v, 0.0, tile.causal, attn_mask=bias, scale=self.scale
        )
        # Minus infinity for queries that meet no key, where torch says 0.
        return out, lse if bias is None else lse.masked_fill(_dead(bias), -torch.inf)

    def backward(self, tile: Tile, grad: Tensor, out: Tensor, lse: Tensor) -> Gradients:
        if tile.causal and tile.bias is not None:
            return UnfusedAttention(self.scale).backward(tile, grad, out, lse)
        bias = None if tile.bias is None else _added(tile.bias, tile.q.dtype)
        found = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, tile.q, tile.k, tile.v, out, lse, 0.0, tile.causal, attn_mask=bias, scale=self.scale
        )
        return (*found, None)


@dataclass(frozen=True, slots=True)
class Flash:
    """torch's FlashAttention for CUDA, with grouped heads and without masks."""

    scale: float

    def forward(self, tile: Tile) -> tuple[Tensor, Tensor]:
        found = _aten._scaled_dot_product_flash_attention(
            tile.q, tile.k, tile.v, 0.0, tile.causal, False, scale=self.scale
        )
        return found[0], found[1]

    def backward(self, tile: Tile, grad: Tensor, out: Tensor, lse: Tensor) -> Gradients:
        # The state of a dropout that there is not.
        unused = (torch.empty(shape, dtype=torch.uint64, device=tile.q.device) for shape in ((2,), ()))
        given = (grad, tile.q, tile.k, tile.v, out, lse.contiguous(), None, None, tile.q.shape[2], tile.k.shape[2])
        found = _aten._scaled_dot_product_flash_attention_backward(*given, 0.0, tile.causal, *unused, scale=self.scale)
        return (*found, None)


@dataclass(frozen=True, slots=True)
class Efficient:
    """torch's memory-efficient attention for CUDA, with float32 and masks; keys need as many heads as queries."""

    scale: float

    def forward(self, tile: Tile) -> tuple[Tensor, Tensor]:
        k, v = _repeated(tile.k, tile.q), _repeated(tile.v, tile.q)
        bias = self._bias(tile)
        out, lse, *_ = _aten._scaled_dot_product_efficient_attention(
            tile.q, k, v, bias, True, 0.0, tile.causal, scale=self.scale
        )
        lse = lse[..., : tile.q.shape[2]]
        if bias is not None:
            dead = _dead(bias)
            out, lse = out.masked_fill(dead.unsqueeze(-1), 0), lse.masked_fill(dead, -torch.inf)
        return out, lse

    def backward(self, tile: Tile, grad: Tensor, out: Tensor, lse: Tensor) -> Gradients:
        # The kernel reads logarithms in rows of 32, and infinity as none.
        lse = F.pad(lse, (0, -lse.shape[-1] % 32), value=torch.inf).contiguous()
        state = torch.zeros((), dtype=torch.int64, device=tile.q.device)
        k, v = _repeated(tile.k, tile.q), _repeated(tile.v, tile.q)
        wanted = [True, True, True, False]
        given = (grad, tile.q, k, v, self._bias(tile), out, lse, state, state, 0.0, wanted, tile.causal)
        dq, dk, dv, _ = _aten._scaled_dot_product_efficient_attention_backward(*given, scale=self.scale)
        return dq, _grouped(dk, tile.k), _grouped(dv, tile.v), None

    @staticmethod
    def _bias(tile: Tile) -> Any:
        if tile.bias is None:
            return None
        bias = _added(tile.bias, tile.q.dtype)
        rows, keys = tile.q.shape[2], tile.k.shape[2]
        bias = bias.expand(*bias.shape[:2], bias.shape[2], keys)
        bias = F.pad(bias, (0, -keys % 16)).contiguous()[..., :keys]
        return bias.expand(*tile.q.shape[:2], rows, keys)


def _wide(tile: Tile) -> tuple[Tensor, Tensor, Tensor]:
    dtype = torch.float64 if tile.q.dtype == torch.float64 else torch.float32
    return tile.q.to(dtype), _repeated(tile.k, tile.q).to(dtype), _repeated(tile.v, tile.q).to(dtype)


def _repeated(keys: Tensor, q: Tensor) -> Tensor:
    each = q.shape[1] // keys.shape[1]
    return keys if each == 1 else keys.repeat_interleave(each, 1)


def _grouped(grad: Tensor, keys: Tensor) -> Tensor:
    if grad.shape[1] == keys.shape[1]:
        return grad
    return grad.unflatten(1, (keys.shape[1], -1)).sum(2)


def _added(bias: Tensor, dtype: torch.dtype) -> Tensor:
    if bias.dtype != torch.bool:
        return bias.to(dtype)
    return torch.zeros(bias.shape, dtype=dtype, device=bias.device).masked_fill_(~bias, -torch.inf)


def _dead(bias: Tensor) -> Tensor:
    return (bias == -torch.inf).all(-1)
