"""The first step of a job on one device, and its comparison with the ranks' first step.

The plain loop takes the step, and twice more with each weight changed in its last place (``witness.rounding``). Ranks
send products of their parts with random signs, so that little is sent: the expected square of such a product is the
square of the norm (Achlioptas 2003).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, BinaryIO, Literal, final

import torch
from safetensors.torch import load, save
from torch import Tensor
from torch.utils._pytree import tree_leaves

from phalanx.config import Job
from phalanx.witness.dropout_off import dropout_off
from phalanx.witness.rounding import CAP, FLOOR, LAST_PLACE, LOSS_TERMS, SUM_FLOOR, SUMS, TIMES, Variation, spread

if TYPE_CHECKING:
    from phalanx.witness.plain_loop import Witness

Kind = Literal["gradient", "update", "buffer"]
Ranges = tuple[tuple[int, int], ...]
Piece = tuple[tuple[int, Ranges], ...]
"""Which part of a whole tensor: the dimensions that are cut, and the ranges [start, stop) of each; none: all of it."""
_LOSS_TIMES = 1, 2  # with changed weights: gradients that do not grow with the loss are changed in backward
_SEVERAL = 16  # numbers of a gradient; fewer may be close by chance
_COLUMNS = 8  # of random signs


def take_first_step(
    job: Job, precision: str, device: torch.device, file: BinaryIO, lr_scale: float = 1.0, cut: Any = None
) -> Iterator[dict[str, Any]]:
    """Take it on ``device``, learning rates times ``lr_scale``; tensors go to ``file``; ``cut``: see ``Variation``.

    Yields the rest as JSON: first without noise, which is 0 there, then with it. ``without`` has the reason if there is
    none. It seeds the global generators, and needs a process of its own.
    """
    from phalanx.witness.plain_loop import Witness, why_not  # of no use to the process that judges

    if reason := why_not(job):
        yield {"without": reason}
        return
    how: dict[str, Any] = {"precision": precision, "device": device}
    first: dict[str, Any] = {"lr_scale": lr_scale, "first_step": True, "cut": cut}
    with dropout_off():
        one = Witness.of(job, 1, varied=Variation(**first), **how)
    mine, (_, parts) = _computed(one), one.batches[0]
    if len(parts) > 1:  # replicas keep buffers of their own, of other micro-batches
        mine = {name: value for name, value in mine.items() if not name.startswith("buffer.")}
    reasons = {
        "the model draws random numbers in forward": one.drew,
        "its fp16 gradients overflow": one.skipped[0],
        "its numbers are not finite": not all(bool(tensor.isfinite().all()) for tensor in mine.values()),
    }
    if found := [why for why, holds in reasons.items() if holds]:
        yield {"without": found[0]}
        return
    file.write(save({name: tensor.contiguous() for name, tensor in mine.items()}))
    file.flush()
    sizes = {name: _norm(value) for name, value in one.values["start"].items()}
    eps = {name: float(options.get("eps") or 0.0) for name, options in one.options.items()}
    digests = {key: each for held, part in parts for key, each in sample_digests(held, part).items()}
    told: dict[str, Any] = {"loss": one.losses[0], "sizes": sizes, "eps": eps, "samples": digests}
    told["micro"] = [list(held) for held, _ in parts]
    yield told | {"off": 0.0, "noise": dict.fromkeys(mine, 0.0), "bends": False}
    first |= {"share": LAST_PLACE[precision], "batches": one.batches}
    with dropout_off():
        again = [Variation(**first, seed=times, times=times) for times in _LOSS_TIMES]
        others = [Witness.of(job, 1, varied=varied, **how) for varied in again]
    computed = [_computed(other) for other in others]
    noise = {
        name: [spread(value.numel()) * _norm(other[name] - value) for other in computed] for name, value in mine.items()
    }
    gradients = [name for name, value in mine.items() if name.startswith("gradient.") and value.numel() >= _SEVERAL]
    bends = any(noise[name][1] > 1e3 * noise[name][0] + 0.01 * _norm(mine[name]) for name in gradients)
    off = spread(SUMS) * max(abs(other.losses[0] - told["loss"]) for other in others)
    rounding = {name: min(each) if bends else max(each) for name, each in noise.items()}
    yield told | {"off": off, "noise": rounding, "bends": bends}


def sample_digests(ids: Sequence[int], batch: Any) -> dict[str, str]:
    """Map sample number to a digest of its rows of a batch, after their shapes."""
    dense = [one for one in tree_leaves(batch) if isinstance(one, Tensor) and one.layout == torch.strided]
    rows = [one for one in dense if not one.is_nested and one.shape[:1] == (len(ids),) and one.numel()]
    shapes = " ".join(str(tuple(one.shape[1:])) for one in rows)
    flat = [one.detach().cpu().resolve_conj().reshape(len(ids), -1).contiguous() for one in rows]
    joined = [b"".join(one[place].view(torch.uint8).numpy().tobytes() for one in flat) for place in range(len(ids))]
    return {
        str(number): f"{shapes}: {blake2b(each, digest_size=8).hexdigest()}"
        for number, each in zip(ids, joined, strict=True)
    }


@final
@dataclass(frozen=True, slots=True)
class FirstStepOfOne:
    """The result of ``take_first_step``:

    ``answer``, and ``tensors`` by kind and name, such as ``gradient.0.weight``.
    """

    answer: Mapping[str, Any]
    tensors: Mapping[str, Tensor]
    precision: str

    @classmethod
    def read(cls, answer: Mapping[str, Any], file: BinaryIO, precision: str) -> FirstStepOfOne:
        file.seek(0)
        return cls(answer, load(file.read()), precision)

    def other_data(self, ranks: Sequence[Mapping[str, str]]) -> str:
        """Return the first sample that differs on a rank, in words; ``ranks``: each rank's ``sample_digests``."""
        mine = self.answer["samples"]
        for rank, told in enumerate(ranks):
            for number, digest in told.items():
                known = mine.get(number, digest)
                if digest != known and digest.partition(":")[0] == known.partition(":")[0]:
                    return f"sample {number} on rank {rank} is another one"
        return ""

    def judged(self, kind: Kind, loss: float, ranks: Sequence[Mapping[str, Any]]) -> tuple[str, float, float]:
        """Return the difference in words, if any, and all tensors' actual and allowed distance, relative.

        ``ranks``: of each rank, name → its part of the tensor, and ``signed`` of that part.
        """
        here, cap = self.answer["loss"], CAP[self.precision]
        size = max(abs(here), LOSS_TERMS)
        most = min(TIMES * self.answer["off"], cap * size) + SUM_FLOOR[self.precision] * size
        if not abs(loss - here) <= most:
            return f"its loss is {loss:.7g}, that of one device {here:.7g}", math.inf, 0.0
        wholes = {name.partition(".")[2]: one for name, one in self.tensors.items() if name.startswith(f"{kind}.")}
        norms = {name: _norm(whole) for name, whole in wholes.items()}
        total, names = max(math.hypot(*norms.values()), 1e-30), {name for told in ranks for name in told}
        bounds = {name: self._allowed(kind, name, total) for name in names | norms.keys()}
        worst, words, apart = 1.0, "", dict[str, float]()
        known: dict[str, list[float]] = {}
        for rank, told in enumerate(ranks):
            for name, (cuts, products) in told.items():
                whole, size, allowed = wholes.get(name), max(norms.get(name, 0.0), 1e-30), bounds[name]
                if (key := f"{name} {cuts}") not in known:
                    known[key] = [0.0] * _COLUMNS if whole is None else signed(cut_out(whole, cuts), cuts, whole.shape)
                off = math.dist(products, known[key]) / math.sqrt(_COLUMNS)
                if not off <= worst * allowed:
                    worst = off / allowed if allowed else math.inf
                    words = f"the {kind} of {name} on rank {rank}, by {off / size:.2g} of its norm"
                    words += f" (allowed {allowed / size:.2g})"
                apart[name] = max(off, apart.get(name, 0.0))
        missing = [name for name in norms.keys() - names if kind != "buffer" and norms[name] > bounds[name]]
        words = words or (f"no rank has the {kind} of {missing[0]}" if missing else "")
        return words, math.hypot(*apart.values()) / total, math.hypot(*bounds.values()) / total

    def _allowed(self, kind: Kind, name: str, total: float) -> float:
        whole = self.tensors.get(f"{kind}.{name}")
        if whole is None:
            return math.inf if kind == "buffer" else LAST_PLACE["fp32"] * total
        floor, noise = FLOOR[self.precision], self.answer["noise"]
        allowed = TIMES * noise.get(f"{kind}.{name}", math.inf)
        allowed = (min(allowed, CAP[self.precision] * total) if kind == "gradient" else allowed) + floor * _norm(whole)
        if kind == "update":
            # Adam steps in either direction for a gradient that is nothing but rounding; near eps, not as far.
            size, eps = self.tensors[f"gradient.{name}"].abs(), self.answer["eps"].get(name, 0.0)
            limit = (TIMES * noise.get(f"gradient.{name}", math.inf) + floor * _norm(size)) / math.sqrt(
                size.numel() or 1
            )
            allowed += 2 * _norm(whole * torch.where(size <= 2 * limit, 1.0, eps * limit / (size * (size + eps))))
            return allowed + 2 * LAST_PLACE["fp32"] * self.answer["sizes"][name]
        return allowed + LAST_PLACE["fp32"] * total


