"""A job of several phases as the plain jobs that they are: one model, of which each trains its own parameters."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import nn

from phalanx.config.job import Job
from phalanx.config.phases import Phase, PhaseInputs, owned
from phalanx.parallel.phase_layouts import train_only
from phalanx.units import show_names


def phase_jobs(job: Job) -> list[Job]:
    """The plain job of each phase, which knows of no others; ``job`` itself where it has none.

    Their model is the job's with ``requires_grad=False`` for all that the phase does not update. The first one is
    evaluated.
    """
    if not job.phases:
        return [job]
    return [_plain(job, index, phase) for index, phase in enumerate(job.phases)]


def evaluated_job(job: Job) -> Job:
    """The plain job whose loss evaluations take: the first phase's."""
    return phase_jobs(job)[0]


def parameters_of_phases(job: Job, module: nn.Module) -> list[dict[str, nn.Parameter]]:
    """Name → parameter of ``module`` for each phase; what the model itself has frozen is of none.

    Raises:
        SpecError: if a pattern matches nothing, or two phases own one parameter.
    """
    names: dict[int, list[str]] = {}
    named = {name: one for name, one in module.named_parameters(remove_duplicate=False) if one.requires_grad}
    for name, one in named.items():
        names.setdefault(id(one), []).append(name)
    found = owned(job.phases, [tuple(each) for each in names.values()])
    return [{name: named[name] for name in own} for own in found]


def freeze_unowned(job: Job, module: nn.Module) -> None:
    """Switch the gradients of parameters off that no phase updates; nothing where the job has no phases.

    Raises:
        SpecError: if a pattern matches nothing, or two phases own one parameter.
    """
    if job.phases:
        train_only(module, frozenset[str]().union(*parameters_of_phases(job, module)))


def unowned_advice(job: Job, module: nn.Module) -> list[str]:
    """What is to be said of parameters that no phase updates."""
    names = [name for name, one in module.named_parameters() if not one.requires_grad]
    if not job.phases or not names:
        return []
    return [f"no phase updates {len(names)} parameters ({show_names(names)}): they stay as they are."]


def _plain(job: Job, index: int, phase: Phase) -> Job:
    def model() -> Any:
        module = job.model()
        if isinstance(module, nn.Module):
            train_only(module, parameters_of_phases(job, module)[index])
        return module

    return replace(
        job if index == 0 else without_evaluation(job),
        model=model,
        phases=(),
        loss=phase.loss,
        optimizer=phase.optimizer,
        inputs=PhaseInputs(phase.name, phase.inputs or job.inputs, first=index == 0),
        schedule=job.schedule if phase.schedule is None else phase.schedule,
    )


def without_evaluation(job: Job) -> Job:
    """``job``, which then evaluates nothing and looks for no best evaluation."""
    return replace(job, evaluate=None, metrics=None, evaluate_every=0, best=None)


def in_even_batches(job: Job, most: int | None = None) -> Job:
    """``job``, with ``job.batch`` samples in every global batch, or with ``most`` where those are fewer."""
    return replace(job, batch=min(job.batch, most or job.batch), batch_ramp=None, batch_tokens=None)
