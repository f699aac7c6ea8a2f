"""The table of launch targets, and what ``--to`` and the options beside it say."""

from __future__ import annotations

import difflib
from importlib import import_module

from phalanx.errors import Problem, SpecError
from phalanx.launch.targets.target import Target

# A text each, so that what one target needs is imported only where that one is asked for.
TARGETS = {
    "ssh": "phalanx.launch.targets.ssh:SshTarget",
    "slurm": "phalanx.launch.targets.slurm:SlurmTarget",
    "kubernetes": "phalanx.launch.targets.kubernetes:KubernetesTarget",
    "ray": "phalanx.launch.targets.ray:RayTarget",
    "sagemaker": "phalanx.launch.targets.sagemaker:SageMakerTarget",
}
"""Every target: the word before the colon in ``--to``, and its class."""


def target_class(name: str) -> type[Target]:
    """The class of the target of that name, which there is."""
    module, _, kind = TARGETS[name].partition(":")
    return getattr(import_module(module), kind)


def find_target(text: str) -> Target:
    """The target that ``--to`` names: ``ssh:hosts.toml``, ``slurm``, ``ray:http://head:8265``.

    Raises:
        SpecError: there is none of that name, or what follows the colon is wrong.
    """
    name, _, address = text.partition(":")
    if name not in TARGETS:
        near = difflib.get_close_matches(name, TARGETS, n=1, cutoff=0.4)
        allowed = ", ".join(TARGETS)
        raise SpecError.of(where="--to", given=repr(text), allowed=allowed, fix=f"--to {(near or ['slurm'])[0]}")
    return target_class(name)(address)


def settled_options(target: Target, words: list[str]) -> dict[str, str]:
    """The target's own options out of the ``words`` of a command line, by their names without dashes.

    Raises:
        SpecError: with every word that is none, and the one that was meant where that can be told; with every option
            that is given twice and may be given once.
    """
    found: dict[str, str] = {}
    problems: list[Problem] = []
    rest = list(words)
    while rest:
        word, equals, value = rest.pop(0).partition("=")
        name = word.removeprefix("--")
        option = target.options.get(name)
        if not word.startswith("--") or option is None:
            problems.append(_unknown(target, word))
            if not equals and rest and not rest[0].startswith("--"):
                rest.pop(0)
            continue
        if not equals:
            if not rest or (rest[0].startswith("--") and not option.dashes):
                allowed, fix = option.help, f"--{name} {option.example}"
                problems.append(Problem(where=word, given="no value", allowed=allowed, fix=fix))
                continue
            value = rest.pop(0)
        if name not in found:
            found[name] = value
        elif option.between:
            found[name] += f"{option.between}{value}"
        else:
            given = f"twice: {found[name]}, {value}"
            problems.append(Problem(where=word, given=given, allowed="once", fix=f"--{name} {value}"))
    if problems:
        raise SpecError(problems)
    return found


def _unknown(target: Target, word: str) -> Problem:
    name = word.removeprefix("--")
    allowed = f"options of {target.name}: {', '.join(f'--{one}' for one in target.options) or 'it has none'}"
    for one in (one for one, option in target.options.items() if option.dashes):
        allowed += f"; others as --{one} {target.options[one].example}"
    near = [one for one in target.options if len(name) > 2 and one.startswith(name)]
    near = near or difflib.get_close_matches(name, target.options, n=2, cutoff=0.8)
    fix = " or ".join(f"--{one}" for one in near) or "phalanx launch --help"
    others = [one for one in TARGETS if one != target.name and name in target_class(one).options]
    if others:
        allowed += f"; {word} belongs to {', '.join(others)}"
        fix = fix if near else f"without {word}, or --to {others[0]}"
    return Problem(where="--to", given=f"{target.name}, with {word}", allowed=allowed, fix=fix)
