"""Rows of samples from all ranks, for a loss that compares the samples of a whole global batch.

A tensor has a row for each sample where its first dimension is as long as its micro-batch; rows come together in the
order of the global batch, as one device has them. What has no rows, such as a temperature, has to be the same in every
micro-batch of every rank, and comes once.
"""

from __future__ import annotations

import copy
import hashlib
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from phalanx.comm import Mesh, all_gather_flat, from_every_rank
from phalanx.config import Plan
from phalanx.config.fields import DATA_AXES
from phalanx.errors import LossError
from phalanx.parallel import Example
from phalanx.trace.fake_tensors import faked, fakes, quiet

OUTPUT = "the model's output"
_MOST = 60
"""Tensors in an output, each of which is a bit of a whole number."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Column:
    """One tensor of a structure, as each piece here has it: ``rows`` for each sample, or the same in every piece."""

    name: str
    tensors: tuple[Tensor, ...]
    samples: tuple[int, ...]
    rows: bool

    @property
    def own(self) -> Tensor:
        """What this process adds: its rows in order, or what all have alike."""
        if not self.rows:
            return self.tensors[0].detach()
        real = [one.detach()[:count] for one, count in zip(self.tensors, self.samples, strict=True)]
        first = real[0].device
        return real[0] if len(real) == 1 else torch.cat([one.to(first) for one in real])

    @property
    def learns(self) -> bool:
        """Whether backward goes through it."""
        return any(one.requires_grad for one in self.tensors)

    @property
    def unclear(self) -> bool:
        """Whether rows are only guessed: pieces of one sample, and a first dimension of 1."""
        return self.rows and max(self.samples) <= 1


@final
class RowGather:
    """Brings rows together over the ranks that hold other samples of a global batch, in the order of their parts."""

    def __init__(
        self,
        device: torch.device,
        group: dist.ProcessGroup | None = None,
        known: Mapping[str, bool] | None = None,
    ) -> None:
        """``device``: where outputs are. ``group``: the ranks; ``None``: all samples are here.

        ``known``: name in an output → whether it has rows.
        """
        self.device, self._group = device, group
        self._known = known or {}
        self._alike: set[str] = set()
        self._index = dist.get_rank(group) if group else 0
        self._size = dist.get_world_size(group) if group else 1

    @classmethod
    def of(cls, plan: Plan, rank: int, device: torch.device, known: Mapping[str, bool]) -> RowGather:
        """Of ``rank`` under ``plan``. Collective over all ranks."""
        return cls(device, Mesh(plan, rank).group(*DATA_AXES), known)

    @property
    def first(self) -> bool:
        """Whether this process holds the first samples: what all compute alike counts there."""
        return self._index == 0

    def splits(self, pieces: int) -> bool:
        """Whether a global batch of which so many pieces are here is more than one piece."""
        return self._size > 1 or pieces > 1

    def gather(self, columns: Sequence[Column], where: str) -> tuple[list[Column], list[Tensor], int]:
        """The columns as all ranks see them, each one's rows of all ranks, and where this rank's begin. Collective.

        Raises:
            LossError: if the ranks' columns do not fit together.
        """
        own = [column.own for column in columns]
        here = sum(columns[0].samples) if columns else 0
        if self._size == 1:
            return list(columns), own, 0
        counts, rows = self._agree(columns, own, here, where)
        decided = [replace(one, rows=real) for one, real in zip(columns, rows, strict=True)]
        own = [column.own for column in decided]
        return decided, self._exchange(decided, own, counts), sum(counts[: self._index])

    def _agree(
        self, columns: Sequence[Column], own: Sequence[Tensor], here: int, where: str
    ) -> tuple[list[int], list[bool]]:
        """Each rank's samples, and which columns have rows."""
        form = [
            (one.name, str(tensor.dtype), tuple(tensor.shape[1:]), (1,) if one.rows else tuple(tensor.shape[:1]))
            for one, tensor in zip(columns, own, strict=True)
        ]
        digest = int.from_bytes(hashlib.blake2b(repr(form).encode(), digest_size=8).digest(), "little") >> 1
        rows = sum(1 << at for at, one in enumerate(columns) if one.rows)
        unclear = sum(1 << at for at, one in enumerate(columns) if one.unclear)
        assert self._group is not None
        on_host = "cpu" in {device.type for device in self._group._device_types}
        device = torch.device("cpu") if on_host else own[0].device
        told = torch.empty(4 * self._size, dtype=torch.int64, device=device)
        all_gather_flat(told, torch.tensor([here, digest, rows, unclear], device=device), self._group)
        headers: list[list[int]] = told.view(self._size, 4).tolist()
        everywhere = [all(header[2] >> at & 1 for header in headers) for at in range(len(columns))]
        fits = len({header[1] for header in headers}) == 1
        for at, real in enumerate(everywhere):
            fits = fits and (real or all(not header[2] >> at & 1 or header[3] >> at & 1 for header in headers))
        if not fits:
            shapes = ", ".join(
                f"{one.name} {tuple(mine.shape)}".strip() for one, mine in zip(columns, own, strict=True)
            )
            raise LossError(_unlike(f"from one rank to another (here {shapes})", where))
        return [header[0] for header in headers], everywhere

    def _exchange(self, columns: Sequence[Column], own: Sequence[Tensor], counts: Sequence[int]) -> list[Tensor]:
        """Every rank's rows, in one gather of bytes; as many from each as the largest share has."""
        most, here = max(counts), counts[self._index]
        widths = [_bytes_each(tensor, one.rows) for one, tensor in zip(columns, own, strict=True)]
        lengths = [most * width if one.rows else width for one, width in zip(columns, widths, strict=True)]
        flat = torch.zeros(sum(lengths), dtype=torch.uint8, device=own[0].device)
        for one, tensor, width, part in zip(columns, own, widths, flat.split(lengths), strict=True):
            part[: here * width if one.rows else width].copy_(tensor.contiguous().reshape(-1).view(torch.uint8))
        out = torch.empty(self._size * len(flat), dtype=torch.uint8, device=flat.device)
        assert self._group is not None
        if len(flat):
            all_gather_flat(out, flat, self._group)
        found: list[Tensor] = []
        for one, tensor, part in zip(columns, own, out.view(self._size, -1).split(lengths, dim=1), strict=True):
            if not one.rows:
                self._check_alike(one.name, part)
                found.append(tensor)
                continue
            every = part.contiguous().view(tensor.dtype).view(self._size, most, *tensor.shape[1:])
            found.append(torch.cat([rows[:count] for rows, count in zip(every, counts, strict=True)]))
        return found

    def _check_alike(self, name: str, every: Tensor) -> None:
        """On CUDA once for each name: looking waits for the device."""
        if every.device.type != "cpu" and name in self._alike:
            return
        self._alike.add(name)
        if not torch.equal(every, every[:1].expand_as(every)):
            raise LossError(_not_the_same(name))

    def values(self, mine: Any) -> list[Any]:
        """What every rank has for ``mine``, which is JSON. Collective."""
        return from_every_rank(mine, self._group) if self._group else [mine]

    def columns(self, values: Sequence[Any], samples: Sequence[int], where: str) -> list[Column]:
        """The tensors of the pieces' ``values``, which are ``where``: an output or a part of the batch.

        Raises:
            LossError: if the pieces' structures or shapes do not fit together.
        """
        each = [list(leaves(value)) for value in values]
        names = [name for name, _ in each[0]]
        if any([name for name, _ in one] != names for one in each):
            raise LossError(_unlike("from one micro-batch to another", where))
        found: list[Column] = []
        for at, name in enumerate(names):
            tensors = [one[at][1] for one in each]
            if not isinstance(tensors[0], Tensor):
                continue
            rows = all(one.dim() and len(one) == max(1, count) for one, count in zip(tensors, samples, strict=True))
            rows = rows and (where != OUTPUT or self._known.get(name, True))
            if len({(one.dtype, tuple(one.shape[1:] if rows else one.shape)) for one in tensors}) > 1:
                shapes = ", ".join(f"{name} {tuple(one.shape)}".strip() for one in tensors[:3])
                raise LossError(_unlike(f"from one micro-batch to another ({shapes})", where))
            if not rows and not all(_alike(tensors[0], one) for one in tensors[1:]):
                raise LossError(_not_the_same(name))
            found.append(Column(name=name, tensors=tuple(tensors), samples=tuple(samples), rows=rows))
        if len(found) > _MOST:
            raise LossError(
                f'{where} holds {len(found)} tensors; allowed with loss_over="batch": {_MOST}\n'
                "    try: a model that gives what the loss reads, and no more"
            )
        return found


