"""Parameter groups by pattern: an optimizer's options by the names of the model.

Every rank makes the same groups in the same order, with its own parameters, even if it has none: a rank of a pipeline
has some of the names only. So schedulers, which keep a rate for each group by position, and checkpoints find the same
groups under every plan.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any, final

import torch

from phalanx.config.fields import is_number
from phalanx.config.phases import fits, fits_nothing, last_that_fits
from phalanx.errors import Problem, SpecError

Patterns = Mapping[str, Mapping[str, Any]]


@final
class ParameterGroup(dict[str, Any]):
    """A parameter group of ``groups``; options that its optimizer does not read are an error."""


def groups(params: Iterable[Any], patterns: Patterns) -> list[dict[str, Any]]:
    """Return parameter groups by name patterns, for any optimizer of torch's form.

    ::

        optimizer=lambda params: torch.optim.AdamW(
            px.groups(params, {"*.bias": {"weight_decay": 0.0}, "head.*": {"lr": 1e-3}}), lr=3e-4)

    Args:
        params: the argument of ``job.optimizer``. Or (name, parameter) pairs of a whole model, such as
            ``module.named_parameters()``.
        patterns: full names of parameters, as in ``model.named_parameters()`` under every plan, with ``*`` for any
            text → options of the optimizer for them. If several patterns match a name, the last counts.

    Returns:
        Parameters without a matching pattern, with the optimizer's own options, then a group for each pattern in the
            order
        given. A group is empty if this rank holds none of its parameters. A schedule multiplies each group's own
            ``lr``.

    Raises:
        SpecError: if a pattern matches no trainable parameter of the whole model, or none that later patterns leave to
            it; or if its options are no dict of names.
    """
    made = [ParameterGroup(params=members, **options) for options, members in _dealt(params, patterns)]
    return [*made]


def no_decay(params: Iterable[Any], weight_decay: float, patterns: Patterns | None = None) -> list[dict[str, Any]]:
    """Return parameter groups without decay for biases and norms, that is, for at most one dimension.

    Dimensions are those of the whole parameter; a rank's slice or rows have as many.

    Args:
        params: as ``groups`` takes them.
        weight_decay: of parameters of two dimensions and more.
        patterns: further options by name, as ``groups`` takes them. A pattern with its own ``weight_decay`` applies it
            to all its parameters.

    Returns:
        Two groups, with decay and without, of parameters without a matching pattern; then as many for each pattern, or
            one
        if it states its own ``weight_decay``.

    Raises:
        SpecError: if ``weight_decay`` is no number from 0 on, and as ``groups`` does.
    """
    if not is_number(weight_decay) or weight_decay < 0:
        allowed = "a number, 0 or more"
        fix = "px.no_decay(params, weight_decay=0.1)"
        raise SpecError([Problem(where="px.no_decay.weight_decay", given=repr(weight_decay), allowed=allowed, fix=fix)])
    found: list[dict[str, Any]] = []
    for options, members in _dealt(params, patterns or {}):
        if "weight_decay" in options:
            found.append(ParameterGroup(params=members, **options))
            continue
        for decay, decayed in ((weight_decay, True), (0.0, False)):
            chosen = [one for one in members if (one.dim() > 1) is decayed]
            found.append(ParameterGroup(params=chosen, **options, weight_decay=decay))
    return found


def unread_options(optimizer: torch.optim.Optimizer) -> list[Problem]:
    """Return options given to ``groups`` that ``optimizer``, torch's own or ours, does not read."""
    kind = type(optimizer)
    if not kind.__module__.startswith(("torch.optim.", "phalanx.")):
        return []
    asked = [key for group in optimizer.param_groups if isinstance(group, ParameterGroup) for key in group]
    # A scheduler of torch's adds some of its own.
    known = {"params", "param_names", *optimizer.defaults}
    ours = {key for key in asked if key not in known and key not in _OF_SCHEDULERS}
    return [
        Problem(
            where="job.optimizer",
            given=f"the option {key!r} of a parameter group, which {kind.__name__} does not read",
            allowed=", ".join(sorted(optimizer.defaults)),
            fix=(difflib.get_close_matches(key, sorted(optimizer.defaults), n=1) or ["weight_decay"])[0],
        )
        for key in sorted(ours)
    ]


_OF_SCHEDULERS = ("initial_lr", "max_lr", "min_lr", "swa_lr", "base_momentum", "max_momentum")


def _dealt(params: Iterable[Any], patterns: Patterns) -> list[tuple[dict[str, Any], list[torch.Tensor]]]:
    named, whole = _names_of(params)
    _check_options(patterns)
    if whole is not None:
        _check_names(patterns, whole)
    found: dict[str | None, list[torch.Tensor]] = {None: [], **{pattern: [] for pattern in patterns}}
    for name, parameter in named:
        found[last_that_fits(name, patterns)].append(parameter)
    return [({} if key is None else dict(patterns[key]), members) for key, members in found.items()]


def _names_of(params: Iterable[Any]) -> tuple[list[tuple[str, torch.Tensor]], tuple[str, ...] | None]:
    if named := getattr(params, "named", None):
        return list(named()), getattr(params, "whole", None)
    pairs = list(params)
    if all(isinstance(one, tuple) and len(one) == 2 and isinstance(one[0], str) for one in pairs):  # pyrefly: ignore
        return pairs, tuple(name for name, _ in pairs)
    given = f"{len(pairs)} parameters without names"
    allowed = "what job.optimizer is called with, or (name, parameter) pairs"
    raise SpecError([Problem(where="px.groups.params", given=given, allowed=allowed, fix="model.named_parameters()")])


def _check_options(patterns: Patterns) -> None:
    fix = 'px.groups(params, {"*.bias": {"weight_decay": 0.0}})'
    given: Any = patterns
    if not isinstance(given, Mapping):
        allowed = "names → options of the optimizer"
        raise SpecError([Problem(where="px.groups.patterns", given=repr(given), allowed=allowed, fix=fix)])
    problems = [
        Problem(where="px.groups.patterns", given=f"{pattern!r}: {options!r}", allowed=allowed, fix=fix)
        for pattern, options in given.items()  # pyrefly: ignore
        for allowed in ["a name, * standing for any text → a dict of options, of which none is params"]
        if not isinstance(pattern, str)
        or not isinstance(options, Mapping)
        or any(not isinstance(key, str) or key in ("params", "param_names") for key in options)  # pyrefly: ignore
    ]
    if problems:
        raise SpecError(problems)


def _check_names(patterns: Patterns, whole: tuple[str, ...]) -> None:
    chosen = {last_that_fits(name, patterns) for name in whole}
    problems: list[Problem] = []
    for pattern, options in patterns.items():
        if pattern in chosen:
            continue
        fitting = [name for name in whole if fits(name, (pattern,))]
        if fitting:
            over = sorted({repr(last_that_fits(name, patterns)) for name in fitting})
            given = (
                f"the pattern {pattern!r}, of whose names none is left to it: {', '.join(over)} after it fits them too"
            )
            allowed, fix = "the last pattern that fits a name counts: general ones first", f"{pattern!r} as the last"
            problems.append(Problem(where="job.optimizer", given=given, allowed=allowed, fix=fix))
        else:
            fix = partial(_one_group, options=options)
            kind = "trainable parameter of the model"
            problems.append(fits_nothing("job.optimizer", pattern, whole, kind=kind, fix=fix))
    if problems:
        raise SpecError(problems)


def _one_group(pattern: str, options: Mapping[str, Any]) -> str:
    return f"px.groups(params, {{{pattern!r}: {dict(options)!r}}})"
