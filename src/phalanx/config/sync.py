"""How replicas are kept together, as a plan says it: averaging, servers, compression, uneven shares, buckets."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from phalanx.config.fields import AXES, SYNC_KEYS, UNBOUNDED, plan_problem
from phalanx.errors import Problem

if TYPE_CHECKING:
    from phalanx.config.plan import Plan


_OUTER = {"nesterov": {"outer_lr": 0.7, "outer_momentum": 0.9}}


def outer_defaults(outer: str) -> dict[str, float]:
    """Learning rate and momentum of an outer optimizer where a plan states none: those of DiLoCo for ``nesterov``."""
    return _OUTER.get(outer, {"outer_lr": 1.0, "outer_momentum": 0.0})


def within(plan: Plan) -> Plan:
    """What one replica of ``plan`` is by itself where replicas step by themselves; else ``plan``."""
    if plan.sync == "each":
        return plan
    plain = type(plan)()
    return replace(plan, dp=1, **{key: getattr(plain, key) for key in SYNC_KEYS})


def bounds(plan: Plan) -> Iterator[str]:
    """What bounds the difference from one device, a sentence for each way in which a plan gives its result up."""
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
    """``yes``, ``within the rounding of TYPE``, or ``no``: whether each step is that of one device in fp32."""
    rounded: list[str] = [plan.compress] if Compression.parse(plan.compress).facts.rounds else []
    if any(bounds(replace(plan, compress="none") if rounded else plan)):
        return "no"
    if plan.precision not in ("fp32", *rounded):
        rounded.append(plan.precision)
    return f"within the rounding of {' and '.join(rounded)}" if rounded else "yes"


def apart_problems(plan: Plan) -> Iterator[Problem]:
    """What the keys of other ways to keep replicas together need, and what they exclude."""
    yield from _sync(plan)
    yield from _server(plan)
    yield from _compress(plan)
    yield from _shares(plan)


def _sync(plan: Plan) -> Iterator[Problem]:
    dp, apart = max(2, plan.dp), plan.sync != "each"
    for name, plain in (("every", 1), ("after", 0)):
        value = getattr(plan, name)
        if name == "after" and plan.staleness:
            continue
        if value != plain and not apart:
            allowed = "only with sync=local or sync=diloco: otherwise replicas are brought together in every step"
            if name == "after":
                allowed = "only with sync=local, sync=diloco or staleness: other plans are synchronous all along"
            fix = f"dp={dp} sync=local every={max(32, plan.every)}" + (f" {name}={value}" if name != "every" else "")
            yield plan_problem(name, f"{name}={value} with sync=each", allowed, fix)
    if (plan.outer != "none") != (plan.sync == "diloco"):
        allowed = "nesterov or sgd with sync=diloco, and nothing without: it steps what replicas have learnt"
        outer = plan.outer if plan.outer != "none" else "nesterov"
        yield plan_problem(
            "outer", f"outer={plan.outer} with sync={plan.sync}", allowed, f"dp={dp} sync=diloco outer={outer}"
        )
    for name, value in outer_defaults(plan.outer).items():
        settable = plan.outer == "nesterov" or (plan.outer == "sgd" and name == "outer_lr")
        if not settable and getattr(plan, name) != value:
            given = f"{name}={getattr(plan, name)} with outer={plan.outer}"
            yield plan_problem(name, given, "only with sync=diloco outer=nesterov", f"dp={dp} sync=diloco")
    if apart and plan.dp == 1:
        allowed = "only together with dp=2 or more: it says how replicas are brought together"
        yield plan_problem(
            "sync", f"sync={plan.sync} without dp", allowed, f"dp=2 sync={plan.sync} every={max(2, plan.every)}"
        )


def _server(plan: Plan) -> Iterator[Problem]:
    dp = max(2, plan.dp)
    if plan.staleness is not None and not plan.server:
        allowed = "only together with server=1 or more: gradients may be of parameters so many updates old"
        stale = f"staleness={_said(plan.staleness)}"
        yield plan_problem("staleness", f"{stale} without server", allowed, f"server=1 dp={dp} {stale}")
    if plan.backup and not plan.server:
        fix = f"server=1 dp={dp} backup=1"
        yield plan_problem("backup", f"backup={plan.backup} without server", "only together with server=1 or more", fix)
    if plan.server and plan.sync != "each":
        allowed = "one of the two: both say how replicas are brought together"
        given, fix = f"server={plan.server} with sync={plan.sync}", f"server={plan.server} dp={dp}"
        yield plan_problem("server", given, allowed, fix)
    if plan.server and plan.shares:
        allowed = "one of the two: servers deal samples out to whoever is free"
        given = f"shares={plan.shares} with server={plan.server}"
        yield plan_problem("shares", given, allowed, f"server={plan.server} dp={dp}")
    if plan.backup and plan.staleness:
        given = f"backup={plan.backup} with staleness={_said(plan.staleness)}"
        allowed = "one of the two: with staleness nobody waits for the slowest anyway"
        yield plan_problem("backup", given, allowed, f"server={plan.server} dp={dp} backup={plan.backup}")
    elif plan.server and plan.backup >= plan.dp:
        given = f"backup={plan.backup} with dp={plan.dp}"
        yield plan_problem(
            "backup", given, "fewer than the workers", f"server={plan.server} dp={plan.backup + 1} backup=1"
        )
    if plan.server:
        yield from _beside_servers(plan)


def _compress(plan: Plan) -> Iterator[Problem]:
    try:
        codec = Compression.parse(plan.compress).codec
    except ValueError:
        allowed = "none, fp16, bf16, int8, powersgd (powersgd:4, its rank), topk (topk:0.01, the share that is sent)"
        yield plan_problem("compress", f"compress={plan.compress}", allowed, "dp=2 compress=int8")
        return
    if codec == "none":
        return
    given = f"compress={plan.compress}"
    if plan.dp == 1:
        allowed = "only together with dp=2 or more: it is how replicas send each other gradients"
        yield plan_problem("compress", f"{given} without dp", allowed, f"dp=2 compress={plan.compress}")
    inner = [f"{name}={getattr(plan, name)}" for name in AXES if name != "dp" and getattr(plan, name) > 1]
    if inner and plan.sync == "each" and not plan.server:
        allowed = "dp alone, or sync=local or sync=diloco: sharded and split gradients are summed by other means"
        fix = f"dp={max(2, plan.dp)} compress={plan.compress}"
        yield plan_problem("compress", f"{given} with {' '.join(inner)}", allowed, fix)
    if codec == "powersgd" and (plan.server or plan.sync != "each"):
        other = f"server={plan.server}" if plan.server else f"sync={plan.sync}"
        allowed = "fp16, bf16, int8 or topk there: PowerSGD sums thin matrices over all ranks of a step"
        yield plan_problem("compress", f"{given} with {other}", allowed, f"{other} dp={max(2, plan.dp)} compress=int8")


def _count(count: int, what: str) -> str:
    return f"{count} {what}{'s' if count > 1 else ''}"


def _said(staleness: float) -> str:
    return UNBOUNDED if staleness == math.inf else str(staleness)


def _beside_servers(plan: Plan) -> Iterator[Problem]:
    """Workers of servers hold a whole model and no optimizer."""
    split = [f"{name}={getattr(plan, name)}" for name in (*AXES, "threads") if name != "dp" and getattr(plan, name) > 1]
    fix = f"server={plan.server} dp={max(2, plan.replicas)}"
    if split:
        given = f"server={plan.server} with {' '.join(split)}"
        yield plan_problem("server", given, "dp alone: each worker holds a whole model", fix)
    if plan.offload != "none":
        given = f"offload={plan.offload} with server={plan.server}"
        yield plan_problem("offload", given, "none: servers hold the optimizer", fix)


def _shares(plan: Plan) -> Iterator[Problem]:
    """Weights that cannot be read, that are not one for each rank of ``dp``, or that give one nothing."""
    given, fix = f"shares={plan.shares}", f"dp={max(2, plan.dp)} shares=auto"
    try:
        each = weights(plan.shares)
    except ValueError:
        allowed = "auto, or a whole number for each rank of dp, joined by commas"
        yield plan_problem("shares", given, allowed, "dp=2 shares=3,1")
        return
    if plan.shares and plan.dp == 1:
        allowed = "only together with dp=2 or more: they are shares of its ranks"
        yield plan_problem("shares", f"{given} without dp", allowed, fix)
    elif plan.shares and plan.pp > 1:
        allowed = "no pipeline: ranks of dp that are whole replicas"
        yield plan_problem("shares", f"{given} with pp={plan.pp}", allowed, fix)
    elif each and (len(each) != plan.dp or not all(each)):
        allowed = f"{plan.dp} weights, one for each rank of dp, 1 or more each"
        yield plan_problem("shares", f"{given} with dp={plan.dp}", allowed, fix)


@dataclass(frozen=True, kw_only=True, slots=True)
class CodecFacts:
    """What plans, forecasts and runs have to know of a codec alike.

    Attributes:
        way: how messages are averaged: ``chunks`` go to the rank that adds them up, and the mean of it to all;
            ``gathered`` ones go to all; ``thin`` matrices, or ``whole`` tensors, are summed as they are.
        bytes: of a message, an element that is sent.
        rounds: whether every element is sent; others leave most of them for later.
        feeds_back: whether what it leaves out of a tensor is too much to be lost, and is added to the next one.
        grain: elements that are encoded together: a tensor is best cut at multiples of it.
        amount: where a plan states none: rank of ``powersgd``, share of the elements that ``topk`` sends; 0 for others.
        averaged: bytes moved in memory, an element that is averaged: each operation of ``parallel.compression`` reads
            and writes once.
        pushed: the same for an element that a worker encodes for a server, with what it keeps of what it leaves out.
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
    """One way to send less: a codec, and where it takes one its amount (see ``CodecFacts``)."""

    codec: str
    amount: float = 0.0

    @property
    def facts(self) -> CodecFacts:
        """Of its codec."""
        return CODECS[self.codec]

    @classmethod
    def parse(cls, text: str) -> Compression:
        """What ``int8``, ``powersgd:4`` or ``topk:0.01`` says; rank 4 and a share of 0.01 where not given.

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
    """The weights that a text such as ``3,1`` gives to the ranks of ``dp``; none for ``auto`` and for the empty text.

    Raises:
        ValueError: if it is none of these.
    """
    if text in ("", AUTO):
        return ()
    if not re.fullmatch(r"\d+(,\d+)*", text):
        raise ValueError(f"{text!r} is neither auto nor whole numbers joined by commas, such as 3,1")
    return tuple(int(word) for word in text.split(","))


def split_by_weight(total: int, each: Sequence[float]) -> tuple[int, ...]:
    """``total`` samples dealt out in proportion to the weights ``each``: the largest remainders are rounded up.

    Of equal remainders the first is rounded up, so that equal weights get what even shares are: 7 over 1, 1 is 4, 3.

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
"""Of a bucket of gradients that are reduced in one collective, about; a larger tensor stands alone. As in torch."""
