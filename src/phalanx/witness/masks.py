"""Dropout drawn by sample and layer, for the plain loop: the rule of the documentation, in lines of its own.

``docs/explanation/proof.md`` ("Masks by sample and layer") says what is hashed. Nothing of Phalanx's own masks is
called; what both take from the same place is the rule.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch
from zlib import crc32

import numpy as np
import torch
from torch import Tensor, nn

from phalanx.witness.samples import stream_seed

Shape = Sequence[int]


class KeyedMasks:
    """Draws every mask of a model while ``drawing``.

    Attributes:
        of_no_sample: name → the shapes, over all steps, of masks in none of whose dimensions the samples were found.
    """

    def __init__(self, seed: int) -> None:
        self.of_no_sample: dict[str, list[list[int]]] = {}
        self._seed = seed
        self.begin(0, [])

    def begin(self, step: int, ids: list[int]) -> None:
        """What comes is the forward of this step, on the samples with these numbers."""
        self._step, self._ids = step, ids
        self._stack: list[dict[str, Any]] = [{"path": "", "masks": 0}]
        self._known: dict[int, str] = {}

    @contextmanager
    def drawing(self, model: nn.Module) -> Iterator[None]:
        """While inside, dropout of any kind in training is drawn so; alpha dropout is off."""
        fused = torch.nn.functional.scaled_dot_product_attention
        replaced = {
            **{name: lambda input, *_, **__: input for name in ("alpha_dropout", "feature_alpha_dropout")},
            **{f"dropout{dims}d": self._channels for dims in (1, 2, 3)},
            "dropout": self._elements,
            "scaled_dot_product_attention": lambda *args, **named: self._attention(fused, *args, **named),
        }
        with ExitStack() as stack:
            stack.enter_context(patch.multiple(torch.nn.functional, **replaced))  # pyrefly: ignore[no-matching-overload]
            for name, module in model.named_modules():
                stack.callback(module.register_forward_pre_hook(self._entering(name)).remove)
                stack.callback(module.register_forward_hook(self._leaving, always_call=True).remove)
            yield

    def _entering(self, name: str) -> Any:
        def enter(*_: Any) -> None:
            if not name:  # the model itself
                self._stack = [{"path": "", "masks": 0}] * 2
                return
            above = self._stack[-1]
            times = above[name] = above.get(name, -1) + 1
            self._stack.append({"path": f"{above['path']}/{name}*{times}".removeprefix("/"), "masks": 0})

        return enter

    def _leaving(self, *_: Any) -> None:
        del self._stack[max(1, len(self._stack) - 1) :]

    def _elements(self, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        return self._times(input, list(input.shape), p if training else 0.0, inplace)

    def _channels(self, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        shape = [size if dim < 2 else 1 for dim, size in enumerate(input.shape)]
        return self._times(input, shape, p if training else 0.0, inplace)

    def _attention(
        self,
        fused: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        """By torch's own composite where it drops, which takes a mask."""
        if not dropout_p:
            return fused(query, key, value, attn_mask, 0.0, is_causal, scale=scale, enable_gqa=enable_gqa)
        ones = query.new_ones(*query.shape[:-1], key.size(-2))
        kept = self._times(ones, list(ones.shape), dropout_p, inplace=True) > 0
        plain = torch.ops.aten._scaled_dot_product_attention_math
        return plain(query, key, value, attn_mask, dropout_p, is_causal, kept, scale=scale, enable_gqa=enable_gqa)[0]

    def _times(self, input: Tensor, shape: list[int], rate: float, inplace: bool) -> Tensor:
        if not rate:
            return input
        factors = self._factors(shape, rate, self._name(input.device))
        mask = torch.from_numpy(factors).to(input.device, input.dtype)
        return input.mul_(mask) if inplace else input * mask

    def _name(self, device: torch.device) -> str:
        """The name of the mask; in backward, that of the forward that a checkpoint repeats.

        It repeats the stream of random numbers with it, so that one number drawn from that is the same again.
        """
        drawn = int(torch.randint(2**62, (), device=device))
        if drawn not in self._known:
            top = self._stack[-1]
            self._known[drawn] = f"{top['path']}:{top['masks']}"
            top["masks"] += 1
        return self._known[drawn]

    def _factors(self, shape: list[int], rate: float, name: str) -> np.ndarray[Any, Any]:
        """0, or 1 over the share that is kept, for each element."""
        samples, words = len(self._ids), (self._step, crc32(name.encode()))
        second = len(shape) > 1 and shape[0] != samples and shape[1] == samples
        found = second or (shape and samples and shape[0] % samples == 0)
        if found and name not in self.of_no_sample:  # fewer samples may divide what is not theirs
            keys = [stream_seed(self._seed, *words, 1 + sample) for sample in self._ids]
        else:
            second, keys = False, [stream_seed(self._seed, *words)]
            known = self.of_no_sample.setdefault(name, [])
            known += [shape] if shape not in known else []
        hashes = hashed(keys, math.prod(shape) // len(keys))
        kept = (hashes >> np.uint64(40)) >= np.uint64(round(rate * 2**24))
        factors = kept.astype(np.float32) * (np.float32(1) / np.float32(1 - rate) if rate < 1 else np.float32(0))
        if second:
            return np.ascontiguousarray(factors.reshape(samples, shape[0], *shape[2:]).swapaxes(0, 1))
        return factors.reshape(shape)


def hashed(keys: Sequence[int], many: int) -> np.ndarray[Any, Any]:
    """For each key a row of ``many`` words of 64 bits: SplitMix64 started at the key."""
    words = np.array(keys, np.uint64)[:, None] + np.arange(1, many + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    words = (words ^ words >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ words >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return words ^ words >> np.uint64(31)
