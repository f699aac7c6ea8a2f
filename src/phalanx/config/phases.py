"""Phases: more than one network or update in a step, each with its own loss, parameters and optimizer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar

from phalanx.config.fields import is_whole
from phalanx.config.losses import told_of_training
from phalanx.config.name_patterns import fits, fits_nothing
from phalanx.config.schedule import Schedule
from phalanx.errors import Problem, SpecError
from phalanx.units import show_names

_EXAMPLE = 'px.Phase(name="critic", parameters="critic.*", loss=critic_loss, optimizer=critic_optimizer)'


@dataclass(frozen=True, kw_only=True, slots=True)
class Phase:
    """One update of a step: a forward over the global batch, its loss, and the optimizer of its parameters.

    Attributes:
        name: of the phase; what ``forward`` gets as ``phase`` where it has a parameter of that name.
        parameters: names of the parameters that it updates, ``*`` standing for any text; one pattern or several. The
            gradient of this phase is taken of these alone: all others have ``requires_grad=False`` meanwhile.
        loss: ``loss(output, batch)``, as ``Job.loss``.
        optimizer: ``optimizer(params)`` builds the ``torch.optim.Optimizer`` over exactly these parameters, or gives
            (optimizer, scheduler), as ``Job.optimizer``; the scheduler is stepped in every step of the run, also in
            those in which the phase has no turn.
        every: it has its turn in the steps ``k`` with ``k % every == 0``, the first step, 0, among them.
        inputs: ``inputs(batch)`` gives the model's arguments in this phase; ``Job.inputs`` where not given.
        schedule: the factor on its learning rate, over the steps of the run; ``Job.schedule`` where not given.
    """

    name: str
    parameters: str | Sequence[str]
    loss: Callable[[Any, Any], Any]
    optimizer: Callable[[Any], Any]
    every: int = 1
    inputs: Callable[[Any], Any] | None = None
    schedule: Schedule | Callable[[int], Any] | None = None

    @property
    def patterns(self) -> tuple[str, ...]:
        """``parameters``, also where that is one text."""
        return (self.parameters,) if isinstance(self.parameters, str) else tuple(self.parameters)

    def turn(self, step: int) -> bool:
        """Return True if the phase is part of this optimizer step."""
        return step % self.every == 0

    def __post_init__(self) -> None:
        if problems := _problems(self):
            raise SpecError(problems)
        object.__setattr__(self, "loss", told_of_training(self.loss))


@dataclass(frozen=True, slots=True)
class PhaseInputs:
    """The ``inputs`` of the plain job that a phase is: what ``given`` gives, and the phase's name beside it.

    ``given`` is ``None`` where the model's arguments are what ``forward`` names of the batch. ``first``: whether the
    phase is the first, which is evaluated.
    """

    phase: str
    given: Callable[[Any], Any] | None
    first: bool = True

    def __call__(self, batch: Any) -> Any:
        return batch if self.given is None else self.given(batch)


def not_given(*_: Any) -> NoReturn:
    """Stands for the loss and the optimizer of a job with phases, which has none of its own.

    Raises:
        SpecError: whenever it is called.
    """
    raise SpecError([_of_phases("a job whose phases have losses and optimizers of their own", "")])


def phase_problems(given: object, loss: Any, optimizer: Any, loss_over: str) -> list[Problem]:
    """What is wrong with ``job.phases``, which is ``given``, or with what a job has beside them."""
    phases = _listed(given, Phase)
    if phases is None:
        return [_of_phases(repr(given), "a list of px.Phase")]
    if not phases:
        return []
    found: list[Problem] = []
    beside = {"loss": loss, "optimizer": optimizer}
    for name in (name for name, value in beside.items() if value is not not_given):
        both, allowed = f"{name} and phases", "one of the two: each phase has its own"
        found.append(Problem(where=f"job.{name}", given=both, allowed=allowed, fix=f"phases=[{_EXAMPLE}]"))
    names = [one.name for one in phases]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        found.append(_of_phases(f"two phases called {', '.join(twice)}", "a name of its own for each phase"))
    if phases[0].every != 1:
        late = f"{phases[0].name} first, with every={phases[0].every}"
        allowed = "a first phase with every=1: its loss is the one that the run logs in each step"
        found.append(_of_phases(late, allowed, f"phases=[px.Phase(name={phases[0].name!r}, every=1, ...), ...]"))
    if loss_over != "samples":
        whole = f"loss_over={loss_over!r} and phases"
        allowed = 'loss_over="samples": outputs are gathered for one loss a step, not for that of each phase'
        found.append(Problem(where="job.loss_over", given=whole, allowed=allowed, fix='loss_over="samples"'))
    return found


def owned(phases: Sequence[Phase], parameters: Sequence[tuple[str, ...]]) -> list[list[str]]:
    """For each phase the parameters that it updates, by their first names.

    Args:
        phases: of the job.
        parameters: that require a gradient: the names of each; several where it is tied.

    Raises:
        SpecError: if a pattern matches nothing, or two phases own one parameter.
    """
    found: list[list[str]] = []
    problems: list[Problem] = []
    owner: dict[str, str] = {}
    twice: dict[tuple[str, str], list[str]] = {}
    for phase in phases:
        own = [names[0] for names in parameters if any(fits(name, phase.patterns) for name in names)]
        for pattern in phase.patterns:
            every_name = [name for names in parameters for name in names]
            if not any(fits(name, (pattern,)) for name in every_name):
                kind = f"parameter that requires a gradient, of the phase {phase.name}"
                problems.append(fits_nothing("job.phases", pattern, every_name, kind=kind, fix=_FIX.format))
        for name in own:
            if name in owner:
                twice.setdefault((owner[name], phase.name), []).append(name)
            owner.setdefault(name, phase.name)
        found.append(own)
    for (one, other), names in twice.items():
        given = f"{show_names(names)}, which the phases {one} and {other} both update"
        problems.append(_of_phases(given, "each parameter in one phase at most, under all names that it has"))
    if problems:
        raise SpecError(problems)
    return found


_Kind = TypeVar("_Kind")


def _listed(given: object, kind: type[_Kind]) -> list[_Kind] | None:
    """``given``, if it is a list or a tuple of nothing else."""
    items: list[Any] | None = list(given) if isinstance(given, tuple | list) else None  # pyrefly: ignore
    return None if items is None or not all(isinstance(one, kind) for one in items) else items


_FIX = "parameters={!r}"


def _of_phases(given: str, allowed: str, fix: str = f"phases=[{_EXAMPLE}, ...]") -> Problem:
    return Problem(where="job.phases", given=given, allowed=allowed, fix=fix)


def _problems(phase: Phase) -> list[Problem]:
    found: list[Problem] = []

    def wrong(name: str, allowed: str, fix: str) -> None:
        given = repr(getattr(phase, name))
        found.append(Problem(where=f"phase.{name}", given=given, allowed=allowed, fix=fix))

    if not isinstance(phase.name, str) or not phase.name:  # pyrefly: ignore
        wrong("name", "a text", 'name="critic"')
    patterns = [phase.parameters] if isinstance(phase.parameters, str) else _listed(phase.parameters, str)
    if not patterns or not all(patterns):
        wrong("parameters", "names of parameters, * standing for any text", 'parameters="critic.*"')
    for name, fix in (("loss", "loss=critic_loss"), ("optimizer", "optimizer=lambda params: torch.optim.Adam(params)")):
        if not callable(getattr(phase, name)):
            wrong(name, "a function", fix)
    if phase.inputs is not None and not callable(phase.inputs):
        wrong("inputs", "a function, or None", "inputs=lambda batch: batch['image']")
    if not is_whole(phase.every, 1):
        wrong("every", "a whole number of steps, 1 or more", "every=2")
    schedule: Any = phase.schedule
    if schedule is not None and not isinstance(schedule, Schedule) and not callable(schedule):
        wrong("schedule", "a px.Schedule, a function of the step, or None", 'schedule=px.Schedule(decay="cosine")')
    return found
