"""A profile as arrays: one row an operation, so that a hundred operations are priced for a thousand plans at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any, TypeVar, cast

import numpy as np
import numpy.typing as npt

from phalanx.trace import ModelPart, Operation, Profile, SizeLaw

Array = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]
T = TypeVar("T")


def by_field(each: Sequence[T], join: Callable[[list[Array]], Array]) -> T:
    """Return a dataclass of arrays whose fields are joined from those of ``each`` by ``join``."""
    names = [one.name for one in fields(cast(Any, each[0]))]
    return type(each[0])(**{name: join([getattr(one, name) for one in each]) for name in names})


def picked(each: Sequence[T], at: npt.NDArray[np.intp]) -> T:
    """Return a dataclass with the ``at[i]``-th entry at each candidate i."""
    return by_field(each, lambda arrays: np.take_along_axis(np.stack(arrays), at[None], axis=0)[0])


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Laws:
    """Many ``SizeLaw``: shape (rows,) each."""

    factor: Array
    samples: Array
    length: Array

    @classmethod
    def of(cls, sizes: Sequence[SizeLaw]) -> Laws:
        return cls(
            factor=np.array([size.factor for size in sizes], dtype=float),
            samples=np.array([size.by_samples for size in sizes], dtype=float),
            length=np.array([size.by_length for size in sizes], dtype=float),
        )

    def at(self, samples: Array, length: Array) -> Array:
        """Return the counts for each of N candidates: shape (rows, N)."""
        grown: Array = self.factor[:, None] * np.ones_like(samples)[None, :]
        for powers, base in ((self.samples, samples), (self.length, length)):
            for power in np.unique(powers[powers != 0]):
                grown[powers == power] *= (base if power == 1 else base**power)[None, :]
        return grown


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class OperationArrays:
    """The operations of a profile."""

    part: npt.NDArray[np.intp]  # index of the part, by row
    backward: Mask  # whether it is of the backward
    matmul: Mask  # a product or a convolution
    convolution: Mask  # a convolution
    attention: Mask  # a fused attention
    memory: Mask  # neither
    column: Mask  # its weight is cut along its outputs; ``row``, ``inner``, ``tokens``: see ``config.model_costs``
    row: Mask
    inner: Mask
    tokens: Mask
    most: Array  # ranks of ``tp`` that it is divided over at most
    weights: Mask  # yields gradients of parameters only
    wide: Mask  # computed in fp32 under any precision: losses and what they need
    half: Array  # 0.5 if attention is causal, else 1
    expert: Mask  # it belongs to experts
    dims: tuple[Laws, ...]  # six laws: of products (batch, m, n, k, -, -), of attention as in ``Operation.dims``
    traffic: Laws  # elements moved by a kernel of its own
    fused: Laws  # elements moved where it is joined with its neighbours
    names: tuple[str, ...]
    profile: Profile
    balanced: bool = True  # whether stages of a pipeline are cut by cost, else by number

    @property
    def parts(self) -> tuple[ModelPart, ...]:
        return self.profile.parts


_WIDE = ("log_softmax", "nll_loss", "cross_entropy")


@lru_cache(maxsize=512)
def table(profile: Profile, balanced: bool = True) -> OperationArrays:
    """Return the operations of ``profile``, forward and backward of each part in turn."""
    rows: list[tuple[int, bool, Operation]] = []
    for index, part in enumerate(profile.parts):
        rows += [(index, False, operation) for operation in part.forward]
        rows += [(index, True, operation) for operation in part.backward]
    operations = [operation for _, _, operation in rows]
    one = SizeLaw(1.0)

    def having(name: str, *values: str) -> Mask:
        return np.array([getattr(operation, name) in values for operation in operations], dtype=bool)

    return OperationArrays(
        part=np.array([index for index, _, _ in rows], dtype=np.intp),
        backward=np.array([backward for _, backward, _ in rows], dtype=bool),
        matmul=having("kind", "matmul", "convolution"),
        convolution=having("kind", "convolution"),
        attention=having("kind", "attention"),
        memory=having("kind", "memory"),
        column=having("share", "column"),
        row=having("share", "row"),
        inner=having("share", "inner"),
        tokens=having("share", "tokens"),
        most=np.array([float(operation.most) for operation in operations]),
        weights=np.array([operation.weights for operation in operations], dtype=bool),
        wide=np.array([any(word in operation.name for word in _WIDE) for operation in operations], dtype=bool),
        half=np.array([0.5 if operation.causal else 1.0 for operation in operations]),
        expert=np.array([operation.expert for operation in operations], dtype=bool),
        dims=tuple(
            Laws.of([operation.dims[at] if at < len(operation.dims) else one for operation in operations])
            for at in range(6)
        ),
        traffic=Laws.of([operation.traffic for operation in operations]),
        fused=Laws.of([operation.fused for operation in operations]),
        names=tuple(operation.name for operation in operations),
        profile=profile,
        balanced=balanced,
    )
