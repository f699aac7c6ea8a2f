"""The trained model of a run as a Keras model: to save as ``.keras`` or ``.weights.h5``, to serve or to go on with."""

from __future__ import annotations

from typing import Any

from phalanx.config import Job
from phalanx.errors import SpecError
from phalanx.report.run_results import Run, Which


def to_keras(run: Run, job: Job | None = None, *, step: Which = None, averaged: bool = False) -> Any:
    """The Keras model that ``run`` has trained, as the job's function builds and compiles it, with the trained values.

    It is a model of Keras alone: ``to_keras(run).save("model.keras")``, ``.save_weights("model.weights.h5")``.

    Args:
        run: of a job that ``px.from_keras`` has made.
        job: that builds the model, where the run does not know its own.
        step: which checkpoint, as of ``Run.checkpoint``.
        averaged: with the average of the weights that ``job.average`` keeps.

    Raises:
        SpecError: no job is known, it is none of Keras, or there is no such checkpoint or average.
        CheckpointError: the checkpoint is damaged.
    """
    known = job or run.job
    if known is None or not hasattr(known.model, "plain"):
        given = "none" if known is None else "a job whose model is none of Keras"
        allowed = "a job that px.from_keras has made"
        raise SpecError.of("job", given, allowed, "px.to_keras(px.load(folder, job()))")
    import torch

    trained: Any = run.model(known, step=step, averaged=averaged)
    with torch.random.fork_rng(devices=[]):
        model: Any = known.model.plain()  # pyright: ignore[reportFunctionMemberAccess]
    there = trained.keras_model.weights
    for variable, value in zip(model.weights, there, strict=True):
        variable.assign(value.value)
    model.optimizer.build(model.trainable_variables)  # files of Keras have its state, here that of a first step
    return model
