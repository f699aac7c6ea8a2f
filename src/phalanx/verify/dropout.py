"""Dropout that is the same however a batch is split: masks are drawn by sample and layer.

A proof switches dropout off, or on request draws it so: whether an element is kept is a hash of the job's seed, the
step, the sample's id, the layer's name, which of the layer's calls it is, and the element's place within the sample (a
counter-based generator in the sense of Salmon et al. 2011, with SplitMix64's finaliser). No rank, no micro-batch and no
order is in it, so that a plan drops what one device drops, and a plan that drops anything else is unequal.

Samples are along the first dimension, alone or with what is within a sample (tokens) folded into it; or along the
second, where the first has another length. What is of no sample, such as a weight, is drawn by layer and step.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any
from zlib import crc32

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from phalanx.train import step as steps
from phalanx.train.rng import stream

_BITS = 24  # of a fp32 number in [0, 1)


@dataclass(slots=True)
class _Micro:
    """What one thread computes on: the step, the samples' ids, and the layers that are running."""

    step: int = 0
    ids: tuple[int, ...] = ()
    running: list[tuple[str, Iterator[int]]] = field(default_factory=list[tuple[str, Iterator[int]]])


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a mask is drawn: everything that it is drawn by but the elements' places."""

    step: int
    ids: tuple[int, ...]
    layer: str
    call: int


