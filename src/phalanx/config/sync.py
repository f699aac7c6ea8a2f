"""How a plan synchronises replicas: averaging, compression, uneven shares, and the exactness that follows."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from phalanx.config.plan import Plan

_SYNC_KEYS = "sync every after outer outer_lr outer_momentum server staleness backup compress shares".split()


def outer_defaults(outer: str) -> dict[str, float]:
    """Return learning rate and momentum of an outer optimizer; for ``nesterov`` those of DiLoCo."""
    lr, momentum = (0.7, 0.9) if outer == "nesterov" else (1.0, 0.0)
    return {"outer_lr": lr, "outer_momentum": momentum}


def within(plan: Plan) -> Plan:
    """Return the plan of one replica if replicas step separately; else ``plan``."""
    if plan.sync == "each":
        return plan
    plain = type(plan)()
    return replace(plan, dp=1, **{key: getattr(plain, key) for key in _SYNC_KEYS})


def bounds(plan: Plan) -> Iterator[str]:
    """Yield a sentence for each way in which the result of ``plan`` differs from one device."""
    if plan.sync != "each":
        yield f"replicas are synchronised only after every {_count(plan.every, 'step')}"
    if plan.staleness == math.inf:
        yield "parameters may be any number of updates behind when a gradient is computed"
    elif plan.staleness:
        yield f"parameters are at most {_count(int(plan.staleness), 'update')} behind when a gradient is computed"
    if plan.backup:
        slowest = "worker" if plan.backup == 1 else _count(plan.backup, "worker")
        yield f"each step leaves out the samples of the slowest {slowest}"
    what = "gradient" if plan.sync == "each" else "difference"
    if Compression.parse(plan.compress).facts.feeds_back:
        yield f"{plan.compress} sends a part of each {what} in later steps"
    elif plan.compress != "none":
        yield f"{what}s are rounded to {plan.compress} where they are sent"


def exactness(plan: Plan) -> str:
    """Return ``yes``, ``within the rounding of TYPE``, or ``no``: if each step is that of one device in fp32."""
    rounded: list[str] = [plan.compress] if Compression.parse(plan.compress).facts.rounds else []
    if any(bounds(replace(plan, compress="none") if rounded else plan)):
        return "no"
    if plan.precision not in ("fp32", *rounded):
        rounded.append(plan.precision)
    return f"within the rounding of {' and '.join(rounded)}" if rounded else "yes"


def _count(count: int, what: str) -> str:
    return f"{count} {what}{'s' if count > 1 else ''}"


def is_read(parse: Callable[[str], Any], text: object) -> bool:
    """Return True if ``text`` is a text that ``parse`` reads."""
    try:
        return isinstance(text, str) and bool(parse(text) or True)
    except ValueError:
        return False


@dataclass(frozen=True, kw_only=True, slots=True)
class CodecFacts:
    """Properties of a codec, the same for plans, forecasts and runs.

    Attributes:
        way: how messages are averaged: ``chunks`` by the rank that adds them up, ``gathered`` by every rank; ``thin``
            matrices and ``whole`` tensors by an all-reduce.
        bytes: per element sent.
        rounds: True if every element is sent in each step.
        feeds_back: True if the rest of a tensor is added to the next one.
        grain: elements encoded together; cut tensors at multiples of it.
        amount: default rank of ``powersgd``, or share of elements sent by ``topk``; 0 for others.
        averaged: bytes moved in memory per element averaged by ``parallel.compression``.
        pushed: bytes moved in memory per element encoded for a server, with the rest that is kept.
    """

    way: Literal["whole", "chunks", "gathered", "thin"]
    bytes: float = 4.0
    rounds: bool = False
    feeds_back: bool = False
    grain: int = 1
    amount: float = 0.0
    averaged: float = 0.0
    pushed: float = 0.0


CODECS = {
    "none": CodecFacts(way="whole"),
    "fp16": CodecFacts(way="chunks", bytes=2.0, rounds=True, averaged=76.0, pushed=22.0),
    "bf16": CodecFacts(way="chunks", bytes=2.0, rounds=True, averaged=48.0, pushed=12.0),
    "int8": CodecFacts(  # a scale of 4 bytes a block
        way="chunks", bytes=1 + 4 / 256, rounds=True, feeds_back=True, grain=256, averaged=135.0, pushed=97.0
    ),
    "powersgd": CodecFacts(way="thin", feeds_back=True, amount=4.0, averaged=62.0),
    "topk": CodecFacts(way="gathered", bytes=8.0, feeds_back=True, amount=0.01, averaged=82.0, pushed=78.0),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Compression:
    """A codec with its amount (see ``CodecFacts``)."""

    codec: str
    amount: float = 0.0

    @property
    def facts(self) -> CodecFacts:
        """Return the properties of its codec."""
        return CODECS[self.codec]

    @classmethod
    def parse(cls, text: str) -> Compression:
        """Return the compression of ``int8``, ``powersgd:4`` or ``topk:0.01``; 4 and 0.01 are the default amounts.

        Raises:
            ValueError: if it is none of these.
        """
        name, colon, amount = text.partition(":")
        if name not in CODECS or (colon and not CODECS[name].amount):
            raise ValueError(text)
        value = float(amount) if colon else CODECS[name].amount
        allowed = {"powersgd": value >= 1 and value == int(value), "topk": 0 < value <= 1}
        if not allowed.get(name, True):
            raise ValueError(text)
        return cls(codec=name, amount=value)


AUTO = "auto"
"""The text of shares that follow the speed of each device."""


def weights(text: str) -> tuple[int, ...]:
    """Return the weights of a text such as ``3,1``, one for each rank of ``dp``; none for ``auto`` and "".

    Raises:
        ValueError: if it is none of these.
    """
    if text in ("", AUTO):
        return ()
    if not re.fullmatch(r"\d+(,\d+)*", text):
        raise ValueError(f"{text!r} is neither auto nor whole numbers joined by commas, such as 3,1")
    return tuple(int(word) for word in text.split(","))


def split_by_weight(total: int, each: Sequence[float]) -> tuple[int, ...]:
    """Return ``total`` samples split in proportion to the weights ``each``; the largest remainders are rounded up.

    The first of equal remainders is rounded up: 7 over 1, 1 is 4, 3.

    Raises:
        ValueError: if the weights add up to nothing.
    """
    whole = sum(each)
    if whole <= 0:
        raise ValueError("weights that add up to nothing")
    parts = [total * one / whole for one in each]
    counts = [int(part + 1e-9) for part in parts]
    late = sorted(range(len(each)), key=lambda at: (-round(parts[at] - counts[at], 9), at))
    for at in late[: total - sum(counts)]:
        counts[at] += 1
    return tuple(counts)


BUCKET_BYTES = 25 * 2**20
"""Size of a bucket of gradients reduced by one collective, as in torch; a larger tensor has its own."""
