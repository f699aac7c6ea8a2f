"""A plan: how a job is laid over devices. One line of text, or TOML; both round-trip."""

from __future__ import annotations

import difflib
import tomllib
from dataclasses import dataclass, fields
from math import prod
from typing import Any, Literal, get_args

import tomli_w

from phalanx.errors import Problem, SpecError
from phalanx.spec.fields import is_whole

Precision = Literal["fp32", "tf32", "bf16", "fp16", "fp8"]
Recompute = Literal["none", "selective", "full"]
Offload = Literal["none", "optimizer", "parameters"]
Device = Literal["auto", "cpu", "cuda"]
Schedule = Literal["gpipe", "1f1b", "interleaved", "zero-bubble", "zbv", "dualpipev"]
Attention = Literal["ring", "alltoall", "gather"]

AXES = ("pp", "dp", "fsdp", "ep", "cp", "tp")
"""The dimensions of the mesh, from the one whose ranks are farthest apart to the one whose ranks are neighbours."""

DATA_AXES = ("dp", "fsdp", "ep")
"""Those whose ranks hold different samples."""

_CHOICES: dict[str, tuple[str, ...]] = {
    "precision": get_args(Precision),
    "recompute": get_args(Recompute),
    "offload": get_args(Offload),
    "device": get_args(Device),
    "schedule": get_args(Schedule),
    "attention": get_args(Attention),
}
_STAGES = {"gpipe": 1, "1f1b": 1, "interleaved": 2, "zero-bubble": 2, "zbv": 2, "dualpipev": 2}
TRUTHS = ("compile", "sequence")
"""Keys that are true or false."""


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
        split: names of the modules that begin each stage but the first, joined by ``/``; empty: balanced by cost.
        sequence: with ``tp``, activations between products are shared out along the tokens too (sequence parallelism).
        attention: with ``cp``, how keys and values meet all queries.
        micro: samples in one forward and backward on one rank; ``None``: the rank's whole share at once.
        precision: of the computation; parameters, reductions and optimizer state stay fp32. ``tf32`` and ``fp8`` can be
            forecast, not yet run.
        recompute: activations computed again in backward: ``none``, ``selective`` (all but matrix products and
            attention), ``full`` (all but block inputs).
        offload: what lives in host memory between uses.
        compile: ``torch.compile`` each block.
        device: ``auto`` takes CUDA devices where there are any.
    """

    dp: int = 1
    fsdp: int = 1
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    threads: int = 1
    schedule: Schedule = "1f1b"
    stages: int = None  # pyright: ignore[reportAssignmentType]  # a number from __post_init__ on
    split: str = ""
    sequence: bool = False
    attention: Attention = "ring"
    zero: int = None  # pyright: ignore[reportAssignmentType]  # a number from __post_init__ on
    micro: int | None = None
    precision: Precision = "fp32"
    recompute: Recompute = "none"
    offload: Offload = "none"
    compile: bool = False
    device: Device = "auto"

    def __post_init__(self) -> None:
        if self.zero is None:  # pyright: ignore[reportUnnecessaryComparison]
            object.__setattr__(self, "zero", 3 if is_whole(self.fsdp, 2) else 0)
        if self.stages is None:  # pyright: ignore[reportUnnecessaryComparison]
            object.__setattr__(self, "stages", _STAGES.get(self.schedule, 1))
        problems = _problems(self)
        if problems:
            raise SpecError(problems)

    @property
    def world_size(self) -> int:
        """Processes the plan needs."""
        return prod(self.mesh.values())

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
    def splits_model(self) -> bool:
        """Whether a replica of the model is more than one rank."""
        return max(self.tp, self.pp, self.cp, self.ep) > 1

    def coordinate(self, rank: int) -> dict[str, int]:
        """Where ``rank`` stands along each dimension of the mesh."""
        found: dict[str, int] = {}
        for name, size in reversed(self.mesh.items()):
            rank, found[name] = divmod(rank, size)
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
        words = [f"{name}={_show(value)}" for name, value in _given(self).items() if value != getattr(default, name)]
        return " ".join(words) or "single"

    @classmethod
    def parse(cls, text: str) -> Plan:
        """The plan that a line such as ``fsdp=4 zero=2 micro=1 precision=bf16`` or ``single`` describes.

        Raises:
            SpecError: with everything that is wrong in the line.
        """
        values: dict[str, Any] = {}
        problems: list[Problem] = []
        for word in text.replace(",", " ").split():
            if word == "single":
                continue
            key, equals, value = word.partition("=")
            if not equals:
                problems.append(
                    Problem(
                        where=f"plan {text!r}",
                        given=word,
                        allowed="words of the form key=value, or 'single'",
                        fix=f"{_nearest(key)}=2",
                    )
                )
            elif key in values:
                problems.append(
                    Problem(where=f"plan.{key}", given=f"{key} twice", allowed="each key once", fix=f"{key}={value}")
                )
            else:
                parsed, problem = _parse_value(key, value)
                if problem:
                    problems.append(problem)
                else:
                    values[key] = parsed
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
        try:
            table = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise SpecError(
                [Problem(where="plan", given=str(error), allowed="a TOML document of plan keys", fix="dp = 2")]
            ) from None
        values: dict[str, Any] = {}
        problems: list[Problem] = []
        for key, value in table.items():
            parsed, problem = _parse_value(key, _show(value))
            if problem:
                problems.append(problem)
            else:
                values[key] = parsed
        return _build(values, problems)


def _given(plan: Plan) -> dict[str, Any]:
    values = {field.name: getattr(plan, field.name) for field in fields(plan)}
    if plan.fsdp > 1 and plan.zero == 3:
        values["zero"] = 0  # the default of a sharded plan goes without saying
    if plan.stages == _STAGES[plan.schedule]:
        values["stages"] = Plan().stages
    return values


def _show(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


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
    return next(iter(difflib.get_close_matches(key, names, n=1, cutoff=0.4)), "dp")


def _parse_value(key: str, text: str) -> tuple[Any, Problem | None]:
    names = [field.name for field in fields(Plan)]
    if key not in names:
        return None, Problem(
            where=f"plan.{key}", given=f"unknown key {key!r}", allowed=", ".join(names), fix=f"{_nearest(key)}={text}"
        )
    if key in _CHOICES or key == "split":
        return text, None  # Plan itself checks choices
    if key in TRUTHS:
        if text not in ("true", "false"):
            return None, Problem(where=f"plan.{key}", given=repr(text), allowed="true or false", fix=f"{key}=true")
        return text == "true", None
    try:
        return int(text), None
    except ValueError:
        return None, Problem(
            where=f"plan.{key}", given=repr(text), allowed="a whole number", fix=f"{key}={3 if key == 'zero' else 2}"
        )


def _problems(plan: Plan) -> list[Problem]:
    """Everything that is wrong in the plan by itself, without a job or a machine."""
    found: list[Problem] = []

    def wrong(name: str, allowed: str, fix: str) -> None:
        found.append(
            Problem(where=f"plan.{name}", given=f"{name}={_show(getattr(plan, name))}", allowed=allowed, fix=fix)
        )

    for name in (*AXES, "threads", "stages"):
        if not is_whole(getattr(plan, name), 1):
            wrong(name, "a whole number, 1 or more", f"{name}=2")
    if plan.micro is not None and not is_whole(plan.micro, 1):
        wrong("micro", "a whole number of samples, 1 or more", "micro=8")
    for name, choices in _CHOICES.items():
        if getattr(plan, name) not in choices:
            near = difflib.get_close_matches(str(getattr(plan, name)), choices, n=1, cutoff=0.0)
            wrong(name, ", ".join(choices), f"{name}={near[0] if near else choices[0]}")
    for name in TRUTHS:
        if not isinstance(getattr(plan, name), bool):
            wrong(name, "true or false", f"{name}=true")
    if not is_whole(plan.zero, 0) or plan.zero > 3:
        wrong("zero", "1, 2 or 3", "fsdp=2 zero=3")
    if found:
        return found

    if plan.zero and plan.fsdp == 1:
        wrong(
            "zero",
            "only together with fsdp=2 or more: zero says what fsdp shards",
            f"fsdp={max(2, plan.dp)} zero={plan.zero}",
        )
    if plan.zero == 0 and plan.fsdp > 1:
        wrong("zero", "1, 2 or 3 with fsdp; ranks that each hold everything are dp", f"dp={plan.dp * plan.fsdp}")
    if plan.threads > 1 and plan.world_size > 1:
        wrong("threads", "threads alone: it is the one-process way; with dp or fsdp leave it out", f"dp={plan.threads}")
    found += _misplaced(plan)
    if plan.offload == "parameters" and plan.zero != 3:
        wrong(
            "offload",
            "parameters only with zero=3, which is what gathers them when needed",
            f"fsdp={max(2, plan.fsdp, plan.dp)} zero=3 offload=parameters",
        )
    return found


def _misplaced(plan: Plan) -> list[Problem]:
    """Keys that say how a dimension of the mesh works, where the plan has no such dimension."""
    found: list[Problem] = []
    default = {field.name: field.default for field in fields(Plan)}
    needs = {"schedule": "pp", "split": "pp", "sequence": "tp", "attention": "cp"}
    for name, axis in needs.items():
        value = getattr(plan, name)
        if value != default[name] and getattr(plan, axis) == 1:
            given = f"{name}={_show(value)} without {axis}"
            found.append(
                Problem(
                    where=f"plan.{name}",
                    given=given,
                    allowed=f"only together with {axis}=2 or more",
                    fix=f"{axis}=2 {name}={_show(value)}",
                )
            )
    if plan.stages != _STAGES[plan.schedule] and (plan.pp == 1 or plan.schedule != "interleaved"):
        found.append(
            Problem(
                where="plan.stages",
                given=f"stages={plan.stages} with schedule={plan.schedule}",
                allowed=f"{_STAGES[plan.schedule]}; only schedule=interleaved takes any number",
                fix=f"pp={max(2, plan.pp)} schedule=interleaved stages={max(2, plan.stages)}",
            )
        )
    if plan.threads > 1 and plan.splits_model:
        found.append(
            Problem(
                where="plan.threads",
                given=f"threads={plan.threads} with a model split over ranks",
                allowed="threads alone: it is the one-process way",
                fix=f"dp={plan.threads}",
            )
        )
    if plan.sequence and plan.cp > 1:
        found.append(
            Problem(
                where="plan.sequence",
                given=f"sequence=true with cp={plan.cp}",
                allowed="one of the two: both share out the tokens",
                fix=f"tp={plan.tp} cp={plan.cp}",
            )
        )
    return found
