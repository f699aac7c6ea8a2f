"""Messages between the ranks of a pipeline: their senders, receivers and order; local shards in messages.

Between two ranks messages pass in the order of a simulation of the schedule. NCCL, which has no tags and handles one
message after another, needs both ends to post them in one order; gloo has tags and does not, so a receive with an
unknown size is left for later. Receives are posted ahead, a few at a time.

Sliced tensors travel from stage to stage as slices, and their cuts are sent once. A stage knows the shapes of whole
values before they arrive, from its fakes, but not along which tokens they are sliced. The first time that values of
some shapes pass a cut, a line of text precedes them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from phalanx.device_kinds import kind_of
from phalanx.parallel.local_shards import Axis, Cut, Placed, is_sliced, sliced
from phalanx.parallel.local_shards.tensor import local_of
from phalanx.placement.schedules import Order, timed

if TYPE_CHECKING:
    from phalanx.parallel.pipeline.runner import PipelineRun

_AHEAD = 2  # receives from one rank that are posted before anyone waits for them


class Message(NamedTuple):
    """Values that one stage sends a neighbour for one micro-batch."""

    forward: bool  # values for the next stage; else gradients for the one before
    cut: int  # the stage that begins after the cut they pass
    micro: int


def messages(order: Order, rank: int) -> dict[int, list[tuple[Message, bool]]]:
    """Map other rank to its messages with ``rank``, in order, with True for those sent by ``rank``."""
    found: dict[int, list[tuple[Message, bool]]] = {}
    stages = len(order.rank_of)
    for one in sorted(timed(order), key=lambda one: (one.end, one.action.stage, one.action.kind)):
        kind, stage, micro = one.action
        if kind == "W" or (kind == "F" and stage == stages - 1) or (kind != "F" and stage == 0):
            continue
        message = Message(kind == "F", stage + 1 if kind == "F" else stage, micro)
        to = order.rank_of[stage + 1 if kind == "F" else stage - 1]
        if to != one.rank and rank in (to, one.rank):
            found.setdefault(to if rank == one.rank else one.rank, []).append((message, rank == one.rank))
    return found


def wants_order(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Return True if the group distinguishes messages of tensors on ``device`` by their order alone."""
    kind = kind_of(device)
    return kind.in_order and kind.backend in dist.get_backend_config(group)


class StageMessages:
    """The messages of one run of one rank."""

    def __init__(
        self,
        order: Order,
        rank: int,
        *,
        peers: Sequence[int],
        group: dist.ProcessGroup | None,
        device: torch.device,
        contents: PipelineRun,
    ) -> None:
        self._order, self._rank, self._peers, self._group = order, rank, peers, group
        self._device, self._contents = device, contents
        # Whether receives are posted in order, and sizes so have to be known ahead.
        self.in_order = group is not None and wants_order(group, device)
        self._lines = messages(order, rank)
        self._tags = {message: index for line in self._lines.values() for index, (message, _) in enumerate(line)}
        self._todo = {
            other: [one for one in line if self.in_order or not one[1]] for other, line in self._lines.items()
        }
        self._waiting = dict.fromkeys(self._lines, 0)
        self._ready: dict[Message, list[Tensor]] = {}
        self._lines_ahead: dict[Message, Tensor] = {}
        self._posted: dict[Message, list[tuple[dist.Work | None, Tensor]]] = {}
        self._sent: list[tuple[dist.Work | None, Tensor]] = []
        self._handed: dict[Message, list[Tensor]] = {}

    def send(self, message: Message, tensors: Sequence[Tensor], line: Tensor | None = None) -> None:
        """Send a message, with an optional line before it; to a stage of this rank hand it over."""
        other = self._other(message)
        if other == self._rank:
            self._handed[message] = list(tensors)
            return
        self._ready[message] = [tensor.contiguous() for tensor in tensors]
        if line is not None:
            self._lines_ahead[message] = line.to(self._device)
        if self.in_order:
            self._advance(other)
        else:
            self._post_send(message, other)
        self._sent = [(work, tensor) for work, tensor in self._sent if work is not None and not work.is_completed()]

    def receive(self, message: Message) -> list[Tensor]:
        """Wait for a message and return its tensors."""
        other = self._other(message)
        if other == self._rank:
            return self._handed.pop(message)
        if message not in self._posted:
            self._advance(other, message)
        found: list[Tensor] = []
        for work, tensor in self._posted.pop(message):
            if work is not None:
                work.wait()
            found.append(tensor)
        self._waiting[other] -= 1
        self._advance(other)
        return found

    def expect(self, message: Message) -> None:
        """Post the receive of a message, after the receives that must precede it."""
        other = self._other(message)
        if other != self._rank and message not in self._posted:
            self._advance(other, message)

    def finish(self) -> None:
        """Wait until everything has been sent."""
        for work, _ in self._sent:
            if work is not None:
                work.wait()
        self._sent = []

    def _other(self, message: Message) -> int:
        before, after = self._order.rank_of[message.cut - 1], self._order.rank_of[message.cut]
        return after if before == self._rank else before

    def _advance(self, other: int, until: Message | None = None) -> None:
        line = self._todo[other]
        if until is not None and not self.in_order:  # tags tell messages apart: this one need not wait for others
            self._post_receive(until, other, True)
            line.remove((until, False))
            until = None
        while line:
            message, mine = line[0]
            enough = until is None and self._waiting[other] >= _AHEAD
            if mine and message in self._ready:
                self._post_send(message, other)
            elif mine or enough or not self._post_receive(message, other, until is not None):
                return
            line.pop(0)
            if message == until:
                until = None

    def _post_send(self, message: Message, other: int) -> None:
        tensors = list(enumerate(self._ready.pop(message)))
        line = self._lines_ahead.pop(message, None)
        if line is not None:
            length = torch.tensor([len(line)], device=self._device)
            tensors = [(_MOST_LEAVES - 2, length), (_MOST_LEAVES - 1, line), *tensors]
        for leaf, tensor in tensors:
            # It would never be sent, and the other rank would wait for ever.
            assert not isinstance(tensor, FakeTensor), f"{message}: a stand-in for a value of another stage"
            work = dist.isend(tensor, self._peers[other], group=self._group, tag=self._tag(message, leaf))
            self._sent.append((work, tensor))

    def _post_receive(self, message: Message, other: int, needed: bool) -> bool:
        if self._contents.untold(message):
            if not needed:
                return False
            length = torch.zeros(1, dtype=torch.int64, device=self._device)
            self._take(length, message, other, _MOST_LEAVES - 2)
            line = torch.zeros(int(length), dtype=torch.uint8, device=self._device)
            self._take(line, message, other, _MOST_LEAVES - 1)
            self._contents.tell(message, line)
        sizes = self._contents.sizes(message)
        if sizes is None:
            return False
        posted: list[tuple[dist.Work | None, Tensor]] = []
        for leaf, like in enumerate(sizes):
            tensor = torch.empty(like.shape, dtype=like.dtype, device=self._device)
            work = dist.irecv(tensor, self._peers[other], group=self._group, tag=self._tag(message, leaf))
            posted.append((work, tensor))
        self._posted[message] = posted
        self._waiting[other] += 1
        return True

    def _take(self, tensor: Tensor, message: Message, other: int, leaf: int) -> None:
        work = dist.irecv(tensor, self._peers[other], group=self._group, tag=self._tag(message, leaf))
        if work is not None:
            work.wait()

    def _tag(self, message: Message, leaf: int) -> int:
        return self._tags[message] * _MOST_LEAVES + leaf


