"""The output and the batch of a whole global batch, as on one device, for a loss that compares samples.

An entry of the batch is gathered when the loss first reads it: most losses read labels and no inputs. Every rank runs
the same loss on the same values, so that all read the same entries in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, final

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves

from phalanx.config.model_costs import ComparedTensors
from phalanx.errors import LossError
from phalanx.parallel import Example
from phalanx.trace.fake_tensors import faked, fakes, quiet
from phalanx.train.inputs import to_device
from phalanx.train.row_gather import OUTPUT, Column, RowGather, bytes_of, is_plain, leaves, rebuilt, which_have_rows


@dataclass(frozen=True, kw_only=True, slots=True)
class OutputPiece:
    """A micro-batch computed by this process: ``samples``, 0 for a filler, its batch, and the model's output."""

    output: Any
    batch: Any
    samples: int


@final
class WholeBatch:
    """The output and the batch of a whole global batch: the arguments of ``job.loss``.

    Attributes:
        output: of the pieces' structure, with the rows of all; this process's own get gradients.
        batch: the same of the batch; a dict or sequence gathers an entry at its first read.
        samples: in the global batch.
    """

    def __init__(self, pieces: Sequence[OutputPiece], gather: RowGather, device: torch.device, samples: int) -> None:
        """Gather the pieces. Collective over the ranks of ``gather``.

        Raises:
            LossError: if the values of ranks and micro-batches do not fit together.
        """
        self.samples, self._pieces = samples, pieces
        if not gather.splits(len(pieces)):
            self._columns = [
                Column(name=name, tensors=(value,), samples=(samples,), rows=False)
                for name, value in leaves(pieces[0].output)
                if isinstance(value, Tensor)
            ]
            self._own = [one.own.requires_grad_(one.learns) for one in self._columns]
            self.output, self.batch = rebuilt(pieces[0].output, iter(self._own)), pieces[0].batch
            return
        counts = [piece.samples for piece in pieces]
        columns = gather.columns([piece.output for piece in pieces], counts, OUTPUT)
        self._columns, whole, start = gather.gather(columns, OUTPUT)
        self._own = [column.own.to(device).requires_grad_(column.learns) for column in self._columns]
        joined: list[Tensor] = []
        for column, own, rows in zip(self._columns, self._own, whole, strict=True):
            if column.why:
                joined.append(UnreadableTensor(column.why))
            elif column.rows and len(own) < len(rows):
                joined.append(torch.cat([rows[:start], own, rows[start + len(own) :]]))
            else:
                joined.append(own)
        self.output = rebuilt(pieces[0].output, iter(joined), _plain_or_unreadable)
        self.batch = BatchEntries(gather, counts, device).of([piece.batch for piece in pieces])

    def gradients(self, value: Tensor) -> list[list[Tensor | None]]:
        """Return gradients of ``value`` by each piece's output tensors, in order; ``None`` if independent.

        A value without rows has one gradient in all, shared over the pieces by their samples.
        """
        wanted = [own for own in self._own if own.requires_grad]
        found = iter(torch.autograd.grad(value, wanted, allow_unused=True))
        grads = [next(found) if own.requires_grad else None for own in self._own]
        each: list[list[Tensor | None]] = [[] for _ in self._pieces]
        for column, grad in zip(self._columns, grads, strict=True):
            parts = [None] * len(self._pieces) if grad is None else self._parts(column, grad)
            for piece, part in zip(each, parts, strict=True):
                piece.append(part)
        return each

    def _parts(self, column: Column, grad: Tensor) -> list[Tensor]:
        if not column.rows:
            shares = [count / self.samples for count in column.samples]
            return [
                (grad if share == 1 else grad * share).to(one.device)
                for one, share in zip(column.tensors, shares, strict=True)
            ]
        parts = zip(column.tensors, column.samples, grad.split(list(column.samples)), strict=True)
        return [part.to(one.device) if count else torch.zeros_like(one) for one, count, part in parts]


@final
class UnreadableTensor(Tensor):
    """A stand-in for an output tensor that cannot be joined, with an error when it is read."""

    _why: str

    @staticmethod
    def __new__(cls, why: str) -> UnreadableTensor:
        made = Tensor._make_subclass(cls, torch.empty(0))
        made._why = why
        return made

    def __init__(self, *_: Any) -> None:
        pass

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = [one for one in tree_leaves((args, kwargs)) if isinstance(one, UnreadableTensor)]
        raise LossError(found[0]._why if found else "a tensor of the output cannot be put together")


def _plain_or_unreadable(value: Any) -> Any:
    if is_plain(value):
        return value
    why = f"a {type(value).__name__} in the output is of a micro-batch, and no tensor: it cannot be put together"
    return UnreadableTensor(f'{why} with loss_over="batch"')


