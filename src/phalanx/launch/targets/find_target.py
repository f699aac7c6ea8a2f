"""The table of launch targets, and the reader of ``--to`` and the options beside it."""

from __future__ import annotations

import difflib
from importlib import import_module

import click

from phalanx.errors import Problem, SpecError
from phalanx.launch.targets.target import Target

# A text each, so that a target's packages are imported only with it.
TARGETS = {
    "ssh": "phalanx.launch.targets.ssh:SshTarget",
    "slurm": "phalanx.launch.targets.slurm:SlurmTarget",
    "kubernetes": "phalanx.launch.targets.kubernetes:KubernetesTarget",
    "ray": "phalanx.launch.targets.ray:RayTarget",
    "sagemaker": "phalanx.launch.targets.sagemaker:SageMakerTarget",
    "sky": "phalanx.launch.targets.sky:SkyTarget",
}
"""The word before the colon of ``--to`` → its class."""


def target_class(name: str) -> type[Target]:
    """Return the class of a target of the table."""
    module, _, kind = TARGETS[name].partition(":")
    return getattr(import_module(module), kind)


def find_target(text: str) -> Target:
    """Return the target of ``--to``: ``ssh:hosts.toml``, ``slurm``, ``ray:http://head:8265``.

    Raises:
        SpecError: it is not in the table, or the text after the colon is wrong.
    """
    name, _, address = text.partition(":")
    if name not in TARGETS:
        near = difflib.get_close_matches(name, TARGETS, n=1, cutoff=0.4)
        allowed = ", ".join(TARGETS)
        raise SpecError.of(where="--to", given=repr(text), allowed=allowed, fix=f"--to {(near or ['slurm'])[0]}")
    return target_class(name)(address)


def settled_options(target: Target, words: list[str]) -> dict[str, str]:
    """Return the target's own options in the ``words`` of a command line, by their names without dashes.

    Raises:
        SpecError: with every unknown option and the nearest that is known, and every option given once too often.
    """
    names = {name.replace("-", "_"): name for name in target.options}
    given = [click.Option([f"--{name}", key], multiple=True) for key, name in names.items()]
    lenient = {"ignore_unknown_options": True, "allow_extra_args": True}
    try:
        context = click.Command("launch", params=[*given], add_help_option=False).make_context("", [*words], **lenient)
    except click.BadOptionUsage as error:
        name = error.option_name.removeprefix("--")
        allowed, fix = target.options[name].help, f"--{name} {target.options[name].example}"
        raise SpecError.of(f"--{name}", "no value", allowed, fix) from None
    unknown = [word.partition("=")[0] for word in context.args if word.startswith("-")] or context.args
    problems = [_unknown(target, word) for word in unknown]
    found: dict[str, str] = {}
    for key, name in names.items():
        values, option = context.params[key] or (), target.options[name]
        if any(value.startswith("--") for value in values) and not option.through:
            fix = f"--{name} {option.example}"
            problems.append(Problem(where=f"--{name}", given="no value", allowed=option.help, fix=fix))
        elif len(values) > 1 and not option.between:
            twice = f"twice: {', '.join(values)}"
            problems.append(Problem(where=f"--{name}", given=twice, allowed="once", fix=f"--{name} {values[-1]}"))
        elif values:
            found[name] = option.between.join(values)
    if problems:
        raise SpecError(problems)
    return found


def _unknown(target: Target, word: str) -> Problem:
    name = word.lstrip("-")
    allowed = f"options of {target.name}: {', '.join(f'--{one}' for one in target.options) or 'it has none'}"
    near = [one for one in target.options if len(name) > 2 and one.startswith(name)]
    near = near or difflib.get_close_matches(name, target.options, n=2, cutoff=0.8)
    fix = " or ".join(f"--{one}" for one in near) or "phalanx launch --help"
    others = [one for one in TARGETS if one != target.name and name in target_class(one).options]
    if others:
        allowed += f"; {word} belongs to {', '.join(others)}"
        fix = fix if near else f"without {word}, or --to {others[0]}"
    for through in (option.through for option in target.options.values() if option.through):
        allowed += f"; others by {through.format('--name=value')}"
        fix = fix if near or others else through.format(f"{word}=...")
    fix = fix if word.startswith("--") else f"without {word}"
    return Problem(where="--to", given=f"{target.name}, with {word}", allowed=allowed, fix=fix)
