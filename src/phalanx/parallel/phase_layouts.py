"""Several updates in a step: one model laid out for each phase, with gradients of that phase's parameters only.

torch's reducer under ``dp`` and the buckets of ``zero=1`` and ``zero=2`` wait for gradients, so they are made for each
phase over its own parameters; phases share none, so that none waits for another's. ``fully_shard`` (``zero=3``) reduces
whatever gradients exist, and one device does not wait: these are laid out once.

Plans that trace one forward of the model, such as for pipeline stages, tensor parallelism or recompute, are refused:
each phase has another forward.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

from torch import nn

from phalanx.config import Job, Plan
from phalanx.config.fields import plan_problem
from phalanx.errors import Problem
from phalanx.parallel.layout import Layout, MicroBatchWork

_EACH = "phases, whose forward is another one in each: where {} is found by a look at one"


def check(job: Job, plan: Plan) -> list[Problem]:
    """Return the problems of a plan with a job's phases."""
    if not job.phases:
        return []
    found: list[Problem] = []

    def wrong(name: str, given: str, fix: str) -> None:
        allowed = "single, threads, dp, and fsdp with any zero, with micro"
        found.append(plan_problem(name, f"{name}={getattr(plan, name)} for {given}", allowed, fix))

    whole = f"dp={plan.world_size}" if plan.world_size > 1 else "single"
    for axis, what in (("pp", "the model is cut"), ("tp", "weights are cut"), ("ep", "experts lie")):
        if getattr(plan, axis) > 1:
            wrong(axis, _EACH.format(what), whole)
    if plan.cp > 1:
        wrong("cp", _EACH.format("sequences are cut"), whole)
    if plan.server:
        wrong("server", "phases: servers apply one update for the gradients of a piece", f"dp={plan.dp}")
    if plan.sync != "each":
        given = "phases: replicas that step by themselves are averaged after each update of one optimizer"
        wrong("sync", given, whole)
    if plan.compile:
        given = "phases: what is compiled for the gradients of one phase is compiled anew for each other"
        wrong("compile", given, str(replace(plan, compile=False)))
    if plan.recompute != "none":
        wrong("recompute", _EACH.format("what is recomputed lies"), str(replace(plan, recompute="none")))
    if plan.precision == "fp16":
        given = "phases: a loss scale follows the gradients of one loss, and a checkpoint keeps one"
        wrong("precision", given, str(replace(plan, precision="bf16")))
    if plan.shares:
        wrong("shares", "phases: shares follow the seconds of one forward and backward", str(replace(plan, shares="")))
    if plan.offload != "none":
        wrong("offload", "phases: what is on the host is of one optimizer", str(replace(plan, offload="none")))
    if plan.compress != "none":
        wrong("compress", "phases: what is left out of gradients is kept for one", str(replace(plan, compress="none")))
    if job.batch_statistics == "global":
        given = "batch_statistics='global' and phases: statistics are exchanged in the order of one forward"
        fix = 'batch_statistics="micro"'
        found.append(Problem(where="job.batch_statistics", given=given, allowed='"micro"', fix=fix))
    return found


def lay_out_phases(
    module: nn.Module, plan: Plan, phases: Sequence[Mapping[str, nn.Parameter]], lay_out: Callable[[], Layout]
) -> list[PhaseLayout]:
    """Return the layout of each phase, with gradients of these parameters; ``lay_out`` makes one."""
    separate = plan.kind == "replicate" or (plan.kind == "shard" and plan.zero < 3)
    shared = None if separate else lay_out()
    made: list[PhaseLayout] = []
    for own in phases:
        names = frozenset(own)
        if shared is None:
            train_only(module, names)
        made.append(PhaseLayout(shared or lay_out(), names))
    every = frozenset[str]().union(*phases)
    train_only(module, every)
    for one in made:
        one.every = every
    return made


class PhaseLayout(Layout):
    """A layout in which ``begin`` disables the gradients of other phases' parameters, until ``stepped``."""

    def __init__(self, inner: Layout, names: frozenset[str]) -> None:
        self._inner, self._names = inner, names
        self.every = names
        held = inner.holdings
        own = {name: tensor for name, tensor in held.parameters.items() if name in names}
        self.holdings = replace(held, parameters=own)

    @property
    def modules(self) -> list[nn.Module]:
        return self._inner.modules

    @cached_property
    def _switches(self) -> list[tuple[nn.Parameter, bool]]:
        """Return the parameters of all phases with True for those of this one; they stay the same objects between
        steps.
        """
        named = [pair for module in self.modules for pair in module.named_parameters()]
        return [(one, name in self._names) for name, one in named if name in self.every]

    def begin(self) -> None:
        for one, own in self._switches:
            one.requires_grad_(own)
        self._inner.begin()

    def computes(self, part: int, samples: int) -> None:
        self._inner.computes(part, samples)

    def accumulate(self, parts: Sequence[Sequence[Any]], work: MicroBatchWork) -> None:
        self._inner.accumulate(parts, work)

    def finish(self) -> None:
        self._inner.finish()

    def stepped(self) -> None:
        self._inner.stepped()
        for one, _ in self._switches:
            one.requires_grad_(True)


class AllPhases(Layout):
    """The layouts of all ``phases`` as one, to be saved, restored and evaluated; each phase computes in its own."""

    def __init__(self, phases: Sequence[PhaseLayout]) -> None:
        self.phases = list(phases)
        parameters = {name: tensor for one in phases for name, tensor in one.parameters.items()}
        self.holdings = replace(phases[0].holdings, parameters=parameters)

    @property
    def modules(self) -> list[nn.Module]:
        return self.phases[0].modules

    def accumulate(self, parts: Sequence[Sequence[Any]], work: MicroBatchWork) -> None:
        raise NotImplementedError("each phase computes in its own layout")

    def finish(self) -> None:
        """Do nothing: each phase has waited for its gradients."""

    def stepped(self) -> None:
        for one in self.phases:
            one.stepped()


def train_only(module: nn.Module, names: Collection[str]) -> None:
    """Enable gradients for exactly the parameters of ``module`` with these names."""
    for name, one in module.named_parameters():
        if one.requires_grad != (name in names):
            one.requires_grad_(name in names)