def which_have_rows(module: nn.Module, example: Example) -> dict[str, bool]:
    """Name in the output of ``module`` → whether it has a row for each of two samples.

    ``module`` needs no values; empty where it cannot be run on fakes, or there is one sample.
    """
    if not any(isinstance(one, Tensor) and len(one.shape) and len(one) == 2 for _, one in leaves(example.batch)):
        return {}
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    try:
        with torch.random.fork_rng(devices=[]), torch.no_grad(), quiet(), faked(module, mode):
            args, kwargs = fakes(mode, (example.args, example.kwargs))
            output = module(*args, **kwargs)
            found = [(name, one) for name, one in leaves(output) if isinstance(one, Tensor)]
            return {name: bool(one.dim()) and len(one) == 2 for name, one in found}
    except Exception:  # whatever the model raises on fakes
        return {}


def leaves(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """What a structure of mappings, sequences and dataclasses holds, in order, each by the way that leads to it."""
    children = _children(value)
    if children is None:
        yield name, value
        return
    for key, child in children:
        yield from leaves(child, f"{name}{key}")


def rebuilt(value: Any, tensors: Iterator[Tensor]) -> Any:
    """A structure like ``value`` with other tensors, in the order of ``leaves``."""
    children = _children(value)
    if children is None:
        return next(tensors) if isinstance(value, Tensor) else value
    made = [rebuilt(child, tensors) for _, child in children]
    if isinstance(value, Mapping):
        whole: Any = copy.copy(value) if isinstance(value, dict) else dict(value)
        for key, child in zip(value, made, strict=True):
            whole[key] = child
        return whole
    if isinstance(value, tuple | list):
        return type(value)(*made) if hasattr(value, "_fields") else type(value)(made)
    whole = copy.copy(value)
    for one, child in zip(fields(value), made, strict=True):
        object.__setattr__(whole, one.name, child)
    return whole


def _bytes_each(tensor: Tensor, rows: bool) -> int:
    return math.prod(tensor.shape[1:] if rows else tensor.shape) * tensor.element_size()


def with_whole_tensors(output: Any) -> Any:
    """``output`` with what ``tp`` or ``cp`` has sliced gathered, with gradient."""
    split = sys.modules.get("phalanx.parallel.local_shards.tensor")
    if split is None:  # loaded by plans that slice
        return output
    tensors: list[Any] = [value for _, value in leaves(output) if isinstance(value, Tensor)]
    return rebuilt(output, (one.whole() if split.is_sliced(one) else one for one in tensors))


def _children(value: Any) -> list[tuple[str, Any]] | None:
    if isinstance(value, Mapping):
        return [(f"[{key!r}]", child) for key, child in value.items()]
    if isinstance(value, tuple | list):
        return [(f"[{at}]", child) for at, child in enumerate(value)]
    if is_dataclass(value) and not isinstance(value, type):
        return [(f".{one.name}", getattr(value, one.name)) for one in fields(value)]
    return None


def _alike(one: Tensor, other: Tensor) -> bool:
    one, other = one.detach(), other.detach().to(one.device)
    return torch.equal(one, other) or bool(((one == other) | ((one != one) & (other != other))).all())


def _unlike(how: str, where: str) -> str:
    return (
        f'{where} differs in its shape {how}; with loss_over="batch" all samples\' rows are put together, as one '
        "device has them.\n"
        "    Usual cause: each micro-batch is padded to its own longest sample. Pool it in the model, or pad alike."
    )


def _not_the_same(name: str) -> str:
    return (
        f"the output{f' {name}' if name else ''} has no row for each sample, and is not the same in every micro-batch; "
        'with loss_over="batch" the loss could not be that of one device.\n'
        "    Usual cause: a mean over the micro-batch, or samples compared in the model. Give what the loss is to "
        "compare, a row for each sample, and compare in job.loss"
    )
