"""The trained model of a run as a Keras model: to save as ``.keras`` or ``.weights.h5``, to serve or to go on with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from phalanx.config import Job
from phalanx.errors import SpecError
from phalanx.report.run_results import Run, Which


def to_keras(run: Run, job: Job | None = None, *, step: Which = None, averaged: bool = False) -> Any:
    """The Keras model that ``run`` has trained, as the job's function builds and compiles it, with the trained values.

    It is a model of Keras alone: ``to_keras(run).save("model.keras")``, ``.save_weights("model.weights.h5")``. Its
    optimizer has the state that the run's had at that step, so that Keras' ``fit`` goes on as the run would have; it
    begins anew beside averaged weights, and where the compiled optimizer is not the one that the run has stepped.

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

    path = run.checkpoint(step)  # once: a run that goes on may save another meanwhile
    trained: Any = run.model(known, step=int(path.name.removeprefix("step-")), averaged=averaged)
    with torch.random.fork_rng(devices=[]):
        model: Any = known.model.plain()  # pyrefly: ignore
    there = trained.keras_model.weights
    for variable, value in zip(model.weights, there, strict=True):
        variable.assign(value.value)
    model.optimizer.build(model.trainable_variables)  # files of Keras have its state
    if not averaged:
        _give_state(known, trained, path, model.optimizer)
    return model


def _give_state(job: Job, trained: Any, path: Path, optimizer: Any) -> None:
    """Put what the checkpoint ``path`` has of the job's optimizer into ``optimizer``, of Keras and built."""
    from phalanx.checkpoint import read_state, restore_optimizer
    from phalanx.train.build_optimizer import optimizer_over
    from phalanx.train.keras.keras_optimizers import KerasFormula

    learning = {name: one for name, one in trained.named_parameters() if one.requires_grad}
    saved = optimizer_over(job, learning).optimizer
    kind = (read_state(path).get("optimizer") or {}).get("kind")
    if isinstance(saved, KerasFormula) and type(saved).__name__ == kind:
        restore_optimizer(saved, learning, path)
        saved.give_state(trained.learning, optimizer)
        optimizer.iterations.assign(int(path.name.removeprefix("step-")))
