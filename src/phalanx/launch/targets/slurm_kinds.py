"""Nodes of one kind or of two that a job asks Slurm for, and how many of a run's processes each of them has."""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass

from phalanx.config import Plan, RunSpec
from phalanx.device_kinds import on_host
from phalanx.errors import Problem
from phalanx.launch.targets.offer import Offer, gpus_offered, misfit
from phalanx.launch.targets.option_checks import is_count, uneven_nodes, wrong_counts, wrong_option
from phalanx.launch.targets.slurm_offer import gpus_in, has_gpus, slurm_offer
from phalanx.launch.targets.target import Option

NODE_OPTIONS = {
    "nodes": Option(help="nodes, each with an equal part of the plan's processes; 1 where not given", example="2"),
    "partition": Option(help="partition, or several with commas", example="gpu"),
    "account": Option(help="account that pays", example="vision"),
    "qos": Option(help="quality of service", example="long"),
    "constraint": Option(help="features that nodes must have", example="a100"),
    "gres": Option(help="generic resources of each node, in place of --gpus-per-node", example="gpu:a100:8"),
    "gpus-per-node": Option(
        help="GPUs of each node; one a device of the plan where the partition has any, 0: none", example="8"
    ),
    "cpus-per-task": Option(help="cores of each node; without GPUs one a worker where not given", example="32"),
    "mem": Option(help="memory of each node, 0: all that it has", example="256G"),
    "nodelist": Option(help="nodes that the job must have", example="n[1-2]"),
    "exclude": Option(help="nodes that it must not have", example="n7"),
}
"""Options that say which nodes, and what of each."""

_COUNTS = {"nodes": 1, "gpus-per-node": 0, "cpus-per-task": 1, "processes": 1}  # name → least
_WORD = re.compile(r"[^\s\"'\\#`$]+")  # nothing that sbatch, as it reads the script, takes for more than a word
_PROCESSES = Option(help="processes of each of these nodes", example="4")
_ALSO = "nodes=2 partition=old"
_GUESSED = "sinfo {}: taken as nodes without GPUs; give --gpus-per-node"


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeKind:
    """Nodes that are alike.

    Attributes:
        nodes: how many.
        workers: processes of the run on each.
        gpus: of each node; ``None``: none are asked for, or ``gres`` does.
        cores: of each node; ``None``: as Slurm gives them.
        words: further options of ``sbatch``, name → value.
        guessed: what was taken for granted, in a sentence; empty where all is known.
    """

    nodes: int
    workers: int
    gpus: int | None
    cores: int | None
    words: Mapping[str, str]
    guessed: str = ""

    @classmethod
    def of(cls, options: Mapping[str, str], workers: int, plan: Plan) -> NodeKind:
        """From options without fault; ``workers``: of ``plan`` on each of these nodes."""
        gpus, cores, guessed = _count(options, "gpus-per-node"), _count(options, "cpus-per-task"), ""
        if gpus is None and "gres" not in options and not on_host(plan.device):
            there = plan.device != "auto" or has_gpus(options.get("partition"))
            gpus, guessed = workers * plan.threads if there else None, _GUESSED if there is None else ""
        if cores is None and not gpus and "gres" not in options:
            cores = workers * plan.threads
        words = {name: options[name] for name in NODE_OPTIONS if name in options and name not in _COUNTS}
        nodes = _count(options, "nodes") or 1
        guessed = guessed.format("does not answer" if guessed and shutil.which("sinfo") else "is not here")
        return cls(nodes=nodes, workers=workers, gpus=gpus or None, cores=cores, words=words, guessed=guessed)


def also_options(text: str | None) -> tuple[dict[str, str], list[Problem]]:
    """The options in ``--also "nodes=2 partition=old"``, and what is wrong in them; empty where it is not given."""
    if text is None:
        return {}, []
    found: dict[str, str] = {}
    problems: list[Problem] = []
    for word in text.split():
        name, equals, value = word.partition("=")
        if not equals or name not in (*NODE_OPTIONS, "processes") or name in found:
            allowed = f"NAME=VALUE of these, each once: {', '.join((*NODE_OPTIONS, 'processes'))}"
            problems.append(_wrong_also(word, allowed))
        found[name] = value
    if not found:
        problems.append(_wrong_also(repr(text), "what other nodes are asked for"))
    problems += [_wrong_also(f"{one.where[2:]}={found[one.where[2:]]}", one.allowed) for one in node_problems(found)]
    return found, problems


def node_problems(options: Mapping[str, str]) -> list[Problem]:
    """What is wrong in options that say which nodes, each by itself."""
    words = [
        wrong_option(NODE_OPTIONS, name, repr(options[name]), "a word, without spaces and quotes")
        for name in NODE_OPTIONS
        if name in options and name not in _COUNTS and not _WORD.fullmatch(options[name])
    ]
    counts = wrong_counts({**NODE_OPTIONS, "processes": _PROCESSES}, options, _COUNTS)
    if not counts and "gres" in options and "gpus-per-node" in options:
        given = f"{options['gpus-per-node']} with --gres {options['gres']}"
        fix = f"--gres {options['gres']}"
        counts.append(wrong_option(NODE_OPTIONS, "gpus-per-node", given, "one of the two", fix))
    return [*words, *counts]


def workers_of(run: RunSpec, options: Mapping[str, str], also: Mapping[str, str]) -> tuple[list[int], list[Problem]]:
    """Processes on each node of each kind, and why they cannot be laid so. The options are without fault."""
    processes, nodes = run.plan.processes, _count(options, "nodes") or 1
    if not also:
        return [processes // nodes], uneven_nodes(run.plan, nodes)
    others = _count(also, "nodes") or 1
    each = _count(also, "processes") or processes // (nodes + others)
    rest = processes - others * each
    if not each or rest < nodes or rest % nodes:
        given = f"{each} processes on each of {others}, so that {rest} of the {processes} of {run.plan} are for {nodes}"
        allowed = "as many as leave equally many for each of --nodes"
        fits = [one for one in range(1, processes) if (left := processes - others * one) >= nodes and left % nodes == 0]
        fix = f'--also "nodes={others} processes={fits[-1]}"' if fits else f"--nodes 1 --also {_ALSO!r}"
        return [1, 1], [Problem(where="--also", given=given, allowed=allowed, fix=fix)]
    return [rest // nodes, each], []


def too_few_gpus(plan: Plan, options: Mapping[str, str], also: Mapping[str, str]) -> list[Problem]:
    """Whether ``plan`` needs more GPUs than nodes of the one kind, or of both, have. The options are without fault."""
    if on_host(plan.device):
        return []
    offers = [_offered(one) for one in (options, also) if one or one is options]
    known = [one for one in offers if one]
    problem = misfit(plan, *known) if len(known) == len(offers) else None
    return [problem] if problem else []


def _count(options: Mapping[str, str], name: str) -> int | None:
    text = options.get(name, "")
    return int(text) if is_count(text, _COUNTS[name]) else None


def _offered(options: Mapping[str, str]) -> Offer | None:
    """The GPUs that the options ask for, else what ``sinfo`` says; ``None`` where neither says how many."""
    nodes, gpus = _count(options, "nodes") or 1, _count(options, "gpus-per-node")
    if gpus is None and "gres" not in options:
        return slurm_offer(options)
    by = "--gres" if gpus is None else "--gpus-per-node"
    gpus = gpus_in(options["gres"]) if gpus is None else gpus
    return None if gpus is None else gpus_offered(nodes, gpus, by)


def _wrong_also(given: str, allowed: str) -> Problem:
    return Problem(where="--also", given=given, allowed=allowed, fix=f'--also "{_ALSO}"')
