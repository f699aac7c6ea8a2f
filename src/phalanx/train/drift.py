"""Drift: replicas with different parameters that should be equal.

Ranks that differ along ``dp`` or ``cp`` only start from the same values, add up the same gradients and take the same
step, so their parameters are the same to the last bit. So are running statistics of normalisation layers, which all
ranks copy from the first one after each step (``parallel/buffer_sync.py``). A bit that flips in memory, a broken
collective, or code of the job that changes a parameter on one rank breaks that without a trace: from then on every rank
trains a model of its own. So every few steps the ranks compare fingerprints of a fifth of their values, another fifth
each time: a sum of the bits, which changes with any one element. That reads a fifth of the parameters and sends eight
bytes.

If fingerprints differ, the ranks compare the tensors, then the blocks of each, then the values. Differences no larger
than rounding are only reported, because unlike processors may compute unlike last bits. On a device the second look is
one step later; values that are equal again by then are reported, too.

Not compared are independent replicas (``sync=local``, ``sync=diloco``), which differ by design between averagings;
workers of parameter servers, which receive their parameters anew; replicas in threads; and other buffers, which forward
may change by the samples it sees. Ranks along ``tp`` and ``fsdp`` hold other parts of the model and cannot be compared.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import final

import torch
import torch.distributed as dist

from phalanx.comm import Mesh, all_gather_flat, local
from phalanx.config import Plan
from phalanx.config.run import DriftPolicy
from phalanx.device_kinds import kind_of
from phalanx.errors import DriftError

PARTS = 5
"""Looks after which every parameter has been compared."""

_BLOCKS = 1024  # of a tensor that differs
_AT_ONCE = 2**22  # elements that are compared at once, or one block
_ROW = 4096  # elements of eight bytes that are summed up together
_ROUNDING = 1e-5  # of the largest value: what two processors may make of the same sums
_PASSED = (
    "replicas differed after step {}, and no longer do: what differed has been brought together since, as running "
    "statistics are after each step; memory, a device or a link may be at fault"
)


@final
class DriftWatch:
    """A comparison of this rank with its replicas; every call is collective among them.

    Attributes:
        found: True after an unresolved difference: no replica's state can be trusted.
    """

    def __init__(
        self, parameters: Mapping[str, torch.Tensor], group: dist.ProcessGroup, policy: DriftPolicy, every: int
    ) -> None:
        """Watch ``parameters`` (name → value equal on every rank), a part of them ``every`` so many steps."""
        self._tensors = {name: local(tensor).detach() for name, tensor in parameters.items()}
        self._group, self._policy, self._every = group, policy, every
        self._parts = _parts(self._tensors)
        self._waiting: _Look | None = None
        self._warnings: list[str] = []
        self._rounds = self.found = False

    @classmethod
    def of(
        cls, plan: Plan, rank: int, parameters: Mapping[str, torch.Tensor], policy: DriftPolicy, every: int
    ) -> DriftWatch | None:
        """Return the watch for a rank of ``plan``; ``None`` without replicas, or if it is off. Collective."""
        group = Mesh(plan, rank).group("dp", "cp") if policy != "off" and plan.kind != "threads" else None
        return cls(parameters, group, policy, every) if group is not None else None

    def stepped(self, step: int) -> None:
        """Compare after ``step``, if it is time.

        Raises:
            DriftError: naming the tensor and the ranks, if they have drifted apart and the policy is to stop.
        """
        self.settle()
        if (step + 1) % self._every:
            return
        part = self._parts[(step + 1) // self._every % PARTS]
        fingerprint = bit_sum(piece.of(self._tensors) for piece in part)
        if not (kind := kind_of(fingerprint.device)).streams:
            self._waiting = _Look(step, part, fingerprint)
            self.settle()
            return
        # On a device one step later: the host does not wait for it while nothing is queued there.
        host, ready = torch.empty_like(fingerprint, device="cpu", pin_memory=True), kind.event()
        host.copy_(fingerprint, non_blocking=True)
        ready.record()
        self._waiting = _Look(step, part, host, ready)

    def settle(self) -> None:
        """Finish the pending comparison, if there is one.

        Raises:
            DriftError: as ``stepped``.
        """
        look, self._waiting = self._waiting, None
        if look is None:
            return
        if look.ready is not None:
            look.ready.synchronize()
        fingerprints = [row[0] for row in self._rows(look.fingerprint.view(1))]
        if len(set(fingerprints)) > 1:
            self.found = True
            if difference := self._look_closer(look):
                self._take(difference)
            else:
                self._warnings.append(_PASSED.format(look.step))
            self.found = False

    def news(self) -> Sequence[str]:
        """Return warnings since the last call."""
        found, self._warnings = self._warnings, []
        return found

    def _take(self, found: ReplicaDifference) -> None:
        if found.rounding:
            if not self._rounds:
                self._warnings.append(f"{found}, which is no more than rounding: the processors are perhaps not alike")
            self._rounds = True
        elif self._policy == "warn":
            self._warnings.append(f"{found}; from here on they train models of their own")
        else:
            raise DriftError(
                f"{found}; from here on they would train models of their own\n"
                "    It comes from memory or a device that fails, a link that changes what it carries, or code of the "
                "job that changes a parameter on one rank: look at the rank that differs first\n"
                '    try: resume=True, to resume from the last checkpoint; drift="warn" to continue all the same'
            )

    def _look_closer(self, look: _Look) -> ReplicaDifference | None:
        """Return tensor, difference and ranks: the first difference beyond rounding, else the first of all.

        ``None`` if there is no difference any more.
        """
        each = self._rows(torch.stack([bit_sum([piece.of(self._tensors)]).cpu() for piece in look.part]))
        rounding: ReplicaDifference | None = None
        for index in _differing(each):
            difference = self._difference(look.step, look.part[index])
            if not difference.rounding:
                return difference
            rounding = rounding or difference
        return rounding

    def _difference(self, step: int, piece: Piece) -> ReplicaDifference:
        values = piece.of(self._tensors)
        blocks = values.tensor_split(min(_BLOCKS, max(1, values.numel())))
        rows = self._rows(torch.stack([bit_sum([block]).cpu() for block in blocks]))
        # sums of blocks may happen to be the same, of other values
        differing = [blocks[index] for index in _differing(rows)] or list(blocks)
        most, by, there = 0.0, -1.0, torch.zeros(1, dtype=torch.float64)
        for some in _grouped(differing):
            highest = torch.cat([block.cpu().double() for block in some])
            highest[highest.isnan()] = math.inf
            own, lowest = highest.clone(), highest.clone()
            dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=self._group)
            dist.all_reduce(lowest, op=dist.ReduceOp.MIN, group=self._group)
            apart = (highest - lowest).nan_to_num(nan=0.0, posinf=math.inf)
            most = max(most, highest.abs().max().item(), lowest.abs().max().item())
            if apart.max().item() > by:
                by, there = apart.max().item(), own[apart.argmax()].view(1)
        ranks, held = dist.get_process_group_ranks(self._group), torch.empty(len(rows), dtype=torch.float64)
        all_gather_flat(held, there, self._group)
        far = [rank for rank, value in zip(ranks, held, strict=True) if not abs(value - held.median()) < by / 2]
        return ReplicaDifference(
            step=step,
            name=piece.name,
            ranks=tuple(far if 2 * len(far) < len(ranks) else ranks),
            of=tuple(ranks),
            by=by,
            most=most,
        )

    def _rows(self, mine: torch.Tensor) -> list[list[int]]:
        size = self._group.size()
        out = torch.empty(size * mine.numel(), dtype=mine.dtype)
        all_gather_flat(out, mine, self._group)
        return out.view(size, -1).tolist()


@dataclass(frozen=True, slots=True)
class Piece:
    """Elements ``first`` to ``last`` of a tensor."""

    name: str
    first: int
    last: int

    def of(self, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return its present values, flat."""
        return tensors[self.name].reshape(-1)[self.first : self.last]