_MOST_LEAVES = 1024


_Way = list[Any]
"""How one value is cut: for each axis its name, the dimension and the cut's parts; empty for a whole one."""


class Parcels:
    """This rank's knowledge of the cuts of passing values."""

    def __init__(self) -> None:
        self.axes: Mapping[str, Axis] = {}  # by name, that values may be sliced along; without any, nothing is told
        self._ways: dict[Any, list[_Way]] = {}
        self._told: set[Any] = set()

    def packed(self, cut: int, values: Sequence[Tensor]) -> tuple[list[Tensor], Tensor | None]:
        """Return the tensors to send for ``values``, and the line to send before them."""
        if not self.axes:
            return list(values), None
        ways = [_way(value) for value in values]
        key = _key(cut, values)
        self._ways[key] = ways
        told = None
        if key not in self._told:
            self._told.add(key)
            told = torch.tensor(list(json.dumps(ways).encode()), dtype=torch.uint8)
        return [local_of(value) for value in values], told

    def unknown(self, cut: int, fakes: Sequence[Tensor]) -> bool:
        """Return True if the sender will announce the cuts of these values."""
        return bool(self.axes) and _key(cut, fakes) not in self._ways

    def learn(self, cut: int, fakes: Sequence[Tensor], told: Tensor) -> None:
        self._ways[_key(cut, fakes)] = json.loads(bytes(told.tolist()))

    def sizes(self, cut: int, fakes: Sequence[Tensor]) -> list[Tensor]:
        """Return tensors in the shapes in which these values travel."""
        found: list[Tensor] = []
        for fake, way in zip(fakes, self._of(cut, fakes), strict=True):
            shape = list(fake.shape)
            for one in self._placed(way):
                shape[one.dim] = one.cut.length(one.axis.rank)
            found.append(torch.empty(shape, dtype=fake.dtype, device="meta"))
        return found

    def unpacked(self, cut: int, fakes: Sequence[Tensor], arrived: Sequence[Tensor]) -> list[Tensor]:
        """Return the values from ``arrived``, the received tensors."""
        found: list[Tensor] = []
        for local, way in zip(arrived, self._of(cut, fakes), strict=True):
            placed = self._placed(way)
            for one in placed:
                one.axis.length = one.cut.size // one.cut.outer  # as where values are first sliced
            found.append(sliced(local, placed))
        return found

    def _of(self, cut: int, fakes: Sequence[Tensor]) -> list[_Way]:
        return self._ways[_key(cut, fakes)] if self.axes else [[] for _ in fakes]

    def _placed(self, way: _Way) -> list[Placed]:
        return [
            Placed(self.axes[name], dim, Cut(outer, units, inner, tuple(tuple(map(tuple, one)) for one in held)))
            for name, dim, outer, units, inner, held in way
        ]


def _way(value: Tensor) -> _Way:
    if not is_sliced(value):
        return []
    return [[one.axis.name, one.dim, one.cut.outer, one.cut.units, one.cut.inner, one.cut.held] for one in value.placed]


def _key(cut: int, values: Sequence[Tensor]) -> Any:
    return cut, tuple((tuple(value.shape), value.dtype) for value in values)
