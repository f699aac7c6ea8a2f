"""A plan: how a job is laid over devices. One line of text, or TOML; both round-trip."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Collection
from dataclasses import dataclass, fields, replace
from math import prod
from typing import Any, Literal

import tomli_w

from phalanx.config.fields import (
    AXES,
    DATA_AXES,
    NUMBERS,
    STAGES,
    TEXTS,
    TRUTHS,
    UNBOUNDED,
    WORDS,
    Attention,
    Device,
    Offload,
    Outer,
    Precision,
    Recompute,
    Schedule,
    Sync,
    is_whole,
    plan_problem,
)
from phalanx.config.plan_rules import problems_of, show
from phalanx.config.sync import bounds, exactness, outer_defaults
from phalanx.errors import Problem, SpecError
from phalanx.files import toml_table


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """How the work is split. The default is one device.

    Attributes:
        dp: ranks that each hold a whole replica (with ``fsdp``: replicas of the sharded group).
        fsdp: ranks over which optimizer state, gradients and parameters are sharded.
        tp: ranks that share out each layer's weights (tensor parallelism).
        pp: ranks that each hold a run of layers (pipeline parallelism; with one micro-batch plain model parallelism).
        cp: ranks that share out each sample's tokens (context parallelism).
        ep: ranks that share out experts, and hold different samples (expert parallelism).
        threads: replicas in one process, one thread and one device each.
        zero: what ``fsdp`` shards: 1 optimizer state, 2 and gradients, 3 and parameters. 3 where not given; 0 is
            nothing, and stands where there is no ``fsdp``.
        schedule: in which order a pipeline's stages run their micro-batches.
        stages: stages on each rank of ``pp``; what the schedule needs where not given.
        sequence: with ``tp``, activations between products are shared out along the tokens too (sequence parallelism).
        attention: with ``cp``, how keys and values meet all queries.
        micro: samples in one forward and backward on one rank; ``None``: the rank's whole share at once.
        precision: of the computation; parameters, reductions and optimizer state stay fp32. ``tf32`` and ``fp8`` can be
            forecast, not yet run.
        recompute: activations computed again in backward: ``none``, ``selective`` (all but matrix products and
            attention), ``full`` (all but block inputs).
        offload: what lives in host memory between uses.
        compile: ``torch.compile`` each block.
        device: kind of device; ``auto`` takes accelerators where there are enough of one kind, else the host's cores.
        sync: how ranks of ``dp`` are brought together: ``each`` sums gradients in every step; ``local`` lets each step
            by itself and averages parameters; ``diloco`` hands the average of what they learnt to an outer optimizer.
        every: steps from one averaging to the next, with ``local`` and ``diloco``.
        after: first steps that are those of one device: with ``local`` and ``diloco`` gradients are summed in each of
            them (post-local SGD), with ``staleness`` they lack nothing.
        outer: optimizer of ``diloco``; ``nesterov`` where not given, ``none`` for others.
        outer_lr: learning rate of the outer optimizer; 0.7 for ``nesterov`` and 1 for ``sgd`` where not given.
        outer_momentum: of ``nesterov``; 0.9 where not given.
        server: parameter servers beside the ranks of ``dp``, on the hosts' processors; they hold the optimizer.
        staleness: with ``server``, updates that the parameters a gradient is of may lack; 0, where not given, is
            synchronous, ``unbounded`` (``math.inf``) makes nobody wait.
        backup: with ``server``, workers that a step does not wait for: it ends when the others' gradients are in.
        compress: how gradients (or averaged parameters) are sent between ranks of ``dp`` or to servers: ``none``,
            ``fp16``, ``bf16``, ``int8``, ``powersgd:RANK``, ``topk:SHARE``.
        shares: of the global batch, for each rank of ``dp``: weights such as ``3,1``; ``auto`` by speed, as far as
            memory goes; empty: even.
    """

    dp: int = 1
    fsdp: int = 1
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    threads: int = 1
    schedule: Schedule = "1f1b"
    stages: int = None  # pyrefly: ignore  # a number from __post_init__ on
    sequence: bool = False
    attention: Attention = "ring"
    zero: int = None  # pyrefly: ignore  # a number from __post_init__ on
    micro: int | None = None
    precision: Precision = "fp32"
    recompute: Recompute = "none"
    offload: Offload = "none"
    compile: bool = False
    device: Device = "auto"
    sync: Sync = "each"
    every: int = 1
    outer: Outer = None  # pyrefly: ignore  # a word from __post_init__ on
    after: int = 0
    outer_lr: float = None  # pyrefly: ignore  # a number from __post_init__ on
    outer_momentum: float = None  # pyrefly: ignore  # a number from __post_init__ on
    server: int = 0
    staleness: float | None = None
    backup: int = 0
    compress: str = "none"
    shares: str = ""

    def __post_init__(self) -> None:
        if self.zero is None:
            object.__setattr__(self, "zero", 3 if is_whole(self.fsdp, 2) else 0)
        if self.stages is None:
            object.__setattr__(self, "stages", STAGES.get(self.schedule, 1))
        if self.outer is None:
            object.__setattr__(self, "outer", "nesterov" if self.sync == "diloco" else "none")
        for name, value in outer_defaults(self.outer).items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, value)
        if self.staleness is None and is_whole(self.server, 1):
            object.__setattr__(self, "staleness", 0)
        problems = problems_of(self)
        if problems:
            raise SpecError(problems)

    @property
    def on_any_device(self) -> Plan:
        """The plan as a machine looks at it whose devices are not those that it runs on."""
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
        """Size of each dimension of the mesh, in the order in which ranks are dealt out: the last changes fastest."""
        return {name: getattr(self, name) for name in AXES}

    @property
    def devices(self) -> int:
        """Devices the plan needs."""
        return self.world_size * self.threads

    @property
    def replicas(self) -> int:
        """Parts a global batch is split into: ranks with samples of their own, times threads."""
        return prod(getattr(self, name) for name in DATA_AXES) * self.threads

    @property
    def splits_blocks(self) -> bool:
        """Return True if ranks hold slices of a block, or compute with slices of what enters it."""
        return self.tp * self.cp * self.ep > 1

    @property
    def splits_model(self) -> bool:
        """Return True if a replica of the model is more than one rank."""
        return max(self.tp, self.pp, self.cp, self.ep) > 1

    @property
    def bound(self) -> str:
        """What bounds the difference from one device where steps are not those of one; empty where they are."""
        return "; ".join(bounds(self))

    @property
    def exactness(self) -> str:
        """True if each step is that of one device in fp32 with the whole global batch, but for the order of additions.

        ``yes``; ``within the rounding of TYPE`` that it computes in or sends gradients in; or ``no``.
        """
        return exactness(self)

    @property
    def exact(self) -> bool:
        """Return True if each step is that of one device in the same precision."""
        return not self.bound

    @property
    def exact_note(self) -> str:
        """``exactness`` and what bounds the difference, as a sentence; empty where the plan is exact."""
        return f"exact: {self.exactness}. {self.bound[0].upper()}{self.bound[1:]}." if self.bound else ""

    def coordinate(self, rank: int) -> dict[str, int]:
        """Where ``rank`` stands along each dimension of the mesh."""
        found: dict[str, int] = {}
        for name, size in reversed(self.mesh.items()):
            rank, found[name] = divmod(rank, size)
        return found

    def along(self, names: Collection[str], rank: int) -> list[int]:
        """The ranks that differ from ``rank`` along dimensions ``names`` at most, itself among them, in order.

        Takes time in proportion to those, whatever the number of all ranks.
        """
        at, found = self.coordinate(rank), [0]
        for name, size in self.mesh.items():
            places = range(size) if name in names else (at[name],)
            found = [first * size + place for first in found for place in places]
        return found

    def part(self, rank: int) -> int:
        """Which part of the global batch ``rank`` holds (the first of them, with threads)."""
        at, part = self.coordinate(rank), 0
        for name in DATA_AXES:
            part = part * getattr(self, name) + at[name]
        return part * self.threads

    @property
    def kind(self) -> Literal["single", "threads", "replicate", "shard", "split"]:
        """The technique that keeps the replicas together; ``split`` where a replica is several ranks."""
        if self.splits_model:
            return "split"
        if self.threads > 1:
            return "threads"
        if self.fsdp > 1:
            return "shard"
        return "replicate" if self.dp > 1 else "single"

    def __str__(self) -> str:
        default = Plan()
        words = [f"{name}={show(value)}" for name, value in _given(self).items() if value != getattr(default, name)]
        return " ".join(words) or "single"

    @classmethod
    def parse(cls, text: str) -> Plan:
        """The plan that a line such as ``fsdp=4 zero=2 micro=1 precision=bf16`` or ``single`` describes.

        Raises:
            SpecError: with everything that is wrong in the line.
        """
        values: dict[str, Any] = {}
        problems: list[Problem] = []
        for word in words(text):
            if word == "single":
                continue
            key, equals, value = word.partition("=")
            if not equals:
                allowed = "words of the form key=value, or 'single'"
                problems.append(Problem(where=f"plan {text!r}", given=word, allowed=allowed, fix=f"{_nearest(key)}=2"))
            elif key in values:
                problems.append(plan_problem(key, f"{key} twice", "each key once", f"{key}={value}"))
            else:
                _take(key, value, values, problems)
        return _build(values, problems)

    def to_toml(self) -> str:
        """The plan as a TOML document; keys at their default are left out."""
        default = Plan()
        return tomli_w.dumps({name: value for name, value in _given(self).items() if value != getattr(default, name)})

    @classmethod
    def from_toml(cls, text: str) -> Plan:
        """The plan in a TOML document.

        Raises:
            SpecError: with everything that is wrong in it.
        """
        table = toml_table(text, where="plan", fix="dp = 2", allowed="a TOML document of plan keys")
        values: dict[str, Any] = {}
        problems: list[Problem] = []
        for key, value in table.items():
            _take(key, show(value), values, problems)
        return _build(values, problems)


def words(text: str) -> list[str]:
    """The words of a plan's text: spaces part them, and commas but for those before a digit (``shares=3,1``)."""
    return re.sub(r"\s*,\s*(?!\s|\d)", " ", re.sub(r"\s*,\s*(?=\d)", ",", text)).split()


