"""Rows of samples from all ranks, for a loss that compares the samples of a whole global batch.

A tensor has a row for each sample if its first dimension is as long as its micro-batch; rows are joined in the order of
the global batch, as on one device. Values without rows, such as a temperature, have to be the same in every micro-batch
of every rank, and appear once.
"""

from __future__ import annotations

import copy
import hashlib
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cache
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
from phalanx.placement.step_traffic import COLUMNS, HEADER
from phalanx.trace.fake_tensors import Mode, Values, faked, fakes, quiet

OUTPUT = "the model's output"


@dataclass(frozen=True, kw_only=True, slots=True)
class Column:
    """One tensor of a structure, in each piece here: ``rows`` for each sample, or the same in every piece.

    Attributes:
        structure: the whole structure's, in words, with its other values.
        why: the reason why it cannot be joined, if so; raised only when a loss reads it.
    """

    name: str
    tensors: tuple[Tensor, ...]
    samples: tuple[int, ...]
    rows: bool
    structure: str = ""
    why: str = ""

    @property
    def own(self) -> Tensor:
        """Return this process's part: its rows in order, or the common value."""
        if self.why:
            return self.tensors[0].detach().reshape(-1)[:0]
        if not self.rows:
            return self.tensors[0].detach()
        real = [one.detach()[:count] for one, count in zip(self.tensors, self.samples, strict=True)]
        first = real[0].device
        return real[0] if len(real) == 1 else torch.cat([one.to(first) for one in real])

    @property
    def learns(self) -> bool:
        """Return True if backward goes through it."""
        return not self.why and any(one.requires_grad for one in self.tensors)

    @property
    def unclear(self) -> bool:
        """Return True if rows are only guessed: pieces of one sample, and a first dimension of 1."""
        return self.rows and max(self.samples) <= 1

    @property
    def form(self) -> int:
        """Return a number that is equal if ranks' tensors can be joined."""
        one = self.tensors[0]
        return 0 if self.why else _digest(f"{one.dtype} {tuple(one.shape[1:])} {'1' if self.rows else one.shape[:1]}")