class BySample:
    """Masks by sample and layer, in place of torch's, for one job in this process."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._names: dict[int, str] = {}
        self._here = threading.local()
        self._drawn: dict[int, _Place] = {}

    def install(self) -> None:
        """From now on every dropout of this process is drawn so; what cannot be is the identity."""
        off = ("alpha_dropout", "feature_alpha_dropout")
        for name in off:
            setattr(functional, name, lambda input, *_, **__: input)
        functional.dropout = self._dropout
        for dims in (1, 2, 3):
            setattr(functional, f"dropout{dims}d", self._of_channels)
        functional.scaled_dot_product_attention = self._attention(functional.scaled_dot_product_attention)
        register_module_forward_pre_hook(self._begins)
        register_module_forward_hook(self._ends, always_call=True)
        work_of_a_step: Any = steps._Work
        forward, micro_of = work_of_a_step.forward, self._micro

        def told(work: Any, module: nn.Module, device: torch.device, micro: Any) -> Any:
            here = micro_of()
            here.step, here.ids, here.running = work._step.progress.step, micro.ids, []
            self._names = self._names or {
                id(child): name for name, child in work._step.layout.module.named_modules() if name
            }
            return forward(work, module, device, micro)

        work_of_a_step.forward = told

    def mask(self, shape: Sequence[int], rate: float, device: torch.device, place: _Place) -> Tensor:
        """Which elements are kept: 1, over the share that is, or 0."""
        keys, each = self._keys(shape, place)
        numbers = torch.arange(1, each + 1, dtype=torch.int64).unsqueeze(0) * _signed(0x9E3779B97F4A7C15)
        drawn = _mixed(torch.tensor(keys, dtype=torch.int64).unsqueeze(1) + numbers)
        kept = _shifted(drawn, 64 - _BITS) >= round(rate * 2**_BITS)
        mask = kept.to(torch.float32) / (1.0 - rate) if rate < 1.0 else kept.to(torch.float32) * 0.0
        return _laid_out(mask, shape, len(place.ids)).to(device)

    def _keys(self, shape: Sequence[int], place: _Place) -> tuple[list[int], int]:
        words = (place.step, crc32(place.layer.encode()), place.call)
        samples = len(place.ids)
        along = _along(shape, samples)
        if along is None:
            return [stream(self._seed, *words)], math.prod(shape)
        return [stream(self._seed, *words, 1 + one) for one in place.ids], math.prod(shape) // samples

    def _dropout(self, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        if not training or p == 0.0:
            return input
        return self._times(input, tuple(input.shape), p, inplace)

    def _of_channels(self, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        if not training or p == 0.0:
            return input
        return self._times(input, (*input.shape[:2], *(1 for _ in input.shape[2:])), p, inplace)

    def _times(self, input: Tensor, shape: Sequence[int], rate: float, inplace: bool) -> Tensor:
        """``input`` times its mask: one operation, on stages of a pipeline that only follow the model as well."""
        if isinstance(input, FakeTensor):
            return input * 1.0
        with torch._C.DisableTorchFunction():
            mask = self.mask(shape, rate, input.device, self._place(input.device)).to(input.dtype)
        return input.mul_(mask) if inplace else input * mask

    def _attention(self, fused: Any) -> Any:
        def attention(
            query: Tensor,
            key: Tensor,
            value: Tensor,
            attn_mask: Tensor | None = None,
            dropout_p: float = 0.0,
            is_causal: bool = False,
            **named: Any,
        ) -> Tensor:
            if dropout_p == 0.0:
                return fused(query, key, value, attn_mask, 0.0, is_causal, **named)
            if named.get("enable_gqa"):
                times = query.shape[-3] // key.shape[-3]
                key, value = key.repeat_interleave(times, -3), value.repeat_interleave(times, -3)
            scores = query @ key.transpose(-2, -1) * (named.get("scale") or 1.0 / math.sqrt(query.shape[-1]))
            if is_causal:
                scores = scores.masked_fill(
                    torch.ones(scores.shape[-2:], dtype=torch.bool, device=query.device).triu(1), -math.inf
                )
            if attn_mask is not None:
                barred = attn_mask.dtype == torch.bool
                scores = scores.masked_fill(~attn_mask, -math.inf) if barred else scores + attn_mask
            return self._dropout(scores.softmax(-1), dropout_p) @ value

        return attention

    def _place(self, device: torch.device) -> _Place:
        """Where this call is; one that is computed a second time for backward is where it was the first time.

        A second time nobody says what is computed, but the stream of random numbers is what it was: one number of it
        names the call.
        """
        name = int(torch.randint(2**62, (), device=device))
        if name not in self._drawn:
            micro = self._micro()
            layer, calls = micro.running[-1] if micro.running else ("", count())
            if len(self._drawn) > _MOST_CALLS:
                self._drawn.clear()
            self._drawn[name] = _Place(micro.step, micro.ids, layer, next(calls))
        return self._drawn[name]

    def _micro(self) -> _Micro:
        if not hasattr(self._here, "micro"):
            self._here.micro = _Micro()
        return self._here.micro

    def _begins(self, module: nn.Module, _: Any) -> None:
        self._micro().running.append((self._names.get(id(module), ""), count()))

    def _ends(self, *_: Any) -> None:
        if self._micro().running:
            self._micro().running.pop()


_MOST_CALLS = 100_000


def off_by_sample(module: nn.Module) -> list[str]:
    """Names of modules whose dropout cannot be drawn by sample, and is off in any proof."""
    kinds = (nn.AlphaDropout, nn.FeatureAlphaDropout, nn.RNNBase)
    return [
        name
        for name, child in module.named_modules()
        if isinstance(child, kinds) and float(getattr(child, "p", getattr(child, "dropout", 0.0))) > 0
    ]


def _along(shape: Sequence[int], samples: int) -> int | None:
    """The dimension along which the samples are."""
    if not samples or not shape:
        return None
    if shape[0] == samples:
        return 0
    if len(shape) > 1 and shape[1] == samples:
        return 1
    return 0 if shape[0] and shape[0] % samples == 0 else None


def _laid_out(mask: Tensor, shape: Sequence[int], samples: int) -> Tensor:
    """``mask`` (samples × elements of one) in the form of what it is for."""
    if _along(shape, samples) == 1:
        return mask.reshape(samples, shape[0], *shape[2:]).transpose(0, 1)
    return mask.reshape(tuple(shape))


def _signed(word: int) -> int:
    return word - (1 << 64) if word >= 1 << 63 else word


def _shifted(words: Tensor, by: int) -> Tensor:
    """Without the sign that int64 shifts in."""
    return (words >> by) & ((1 << (64 - by)) - 1)


def _mixed(words: Tensor) -> Tensor:
    words = (words ^ _shifted(words, 30)) * _signed(0xBF58476D1CE4E5B9)
    words = (words ^ _shifted(words, 27)) * _signed(0x94D049BB133111EB)
    return words ^ _shifted(words, 31)