def signed(values: Tensor, cuts: Piece, shape: Sequence[int]) -> list[float]:
    """Return sums of ``values``, the part ``cuts`` of a tensor of that ``shape``, each with its own random signs.

    A sign is the product of one for each place in each dimension, so it is the same on any rank that holds the element.
    """
    found, there = values.double(), dict(cuts)
    for dim in range(len(shape) - 1, -1, -1):
        signs = _signs(dim, shape[dim])
        signs = torch.cat([signs[start:stop] for start, stop in there[dim]]) if dim in there else signs
        found = found @ signs if dim == len(shape) - 1 else (found * signs).sum(-2)
    return found.reshape(-1).expand(_COLUMNS).tolist()


def real(tensor: Tensor) -> Tensor:
    """Return the tensor on the host, dense; a complex number as two."""
    tensor = tensor.detach().to_dense() if tensor.is_sparse else tensor.detach()
    return (torch.view_as_real(tensor) if tensor.is_complex() else tensor).cpu()


@lru_cache(maxsize=256)
def _signs(dim: int, size: int) -> Tensor:
    generator = torch.Generator().manual_seed(size * 16 + dim)
    return (torch.randint(2, (size, _COLUMNS), generator=generator) * 2 - 1).double()


def _computed(one: Witness) -> dict[str, Tensor]:
    before, after = one.values["start"], one.values["first"]
    found = {f"gradient.{name}": real(grad) for name, grad in one.reduced[0].items()}
    found |= {f"update.{name}": real(after[name]).double() - real(before[name]).double() for name in one.reduced[0]}
    return found | {f"buffer.{name}": real(tensor).double() for name, tensor in one.buffers["first"].items()}


