"""Phases: several updates in a step, each with its own loss, parameters and optimizer; and patterns of names."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any, NoReturn

from phalanx.config.fields import SelfChecked, Veto, option
from phalanx.config.losses import told_of_training
from phalanx.config.optimizing import Schedule
from phalanx.errors import Problem, SpecError
from phalanx.units import show_names

_EXAMPLE = 'phases=[px.Phase(name="critic", parameters="critic.*", loss=critic_loss, optimizer=critic_optimizer), ...]'


def fits(name: str, patterns: Iterable[str]) -> bool:
    """Return True if one of the ``patterns`` fits ``name``; ``*`` stands for any text."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def last_that_fits(name: str, patterns: Iterable[str]) -> str | None:
    """Return the last pattern that fits ``name``."""
    return next((pattern for pattern in reversed(list(patterns)) if fnmatchcase(name, pattern)), None)


def fits_nothing(where: str, pattern: str, names: Iterable[str], *, kind: str, fix: Callable[[str], str]) -> Problem:
    """Return the problem that ``pattern`` fits none of ``names``, with similar names.

    Args:
        where: the field that has the pattern.
        kind: the kind of the names, in words.
        fix: gives the line to copy for a pattern.
    """
    full = list(dict.fromkeys(names))
    layers = dict.fromkeys(f"{name.partition('.')[0]}.*" for name in full if "." in name)
    near = get_close_matches(pattern, [*full, *layers], n=3, cutoff=0.0)
    return Problem(
        where=where,
        given=f"the pattern {pattern!r}, which fits no {kind}",
        allowed=f"full names, * standing for any text; near are {', '.join(near) or 'none'}",
        fix=fix((near or ["*"])[0]),
    )


def _is_patterns(given: Any) -> bool:
    names = [given] if isinstance(given, str) else given
    return isinstance(names, list | tuple) and bool(names) and all(isinstance(one, str) and one for one in names)