@final
class BatchEntries:
    """Parts of the whole batch, joined from the pieces."""

    def __init__(self, gather: RowGather, samples: Sequence[int], device: torch.device) -> None:
        self._gather, self._samples, self._device = gather, samples, device

    def of(self, values: Sequence[Any], name: str = "") -> Any:
        """Return the whole of ``values``, one for each piece: mappings and sequences gather entries later.

        Raises:
            LossError: if it cannot be joined.
        """
        first = values[0]
        if isinstance(first, Tensor):
            return self._tensor(values, name)
        if isinstance(first, Mapping):
            return EntriesByName({key: self._later(values, key, name) for key in first})
        if isinstance(first, tuple | list):
            if first and not any(isinstance(leaf, Tensor) for _, leaf in leaves(first)):
                return self._plain(values, name)
            if any(len(one) != len(first) for one in values):
                self._refuse(name)
            entries = EntriesInOrder(self._later(values, at, name) for at in range(len(first)))
            return type(first)(*entries) if hasattr(first, "_fields") else entries
        return self._plain(values, name)

    def _later(self, values: Sequence[Any], key: Any, name: str) -> Callable[[], Any]:
        found: list[Any] = []

        def gathered() -> Any:
            if not found:
                try:
                    found.append(self.of([one[key] for one in values], f"{name}[{key!r}]"))
                except (KeyError, IndexError):
                    self._refuse(f"{name}[{key!r}]")
            return found[0]

        return gathered

    def _tensor(self, values: Sequence[Tensor], name: str) -> Tensor:
        where = f"batch{name}"
        columns = self._gather.columns([to_device(one, self._device) for one in values], self._samples, where)
        ((column,), (whole,), _) = self._gather.gather(columns, where)
        if column.why:
            raise LossError(column.why)
        return whole

    def _plain(self, values: Sequence[Any], name: str) -> Any:
        rows = all(
            isinstance(one, tuple | list) and len(one) == max(1, count)
            for one, count in zip(values, self._samples, strict=True)
        )
        try:
            if rows:
                own = [item for one, count in zip(values, self._samples, strict=True) for item in one[:count]]
                return [item for mine in self._gather.values(own) for item in mine]
            every = [one for mine in self._gather.values(list(values)) for one in mine]
        except TypeError:
            self._refuse(name)
        if any(one != every[0] for one in every):
            self._refuse(name)
        return values[0]

    def _refuse(self, name: str) -> NoReturn:
        raise LossError(
            f"batch{name} is not the same in every micro-batch, and has no row for each sample, so that "
            'loss_over="batch" cannot put it together as one device has it.\n'
            "    try: a tensor with a row for each sample, such as an index or a label, from job.collate or the data"
        )


@final
class EntriesByName(dict[Any, Any]):
    """A dict whose values are gathered at their first read."""

    def __getitem__(self, key: Any) -> Any:
        return super().__getitem__(key)()

    def __iter__(self) -> Iterator[Any]:  # with one of its own, dict(...) and ** ask for each value
        return super().__iter__()

    def get(self, key: Any, default: Any = None) -> Any:
        return self[key] if key in self else default  # noqa: SIM401  (it is what this is)

    def setdefault(self, key: Any, default: Any = None) -> Any:
        return self.get(key, default)

    def values(self) -> Any:
        return [self[key] for key in self]

    def items(self) -> Any:
        return [(key, self[key]) for key in self]

    def copy(self) -> dict[Any, Any]:
        return dict(self.items())

    def pop(self, key: Any, *default: Any) -> Any:
        found = super().pop(key, *default)
        return found() if callable(found) else found

    def __or__(self, other: Any) -> Any:
        return self.copy() | other

    def __ror__(self, other: Any) -> Any:
        return other | self.copy()

    def __repr__(self) -> str:
        return repr(self.copy())


@final
class EntriesInOrder(tuple[Any, ...]):
    """A sequence whose entries are gathered at their first read."""

    def __getitem__(self, at: Any) -> Any:
        found: Any = super().__getitem__(at)
        return tuple(one() for one in found) if isinstance(at, slice) else found()

    def __iter__(self) -> Iterator[Any]:
        return (one() for one in super().__iter__())

    def __repr__(self) -> str:
        return repr(tuple(self))


def compared(module: nn.Module, example: Example) -> tuple[ComparedTensors, ...]:
    """Return the tensors gathered by the loss of ``example``: the output, and each entry of the batch that it reads.

    ``module`` needs no values; empty if model or loss cannot be run on fakes.
    """
    known, mode = which_have_rows(module, example), FakeTensorMode(allow_non_fake_inputs=True)
    recorded = _RecordedGather(known)
    try:
        with torch.random.fork_rng(devices=[]), torch.no_grad(), quiet(), faked(module, mode):
            args, kwargs, batch = fakes(mode, (example.args, example.kwargs, example.batch))
            output = module(*args, **kwargs)
            recorded.gather(recorded.columns([output], [2], OUTPUT), OUTPUT)
            entries: Any = recorded
            example.loss(output, BatchEntries(entries, [2], torch.device("cpu")).of([batch]))
    except Exception:  # whatever model and loss raise on fakes
        return ()
    return tuple(recorded.found)


class _RecordedGather:
    """A gather that only records the columns to be gathered."""

    def __init__(self, known: Mapping[str, bool]) -> None:
        self.found: list[ComparedTensors] = []
        self._gather = RowGather(torch.device("cpu"), known=known)
        self.columns = self._gather.columns
        self.values = self._gather.values

    def gather(self, columns: Sequence[Column], where: str) -> tuple[list[Column], list[Tensor], int]:
        rows, others = (sum(bytes_of(one) for one in columns if one.rows is kind) for kind in (True, False))
        self.found.append(ComparedTensors(rows=rows, others=others))
        return list(columns), [one.own for one in columns], 0
