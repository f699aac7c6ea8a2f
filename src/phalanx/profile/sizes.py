"""Traces a model at the sizes that its laws are found from."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from phalanx.errors import PhalanxError
from phalanx.profile.blocks import blocks
from phalanx.profile.costs import Profile
from phalanx.profile.laws import Sizes, profile_of
from phalanx.profile.measured import Measured, Units, measured
from phalanx.profile.refusal import refusal
from phalanx.profile.tracer import Call, traced
from phalanx.profile.tracing import Described, length_of

_SAMPLES = 2  # one sample would let dimensions of 1 pass for others


def measured_at_sizes(described: Described) -> Profile:
    """The profile of a model, from traces of 2 and 4 samples, and of half the length."""
    call = Call(
        module=described.module,
        args=described.args,
        kwargs=dict(described.kwargs),
        batch=described.batch,
        loss=described.loss,
        meta=described.meta,
        values=described.values,
    )
    leaves = [leaf for leaf in tree_leaves((call.args, call.kwargs)) if isinstance(leaf, Tensor)]
    samples = next((one.shape[0] for one in leaves if one.dim()), 1)
    length = described.length or length_of(leaves)
    sizes = Sizes(samples=_SAMPLES, length=length, shorter=max(1, length // 2))
    wanted = [(_SAMPLES, length), (2 * _SAMPLES, length)] + [(_SAMPLES, sizes.shorter)] * (length > 1)
    runs: list[Measured] = []
    dtype: torch.dtype | None = None if call.values else torch.bfloat16
    try:
        runs.append(_run(call, _Form(samples, length, *wanted[0]), dtype))
    except Exception:  # a model may mix what it makes itself with its parameters and allow one precision only
        dtype = None
    try:
        for size in wanted[len(runs) : 2]:
            runs.append(_run(call, _Form(samples, length, *size), dtype))
    except Exception as error:
        raise _refused(error) from error
    notes: list[str] = []
    try:
        runs += [_run(call, _Form(samples, length, *size), dtype) for size in wanted[2:]]
    except Exception:
        notes.append(f"it runs with samples of {length} tokens only: other lengths are a guess")
    return replace(profile_of(runs, sizes, notes), repeated=bool(blocks(described.module)))


def _run(call: Call, form: _Form, dtype: Any) -> Measured:
    itemsize = dtype.itemsize if dtype is not None else _itemsize(call)
    return measured(traced(call, form, dtype), call.module, Units(itemsize=itemsize, samples=form.to_samples))


def _itemsize(call: Call) -> int:
    return next((one.itemsize for one in call.module.parameters() if one.is_floating_point()), 4)


@dataclass(frozen=True, slots=True)
class _Form:
    """Shapes of inputs with other numbers of samples and tokens."""

    samples: int
    length: int
    to_samples: int
    to_length: int

    def __call__(self, tensor: Tensor) -> tuple[int, ...]:
        shape = list(tensor.shape)
        if shape and shape[0] == self.samples:
            shape[0] = self.to_samples
        if self.length > 1 and len(shape) > 1:
            mask = len(shape) in (2, 4) and shape[-1] == shape[-2] == self.length
            for dim in (-1, -2) if mask else (1,):
                more = shape[dim] - self.length
                if more in (0, 1):  # a batch may hold one token more: the last target
                    shape[dim] = self.to_length + more
        return tuple(shape)


def _refused(error: Exception) -> Exception:
    return error if isinstance(error, PhalanxError) else refusal(error)
