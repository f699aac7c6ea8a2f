"""Looks on while a plan trains with dropout: which masks each process draws, in forward and again in backward.

What is seen is what torch draws, on what this process holds: each call of dropout is made once more with ones in place
of its input, from the same state of the random stream, which gives the mask that the call itself then draws. Attention
drops inside its kernel; with equal scores and one-hot values its result is the mask. Ring attention draws a mask for
each tile, which is looked at where it is drawn.
"""

from __future__ import annotations

import hashlib
import math
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils._python_dispatch import _disable_current_modes

from phalanx.parallel import rng_streams
from phalanx.parallel.context import flash_block
from phalanx.parallel.local_shards import Sliced, is_sliced
from phalanx.parallel.pipeline import stage as stages
from phalanx.train import grad_accumulation
from phalanx.train.observer import Observer
from phalanx.verify.dropout import RunningLayers, only_looked_at

ALIKE = 1e-12
"""How probable it may be that two masks are the same by chance, for that to be a finding."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Draw:
    """One mask that one process drew.

    Attributes:
        ids: the samples, as one word; empty for a micro-batch that is none.
        layer: the name of the module, its path, and which of its masks it is.
        part: which part of the whole tensor, as one word; empty for all of it.
        scaled: whether the others were scaled by 1 / (1 - rate).
        digest: of all of the mask; empty where none was drawn.
        start: of as much of it as two masks do not share by chance; empty where it is shorter.
        again: whether it was drawn in backward, to compute activations a second time.
    """

    step: int
    ids: str
    layer: tuple[str, str]
    part: str
    rate: float
    elements: int
    dropped: int
    scaled: bool
    digest: str
    start: str
    again: bool


_NONE: dict[str, Any] = {"elements": 0, "dropped": 0, "scaled": True, "digest": "", "start": ""}
"""What a mask shows, as in ``Draw``, where none is drawn."""


@dataclass(slots=True)
class _Asked:
    """A call with a tensor of which slices are here: what is drawn for them belongs to it."""

    rate: float
    layer: tuple[str, str]
    part: str
    seen: int = 0
    mask: Tensor | None = None


class MaskRecording(Observer):
    """One process's masks; ``answer`` is what it tells as JSON."""

    def __init__(self) -> None:
        self._running = RunningLayers()
        self._here = threading.local()
        self._stream = threading.RLock()  # threads draw from one stream, which is looked at twice
        self.answer: dict[str, Any] = {"draws": []}

    def install(self) -> None:
        """From now on every mask of this process is looked at."""
        for name in ("dropout", "dropout1d", "dropout2d", "dropout3d"):
            setattr(functional, name, self._dropout(getattr(functional, name)))
        functional.scaled_dot_product_attention = self._attention(functional.scaled_dot_product_attention)
        self._look_at_tiles()
        self._running.install()
        reseed = rng_streams.reseed

        def alone(*args: Any) -> None:
            with self._stream:
                reseed(*args)

        modules: tuple[Any, ...] = (grad_accumulation, stages)
        for module in modules:
            module.reseed = alone

    def _dropout(self, original: Callable[..., Tensor]) -> Callable[..., Tensor]:
        @wraps(original)
        def dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
            call = partial(original, input, p, training, inplace)
            channels = original.__name__ != "dropout"
            if not training or p == 0.0 or self._busy or only_looked_at(input):
                return call()
            if is_sliced(input):
                with self._asking(p, input, _part(input)) as asked:
                    result = call()
                    self._applied(asked, input, None if inplace else result)
                return result

            def mask() -> tuple[Tensor, Tensor]:
                drawn = original(torch.ones_like(input), p, True, False)
                if channels:  # one element of each says it
                    drawn = drawn.flatten(2)[..., 0]
                return drawn, torch.ones_like(drawn)

            return self._looked_at(mask, call, p, input.device)

        return dropout

    def _attention(self, original: Callable[..., Tensor]) -> Callable[..., Tensor]:
        @wraps(original)
        def attention(
            query: Tensor,
            key: Tensor,
            value: Tensor,
            attn_mask: Tensor | None = None,
            dropout_p: float = 0.0,
            is_causal: bool = False,
            **named: Any,
        ) -> Tensor:
            call = partial(original, query, key, value, attn_mask, dropout_p, is_causal, **named)
            if dropout_p == 0.0 or self._busy or only_looked_at(query):
                return call()
            if cut := [one for one in (query, key, value) if is_sliced(one)]:
                with self._asking(dropout_p, cut[0], "; ".join(_part(one) for one in (query, key, value))):
                    return call()

            def mask() -> tuple[Tensor, Tensor]:
                q, k = torch.zeros_like(query), torch.zeros_like(key)
                state = self._state(query.device)
                parts: dict[float, list[Tensor]] = {dropout_p: [], 0.0: []}
                for values in _one_hot(value):
                    for rate, found in parts.items():
                        self._state(query.device, state)
                        found.append(original(q, k, values, attn_mask, rate, is_causal, **named))
                return torch.cat(parts[dropout_p], -1), torch.cat(parts[0.0], -1)

            return self._looked_at(mask, call, dropout_p, query.device)

        return attention

    def _look_at_tiles(self) -> None:
        plain: Any = flash_block.UnfusedAttention
        kept = plain._kept

        def looked_at(kernel: flash_block.UnfusedAttention, tile: flash_block.Tile, like: Tensor) -> Tensor | None:
            found = kept(kernel, tile, like)
            if found is not None and not only_looked_at(like):
                with torch.no_grad():
                    self._keep(found, torch.ones_like(found), kernel.dropout)
            return found

        plain._kept = looked_at

    def _looked_at(
        self, mask: Callable[[], tuple[Tensor, Tensor]], call: Callable[[], Tensor], rate: float, device: torch.device
    ) -> Tensor:
        """The result of ``call``, whose mask ``mask`` draws from the same state of the stream."""
        with self._stream:
            state = self._state(device)
            self._here.busy = True
            try:
                with torch.no_grad(), torch._C.DisableTorchFunction(), _disable_current_modes():
                    drawn, whole = mask()
                    self._keep(drawn, whole, rate)
                self._state(device, state)
                return call()
            finally:
                self._here.busy = False

    def _applied(self, asked: _Asked, input: Sliced, result: Tensor | None) -> None:
        """Tell of a result on slices that is not what is here times the mask that was drawn for it."""
        if asked.mask is not None and is_sliced(result):
            expected = input.local.detach() * asked.mask.view_as(input.local)
            allowed = 8 * torch.finfo(expected.dtype).eps
            if not torch.allclose(result.local.detach(), expected, rtol=allowed, atol=0.0, equal_nan=True):
                self._tell(asked.rate, asked.layer, asked.part, {**_NONE, "scaled": False, "digest": "other"})

    @contextmanager
    def _asking(self, rate: float, tensor: Sliced, part: str) -> Iterator[_Asked]:
        nothing = not tensor.local.numel()
        before = self._asked
        self._here.asked = asked = _Asked(rate, self._layer(), part)
        try:
            yield asked
        finally:
            self._here.asked = before
        if not asked.seen and not nothing:
            self._tell(rate, asked.layer, part, _NONE)

    def _keep(self, mask: Tensor, whole: Tensor, rate: float) -> None:
        """Tell of a mask, given what there would be without dropout; what is 0 there cannot be dropped."""
        asked = self._asked
        layer, part = (asked.layer, asked.part) if asked else (self._layer(), "")
        if asked:
            part, asked.seen, rate = f"{part} #{asked.seen}", asked.seen + 1, asked.rate
            asked.mask = mask if asked.seen == 1 else None
        there = whole > 0
        kept, scales = mask[there] != 0, (mask[there] / whole[there]).double()
        allowed = 8 * torch.finfo(mask.dtype).eps
        expected = 1 / (1 - rate) if rate < 1 else 0.0
        enough = kept.numel() >= unlike(rate)
        found = {
            "elements": kept.numel(),
            "dropped": kept.numel() - int(kept.sum()),
            "scaled": bool(((scales[kept] - expected).abs() <= allowed * expected).all()),
            "digest": _digest(kept),
            "start": _digest(kept[: unlike(rate)]) if enough else "",
        }
        self._tell(rate, layer, part, found)

    def _tell(self, rate: float, layer: tuple[str, str], part: str, found: dict[str, Any]) -> None:
        here, again = self._running.here, torch._C._current_graph_task_id() != -1
        ids = ",".join(map(str, here.ids))
        told = Draw(step=here.step, ids=ids, layer=layer, part=part, rate=rate, again=again, **found)
        self.answer["draws"].append(asdict(told))

    def _layer(self) -> tuple[str, str]:
        layer = self._running.here.layers[-1]
        name = layer.path.rpartition("/")[2].rpartition("*")[0]
        return name, layer.draw()

    @property
    def _busy(self) -> bool:
        return getattr(self._here, "busy", False)

    @property
    def _asked(self) -> _Asked | None:
        return getattr(self._here, "asked", None)

    @staticmethod
    def _state(device: torch.device, state: Tensor | None = None) -> Tensor:
        """The state of the device's stream; set to ``state`` where that is given."""
        generator = rng_streams.generator(device)
        if state is not None:
            generator.set_state(state)
        return generator.get_state() if state is None else state


def unlike(rate: float) -> int:
    """Elements from which on two masks drawn for themselves are not the same by chance."""
    same = rate**2 + (1 - rate) ** 2  # of two elements, the probability
    return math.ceil(math.log(ALIKE) / math.log(same)) if same < 1 else 2**62


def _part(tensor: Tensor) -> str:
    if not is_sliced(tensor):
        return ""
    return ", ".join(f"{one.dim}: {one.cut.expanded()[one.axis.rank]}" for one in tensor.placed)


def _one_hot(value: Tensor) -> Iterator[Tensor]:
    """Values of the form of ``value`` that together are a one for each key: as many keys at a time as features."""
    keys, features = value.shape[-2:]
    for start in range(0, keys, features):
        block = torch.zeros_like(value)
        for feature, key in enumerate(range(start, min(start + features, keys))):
            block[..., key, feature] = 1
        yield block


def _digest(kept: Tensor) -> str:
    bits = kept.to("cpu", torch.uint8).contiguous()
    return hashlib.blake2b(bits.numpy().data, digest_size=8).hexdigest()
