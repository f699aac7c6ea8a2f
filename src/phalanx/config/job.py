"""A job: what to train. It says nothing of devices."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from phalanx.config.averaging import Average
from phalanx.config.batch_ramp import BatchRamp, ramp_problems
from phalanx.config.clip import Clip
from phalanx.config.fields import FieldKind, is_number, is_whole, misfits
from phalanx.config.losses import loss_problems, told_of_training
from phalanx.config.own_sampler import Sampler, beside_sampler, sampler_problems
from phalanx.config.phases import Phase, not_given, phase_problems
from phalanx.config.schedule import Schedule
from phalanx.config.token_batch import TokenBatch, token_problems
from phalanx.errors import Problem, SpecError

Unused = Literal["error", "allow"]
LossOver = Literal["samples", "batch"]
Statistics = Literal["micro", "global"]
Cutting = Literal["colwise", "rowwise", "whole", 0, 1]
"""How a weight is cut over ``tp``: along its output or its input features, not at all, or by its dimension."""

_CUTTINGS = get_args(Cutting)


@dataclass(frozen=True, slots=True)
class Pretrained:
    """Initial values from a folder of safetensors as ``save_pretrained`` writes it, or from one such file.

    Attributes:
        path: the folder (``model.safetensors``, or shards with ``model.safetensors.index.json``), or the file.
        missing: names of parameters, ``*`` standing for any text, that may be missing there and then keep the values
            that ``job.model`` gives them, such as those of a new head.
        unused: names there, ``*`` standing for any text, that the model need not have.
    """

    path: str | Path
    missing: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()

    @classmethod
    def of(cls, given: str | Path | Pretrained) -> Pretrained:
        """``given``, of which a path alone stands for a folder that fits name by name."""
        return given if isinstance(given, Pretrained) else cls(given)


@dataclass(frozen=True, slots=True)
class Best:
    """By which number evaluations are compared. The checkpoint of the best one stays, whatever else is deleted.

    Attributes:
        metric: ``loss``, the evaluation's, or a name of ``job.metrics``.
        mode: whether less is better, ``min``, or more, ``max``.
        patience: evaluations in a row that bring nothing better, after which the run ends early; ``None``: it does not.
        min_delta: by how much a better one has to be better.
    """

    metric: str = "loss"
    mode: Literal["min", "max"] = "min"
    patience: int | None = None
    min_delta: float = 0.0

    def __post_init__(self) -> None:
        problems = _problems_of_best(self)
        if problems:
            raise SpecError(problems)


def _problems_of_best(best: Best) -> list[Problem]:
    found: list[Problem] = []

    def wrong(name: str, allowed: str, fix: str) -> None:
        given = repr(getattr(best, name))
        found.append(Problem(where=f"best.{name}", given=given, allowed=allowed, fix=f"px.Best({fix})"))

    if not isinstance(best.metric, str) or not best.metric:  # pyrefly: ignore
        wrong("metric", "loss, or the name of a metric", '"accuracy", mode="max"')
    if best.mode not in ("min", "max"):
        wrong("mode", "min, max", '"accuracy", mode="max"')
    if best.patience is not None and not is_whole(best.patience, 1):
        wrong("patience", "a whole number of evaluations, 1 or more, or None", "patience=3")
    if not is_number(best.min_delta) or best.min_delta < 0:
        wrong("min_delta", "a number, 0 or more", "min_delta=0.001")
    return found


_KINDS = {
    "drop_last": FieldKind(types=(bool,), allowed="True or False", fix="drop_last=True"),
    "batch_tokens": FieldKind(
        types=(TokenBatch, type(None)),
        allowed="a px.TokenBatch, which has the lengths of the samples, or None",
        fix="batch_tokens=px.TokenBatch(8192, lengths)",
    ),
    "shuffle": FieldKind(types=(bool, type(None)), allowed="True, False or None", fix="shuffle=True"),
    "average": FieldKind(
        types=(Average, type(None)), allowed="a px.Average, or None", fix="average=px.Average(decay=0.999)"
    ),
    "best": FieldKind(types=(Best, type(None)), allowed="a px.Best, or None", fix='best=px.Best("loss", patience=3)'),
    "name": FieldKind(types=(str,), allowed="a text", fix='name="digits"'),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """What to train, written for one device.

    Attributes:
        model: builds the ``torch.nn.Module``, on whatever device torch's default is.
        data: builds the training data: a map-style or an iterable dataset.
        loss: ``loss(output, batch)`` gives ``Loss(sum, count)``, or a plain mean over the samples of the batch;
            ``px.model_loss()`` takes the one that the model computes itself, ``px.Losses`` is of several by name. A
            parameter ``training`` is true in training, false in evaluation. Left out only beside ``phases``.
        loss_over: what ``loss`` is called with: ``samples``, some of the batch, whose losses add up; or ``batch``, the
            outputs and the batch of the whole global batch, for losses that compare samples with each other.
        optimizer: ``optimizer(params)`` builds the ``torch.optim.Optimizer`` over exactly these parameters, or gives
            (optimizer, scheduler) with a scheduler of ``torch.optim.lr_scheduler`` over it, stepped once a step.
        phases: more than one update in a step, in this order, each a ``px.Phase`` with parameters, loss and optimizer
            of its own; in place of ``loss`` and ``optimizer``. ``clip`` and ``schedule`` are for each. The first one's
            loss is the run's: in events, in evaluation and for ``best``.
        batch: the **global** batch: samples in one optimizer step, on any number of devices.
        batch_ramp: optimizer step → the global batch from that step on, such as ``{0: 16, 500: 32, 1000: 64}``: from
            step 0 on, the largest of them being ``batch``. Each begins in an epoch's order where the one before ended.
            ``None``: ``batch`` in every step.
        batch_tokens: ``px.TokenBatch(8192, lengths)``: a step takes samples in the order of the epoch until their
            lengths come to so many tokens; ``batch`` is then the most samples that one takes.
        epochs: passes over the data. Give ``epochs`` or ``steps``.
        steps: optimizer steps.
        seed: of initial values, data order and every other random stream.
        inputs: ``inputs(batch)`` gives the model's arguments: a tensor, a tuple (positional) or a dict (keyword).
            Without it: of a dict, the entries that ``forward`` names; of a tuple, the first; else the batch itself.
        collate: joins a list of samples into a batch; torch's default where not given.
        transform: ``transform(batch, keys)`` gives the **global** batch of training in place of the collated one,
            before it is divided: for mixup, CutMix and their like. ``keys`` are its samples' numbers, int64.
        shuffle: by (seed, epoch). ``None``: map-style data are shuffled, streams keep their order.
        sampler: the order of each epoch of map-style data in place of ``shuffle``: ``sampler(seed, epoch)`` gives the
            indices; ``px.weighted``, ``px.buckets``, or ``px.Sampler(function, repeats=True)``. Without ``steps``, an
            epoch has as many steps as its indices make.
        drop_last: whether the last, partial batch of an epoch is dropped.
        workers: processes a rank that load data; 0 loads in the training process.
        prefetch: batches each of the ``workers`` loads ahead; 2 where not given.
        schedule: the factor on the learning rate; a function of the step stands for ``px.Schedule(function=...)``.
        clip: largest global L2 norm of the gradient, or a ``px.Clip``; ``None`` does not clip.
        evaluate: builds the evaluation data (map-style), of which each sample counts exactly once.
        metrics: ``metrics(output, batch)`` gives a dict of name → ``Loss(sum, count)`` or ``px.Metric``.
        evaluate_every: optimizer steps between evaluations; 0: at the end only.
        best: by which number evaluations are compared: the best one's checkpoint stays, and a run may end early.
        average: ``px.Average``: an average of the weights, kept beside them, with which evaluations are made.
        unused: what to do about parameters that get no gradient: ``error`` names them and stops, ``allow`` trains on.
        batch_statistics: what BatchNorm takes mean and variance over in training: each ``micro`` batch by itself, which
            depends on the plan, or the ``global`` batch, as one device does that computes it in one go.
        tensor_parallel: how weights are cut under ``tp``, where it shall be otherwise than found: name of a layer or of
            its weight, ``*`` standing for any text → ``colwise``, ``rowwise``, ``whole``, or a dimension, 0 or 1. The
            last that fits counts.
        initial: where the initial values come from, in place of those that ``model`` draws: a folder that
            ``save_pretrained`` or ``phalanx checkpoint export`` wrote, a safetensors file, or ``px.Pretrained``.
        callbacks: name of an event (``step``, ``evaluate``, ``checkpoint``, ``end`` and others, as the run folder's log
            has them) → function that is called with each one, a dict, soon after it happened: in the process that
            started the run, or in rank 0's where torchrun did. They read, and change nothing; one that raises is told
            of and then left out.
        name: of the run; the job file's name where not given.
    """

    model: Callable[[], Any]
    data: Callable[[], Any]
    loss: Callable[[Any, Any], Any] = not_given
    optimizer: Callable[[Any], Any] = not_given
    phases: Sequence[Phase] = ()
    batch: int
    batch_ramp: BatchRamp | None = None
    batch_tokens: TokenBatch | None = None
    epochs: int | None = None
    steps: int | None = None
    loss_over: LossOver = "samples"
    seed: int = 0
    inputs: Callable[[Any], Any] | None = None
    collate: Callable[[list[Any]], Any] | None = None
    transform: Callable[[Any, Any], Any] | None = None
    shuffle: bool | None = None
    sampler: Sampler | Callable[[int, int], Any] | None = None
    drop_last: bool = False
    workers: int = 0
    prefetch: int | None = None
    schedule: Schedule | Callable[[int], Any] = field(default_factory=Schedule)
    clip: float | Clip | None = None
    evaluate: Callable[[], Any] | None = None
    metrics: Callable[[Any, Any], dict[str, Any]] | None = None
    evaluate_every: int = 0
    best: Best | None = None
    average: Average | None = None
    unused: Unused = "error"
    batch_statistics: Statistics = "micro"
    tensor_parallel: Mapping[str, Cutting] = field(default_factory=dict[str, Cutting])
    initial: str | Path | Pretrained | None = None
    callbacks: Mapping[str, Callable[[dict[str, Any]], object]] = field(
        default_factory=dict[str, Callable[[dict[str, Any]], object]]
    )
    name: str = "job"

    @property
    def lr_schedule(self) -> Schedule:
        """``schedule``, also where that is given as a function."""
        return Schedule.of(self.schedule)

    @property
    def clipping(self) -> Clip | None:
        """``clip``, also where that is given as a number."""
        return Clip.of(self.clip)

    def __post_init__(self) -> None:
        problems = _problems(self) + sampler_problems(self.sampler) + beside_sampler(self.sampler, self.shuffle)
        problems += ramp_problems(self) + token_problems(self)
        problems += phase_problems(self.phases, self.loss, self.optimizer, self.loss_over)
        if problems:
            raise SpecError(problems)
        object.__setattr__(self, "loss", told_of_training(self.loss))


_CHOICES = {"unused": get_args(Unused), "loss_over": get_args(LossOver), "batch_statistics": get_args(Statistics)}


def _problems(job: Job) -> list[Problem]:
    found = loss_problems(job.loss, job.loss_over)

    def wrong(name: str, allowed: str, fix: str) -> None:
        found.append(Problem(where=f"job.{name}", given=_shown(getattr(job, name)), allowed=allowed, fix=fix))

    found += _function_problems(job)
    if not is_whole(job.batch, 1):
        wrong("batch", "samples in one optimizer step: a whole number, 1 or more", "batch=256")
    for name in ("epochs", "steps"):
        if getattr(job, name) is not None and not is_whole(getattr(job, name), 1):
            wrong(name, "a whole number, 1 or more", f"{name}=10")
    if (job.epochs is None) == (job.steps is None):
        given = f"epochs={job.epochs}, steps={job.steps}"
        found.append(Problem(where="job.epochs", given=given, allowed="one of the two", fix="epochs=5"))
    for name, least in (("seed", 0), ("workers", 0), ("evaluate_every", 0)):
        if not is_whole(getattr(job, name), least):
            wrong(name, f"a whole number, {least} or more", f"{name}={max(least, 2)}")
    if job.prefetch is not None and not is_whole(job.prefetch, 1):
        wrong("prefetch", "a whole number, 1 or more, or None", "workers=2, prefetch=2")
    elif job.prefetch is not None and job.workers == 0:
        wrong("prefetch", "only together with workers=1 or more", f"workers=2, prefetch={job.prefetch}")
    if not (job.clip is None or isinstance(job.clip, Clip) or (is_number(job.clip) and job.clip > 0)):
        wrong("clip", "a number above 0, a px.Clip, or None", "clip=1.0")
    for name, choices in _CHOICES.items():
        if getattr(job, name) not in choices:
            wrong(name, ", ".join(choices), f'{name}="{choices[-1]}"')
    cuts: Any = job.tensor_parallel
    if not hasattr(cuts, "items") or any(type(name) is not str or how not in _CUTTINGS for name, how in cuts.items()):
        allowed = "names of layers → " + ", ".join(map(repr, _CUTTINGS))
        wrong("tensor_parallel", allowed, 'tensor_parallel={"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}')
    if (initial := job.initial) is not None and not _reads_initial(initial):
        wrong("initial", "a path, px.Pretrained, or None", 'initial="path/to/folder"')
    called: Any = job.callbacks
    if not hasattr(called, "items") or not all(type(name) is str and callable(what) for name, what in called.items()):
        wrong("callbacks", "names of events → functions", 'callbacks={"evaluate": print}')
    if job.phases and job.average is not None:
        wrong("average", "None beside phases: their updates come at different times", "average=None")
    return (
        found
        + _schedule_problems(job)
        + _evaluation_problems(job)
        + misfits("job", {name: getattr(job, name) for name in _KINDS}, _KINDS)
    )


def _shown(given: Any) -> str:
    """``given`` in one short line: a list of samples, or a model with its layers, is told of by its kind."""
    if hasattr(given, "named_parameters"):
        return f"a model, a {type(given).__name__}"
    whole = repr(given)
    return whole if len(whole) <= _LONG and "\n" not in whole else f"an object of type {type(given).__name__}"


_LONG = 80  # characters


def _function_problems(job: Job) -> list[Problem]:
    found: list[Problem] = []

    def wrong(name: str, allowed: str, fix: str, given: str = "") -> None:
        given = given or _shown(getattr(job, name))
        found.append(Problem(where=f"job.{name}", given=given, allowed=allowed, fix=fix))

    functions = {
        "model": "model=lambda: Net()",
        "data": "data=lambda: dataset",
        "optimizer": "optimizer=lambda params: torch.optim.AdamW(params, lr=3e-4)",
        "loss": "loss=lambda output, batch: px.cross_entropy(output, batch['label'])",
    }
    for name, fix in functions.items():
        value = getattr(job, name)
        if value is not_given and not job.phases:
            wrong(name, "a function, or phases with losses and optimizers of their own", fix, "none")
        elif name != "loss" and not (  # of losses there are more kinds; a module can be called as well
            callable(value) and (isinstance(value, type) or not hasattr(value, "named_parameters"))
        ):
            wrong(name, "a function that builds it when called", fix)
    functions = {
        "inputs": "inputs=lambda batch: batch['image']",
        "collate": "collate=torch.utils.data.default_collate",
        "transform": "transform=lambda batch, keys: mixup(batch)",
        "evaluate": "evaluate=lambda: dataset",
        "metrics": "metrics=lambda output, batch: {'accuracy': px.accuracy(output, batch['label'])}",
    }
    for name, fix in functions.items():
        if getattr(job, name) is not None and not callable(getattr(job, name)):
            wrong(name, "a function, or None", fix)
    return found


def _schedule_problems(job: Job) -> list[Problem]:
    given: Any = job.schedule
    if isinstance(given, Schedule):
        return []
    if not callable(given):
        allowed, fix = "a px.Schedule, or a function of the step", 'schedule=px.Schedule(decay="cosine")'
        return [Problem(where="job.schedule", given=repr(given), allowed=allowed, fix=fix)]
    try:
        Schedule.of(given)
    except SpecError as error:
        return list(error.problems)
    return []


def _evaluation_problems(job: Job) -> list[Problem]:
    found: list[Problem] = []
    if job.evaluate is None:
        allowed, fix = "only together with evaluate, which builds the data for it", "evaluate=lambda: dataset"
        found += [
            Problem(where=f"job.{name}", given=repr(value), allowed=allowed, fix=fix)
            for name in ("metrics", "evaluate_every", "best")
            if (value := getattr(job, name))
        ]
    best: Any = job.best
    if isinstance(best, Best) and best.patience and not job.evaluate_every:
        fix = f"best=px.Best({best.metric!r}, patience={best.patience}), evaluate_every=100"
        allowed = "only together with evaluate_every: without it there is one evaluation, at the end"
        found.append(Problem(where="best.patience", given=repr(best.patience), allowed=allowed, fix=fix))
    return found


def _reads_initial(given: Any) -> bool:
    if isinstance(given, Pretrained):
        path: Any = given.path
        lists: tuple[Any, ...] = (given.missing, given.unused)
        return (
            isinstance(path, str | Path)
            and _reads_initial(path)
            and all(isinstance(names, tuple | list) and all(isinstance(name, str) for name in names) for names in lists)
        )
    return isinstance(given, str | Path) and bool(str(given))