@final
class RowGather:
    """A gather of rows over the ranks with other samples of a global batch, in the order of their parts."""

    def __init__(
        self, device: torch.device, group: dist.ProcessGroup | None = None, known: Mapping[str, bool] | None = None
    ) -> None:
        """Take ``device``, that of outputs, and ``group``, the ranks; ``None``: all samples are here.

        ``known``: name in an output → whether it has rows.
        """
        self.device, self._group = device, group
        self._known = known or {}
        self._looked_at: dict[str, bool] = {}
        self._agreed: dict[str, tuple[list[list[int]], int]] = {}
        self._index = dist.get_rank(group) if group else 0
        self._size = dist.get_world_size(group) if group else 1

    @classmethod
    def of(cls, plan: Plan, rank: int, device: torch.device, known: Mapping[str, bool]) -> RowGather:
        """Build for ``rank`` under ``plan``. Collective over all ranks."""
        return cls(device, Mesh(plan, rank).group(*DATA_AXES), known)

    @property
    def first(self) -> bool:
        """Return True if this process holds the first samples: common values count there."""
        return self._index == 0

    def splits(self, pieces: int) -> bool:
        """Return True if a global batch with this many local pieces is more than one piece."""
        return self._size > 1 or pieces > 1

    def gather(self, columns: Sequence[Column], where: str) -> tuple[list[Column], list[Tensor], int]:
        """Return the columns as all ranks see them, each one's rows of all ranks, and this rank's begin. Collective.

        Raises:
            LossError: if the ranks' structures are not alike.
        """
        header = self._header(columns)
        if self._size == 1:
            decided = self._decided([header], columns, where)
            return decided, [column.own for column in decided], 0
        known = self._agreed.get(where)
        if known is not None and self._on_host:
            # What ranks have is mostly what they had: one gather then tells that and brings it.
            fits = known[0][self._index] == header
            decided = self._decided(known[0], columns, where) if fits else []
            headers, every = self._sent(header, decided, known)
            if headers == known[0]:
                return self._unpacked(decided, every, headers)
        headers = self._told(header)
        decided = self._decided(headers, columns, where)
        most = max(each[0] for each in headers)
        self._agreed[where] = headers, sum(bytes_of(one) * (most if one.rows else 1) for one in decided)
        _, every = self._sent(header, decided, self._agreed[where])
        return self._unpacked(decided, every, headers)

    @property
    def _on_host(self) -> bool:
        return self.device.type == "cpu"

    def _header(self, columns: Sequence[Column]) -> list[int]:
        bits = [
            sum(1 << at for at, one in enumerate(columns) if which(one))
            for which in (lambda one: one.rows, lambda one: one.unclear, lambda one: bool(one.why))
        ]
        forms = [one.form for one in columns]
        names = _digest(columns[0].structure) if columns else 0
        return [sum(columns[0].samples) if columns else 0, names, *bits, *forms, *[0] * (COLUMNS - len(forms))]

    def _told(self, header: list[int]) -> list[list[int]]:
        assert self._group is not None
        kinds = {device.type for device in self._group._device_types}
        device = torch.device("cpu") if "cpu" in kinds else self.device
        told = torch.empty(HEADER * self._size, dtype=torch.int64, device=device)
        all_gather_flat(told, torch.tensor(header, device=device), self._group)
        return told.view(self._size, HEADER).tolist()

    def _decided(self, headers: list[list[int]], columns: Sequence[Column], where: str) -> list[Column]:
        if len({header[1] for header in headers}) > 1:
            raise LossError(_unlike("from one rank to another", where))
        found: list[Column] = []
        for at, one in enumerate(columns):
            rows, unclear, bad = ([header[word] >> at & 1 for header in headers] for word in (2, 3, 4))
            why = one.why
            if not why and any(bad):
                why = _unlike(f"on another rank ({one.name})", where)
            elif not why and len({header[5 + at] for header in headers}) > 1:
                why = _unlike(f"from one rank to another ({one.name} {tuple(one.tensors[0].shape)} here)", where)
            elif not why and all(rows) and all(unclear) and where == OUTPUT and one.name not in self._known:
                why = _UNCLEAR.format(f" {one.name}".rstrip())
            elif not why and not all(rows) and any(row > guess for row, guess in zip(rows, unclear, strict=True)):
                why = _unlike(f"from one rank to another ({one.name})", where)
            found.append(replace(one, rows=all(rows), why=why))
        return found

    def _sent(
        self, header: list[int], columns: Sequence[Column], agreed: tuple[list[list[int]], int]
    ) -> tuple[list[list[int]], Tensor]:
        """Gather every rank's header and columns as bytes in one collective; columns of another form are left out."""
        assert self._group is not None
        most, start = max(each[0] for each in agreed[0]), 8 * HEADER * self._on_host
        flat = torch.zeros(start + agreed[1], dtype=torch.uint8, device=self.device)
        if self._on_host:
            flat[:start].copy_(torch.tensor(header).view(torch.uint8))
        for one in columns:
            own = one.own.to(self.device).contiguous().reshape(-1).view(torch.uint8)
            flat[start : start + len(own)].copy_(own)
            start += bytes_of(one) * (most if one.rows else 1)
        out = torch.empty(self._size * len(flat), dtype=torch.uint8, device=self.device)
        if len(flat):
            all_gather_flat(out, flat, self._group)
        every = out.view(self._size, -1)
        if not self._on_host:
            return agreed[0], every
        start = 8 * HEADER
        return every[:, :start].contiguous().view(torch.int64).tolist(), every[:, start:]

    def _unpacked(
        self, columns: Sequence[Column], every: Tensor, headers: list[list[int]]
    ) -> tuple[list[Column], list[Tensor], int]:
        counts = [header[0] for header in headers]
        most, start = max(counts), 0
        found: list[tuple[Column, Tensor]] = []
        for one in columns:
            size = bytes_of(one) * (most if one.rows else 1)
            part, own = every[:, start : start + size], one.own
            start += size
            if one.why or not one.rows:
                alike = bool(one.why) or self._alike(one.name, part)
                found.append((one if alike else replace(one, why=_not_the_same(one.name)), own))
                continue
            rows = part.contiguous().view(own.dtype).view(self._size, most, *own.shape[1:])
            found.append((one, torch.cat([mine[:count] for mine, count in zip(rows, counts, strict=True)])))
        return [one for one, _ in found], [rows for _, rows in found], sum(counts[: self._index])

    def _alike(self, name: str, every: Tensor) -> bool:
        """Return True if all ranks have the same.

        On CUDA each name is checked once, because it waits for the device.
        """
        if self._on_host or name not in self._looked_at:
            self._looked_at[name] = torch.equal(every, every[:1].expand_as(every))
        return self._looked_at[name]

    def values(self, mine: Any) -> list[Any]:
        """Return every rank's JSON value. Collective."""
        return from_every_rank(mine, self._group) if self._group else [mine]

    def columns(self, values: Sequence[Any], samples: Sequence[int], where: str) -> list[Column]:
        """Return the tensors of the pieces' ``values``; ``where`` is an output or a part of the batch.

        Raises:
            LossError: if the pieces' structures or shapes do not fit together.
        """
        each = [list(leaves(value)) for value in values]
        structure = _structure(each[0])
        if any(_structure(one) != structure for one in each[1:]):
            raise LossError(_unlike("from one micro-batch to another", where))
        found: list[Column] = []
        for at, (name, first) in enumerate(each[0]):
            if not isinstance(first, Tensor):
                continue
            tensors, why = [one[at][1] for one in each], ""
            rows = all(one.dim() and len(one) == max(1, count) for one, count in zip(tensors, samples, strict=True))
            rows = rows and (where != OUTPUT or self._known.get(name, True))
            if len({(one.dtype, tuple(one.shape[1:] if rows else one.shape)) for one in tensors}) > 1:
                shapes = ", ".join(f"{name} {tuple(one.shape)}".strip() for one in tensors[:3])
                why = _unlike(f"from one micro-batch to another ({shapes})", where)
            elif not rows and not all(_equal(first, one) for one in tensors[1:]):
                why = _not_the_same(name)
            mine = {"name": name, "rows": rows, "structure": structure, "why": why}
            found.append(Column(tensors=tuple(tensors), samples=tuple(samples), **mine))
        if len(found) > COLUMNS:
            raise LossError(
                f'{where} holds {len(found)} tensors; allowed with loss_over="batch": {COLUMNS}\n'
                "    try: a model that gives what the loss reads, and no more"
            )
        return found


