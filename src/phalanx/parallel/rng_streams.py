"""Random streams with seeds independent of rank and restarts; a device's stream."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from phalanx.device_kinds import kind_of

if TYPE_CHECKING:
    from phalanx.parallel.local_shards.axis import Axis


def reseed(device: torch.device, seed: int) -> None:
    """Start the device's default stream at ``seed``.

    Cheaper than ``torch.manual_seed``, which visits every kind of device and, before CUDA has begun, keeps each call
    with its traceback for later.
    """
    generator(device).manual_seed(seed)


def branch(device: torch.device, index: int) -> None:
    """Restart the device's default stream as number ``index`` among streams derived from its seed.

    The index changes the lower bits, too: torch's CPU generator reads only the lower 32 of a seed.
    """
    reseed(device, (generator(device).initial_seed() ^ (index * 0x9E3779B97F4A7C15)) % 2**63)


def generator(device: torch.device) -> torch.Generator:
    """Return the default stream of the device."""
    return kind_of(device).generator(device)


class OwnStream:
    """A context with random numbers of this rank; afterwards the ranks of ``axes`` have equal states again."""

    def __init__(self, device: torch.device, axes: list[Axis]) -> None:
        self._device, self._axes, self._generator = device, axes, generator(device)

    def __enter__(self) -> None:
        draw = torch.randint(2**62, (), device=self._device)
        self._state = self._generator.get_state()
        if type(draw) is Tensor and draw.device.type != "meta":
            place = 0
            for axis in self._axes:
                place = place * axis.size + axis.rank
            self._generator.manual_seed((int(draw) + place * 0x9E3779B97F4A7C15) % 2**63)

    def __exit__(self, *_: object) -> None:
        self._generator.set_state(self._state)


_MASK = (1 << 64) - 1


def stream(seed: int, *words: int) -> int:
    """Return a 63-bit seed from ``seed`` and the purpose of the stream, such as (step, micro-batch, part).

    SplitMix64's finaliser (Steele et al. 2014) over each word in turn: streams of neighbouring words are unrelated.
    """
    state = 0
    for word in (seed, *words):  # the seed is mixed by itself first: seed + 1 at step 0 is not seed at step 1
        state = (state + 0x9E3779B97F4A7C15 + word) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state >> 1
