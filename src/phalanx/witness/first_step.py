"""The first step of a job on one device, and whether what ranks computed in theirs is the same but for rounding.

The plain loop takes the step three times: with the initial weights, and twice with each weight changed in its last
place. How far that moves a gradient is its noise; a plan may be off by a few times as much. Ranks send products of what
they hold with random signs, so that little travels: the expected square of such a product is the square of the norm
(Achlioptas 2003).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, final

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from phalanx.config import Job
from phalanx.witness.magnitudes import dense
from phalanx.witness.pieces import Piece, cut_out
from phalanx.witness.plain_loop import FIRST, START, Witness, why_not

Kind = Literal["gradient", "update"]
LAST_PLACE = {"fp32": 2.0**-23, "bf16": 2.0**-8, "fp16": 2.0**-11}
"""Of the precisions of which steps can be compared."""
_FLOOR = {"fp32": 1e-5, "bf16": 2.0**-6, "fp16": 2.0**-9}
"""Of a tensor's norm: what may differ where changed weights move nothing."""
_DRAWS = 2
_TIMES = 8  # the largest noise of so many draws
_COLUMNS = 8  # of random signs


def take_first_step(job: Job, precision: str, device: torch.device, file: Path) -> dict[str, Any]:
    """Take it on ``device``; tensors go to ``file``. Gives the rest as JSON: ``without`` says why there is nothing.

    It seeds the global generators, and so belongs into a process of its own.
    """
    if reason := why_not(job):
        return {"without": reason}
    how: dict[str, Any] = {"precision": precision, "device": device, "lean": True}
    one = Witness.of(job, 1, **how)
    if one.drew:
        return {"without": "the model draws random numbers, as dropout does; phalanx prove compares without dropout"}
    if one.skipped[0]:
        return {"without": "its fp16 gradients overflow"}
    gradients, updates = _real(one.reduced[0]), _updates(one)
    noise = {"gradient": dict.fromkeys(gradients, 0.0), "update": dict.fromkeys(updates, 0.0)}
    off = 0.0
    for draw in range(_DRAWS):
        other = Witness.of(job, 1, changed=(LAST_PLACE[precision], draw), **how)
        off = max(off, abs(other.losses[0] - one.losses[0]))
        for kind, mine, others in (
            ("gradient", gradients, _real(other.reduced[0])),
            ("update", updates, _updates(other)),
        ):
            for name, known in noise[kind].items():
                noise[kind][name] = max(known, _norm(others[name] - mine[name]))
    tensors = {f"gradient.{name}": grad for name, grad in gradients.items()}
    tensors |= {f"update.{name}": moved for name, moved in updates.items()}
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, file)
    sizes = {name: _norm(value) for name, value in one.values[START].items()}
    return {"loss": one.losses[0], "off": off, "noise": noise, "sizes": sizes}


