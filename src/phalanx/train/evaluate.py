"""Evaluation: every sample of the evaluation data exactly once, on any number of devices."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import torch
from torch import nn

from phalanx.comm import from_every_rank, sum_over_ranks
from phalanx.config import Job, Metric, Plan
from phalanx.config.losses import Losses, in_evaluation
from phalanx.data import evaluation_batches
from phalanx.device_kinds import kind_named, kind_of
from phalanx.errors import LossError
from phalanx.train.assembly import Assembly
from phalanx.train.evaluation_sums import EvaluationSums, Found, Sums
from phalanx.train.inputs import Inputs
from phalanx.train.loss import read_loss
from phalanx.train.loss_scaling import compute_context
from phalanx.train.phase_jobs import evaluated_job
from phalanx.train.row_gather import with_whole_tensors
from phalanx.train.whole_batch import OutputPiece, WholeBatch


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluation:
    """The result of one evaluation: sums over counts of all ``samples``, each taken once; ``seconds`` of wall time."""

    loss: float
    samples: int
    metrics: dict[str, float]
    seconds: float

    @classmethod
    def of(
        cls, job: Job, sums: Sums, samples: int, began: float, computed: Mapping[str, float] | None = None
    ) -> Evaluation:
        """Build the result from ``sums`` and ``computed`` metrics; ``began`` is a ``time.perf_counter()``."""
        ratios = {name: total / count if count else math.nan for name, (total, count) in sums.items()}
        loss = job.loss.total(ratios) if isinstance(job.loss, Losses) else ratios.pop("loss")
        metrics = dict(sorted({**ratios, **(computed or {})}.items()))
        return cls(loss=loss, samples=samples, metrics=metrics, seconds=time.perf_counter() - began)


def evaluate(
    job: Job,
    plan: Plan,
    assembly: Assembly,
    dataset: Any,
    *,
    leave: Callable[[], bool] | None = None,
    batches: int | None = None,
) -> Evaluation | None:
    """Run the model, or its first phase, over ``dataset`` without gradients. Collective; all ranks get the same result.

    ``leave()`` is asked after each batch whether to give up, with ``None``; all ranks must be answered alike.
    ``batches``: only so many.

    Raises:
        LossError: if the loss is not of an allowed form, or a metric is not, or one is called ``loss``.
    """
    begun, job = time.perf_counter(), evaluated_job(job)
    layout = assembly.layout
    device = next(layout.module.parameters()).device
    kind = kind_named(assembly.device)
    if device.type == "cpu" and not kind.on_host:  # parameters offloaded between uses
        device = kind.current()
    inputs = Inputs(job, layout.module)
    sums, samples = EvaluationSums(), 0
    with _weights(assembly), torch.no_grad(), evaluation_mode(layout.module):
        lane = assembly.loader.lane(assembly.step.progress.step)
        for number, batch in enumerate(islice(evaluation_batches(dataset, job, lane, micro=plan.micro), batches)):
            pieces: list[OutputPiece] = []
            for micro in (micro for part in batch.parts for micro in part):
                layout.computes(0, micro.samples)
                with compute_context(plan, device):
                    args, kwargs, on_device = inputs(micro.batch, device)
                    output = layout.forward(args, kwargs)
                    pieces.append(OutputPiece(output=output, batch=on_device, samples=micro.samples))
                    samples += micro.samples
                    if job.loss_over == "batch":
                        continue
                    # Of a pipeline only the last rank has an output, and measures.
                    found = {} if output is None else measure(job, output, on_device, micro.samples)
                refuse_metrics(found, plan)
                sums.add(found, micro.ids[0] if micro.ids else 0, counts=micro.samples > 0)
                pieces.clear()
            if pieces:
                with compute_context(plan, device):
                    given = [replace(one, output=with_whole_tensors(one.output)) for one in pieces]
                    whole = WholeBatch(given, assembly.step.rows, device, batch.samples)
                    found = measure(job, whole.output, whole.batch, batch.samples)  # by each rank; the first counts
                sums.add(found, number * job.batch, counts=assembly.step.rows.first)
            if leave is not None and leave():
                return None
    whole, everywhere = _of_all_ranks(sums.ratios, samples, assembly, device)
    computed = _computed(sums, assembly, trial=batches is not None) if job.metrics else {}
    return Evaluation.of(job, whole, everywhere, begun, computed)


def _of_all_ranks(ratios: Sums, samples: int, assembly: Assembly, device: torch.device) -> tuple[Sums, int]:
    layout, names = assembly.layout, sorted(ratios)
    if layout.holdings.stages is not None:
        names = max(from_every_rank(names), key=len)
    flat = [value for name in names for value in ratios.get(name, (0.0, 0.0))]  # pyrefly: ignore[not-iterable]
    totals = torch.tensor([float(samples), *flat], dtype=kind_of(device).widest(), device=device)
    if not layout.holdings.counts:
        totals.zero_()  # another rank computes the same
    sum_over_ranks(totals)
    if assembly.local_sgd:
        assembly.local_sgd.across.sum(totals)
    everywhere, *values = totals.tolist()
    return dict(zip(names, zip(values[::2], values[1::2], strict=True), strict=True)), int(everywhere)  # pyrefly: ignore[bad-argument-type]


def _computed(sums: EvaluationSums, assembly: Assembly, *, trial: bool) -> dict[str, float]:
    sent = sums.to_send() if assembly.layout.holdings.counts else EvaluationSums().to_send()
    found = sums.computed(assembly.from_every_rank(sent), trial=trial)
    return next((one for one in assembly.from_every_rank(found) if one), {})


def refuse_metrics(found: Found, plan: Plan) -> None:
    """Refuse metrics computed once, if the plan cannot.

    Raises:
        LossError: with servers; or for rows, if a rank has a part of each sequence.
    """
    names = [name for name, given in found.items() if isinstance(given, Metric) and (given.rows or plan.server)]
    if names and plan.server:
        raise LossError(
            f"metric {names[0]!r} is a px.Metric; with servers a metric is px.Loss(sum, count): workers send no "
            "tensors of evaluations.\n    try: a plan without server"
        )
    if names and plan.cp > 1:
        raise LossError(
            f"metric {names[0]!r} collects rows, of which a rank has a part under cp={plan.cp}.\n"
            "    try: sums in place of rows, or a plan without cp"
        )


def _weights(assembly: Assembly) -> AbstractContextManager[None]:
    if assembly.local_sgd:
        return assembly.local_sgd.averaged()
    average = assembly.step.average
    return average.applied() if average is not None and average.how.evaluate else nullcontext()


@contextmanager
def evaluation_mode(module: nn.Module) -> Iterator[None]:
    """Put every submodule in evaluation mode for the block, and restore each afterwards."""
    training = [part for part in module.modules() if part.training]
    module.eval()
    try:
        yield
    finally:
        for part in training:
            part.training = True


def measure(job: Job, output: Any, batch: Any, samples: int) -> Found:
    """Return sums and counts of the loss, or of each loss by name, and of each metric, for one micro-batch."""
    read = read_loss(job.loss(output, batch, **in_evaluation(job.loss)), samples, "the evaluation")
    found: dict[str, tuple[Any, Any] | Metric] = {"loss": (read.value * read.weight, read.count)}
    if isinstance(job.loss, Losses):
        found = dict(zip(job.loss.names, read.named, strict=True))
    for name, value in (job.metrics(output, batch) if job.metrics else {}).items():
        if name in found or name == "loss":
            raise LossError(
                f"a metric is called {name!r}, as a loss of the evaluation is, which is always there.\n"
                "    try: another name, or remove it from job.metrics"
            )
        if isinstance(value, Metric):
            found[name] = value
            continue
        if not (isinstance(value, tuple) and len(value) == 2):
            raise LossError(
                f"metric {name!r} is a {type(value).__name__}; a metric is px.Loss(sum, count), so that parts add up, "
                "or a px.Metric, which is computed once.\n"
                '    try: metrics=lambda output, batch: {"accuracy": px.accuracy(output, batch["label"])}'
            )
        found[name] = (value[0], value[1])
    return found