def _norm(tensor: Tensor) -> float:
    return float(torch.linalg.vector_norm(real(tensor), dtype=torch.float64))


def piece_of(tensor: Tensor, holding: Any) -> Piece:
    """Return this rank's part of the whole in ``tensor``; ``holding``: its ``TensorShard``, or ``None``."""
    placed = holding.placed if holding is not None else ()
    ranges: dict[int, Ranges] = {one.dim: one.cut.expanded()[one.axis.rank] for one in placed}
    if chunks := getattr(tensor, "__create_chunk_list__", None):
        (chunk,) = chunks()
        for dim, (at, size) in enumerate(zip(chunk.offsets, chunk.sizes, strict=True)):
            if size != tensor.shape[dim]:
                known = ranges.get(dim, ((0, tensor.shape[dim]),))
                ranges[dim] = _within(known, at, at + size)
    return tuple(sorted(ranges.items()))


def _within(ranges: Ranges, start: int, stop: int) -> Ranges:
    found: list[tuple[int, int]] = []
    before = 0
    for a, b in ranges:
        first, last = a + max(start - before, 0), min(b, a + stop - before)
        if first < last:
            found.append((first, last))
        before += b - a
    return tuple(found)


def cut_out(whole: Tensor, piece: Piece) -> Tensor:
    """Return that part of ``whole``."""
    for dim, ranges in piece:
        runs = [whole.narrow(dim, start, stop - start) for start, stop in ranges]
        whole = torch.cat(runs, dim) if runs else whole.narrow(dim, 0, 0)
    return whole
