"""A plan: how a job is laid over devices. One line of text, or TOML; both round-trip."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass, fields, replace
from math import prod
from typing import Any, Literal

import tomli_w

from phalanx.config.fields import (
    AXES,
    DATA_AXES,
    STAGES,
    UNBOUNDED,
    Attention,
    Device,
    Offload,
    Outer,
    Precision,
    Recompute,
    Schedule,
    SelfChecked,
    Sync,
    choices,
    is_whole,
    nearest,
    option,
    plan_problem,
    show,
    unknown_keys,
)
from phalanx.config.plan_rules import PLAN_RULES
from phalanx.config.sync import Compression, bounds, exactness, is_read, outer_defaults, weights
from phalanx.device_kinds import is_kind
from phalanx.errors import Problem, SpecError
from phalanx.files import toml_table

TRUTHS = ("compile", "sequence")
"""Keys that are true or false."""

_COUNT = {"least": 1}
_TRUTH = {"allowed": "true or false"}
_DILOCO = "dp=2 sync=diloco every=100"
_DEVICE = {
    "accepts": lambda given: given == "auto" or is_kind(given),
    "allowed": lambda: ", ".join(choices()["device"]),
    "example": lambda given: f"device={nearest(str(given), choices()['device'], cutoff=0.7)}",
}
_STALENESS = {
    "accepts": lambda given: given in (None, math.inf) or is_whole(given, 0),
    "allowed": "a whole number of updates, 0 or more, or unbounded",
    "example": "server=1 dp=4 staleness=4",
}
_COMPRESS = {
    "accepts": lambda given: is_read(Compression.parse, given),
    "allowed": "none, fp16, bf16, int8, powersgd (powersgd:4, its rank), topk (topk:0.01, the share that is sent)",
    "example": "dp=2 compress=int8",
}
_SHARES = {
    "accepts": lambda given: is_read(weights, given),
    "allowed": "auto, or a whole number for each rank of dp, joined by commas",
    "example": "dp=2 shares=3,1",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan(SelfChecked, where="plan", rules=PLAN_RULES):
    """How the work is split. The default is one device.

    Attributes:
        dp: ranks that each hold a whole replica (with ``fsdp``: replicas of the sharded group).
        fsdp: ranks over which optimizer state, gradients and parameters are sharded.
        tp: ranks that split each layer's weights (tensor parallelism).
        pp: ranks that each hold some layers (pipeline parallelism; with one micro-batch plain model parallelism).
        cp: ranks that split each sample's tokens (context parallelism).
        ep: ranks that split the experts, and hold different samples (expert parallelism).
        threads: replicas in one process, one thread and one device each.
        zero: sharded by ``fsdp``: 1 optimizer state, 2 and gradients, 3 (default) and parameters; 0 without ``fsdp``.
        schedule: order of the micro-batches in a pipeline's stages.
        stages: stages on each rank of ``pp``; by default as many as the schedule needs.
        sequence: split the activations between products over ``tp`` along the tokens too (sequence parallelism).
        attention: with ``cp``, exchange of keys and values between ranks.
        micro: samples in one forward and backward on one rank; ``None``: the rank's whole share at once.
        precision: of the computation; parameters, reductions and optimizer state stay fp32. ``tf32`` and ``fp8`` can be
            forecast, not yet run.
        recompute: activations computed again in backward: ``none``, ``selective`` (all but matrix products and
            attention), ``full`` (all but block inputs).
        offload: state kept in host memory between uses.
        compile: ``torch.compile`` each block.
        device: kind of device; ``auto`` takes accelerators if there are enough of one kind, else the host's cores.
        sync: of ``dp``: ``each`` sums gradients in every step; ``local`` averages parameters; ``diloco`` hands the
            average change to an outer optimizer.
        every: steps from one averaging to the next, with ``local`` and ``diloco``.
        after: first steps in which gradients are summed in each step (post-local SGD), or without ``staleness``.
        outer: optimizer of ``diloco``; ``nesterov`` by default, ``none`` for others.
        outer_lr: learning rate of the outer optimizer; by default 0.7 for ``nesterov`` and 1 for ``sgd``.
        outer_momentum: of ``nesterov``; 0.9 by default.
        server: parameter servers beside the ranks of ``dp``, on the hosts' processors; they hold the optimizer.
        staleness: with ``server``, maximum number of updates by which a gradient's parameters may be behind; 0 is the
            default and synchronous, ``unbounded`` (``math.inf``) never waits.
        backup: with ``server``, the slowest workers, whose gradients a step leaves out.
        compress: codec of gradients (or averaged parameters) sent between ranks of ``dp`` or to servers: ``none``,
            ``fp16``, ``bf16``, ``int8``, ``powersgd:RANK``, ``topk:SHARE``.
        shares: weights of the ranks of ``dp`` in the global batch, such as ``3,1``; ``auto`` by speed, as far as memory
            goes; empty: even.
    """

    dp: int = option(1, **_COUNT)
    fsdp: int = option(1, **_COUNT)
    tp: int = option(1, **_COUNT)
    pp: int = option(1, **_COUNT)
    cp: int = option(1, **_COUNT)
    ep: int = option(1, **_COUNT)
    threads: int = option(1, **_COUNT)
    schedule: Schedule = "1f1b"
    stages: int = option(None, **_COUNT)  # a number from settle() on
    sequence: bool = option(False, **_TRUTH)
    attention: Attention = "ring"
    zero: int = option(None, "fsdp=2 zero=3", least=0, most=3, allowed="1, 2 or 3")
    micro: int | None = option(None, "micro=8", least=1, allowed="a whole number of samples, 1 or more")
    precision: Precision = "fp32"
    recompute: Recompute = "none"
    offload: Offload = "none"
    compile: bool = option(False, **_TRUTH)
    device: Device = option("auto", **_DEVICE)
    sync: Sync = "each"
    every: int = option(1, "dp=2 sync=local every=32", least=1, of="steps")
    outer: Outer = None  # pyrefly: ignore  # a word from settle() on
    after: int = option(0, "dp=2 sync=local every=32 after=1000", least=0, of="steps")
    outer_lr: float = option(None, f"{_DILOCO} outer_lr=0.7", above=0)
    outer_momentum: float = option(None, f"{_DILOCO} outer_momentum=0.9", least=0, below=1)
    server: int = option(0, "server=1 dp=4", least=0, of="servers")
    staleness: float | None = option(None, **_STALENESS)
    backup: int = option(0, "server=1 dp=4 backup=1", least=0, of="workers")
    compress: str = option("none", **_COMPRESS)
    shares: str = option("", **_SHARES)

    def settle(self) -> None:
        """Fill in the keys that follow from other keys."""
        for name, value in _implied(self).items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, value)

    @classmethod
    def line(cls, name: str, value: Any) -> str:
        """Return a key of a plan as text."""
        return f"{name}={show(value)}"

    def given(self, name: str) -> str:
        """Return a key of the plan as given."""
        return self.line(name, getattr(self, name))

    @property
    def on_any_device(self) -> Plan:
        """The plan with ``device=auto``, for a machine with other devices."""
        return self if self.device == "auto" else replace(self, device="auto")

    @property
    def world_size(self) -> int:
        """Ranks of the mesh: processes that compute."""
        return prod(self.mesh.values())

    @property
    def processes(self) -> int:
        """Processes of a run: the ranks of the mesh, and servers."""
        return self.world_size + self.server

    @property
    def mesh(self) -> dict[str, int]:
        """Size of each dimension of the mesh; the last changes fastest from rank to rank."""
        return {name: getattr(self, name) for name in AXES}

    @property
    def devices(self) -> int:
        """Devices the plan needs."""
        return self.world_size * self.threads

    @property
    def replicas(self) -> int:
        """Parts of a global batch: ranks with samples of their own, times threads."""
        return prod(getattr(self, name) for name in DATA_AXES) * self.threads

    @property
    def splits_blocks(self) -> bool:
        """True if ranks hold slices of a block or of its input."""
        return self.tp * self.cp * self.ep > 1

    @property
    def splits_model(self) -> bool:
        """True if a replica of the model is more than one rank."""
        return max(self.tp, self.pp, self.cp, self.ep) > 1

    @property
    def bound(self) -> str:
        """The bound of the difference from one device; empty if steps are the same."""
        return "; ".join(bounds(self))

    @property
    def exactness(self) -> str:
        """``yes``, ``within the rounding of TYPE``, or ``no``: if each step is that of one device in fp32."""
        return exactness(self)

    @property
    def exact(self) -> bool:
        """True if each step is that of one device in the same precision."""
        return not self.bound

    @property
    def exact_note(self) -> str:
        """``exactness`` and ``bound`` as a sentence; empty if the plan is exact."""
        return f"exact: {self.exactness}. {self.bound[0].upper()}{self.bound[1:]}." if self.bound else ""

    def coordinate(self, rank: int) -> dict[str, int]:
        """Return the place of ``rank`` along each dimension of the mesh."""
        found: dict[str, int] = {}
        for name, size in reversed(self.mesh.items()):
            rank, found[name] = divmod(rank, size)
        return found

    def along(self, names: Collection[str], rank: int) -> list[int]:
        """Return ``rank`` and the ranks that differ from it along the dimensions ``names`` only, in order."""
        at, found = self.coordinate(rank), [0]
        for name, size in self.mesh.items():
            places = range(size) if name in names else (at[name],)
            found = [first * size + place for first in found for place in places]
        return found

    def part(self, rank: int) -> int:
        """Return the number of the part of the global batch that ``rank`` holds; with threads of the first."""
        at, part = self.coordinate(rank), 0
        for name in DATA_AXES:
            part = part * getattr(self, name) + at[name]
        return part * self.threads

    @property
    def kind(self) -> Literal["single", "threads", "replicate", "shard", "split"]:
        """The technique that synchronises the replicas; ``split`` if a replica is several ranks."""
        if self.splits_model:
            return "split"
        if self.threads > 1:
            return "threads"
        return "shard" if self.fsdp > 1 else "replicate" if self.dp > 1 else "single"

    def __str__(self) -> str:
        return " ".join(self.line(name, value) for name, value in _given(self).items()) or "single"

    @classmethod
    def parse(cls, text: str) -> Plan:
        """Return the plan of a line such as ``fsdp=4 zero=2 micro=1 precision=bf16`` or ``single``.

        Raises:
            SpecError: with everything that is wrong in the line.
        """
        values: dict[str, str] = {}
        problems: list[Problem] = []
        for word in words(text):
            key, equals, value = word.partition("=")
            if key in values:
                problems.append(plan_problem(key, f"{key} twice", "each key once", word))
            elif equals:
                values[key] = value
            elif word != "single":
                allowed, fix = "words of the form key=value, or 'single'", f"{nearest(key, _KINDS, cutoff=0.4)}=2"
                problems.append(Problem(where=f"plan {text!r}", given=word, allowed=allowed, fix=fix))
        return _build(values.items(), problems)

    def to_toml(self) -> str:
        """Return the plan as a TOML document without the keys at their default."""
        return tomli_w.dumps(_given(self))

    @classmethod
    def from_toml(cls, text: str) -> Plan:
        """Return the plan in a TOML document.

        Raises:
            SpecError: with everything that is wrong in it.
        """
        table = toml_table(text, where="plan", fix="dp = 2", allowed="a TOML document of plan keys")
        return _build(table.items(), [])


def words(text: str) -> list[str]:
    """Return the words of a plan's text: separated by spaces, or by commas unless a digit follows (``shares=3,1``)."""
    return re.sub(r"\s*,\s*(?!\s|\d)", " ", re.sub(r"\s*,\s*(?=\d)", ",", text)).split()


