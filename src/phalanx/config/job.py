"""A job: what to train. It says nothing of devices."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from phalanx.config.batching import (
    BatchRamp,
    Sampler,
    TokenBatch,
    ramp_problems,
    sampler_problems,
    warms_up_in_samples,
)
from phalanx.config.fields import SelfChecked, Veto, option, shown
from phalanx.config.losses import LOSS, LOSS_RULES, PLAIN_LOSS, is_model_loss, told_of_training
from phalanx.config.optimizing import Average, Clip, Schedule, schedule_problems
from phalanx.config.phases import PHASE_RULES, Phase, not_given

Unused = Literal["error", "allow"]
LossOver = Literal["samples", "batch"]
Statistics = Literal["micro", "global"]
Cutting = Literal["colwise", "rowwise", "whole", 0, 1]
"""The cut of a weight over ``tp``: along its output or input features, none, or a dimension."""


@dataclass(frozen=True, slots=True)
class Pretrained(SelfChecked, where="px.Pretrained", call="px.Pretrained({})"):
    """Initial values from a folder of safetensors as ``save_pretrained`` writes it, or from one such file.

    Attributes:
        path: the folder (``model.safetensors``, or shards with ``model.safetensors.index.json``), or the file.
        missing: names of parameters, ``*`` standing for any text, that may be missing there, such as those of a new
            head; they keep the values of ``job.model``.
        unused: names there, ``*`` standing for any text, that the model need not have.
    """

    path: str | Path = field(metadata={"accepts": lambda given: is_path(given), "example": '"path/to/folder"'})
    missing: Sequence[str] = option((), '"path/to/folder", missing=["head.*"]', allowed="a list of names")
    unused: Sequence[str] = option((), '"path/to/folder", unused=["head.*"]', allowed="a list of names")

    @classmethod
    def of(cls, given: str | Path | Pretrained) -> Pretrained:
        """Return ``given``, or the folder of that path."""
        return given if isinstance(given, Pretrained) else cls(given)


def is_name(given: Any) -> bool:
    """Return True if ``given`` is a text, not empty."""
    return isinstance(given, str) and given != ""


def is_path(given: Any) -> bool:
    """Return True if ``given`` is a path, not empty."""
    return isinstance(given, str | Path) and bool(str(given))


@dataclass(frozen=True, slots=True)
class Best(SelfChecked, where="best", call="px.Best({})"):
    """The number that evaluations are compared by. The checkpoint of the best one is never deleted.

    Attributes:
        metric: ``loss``, the evaluation's, or a name of ``job.metrics``.
        mode: ``min`` if less is better, ``max`` if more is.
        patience: evaluations in a row without a better one that end the run; ``None``: any number.
        min_delta: least difference of a better evaluation.
    """

    metric: str = option("loss", '"accuracy", mode="max"', accepts=is_name, allowed="loss, or the name of a metric")
    mode: Literal["min", "max"] = option("min", '"accuracy", mode="max"')
    patience: int | None = option(None, "patience=3", least=1, of="evaluations")
    min_delta: float = option(0.0, "min_delta=0.001", least=0)


def _builds(given: Any) -> bool:
    """Return True for a function or class; a module can be called as well, but is already built."""
    return callable(given) and (isinstance(given, type) or not hasattr(given, "named_parameters"))


def _builder(example: str) -> dict[str, Any]:
    return {"accepts": _builds, "allowed": "a function that builds it when called", "example": example}


def _unlike(job: Any) -> str:
    """Return the field by which steps have unlike numbers of samples, or ""."""
    return "batch_ramp" if job.batch_ramp else "batch_tokens" if job.batch_tokens is not None else ""


_OPTIMIZER = "optimizer=lambda params: torch.optim.AdamW(params, lr=3e-4)"
_METRICS = "metrics=lambda output, batch: {'accuracy': px.accuracy(output, batch['label'])}"
_CUTS = 'tensor_parallel={"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}'

_BATCH = {"least": 1, "allowed": "samples in one optimizer step: a whole number, 1 or more", "example": "batch=256"}
_BATCH_TOKENS = {
    "allowed": "a px.TokenBatch, which has the lengths of the samples, or None",
    "example": "batch_tokens=px.TokenBatch(8192, lengths)",
}
_INITIAL = {
    "accepts": lambda given: given is None or isinstance(given, Pretrained) or is_path(given),
    "allowed": "a path, px.Pretrained, or None",
    "example": 'initial="path/to/folder"',
}

JOB_RULES = (
    *(
        Veto(
            name,
            lambda job, name=name: getattr(job, name) is not_given and not job.phases,
            "none",
            "a function, or phases with losses and optimizers of their own",
            example,
        )
        for name, example in (("loss", PLAIN_LOSS), ("optimizer", _OPTIMIZER))
    ),
    Veto(
        "epochs",
        lambda job: (job.epochs is None) == (job.steps is None),
        "epochs={epochs}, steps={steps}",
        "one of the two",
        "epochs=5",
    ),
    Veto(
        "prefetch",
        lambda job: job.prefetch is not None and job.workers == 0,
        "{prefetch}",
        "only together with workers=1 or more",
        "workers=2, prefetch={prefetch}",
    ),
    *(
        Veto(
            name,
            lambda job, name=name: getattr(job, name) and job.evaluate is None,
            lambda job, name=name: shown(getattr(job, name)),
            "only together with evaluate, which builds the data for it",
            "evaluate=lambda: dataset",
        )
        for name in ("metrics", "evaluate_every", "best")
    ),
    Veto(
        "best.patience",
        lambda job: job.best and job.best.patience and not job.evaluate_every,
        lambda job: str(job.best.patience),
        "only together with evaluate_every: without it there is one evaluation, at the end",
        lambda job: f"best=px.Best({job.best.metric!r}, patience={job.best.patience}), evaluate_every=100",
    ),
    Veto(
        "shuffle",
        lambda job: job.sampler is not None and job.shuffle is not None,
        "shuffle={shuffle} with a sampler",
        "None: the sampler says the order",
        "shuffle=None",
    ),
    Veto(
        "batch",
        lambda job: job.batch_ramp and job.batch != max(job.batch_ramp.values()),
        lambda job: f"batch={job.batch} with a batch_ramp whose largest is {max(job.batch_ramp.values())}",
        "the largest of batch_ramp as batch: plans, forecasts and evaluation are for it",
        lambda job: f"batch={max(job.batch_ramp.values())}",
    ),
    Veto(
        "sampler",
        lambda job: _unlike(job) and isinstance(job.sampler, Sampler) and job.sampler.by_batch,
        lambda job: f"a sampler that is called with the batch (px.buckets, by_batch=True), and {_unlike(job)}",
        "a sampler of (seed, epoch): an epoch may have batches of more than one size",
        lambda job: f"sampler=None, or {_unlike(job)}=None",
    ),
    Veto(
        "schedule.warmup_samples",
        lambda job: _unlike(job) and warms_up_in_samples(job),
        lambda job: f"a warm-up in samples with {_unlike(job)}",
        "warmup_steps: steps have unlike numbers of samples",
        "warmup_steps=100",
    ),
    Veto(
        "batch_ramp",
        lambda job: job.batch_tokens is not None and job.batch_ramp is not None,
        "batch_tokens and a batch_ramp, which counts samples",
        "one of the two",
        "batch_ramp=None",
    ),
    Veto(
        "drop_last",
        lambda job: job.batch_tokens is not None and job.drop_last,
        "drop_last=True with batch_tokens",
        "False: the last step of an epoch has what is left, divided by its own count",
        "drop_last=False",
    ),
    *LOSS_RULES,
    *PHASE_RULES,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Job(SelfChecked, where="job", rules=JOB_RULES):
    """What to train, written for one device.

    Attributes:
        model: builds the ``torch.nn.Module``, on torch's default device.
        data: builds the training data: a map-style or an iterable dataset.
        loss: ``loss(output, batch)`` gives ``Loss(sum, count)``, or a plain mean over the samples of the batch;
            ``px.model_loss()`` is the model's own, ``px.Losses`` has several by name. A parameter ``training`` is true
            in training, false in evaluation. Left out only beside ``phases``.
        loss_over: the loss is of some ``samples``, and adds up; or of the whole global ``batch``, for losses that
            compare samples with each other.
        optimizer: ``optimizer(params)`` builds the ``torch.optim.Optimizer`` over exactly these parameters, or gives
            (optimizer, scheduler) with a scheduler of ``torch.optim.lr_scheduler``, stepped once a step.
        phases: several updates in a step, in order, each a ``px.Phase``; in place of ``loss`` and ``optimizer``.
            ``clip`` and ``schedule`` are for each. The first one's loss is the run's.
        batch: the **global** batch: samples in one optimizer step, on any number of devices.
        batch_ramp: optimizer step → global batch from it on, such as ``{0: 16, 500: 32}``; the largest is ``batch``.
        batch_tokens: ``px.TokenBatch(8192, lengths)``: a step takes samples until they have so many tokens, at most
            ``batch`` samples.
        epochs: passes over the data. Give ``epochs`` or ``steps``.
        steps: optimizer steps.
        seed: of initial values, data order and every other random stream.
        inputs: ``inputs(batch)`` gives the model's arguments: a tensor, a tuple (positional) or a dict (keyword). By
            default the entries of a dict that ``forward`` names; the first of a tuple; else the batch itself.
        collate: joins a list of samples into a batch; torch's by default.
        transform: ``transform(batch, keys)`` gives the **global** batch of training in place of the collated one, for
            mixup, CutMix and the like. ``keys`` are its samples' numbers, int64.
        shuffle: by (seed, epoch). ``None``: map-style data are shuffled, streams keep their order.
        sampler: the order of each epoch of map-style data in place of ``shuffle``: ``sampler(seed, epoch)`` gives the
            indices; or ``px.weighted``, ``px.buckets``, ``px.Sampler(function, repeats=True)``.
        drop_last: drop the last, partial batch of an epoch.
        workers: processes a rank that load data; 0 loads in the training process.
        prefetch: batches each of the ``workers`` loads ahead; 2 by default.
        schedule: the factor on the learning rate; a function of the step stands for ``px.Schedule(function=...)``.
        clip: largest global L2 norm of the gradient, or a ``px.Clip``; ``None`` does not clip.
        evaluate: builds the evaluation data (map-style), of which each sample counts exactly once.
        metrics: ``metrics(output, batch)`` gives a dict of name → ``Loss(sum, count)`` or ``px.Metric``.
        evaluate_every: optimizer steps between evaluations; 0: at the end only.
        best: the number that evaluations are compared by: the best one's checkpoint stays, and a run may end early.
        average: ``px.Average``: an average of the weights, kept beside them, with which evaluations are made.
        unused: for parameters without a gradient: ``error`` names them and stops, ``allow`` trains on.
        batch_statistics: BatchNorm's mean and variance in training are of each ``micro`` batch, which depends on the
            plan, or of the ``global`` batch, as on one device.
        tensor_parallel: cuts of weights under ``tp`` that replace those found: name of a layer or weight, ``*``
            standing for any text → ``colwise``, ``rowwise``, ``whole``, or a dimension, 0 or 1. The last match counts.
        initial: initial values in place of the model's: a folder of ``save_pretrained`` or
            ``phalanx checkpoint export``, a safetensors file, or ``px.Pretrained``.
        callbacks: name of an event of the log (``step``, ``evaluate``, ``checkpoint``, ``end``) → a function that gets
            each event as a dict, in the starting process, or rank 0 under torchrun. One that raises is left out.
        name: of the run; the job file's name by default.
    """

    model: Callable[[], Any] = field(metadata=_builder("model=lambda: Net()"))
    data: Callable[[], Any] = field(metadata=_builder("data=lambda: dataset"))
    loss: Callable[[Any, Any], Any] = option(not_given, **LOSS)
    optimizer: Callable[[Any], Any] = field(default=not_given, metadata=_builder(_OPTIMIZER))
    phases: Sequence[Phase] = option((), "phases=[px.Phase(...), ...]", allowed="a list of px.Phase")
    batch: int = field(metadata=_BATCH)
    batch_ramp: BatchRamp | None = option(None, problems=ramp_problems)
    batch_tokens: TokenBatch | None = option(None, **_BATCH_TOKENS)
    epochs: int | None = option(None, "epochs=10", least=1)
    steps: int | None = option(None, "steps=10", least=1)
    loss_over: LossOver = "samples"
    seed: int = option(0, least=0)
    inputs: Callable[[Any], Any] | None = option(None, "inputs=lambda batch: batch['image']")
    collate: Callable[[list[Any]], Any] | None = option(None, "collate=torch.utils.data.default_collate")
    transform: Callable[[Any, Any], Any] | None = option(None, "transform=lambda batch, keys: mixup(batch)")
    shuffle: bool | None = None
    sampler: Sampler | Callable[[int, int], Any] | None = option(None, problems=sampler_problems)
    drop_last: bool = False
    workers: int = option(0, least=0)
    prefetch: int | None = option(None, "workers=2, prefetch=2", least=1)
    schedule: Schedule | Callable[[int], Any] = field(
        default_factory=Schedule, metadata={"problems": schedule_problems}
    )
    clip: float | Clip | None = option(None, "clip=1.0", above=0)
    evaluate: Callable[[], Any] | None = option(None, "evaluate=lambda: dataset")
    metrics: Callable[[Any, Any], dict[str, Any]] | None = option(None, _METRICS)
    evaluate_every: int = option(0, least=0)
    best: Best | None = option(None, 'best=px.Best("loss", patience=3)')
    average: Average | None = option(None, "average=px.Average(decay=0.999)")
    unused: Unused = "error"
    batch_statistics: Statistics = "micro"
    tensor_parallel: Mapping[str, Cutting] = field(
        default_factory=dict[str, Cutting],
        metadata={"allowed": "names of layers → 'colwise', 'rowwise', 'whole', 0, 1", "example": _CUTS},
    )
    initial: str | Path | Pretrained | None = option(None, **_INITIAL)
    callbacks: Mapping[str, Callable[[dict[str, Any]], object]] = field(
        default_factory=dict[str, Callable[[dict[str, Any]], object]],
        metadata={"allowed": "names of events → functions", "example": 'callbacks={"evaluate": print}'},
    )
    name: str = option("job", 'name="digits"')

    @property
    def lr_schedule(self) -> Schedule:
        """``schedule`` as a ``px.Schedule``."""
        return Schedule.of(self.schedule)

    @property
    def clipping(self) -> Clip | None:
        """``clip`` as a ``px.Clip``."""
        return Clip.of(self.clip)

    def settle(self) -> None:
        """Pass ``training`` to the loss if it has a parameter of that name."""
        object.__setattr__(self, "loss", told_of_training(self.loss))

    def given(self, name: str) -> str:
        """Return a field in words."""
        return "px.model_loss itself" if is_model_loss(getattr(self, name)) else shown(getattr(self, name))