@dataclass(frozen=True, slots=True)
class _Look:
    step: int
    part: Sequence[Piece]
    fingerprint: torch.Tensor
    ready: torch.Event | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplicaDifference:
    """A difference between replicas.

    Attributes:
        step: the last one taken.
        name: of the first tensor that differs.
        ranks: the minority; all compared ranks, if there is no majority.
        of: compared ranks.
        by: largest difference of an element.
        most: largest value in the differing part.
    """

    step: int
    name: str
    ranks: tuple[int, ...]
    of: tuple[int, ...]
    by: float
    most: float

    @property
    def rounding(self) -> bool:
        """Return True if it may come from the last bits of sums alone."""
        return math.isfinite(self.by) and self.by <= _ROUNDING * self.most

    def __str__(self) -> str:
        ranks = ", ".join(map(str, self.ranks))
        others = "" if len(self.ranks) == len(self.of) else " from their replicas"
        verb = "differ" if len(self.ranks) > 1 else "differs"
        return (
            f"replicas have drifted apart: after step {self.step}, {self.name!r} of rank{'s' * (len(self.ranks) > 1)} "
            f"{ranks} {verb}{others}, by up to {self.by:.2g}"
        )


def _grouped(blocks: Iterable[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    group, elements = list[torch.Tensor](), 0
    for block in blocks:
        if group and elements + block.numel() > _AT_ONCE:
            yield group
            group, elements = [], 0
        group.append(block)
        elements += block.numel()
    yield group


def _differing(rows: Sequence[Sequence[int]]) -> list[int]:
    return [index for index, column in enumerate(zip(*rows, strict=True)) if len(set(column)) > 1]


def _parts(tensors: Mapping[str, torch.Tensor]) -> list[list[Piece]]:
    """Yield all elements in parts of about equal bytes; a part may end within a tensor."""
    total = sum(tensor.nbytes for tensor in tensors.values())
    parts: list[list[Piece]] = [[] for _ in range(PARTS)]
    at = 0
    for name, tensor in tensors.items():
        each, first = tensor.element_size(), 0
        while first < tensor.numel():
            index = min(PARTS - 1, at * PARTS // max(1, total))
            end = total if index == PARTS - 1 else (index + 1) * total // PARTS
            # whole words of eight bytes, which are summed
            count = min(tensor.numel() - first, max(8, -(-(end - at) // each) // 8 * 8))
            parts[index].append(Piece(name, first, first + count))
            first, at = first + count, at + count * each
    return parts


def _words(flat: torch.Tensor) -> Iterator[torch.Tensor]:
    """Return the bits of a flat tensor as 8-byte integers, and the rest as bytes."""
    flat = flat.contiguous()
    if flat.storage_offset() * flat.element_size() % 8:
        flat = flat.clone()
    raw = flat.view(torch.uint8)
    whole = len(raw) // 8 * 8
    yield raw[:whole].view(torch.int64)
    yield raw[whole:].to(torch.int64)


def bit_sum(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    """Return one integer for flat ``tensors``, on their device, which changes with any one element.

    It is a sum of all words of eight bytes, each row of them times an odd number of its own, modulo 2 to the 64.
    """
    found: torch.Tensor | None = None
    for number, words in enumerate(words for tensor in tensors for words in _words(tensor)):
        value = words.sum()
        if rows := len(words) // _ROW:
            odd = 2 * torch.arange(1, rows + 1, device=words.device) + 1
            value = (words[: rows * _ROW].view(rows, _ROW).sum(1) * odd).sum() + words[rows * _ROW :].sum()
        value *= 2 * number + 1
        found = value if found is None else found + value
    return torch.zeros((), dtype=torch.int64) if found is None else found
