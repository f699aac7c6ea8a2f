"""What operations take on a CPU core, from constants measured on the machine.

A core waits for nothing but itself: each operation costs its call, its arithmetic, its traffic through cache or memory,
and the pages of what it makes where these are fresh from the kernel. GPUs follow other laws: see ``price``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from phalanx.forecast.tables import Array, Mask

_PIECE = 2.0**20  # from this size on, freed memory goes back to the kernel: hardware/allocator.py
_CAST = 6.0  # bytes read and written to cast an element
_MADE = 0.4  # share of its traffic that an operation writes, where nobody measured it


@dataclass(frozen=True, kw_only=True, slots=True)
class Core:
    """Constants of one core, alone on the machine.

    Attributes:
        floor: seconds that an eager operation takes, however small.
        operand: seconds for each element that a product reads or writes beside computing, by precision.
        convolution: share of the peak that convolutions reach.
        convolution_half: least size of the product a convolution amounts to, at which it reaches half of that.
        convolution_backward: as ``convolution``, of the backward.
        convolution_backward_half: as ``convolution_half``, of the backward.
        attention: share of the peak that fused attention reaches forward.
        attention_backward: and backward.
        near: bytes/s of an operation whose traffic fits the cache.
        far: bytes/s of one that does not.
        cache: bytes of traffic between the two.
        fresh: seconds for each byte of a result of 1 MiB or more whose pages come from the kernel.
        pace: seconds for each element of traffic that an operation takes beyond ``near`` or ``far``, by its name.
        made: share of its traffic that an operation writes, by its name.
        update: seconds to step one parameter, by the optimizer.
        update_fresh: seconds beyond that where freed memory goes back to the kernel.
        tensor: seconds to step one tensor of parameters beyond that, by the optimizer.
        busy: by how much arithmetic slows down when all cores compute.
        busy_stream: by how much traffic does.
        rest: seconds of each step that no part explains, by processes.
        relay: seconds beyond those of a send in which a stage hands something on to the next, by processes.
    """

    floor: float
    operand: Mapping[str, float] = field(hash=False)
    convolution: float = 0.5
    convolution_half: float = 0.0
    convolution_backward: float = 0.5
    convolution_backward_half: float = 0.0
    attention: float = 0.5
    attention_backward: float = 0.5
    near: float
    far: float
    cache: float
    fresh: float = 0.0
    pace: Mapping[str, float] = field(default_factory=dict[str, float], hash=False)
    made: Mapping[str, float] = field(default_factory=dict[str, float], hash=False)
    update: Mapping[str, float] = field(default_factory=dict[str, float], hash=False)
    update_fresh: Mapping[str, float] = field(default_factory=dict[str, float], hash=False)
    tensor: Mapping[str, float] = field(default_factory=dict[str, float], hash=False)
    busy: float = 1.0
    busy_stream: float = 1.0
    rest: Mapping[str, float] = field(default_factory=dict[str, float], hash=False)
    relay: Mapping[str, float] = field(default_factory=dict[str, float], hash=False)

    @classmethod
    def of(cls, measured: Mapping[str, float]) -> Core | None:
        """The core of ``Device.measured``; ``None`` where what it needs was not measured."""
        if not {"floor", "near", "far", "cache", "operand.fp32"} <= measured.keys():
            return None
        plain = {name: measured[name] for name in cls.__slots__ if name in measured}
        groups = {
            name: _under(name, measured)
            for name in ("operand", "pace", "made", "update", "update_fresh", "tensor", "rest", "relay")
        }
        return cls(**plain, **groups)  # pyright: ignore[reportArgumentType]

    def products(self, sizes: tuple[Array, Array, Array, Array], peak: float, precision: str) -> Array:
        """Seconds of ``batch`` products of m x k by k x n, without the pages of their results."""
        batch, m, n, k = sizes
        each = self.operand.get(precision, self.operand["fp32"])
        return self.floor + batch * (2 * m * n * k / peak + each * (m * n + (m + n) * k))

    def convolutions(self, sizes: tuple[Array, Array, Array, Array], peak: float, backward: Mask) -> Array:
        """Seconds of convolutions as large as these products; few channels leave part of each vector idle."""
        batch, m, n, k = sizes
        share = np.where(backward, self.convolution_backward, self.convolution)[:, None]
        half = np.where(backward, self.convolution_backward_half, self.convolution_half)[:, None]
        least = np.minimum(np.minimum(m, n), k)
        return self.floor + 2 * batch * m * n * k / (peak * share) * (1 + half / least)

    def traffic(self, elements: Array, itemsize: Array, names: Sequence[str]) -> Array:
        """Seconds of operations that move ``elements`` of ``itemsize`` bytes, without the pages of their results."""
        seconds = self.moving(elements * itemsize)
        paces = np.array([self.pace.get(name, 0.0) for name in names])
        return np.where(elements > 0, self.floor + seconds + elements * paces[:, None], 0.0)

    def moving(self, moved: Array) -> Array:
        """Seconds to read and write so many bytes in one operation."""
        away = moved**2 / (moved**2 + self.cache**2)
        return moved * (away / self.far + (1 - away) / self.near)

    def casts(self, elements: Array) -> Array:
        """Seconds to cast elements between 32 and 16 bits, as autocast does around products."""
        return elements * _CAST / self.far

    def written(self, moved: Array, names: Sequence[str]) -> Array:
        """The share of ``moved`` that operations of these names write."""
        return moved * np.array([self.made.get(name, _MADE) for name in names])[:, None]

    def pages(self, size: Array) -> Array:
        """Seconds to get fresh pages for a result of ``size`` bytes."""
        return np.where(size >= _PIECE, self.fresh * size, 0.0)

    def stepping(self, optimizer: str, parameters: Array, tensors: Array, returned: Array) -> Array:
        """Seconds of the optimizer's step; one that nobody measured steps as AdamW does."""
        known = optimizer if optimizer in self.update else "adamw"
        each = self.update.get(known, 0.0) + self.update_fresh.get(known, 0.0) * returned
        return each * parameters + self.tensor.get(known, 0.0) * tensors

    def fixed(self, processes: Array) -> Array:
        """Seconds of each step that no part explains."""
        return _by_processes(self.rest, processes)

    def relayed(self, processes: Array) -> Array:
        """Seconds in which a stage hands something on, beyond the send."""
        return _by_processes(self.relay, processes) if self.relay else np.zeros_like(processes)


def _by_processes(known: Mapping[str, float], processes: Array) -> Array:
    counts = sorted(map(int, known))
    return np.interp(processes, counts, [known[str(count)] for count in counts])


def _under(name: str, measured: Mapping[str, float]) -> dict[str, float]:
    """What is called ``name.something``, by the something."""
    return {key.partition(".")[2]: value for key, value in measured.items() if key.startswith(f"{name}.")}