def _given(plan: Plan) -> dict[str, Any]:
    values = {field.name: getattr(plan, field.name) for field in fields(plan)}
    if plan.fsdp > 1 and plan.zero == 3:
        values["zero"] = 0  # the default of a sharded plan goes without saying
    if plan.stages == STAGES[plan.schedule]:
        values["stages"] = Plan().stages
    if plan.sync == "diloco" and plan.outer == "nesterov":
        values["outer"] = Plan().outer
    if plan.server and plan.staleness == 0:
        values["staleness"] = None
    for name, value in outer_defaults(plan.outer).items():
        if values[name] == value:
            values[name] = getattr(Plan(), name)
    return values


def _build(values: dict[str, Any], problems: list[Problem]) -> Plan:
    """A plan from parsed values, or one SpecError with the problems of words and of values together."""
    try:
        plan = Plan(**values)
    except SpecError as error:
        raise SpecError([*problems, *error.problems]) from None
    if problems:
        raise SpecError(problems)
    return plan


def _nearest(key: str) -> str:
    names = [field.name for field in fields(Plan)]
    near = difflib.get_close_matches(key, names, n=len(names), cutoff=0.4)

    def likeness(name: str) -> tuple[float, bool]:
        return difflib.SequenceMatcher(None, name, key).ratio(), name[:1] == key[:1]

    return max(near, key=likeness, default="dp")


def _take(key: str, text: str, values: dict[str, Any], problems: list[Problem]) -> None:
    """Add what ``text`` says of ``key`` to ``values``, or what is wrong with it to ``problems``."""
    names = [field.name for field in fields(Plan)]
    if key not in names:
        problems.append(plan_problem(key, f"unknown key {key!r}", ", ".join(names), f"{_nearest(key)}={text}"))
    elif key in WORDS or key in TEXTS:
        values[key] = text  # Plan itself checks choices
    elif key in TRUTHS:
        values[key] = text == "true"
        if text not in ("true", "false"):
            problems.append(plan_problem(key, repr(text), "true or false", f"{key}=true"))
    elif key == "staleness" and text == UNBOUNDED:
        values[key] = math.inf
    else:
        kind, allowed, fix = (
            (float, "a number", 0.7) if key in NUMBERS else (int, "a whole number", 2 + (key == "zero"))
        )
        try:
            values[key] = kind(text)
        except ValueError:
            problems.append(plan_problem(key, repr(text), allowed, f"{key}={fix}"))