_PARAMETERS = {
    "accepts": _is_patterns,
    "allowed": "names of parameters, * standing for any text",
    "example": 'parameters="critic.*"',
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Phase(SelfChecked, where="phase"):
    """An update of a step: a forward over the global batch, its loss, and the optimizer of its parameters.

    Attributes:
        name: of the phase; ``forward`` gets it as ``phase`` if it has a parameter of that name.
        parameters: names of the parameters that it updates, ``*`` standing for any text; one pattern or several. All
            others have ``requires_grad=False`` meanwhile.
        loss: ``loss(output, batch)``, as ``Job.loss``.
        optimizer: as ``Job.optimizer``; a scheduler is stepped in every step of the run.
        every: the phase runs in the steps ``k`` with ``k % every == 0``, from step 0 on.
        inputs: ``inputs(batch)`` gives the model's arguments in this phase; ``Job.inputs`` by default.
        schedule: the factor on its learning rate, over the steps of the run; ``Job.schedule`` by default.
    """

    name: str = field(metadata={"accepts": lambda given: isinstance(given, str) and given, "example": 'name="critic"'})
    parameters: str | Sequence[str] = field(metadata=_PARAMETERS)
    loss: Callable[[Any, Any], Any] = field(metadata={"example": "loss=critic_loss"})
    optimizer: Callable[[Any], Any] = field(metadata={"example": "optimizer=lambda params: torch.optim.Adam(params)"})
    every: int = option(1, least=1, of="steps")
    inputs: Callable[[Any], Any] | None = option(None, "inputs=lambda batch: batch['image']")
    schedule: Schedule | Callable[[int], Any] | None = option(None, 'schedule=px.Schedule(decay="cosine")')

    def settle(self) -> None:
        """Pass ``training`` to the loss if it has a parameter of that name."""
        object.__setattr__(self, "loss", told_of_training(self.loss))

    @property
    def patterns(self) -> tuple[str, ...]:
        """``parameters`` as a tuple."""
        return (self.parameters,) if isinstance(self.parameters, str) else tuple(self.parameters)

    def turn(self, step: int) -> bool:
        """Return True if the phase is part of this optimizer step."""
        return step % self.every == 0


@dataclass(frozen=True, slots=True)
class PhaseInputs:
    """The ``inputs`` of the plain job of a phase, with the phase's name.

    ``given`` is ``None`` if ``forward`` names its arguments. ``first``: the phase is the first, which is evaluated.
    """

    phase: str
    given: Callable[[Any], Any] | None
    first: bool = True

    def __call__(self, batch: Any) -> Any:
        return batch if self.given is None else self.given(batch)


def not_given(*_: Any) -> NoReturn:
    """Stand for the loss and the optimizer of a job with phases.

    Raises:
        SpecError: whenever it is called.
    """
    raise SpecError.of("job.phases", "a job whose phases have losses and optimizers of their own", "", _EXAMPLE)


def _repeated(phases: Sequence[Phase]) -> str:
    names = [one.name for one in phases]
    return ", ".join(sorted({name for name in names if names.count(name) > 1}))


PHASE_RULES = (
    *(
        Veto(
            name,
            lambda job, name=name: job.phases and getattr(job, name) is not not_given,
            f"{name} and phases",
            "one of the two: each phase has its own",
            _EXAMPLE,
        )
        for name in ("loss", "optimizer")
    ),
    Veto(
        "phases",
        lambda job: _repeated(job.phases),
        lambda job: f"two phases called {_repeated(job.phases)}",
        "a name of its own for each phase",
        _EXAMPLE,
    ),
    Veto(
        "phases",
        lambda job: job.phases and job.phases[0].every != 1,
        lambda job: f"{job.phases[0].name} first, with every={job.phases[0].every}",
        "a first phase with every=1: its loss is the one that the run logs in each step",
        lambda job: f"phases=[px.Phase(name={job.phases[0].name!r}, every=1, ...), ...]",
    ),
    Veto(
        "loss_over",
        lambda job: job.phases and job.loss_over != "samples",
        "loss_over={loss_over!r} and phases",
        'loss_over="samples": each phase has a loss of its own',
        'loss_over="samples"',
    ),
    Veto(
        "average",
        lambda job: job.phases and job.average is not None,
        "{average}",
        "None beside phases: their updates come at different times",
        "average=None",
    ),
)
"""Rules of a job about its phases."""


def owned(phases: Sequence[Phase], parameters: Sequence[tuple[str, ...]]) -> list[list[str]]:
    """Return for each phase the parameters that it updates, by their first names.

    Args:
        phases: of the job.
        parameters: that require a gradient: the names of each; several for a tied parameter.

    Raises:
        SpecError: if a pattern matches nothing, or two phases own one parameter.
    """
    found: list[list[str]] = []
    problems: list[Problem] = []
    owner: dict[str, str] = {}
    twice: dict[tuple[str, str], list[str]] = {}
    every_name = [name for names in parameters for name in names]
    for phase in phases:
        own = [names[0] for names in parameters if any(fits(name, phase.patterns) for name in names)]
        kind = f"parameter that requires a gradient, of the phase {phase.name}"
        problems += [
            fits_nothing("job.phases", pattern, every_name, kind=kind, fix="parameters={!r}".format)
            for pattern in phase.patterns
            if not any(fits(name, (pattern,)) for name in every_name)
        ]
        for name in own:
            if name in owner:
                twice.setdefault((owner[name], phase.name), []).append(name)
            owner.setdefault(name, phase.name)
        found.append(own)
    for (one, other), names in twice.items():
        given = f"{show_names(names)}, which the phases {one} and {other} both update"
        allowed = "each parameter in one phase at most, under all names that it has"
        problems.append(Problem(where="job.phases", given=given, allowed=allowed, fix=_EXAMPLE))
    if problems:
        raise SpecError(problems)
    return found
