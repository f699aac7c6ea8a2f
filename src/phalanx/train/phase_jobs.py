"""A job of several phases as plain jobs: one model, with each phase training its own parameters."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import nn

from phalanx.config.job import Job
from phalanx.config.phases import Phase, PhaseInputs, owned
from phalanx.parallel.phase_layouts import train_only
from phalanx.units import show_names


def phase_jobs(job: Job) -> list[Job]:
    """Return the plain job of each phase; ``job`` itself if it has no phases.

    Their model is the job's with ``requires_grad=False`` for parameters not updated by the phase. The first one is
    evaluated.
    """
    if not job.phases:
        return [job]
    return [_plain(job, index, phase) for index, phase in enumerate(job.phases)]


def evaluated_job(job: Job) -> Job:
    """Return the plain job whose loss is evaluated: the first phase's."""
    return phase_jobs(job)[0]


def parameters_of_phases(job: Job, module: nn.Module) -> list[dict[str, nn.Parameter]]:
    """Return name → parameter of ``module`` for each phase; parameters frozen by the model are left out.

    Raises:
        SpecError: if a pattern matches no parameter, or two phases own one.
    """
    names: dict[int, list[str]] = {}
    named = {name: one for name, one in module.named_parameters(remove_duplicate=False) if one.requires_grad}
    for name, one in named.items():
        names.setdefault(id(one), []).append(name)
    found = owned(job.phases, [tuple(each) for each in names.values()])
    return [{name: named[name] for name in own} for own in found]


def freeze_unowned(job: Job, module: nn.Module) -> None:
    """Switch off the gradients of parameters that no phase updates, if the job has phases.

    Raises:
        SpecError: if a pattern matches no parameter, or two phases own one.
    """
    if job.phases:
        train_only(module, frozenset[str]().union(*parameters_of_phases(job, module)))


def unowned_advice(job: Job, module: nn.Module) -> list[str]:
    """Return the advice on parameters that no phase updates."""
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
    """Return ``job`` without evaluation and best evaluation."""
    return replace(job, evaluate=None, metrics=None, evaluate_every=0, best=None)


def in_even_batches(job: Job, most: int | None = None) -> Job:
    """Return ``job`` with ``job.batch`` samples in every global batch, at most ``most``."""
    return replace(job, batch=min(job.batch, most or job.batch), batch_ramp=None, batch_tokens=None)
