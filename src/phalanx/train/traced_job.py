"""A job's work in each step: its traced model, its batch, its samples' lengths, its optimizer's state."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, replace
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from phalanx.config import Job
from phalanx.config.batching import smaller_batches
from phalanx.data import EpochOrders, Loader, changing_sampler
from phalanx.errors import Problem, ProfileError
from phalanx.forecast import Lengths, Work
from phalanx.forecast.layouts import lengths_of
from phalanx.parallel.grad_reduce import made_dense
from phalanx.parallel.survey import Example
from phalanx.parallel.unwrapped_blocks import look_inside
from phalanx.trace import ModelCall, length_of, trace
from phalanx.train.build_model import begun, make_data, without_values
from phalanx.train.elementwise import Parameters
from phalanx.train.few_samples import FEW, HOST, example_from, example_of, whole_loader
from phalanx.train.inputs import Inputs
from phalanx.train.loss import read_loss
from phalanx.train.padding_free import joined_dimensions
from phalanx.train.torch_scheduler import MadeOptimizer
from phalanx.train.whole_batch import compared
from phalanx.units import show_names

_ADAM, _AVERAGED = 8.0, 4.0  # bytes a parameter


def work_of(
    job: Job, *, batch: int = 0, length: int = 0, values: bool = False, module: nn.Module | None = None
) -> Work:
    """Return the work of ``job``; no value of the model is computed, unless ``values`` are asked for.

    Args:
        batch: the global batch in place of the job's; 0 for the job's.
        length: tokens of a sample in place of those of the data; 0 for those.
        values: run the model on samples of the data, for shapes that depend on values.
        module: the job's model, if it has been built already.

    Raises:
        ProfileError: if the model's operations or shapes depend on values; it names the line.
        SpecError: if the job's functions return a wrong type.
    """
    if job.phases:
        raise ProfileError([_PHASES])
    if module is None:
        module = job.model() if values else begun(without_values(job))[0]
        assert module is not None
    lengths, example, looked_at = _example(job, module, look_at_lengths=not length)

    def loss(output: Any, batch: Any) -> torch.Tensor:
        return read_loss(job.loss(output, batch), 1, "the forecast").value

    gathered = compared(module, example) if job.loss_over == "batch" else ()
    sparse = made_dense(module)
    look_inside(module, example)  # what the runtime takes for a block is what is priced as one
    given = {"args": example.args, "kwargs": example.kwargs, "batch": example.batch}
    profile = trace(ModelCall(module=module, loss=loss, values=values, **given))
    state, optimizer = _optimizer_of(job, module)
    notes = list(profile.notes)
    if values:
        notes.append("its costs are those of one step on samples of the data: others may choose other shapes")
    notes += looked_at
    if lengths:
        notes.append(lengths.note)
    if state is None:
        told = "the optimizer could not be tried on small parameters: 8 bytes of state each are taken, as Adam has"
        notes.append(told)
    if sparse:
        notes.append(f"sparse gradients of {show_names(sparse)} are priced as dense ones, of every row")
    return Work(
        profile=replace(profile, compared=gathered, notes=(*notes, *_unpriced(job))),
        batch=batch or job.batch,
        smaller=smaller_batches(job),
        length=length,
        lengths=lengths,
        state=(_ADAM if state is None else state) + (_AVERAGED if job.average else 0.0),
        norm=True,  # every step looks whether it is finite
        optimizer=optimizer,
    )


_PHASES = Problem(
    where="job.phases",
    given="phases, each with a forward, a backward and an update of its own: a forecast prices one of each in a step",
    allowed="jobs with one loss and one optimizer; training continues without a forecast",
    fix="phalanx bench JOB, which measures steps",
)


def _example(job: Job, module: nn.Module, *, look_at_lengths: bool) -> tuple[Lengths | None, Example, list[str]]:
    loader = whole_loader(job)
    if not look_at_lengths:
        return None, example_of(job, module, loader), [*filter(None, (loader.looked_at,))]
    inputs = Inputs(job, module)
    lengths, batch, joined = look(loader, lambda one: inputs(one, HOST)[:2])
    return lengths, example_from(job, inputs, batch), [*filter(None, (loader.looked_at, _IN_A_ROW if joined else ""))]


_BESIDE_STEP = ("workers", "prefetch", "collate", "transform", "evaluate", "metrics", "evaluate_every", "best")
_LEARNING = ("seed", "shuffle", "sampler", "drop_last", "schedule", "unused")


def _unpriced(job: Job) -> Iterator[str]:
    default = {one.name: one.default_factory() if callable(one.default_factory) else one.default for one in fields(job)}

    def stated(names: Sequence[str]) -> str:
        return ", ".join(name for name in names if getattr(job, name) != default[name])

    if found := stated(_BESIDE_STEP):
        yield f"Of the job, {found}: not priced; data is taken to be there when a step wants it."
    if found := stated(_LEARNING):
        yield f"Of the job, {found}: changes what is learnt, not what a step takes."
    if smaller := smaller_batches(job):
        yield (
            f"Of the job, batch_ramp: each step is priced as one of {job.batch} samples, the largest batch; steps of "
            f"{', '.join(map(str, smaller))} take less time and memory."
        )
    if job.batch_tokens is not None:
        yield (
            f"Of the job, batch_tokens: each step is priced as one of {job.batch} samples, the most that it takes; "
            "those that have their tokens before take less time and memory."
        )
    if job.average is not None:
        yield "Of the job, average: its memory is counted with the optimizer's state; passes over it are not priced."
    if job.clip is not None:
        yield "Of the job, clip: the sum of the norm over ranks is priced; the passes over gradients are not priced."
    if job.clipping is not None and job.clipping.norm is not None and not job.clipping.by_whole_norm:
        yield "Of the job, clip: one more exchange of a number for each parameter group is not priced."
    if job.loss_over == "batch":
        yield (
            "Of the job, loss_over: what its loss reads is priced as gathered, and a second forward of each of several "
            "micro-batches; not priced are the whole batch's loss on each rank, beyond a micro-batch's, and its memory."
        )
    if job.batch_statistics == "global":
        yield (
            "Of the job, batch_statistics: two small exchanges for each BatchNorm layer, one in forward and one in "
            "backward, are not priced; over slow links a step takes longer by the time to start them."
        )
    if job.tensor_parallel:
        yield "Of the job, tensor_parallel: not priced; layers are taken to be cut as they are found."


def steps_of(job: Job, batch: int = 0) -> int | None:
    """Return the optimizer steps of the whole job; ``None`` for epochs over a stream."""
    if job.steps is not None:
        return job.steps
    data = make_data(job, job.data)
    if not hasattr(data, "__len__") or job.epochs is None:
        return None
    each = batch or job.batch
    if changing := changing_sampler(data, replace(job, batch=each)):
        return changing.steps_of(job.epochs)
    orders = EpochOrders.of(replace(job, batch=each), len(data))
    size = len(data) if orders is None else orders.length
    return job.epochs * (size // each if job.drop_last else -(-size // each))


def _optimizer_of(job: Job, module: nn.Module) -> tuple[float | None, str]:
    """Return the bytes of optimizer state for each parameter, and a name: ``adamw``, ``sgd``, ``adamw-fused``.

    Takes one step on small parameters with the same names. Adam keeps 8, SGD none, with momentum 4. ``None`` if the
    step fails; the name is empty if the optimizer cannot be built.
    """
    name = ""
    trainable = ((name, one.dim()) for name, one in module.named_parameters() if one.requires_grad)
    small = {name: nn.Parameter(torch.ones([2] * max(1, dims))) for name, dims in trainable}
    try:
        with torch.enable_grad(), torch.random.fork_rng(devices=[]):
            optimizer = MadeOptimizer.of(job.optimizer(Parameters(small))).optimizer
            name = type(optimizer).__name__.lower() + ("-fused" if optimizer.defaults.get("fused") else "")
            for parameter in small.values():
                parameter.grad = torch.ones_like(parameter)
            optimizer.step()
    except Exception:  # an optimizer of any make
        return None, name
    kept = sum(
        one.numel() * one.element_size()
        for state in optimizer.state.values()
        for one in state.values()
        if isinstance(one, torch.Tensor) and one.numel() > 1
    )
    return kept / sum(parameter.numel() for parameter in small.values()), name


_COUNT, _PATIENCE = 100, 1.0  # samples; seconds: reading one may take long


_IN_A_ROW = (
    "job.collate joins the samples of a micro-batch in one row: each is priced as a row of its own, as kernels with "
    "cu_seqlens compute it; a mask over the whole row takes time and memory for all pairs of its tokens"
)
_NO_ROWS = Problem(
    where="job.collate",
    given="samples joined along the first dimension, so that nothing tells how many a tensor is of",
    allowed="a forecast of tensors with a first dimension of samples, or of 1; training continues without a forecast",
    fix="input_ids[None], of shape (1, tokens), as transformers' DataCollatorWithFlattening gives them",
)


def look(
    loader: Loader, inputs: Callable[[Any], Any], *, seconds: float = _PATIENCE
) -> tuple[Lengths | None, Any, bool]:
    """Return lengths of samples (``None`` if all are alike), a batch of two of the longest, and True if it joins them.

    If samples are joined in one row the batch has one. ``inputs`` returns the model's arguments for a batch; after
    ``seconds`` no further sample is read.

    Raises:
        ProfileError: if samples are joined along the first dimension.
    """
    end = time.monotonic() + seconds
    found: list[tuple[int, int]] = []
    for place, batch in loader.spread(_COUNT):
        found.append((_length(inputs(batch)), place))
        if len(found) > 1 and (found[-1][0] <= 1 or time.monotonic() > end):  # images and the like have no tokens
            break
    found.sort()
    ends = [found[0][1], found[-1][1]][: len(found)]
    both, alone = inputs(loader.collate(ends)), [inputs(loader.collate([place])) for place in ends]
    dims = joined_dimensions(both, alone) if len(ends) > 1 else set[int]()
    if dims == {0}:
        raise ProfileError([_NO_ROWS])
    lengths = lengths_of([length for length, _ in found], padded=not dims and _length(both) == found[-1][0])
    if dims:
        return lengths, loader.collate(ends[-1:]), True
    return lengths, loader.collate([place for _, place in found[-2:]]) if lengths else loader.example(FEW), False


def _length(given: Any) -> int:
    return length_of([leaf for leaf in tree_leaves(given) if isinstance(leaf, torch.Tensor)])