def which_have_rows(module: nn.Module, example: Example) -> dict[str, bool]:
    """Map name in the output of ``module`` to True if it has a row for each of two samples.

    ``module`` needs no values; empty if it cannot be run on fakes, or there is one sample.
    """
    if not any(isinstance(one, Tensor) and len(one.shape) and len(one) == 2 for _, one in leaves(example.batch)):
        return {}
    modes: list[Mode] = [FakeTensorMode(allow_non_fake_inputs=True)]
    if not any(tensor.is_meta for tensor in module.parameters()):
        modes.append(Values())  # of what decides by values
    for mode in modes:
        try:
            with torch.random.fork_rng(devices=[]), torch.no_grad(), quiet(), faked(module, mode):
                args, kwargs = fakes(mode, (example.args, example.kwargs))
                output = module(*args, **kwargs)
                found = [(name, one) for name, one in leaves(output) if isinstance(one, Tensor)]
                return {name: bool(one.dim()) and len(one) == 2 for name, one in found}
        except Exception:  # whatever the model raises on fakes
            continue
    return {}


def leaves(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the leaves of mappings, sequences and dataclasses, in order, each with its path."""
    children = _children(value)
    if children is None:
        yield name, value
        return
    for key, child in children:
        yield from leaves(child, f"{name}{key}")


def rebuilt(value: Any, tensors: Iterator[Tensor], other: Callable[[Any], Any] = lambda one: one) -> Any:
    """Return a structure like ``value`` with other tensors, in the order of ``leaves``; ``other`` converts the rest."""
    children = _children(value)
    if children is None:
        return next(tensors) if isinstance(value, Tensor) else other(value)
    made = [rebuilt(child, tensors, other) for _, child in children]
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


def bytes_of(column: Column) -> int:
    """Return the bytes of one row, or of a value without rows."""
    if column.why:
        return 0
    one = column.tensors[0]
    return math.prod(one.shape[1:] if column.rows else one.shape) * one.element_size()


@cache
def _digest(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def is_plain(value: Any) -> bool:
    """Return True if it is a number, a text or ``None``, which a structure may have beside tensors."""
    return value is None or isinstance(value, bool | int | float | str)


def _structure(found: Sequence[tuple[str, Any]]) -> str:
    each = (f"{name}={one!r}" if is_plain(one) else f"{name}: {type(one).__name__}" for name, one in found)
    return " ".join(each)


def with_whole_tensors(output: Any) -> Any:
    """Return ``output`` with slices of ``tp`` or ``cp`` gathered, with gradient."""
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


def _equal(one: Tensor, other: Tensor) -> bool:
    one, other = one.detach(), other.detach().to(one.device)
    return torch.equal(one, other) or bool(((one == other) | ((one != one) & (other != other))).all())


_UNCLEAR = (
    "with one sample in each micro-batch it is unknown whether the output{} has a row for each sample.\n"
    "    try: a plan with micro=2 or more, or without micro"
)


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