def _given(plan: Plan) -> dict[str, Any]:
    """Return the keys of ``plan`` that differ from their default, or from the value that follows from other keys."""
    left_out = {one.name: one.default for one in fields(plan)} | _implied(plan)
    return {name: getattr(plan, name) for name, value in left_out.items() if getattr(plan, name) != value}


def _implied(plan: Plan) -> dict[str, Any]:
    """Return the keys that follow from other keys if they are not given."""
    outer = "nesterov" if plan.sync == "diloco" else "none"
    return {
        "zero": 3 if is_whole(plan.fsdp, 2) else 0,
        "stages": STAGES.get(plan.schedule, 1) if isinstance(plan.schedule, str) else 1,
        "outer": outer,
        "staleness": 0 if is_whole(plan.server, 1) else None,
        **outer_defaults(plan.outer or outer),
    }


def _build(given: Iterable[tuple[str, Any]], problems: list[Problem]) -> Plan:
    """Return the plan of keys and texts, or raise the problems of both together."""
    table = dict(given)
    values = {key: _read(key, show(value)) for key, value in table.items() if key in _KINDS}
    for key in table:
        problems += unknown_keys(_KINDS, [key], "plan", f"{nearest(key, _KINDS, cutoff=0.4)}={show(table[key])}")
    try:
        plan = Plan(**values)
    except SpecError as error:
        raise SpecError([*problems, *error.problems]) from None
    if problems:
        raise SpecError(problems)
    return plan


_TRUTHS = {"true": True, "false": False}
_KINDS = {one.name: str(one.type).removesuffix(" | None") for one in fields(Plan)}


def _read(key: str, text: str) -> Any:
    """Return the value of a key's text, or the text itself if it is none of the key's type."""
    reads: dict[str, Any] = {"bool": _TRUTHS.get, "int": int, "float": int if key == "staleness" else float}
    try:
        value = math.inf if (key, text) == ("staleness", UNBOUNDED) else reads.get(_KINDS[key], str)(text)
    except ValueError:
        return text
    return text if value is None else value
