"""A plan: how a job is laid over devices. One line of text, or TOML; both round-trip."""

from __future__ import annotations

import difflib
import tomllib
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

import tomli_w

from phalanx.errors import Problem, SpecError
from phalanx.spec.fields import is_whole

Precision = Literal["fp32", "bf16", "fp16"]
Recompute = Literal["none", "selective", "full"]
Offload = Literal["none", "optimizer", "parameters"]
Device = Literal["auto", "cpu", "cuda"]

_CHOICES: dict[str, tuple[str, ...]] = {
    "precision": get_args(Precision),
    "recompute": get_args(Recompute),
    "offload": get_args(Offload),
    "device": get_args(Device),
}
_COMING = {"tp": "tensor", "pp": "pipeline", "cp": "context", "ep": "expert"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """How the work is split. The default is one device.

    Attributes:
        dp: ranks that each hold a whole replica (with ``fsdp``: replicas of the sharded group).
        fsdp: ranks over which optimizer state, gradients and parameters are sharded.
        threads: replicas in one process, one thread and one device each.
        zero: what ``fsdp`` shards: 1 optimizer state, 2 and gradients, 3 and parameters. 3 where not given; 0 is
            nothing, and stands where there is no ``fsdp``.
        micro: samples in one forward and backward on one rank; ``None``: the rank's whole share at once.
        precision: of the computation; parameters, reductions and optimizer state stay fp32.
        recompute: activations computed again in backward: ``none``, ``selective`` (all but matrix products and
            attention), ``full`` (all but block inputs).
        offload: what lives in host memory between uses.
        compile: ``torch.compile`` each block.
        device: ``auto`` takes CUDA devices where there are any.
    """

    dp: int = 1
    fsdp: int = 1
    threads: int = 1
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
        problems = _problems(self)
        if problems:
            raise SpecError(problems)

    @property
    def world_size(self) -> int:
        """Processes the plan needs."""
        return self.dp * self.fsdp

    @property
    def replicas(self) -> int:
        """Parts a global batch is split into: ranks times threads."""
        return self.world_size * self.threads

    @property
    def kind(self) -> Literal["single", "threads", "replicate", "shard"]:
        """The technique that keeps the replicas together."""
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
    if key in _COMING:
        return None, Problem(
            where=f"plan.{key}",
            given=f"{key}={text}",
            allowed=f"{_COMING[key]} parallelism is not built yet; today: " + ", ".join(names),
            fix="fsdp=2",
        )
    if key not in names:
        return None, Problem(
            where=f"plan.{key}", given=f"unknown key {key!r}", allowed=", ".join(names), fix=f"{_nearest(key)}={text}"
        )
    if key in _CHOICES:
        return text, None  # Plan itself checks choices
    if key == "compile":
        if text not in ("true", "false"):
            return None, Problem(where="plan.compile", given=repr(text), allowed="true or false", fix="compile=true")
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

    for name in ("dp", "fsdp", "threads"):
        if not is_whole(getattr(plan, name), 1):
            wrong(name, "a whole number, 1 or more", f"{name}=2")
    if plan.micro is not None and not is_whole(plan.micro, 1):
        wrong("micro", "a whole number of samples, 1 or more", "micro=8")
    for name, choices in _CHOICES.items():
        if getattr(plan, name) not in choices:
            near = difflib.get_close_matches(str(getattr(plan, name)), choices, n=1, cutoff=0.0)
            wrong(name, ", ".join(choices), f"{name}={near[0] if near else choices[0]}")
    if not isinstance(plan.compile, bool):  # pyright: ignore[reportUnnecessaryIsInstance]
        wrong("compile", "true or false", "compile=true")
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
    if plan.offload == "parameters" and plan.zero != 3:
        wrong(
            "offload",
            "parameters only with zero=3, which is what gathers them when needed",
            f"fsdp={max(2, plan.fsdp, plan.dp)} zero=3 offload=parameters",
        )
    return found