@final
@dataclass(frozen=True, slots=True)
class FirstStepOfOne:
    """What ``take_first_step`` gave: ``answer``, and ``tensors`` by ``gradient.<name>`` and ``update.<name>``."""

    answer: Mapping[str, Any]
    tensors: Mapping[str, Tensor]
    precision: str

    @classmethod
    def read(cls, answer: Mapping[str, Any], file: Path, precision: str) -> FirstStepOfOne:
        return cls(answer, load_file(file), precision)

    def judged(self, kind: Kind, loss: float, ranks: Sequence[Mapping[str, Any]]) -> tuple[str, float]:
        """What differs in words, empty where nothing does, and the largest difference relative to a tensor's norm.

        ``ranks``: of each rank, name → its part of the tensor, and ``signed`` of that part.
        """
        here = self.answer["loss"]
        if not abs(loss - here) <= _TIMES * self.answer["off"] + _FLOOR[self.precision] * abs(here):
            return f"its loss is {loss:.7g}, that of one device {here:.7g}", math.inf
        wholes = {name.partition(".")[2]: one for name, one in self.tensors.items() if name.startswith(f"{kind}.")}
        norms = {name: _norm(whole) for name, whole in wholes.items()}
        total = math.hypot(*norms.values())
        names = norms.keys() | {name for told in ranks for name in told}
        bounds = {name: self._allowed(kind, name, total) for name in names}
        worst, words, largest = 1.0, "", 0.0
        known: dict[str, list[float]] = {}
        for rank, told in enumerate(ranks):
            for name, (cuts, products) in told.items():
                whole, size, allowed = wholes.get(name), norms.get(name, 0.0), bounds[name]
                key = f"{name} {cuts}"
                if key not in known:
                    known[key] = [0.0] * _COLUMNS if whole is None else signed(cut_out(whole, cuts), cuts, whole.shape)
                off = math.dist(products, known[key]) / math.sqrt(_COLUMNS)
                if not off <= worst * allowed:
                    worst = off / allowed if allowed else math.inf
                    words = f"the {kind} of {name} on rank {rank}, by {off / max(size, 1e-30):.2g} of its norm"
                    words += f" (allowed {allowed / max(size, 1e-30):.2g})"
                elif size > _FLOOR["fp32"] * total:
                    largest = max(largest, off / size)
        for name in norms.keys() - {name for told in ranks for name in told}:
            if not words and norms[name] > bounds[name]:
                words = f"no rank has the {kind} of {name}"
        return words, largest

    def _allowed(self, kind: Kind, name: str, total: float) -> float:
        """The norm of a difference that rounding may make."""
        whole = self.tensors.get(f"{kind}.{name}")
        if whole is None:
            return LAST_PLACE["fp32"] * total
        floor, noise = _FLOOR[self.precision], self.answer["noise"]
        allowed = _TIMES * noise[kind][name] + floor * _norm(whole)
        if kind == "gradient":
            return allowed + LAST_PLACE["fp32"] * total
        # Adam steps as far for an element whose gradient is nothing but rounding, in either direction.
        grad = self.tensors[f"gradient.{name}"]
        rounding = (_TIMES * noise["gradient"][name] + floor * _norm(grad)) / math.sqrt(max(1, grad.numel()))
        return (
            allowed + 2 * _norm(whole[grad.abs() <= 2 * rounding]) + 2 * LAST_PLACE["fp32"] * self.answer["sizes"][name]
        )


def signed(values: Tensor, cuts: Piece, shape: Sequence[int]) -> list[float]:
    """Sums of ``values``, the part ``cuts`` of a tensor of that ``shape``, each with random signs of its own.

    A sign is the product of one for each place in each dimension: it is the same wherever an element is held.
    """
    found, there = values.double(), dict(cuts)
    for dim in range(len(shape) - 1, -1, -1):
        signs = _signs(dim, shape[dim])
        signs = torch.cat([signs[start:stop] for start, stop in there[dim]]) if dim in there else signs
        found = found @ signs if dim == len(shape) - 1 else (found * signs).sum(-2)
    return found.reshape(-1).expand(_COLUMNS).tolist()


def real(tensor: Tensor) -> Tensor:
    """On the host, dense; a complex number as two."""
    tensor = dense(tensor.detach())
    return (torch.view_as_real(tensor) if tensor.is_complex() else tensor).cpu()


@lru_cache(maxsize=256)
def _signs(dim: int, size: int) -> Tensor:
    generator = torch.Generator().manual_seed(size * 16 + dim)
    return (torch.randint(2, (size, _COLUMNS), generator=generator) * 2 - 1).double()


def _real(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: real(tensor) for name, tensor in tensors.items()}


def _updates(one: Witness) -> dict[str, Tensor]:
    """By how much the first update has moved each parameter that has a gradient."""
    before, after = one.values[START], one.values[FIRST]
    return {name: real(after[name]).double() - real(before[name]).double() for name in one.reduced[0]}


def _norm(tensor: Tensor) -> float:
    return float(torch.linalg.vector_norm(real(tensor), dtype=torch.float64))
