"""The plain PyTorch loop of a job, written by hand: the reference of a proof.

Forward, backward and update of the whole global batch on one device: ``torch.utils.data.DataLoader``, autograd,
``torch.nn.utils``, the optimizer as the job builds it, ``torch.optim.lr_scheduler``, ``torch.autocast`` and
``torch.amp.GradScaler``. No micro-batches, no ranks, no shards, and no line of Phalanx's own training. It calls a job's
user functions and reads the rest as plain data.
"""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Iterator
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from phalanx.config import Job, Schedule
from phalanx.device_kinds import kind_of
from phalanx.witness import samples
from phalanx.witness.evaluation import by_name, evaluated, on_device, sum_and_count
from phalanx.witness.initial import initial_model
from phalanx.witness.parts import Part, PlainAverage, clip, dense, parts_of

if TYPE_CHECKING:
    from phalanx.witness.rounding import Variation

_HALVES = {"bf16": torch.bfloat16, "fp16": torch.float16}

START, FIRST, END = "start", "first", "end"
WHOLE = 3
"""Steps of which all gradients are kept; of later ones those of parameters that had none, or only zeros, before."""

Tensors = dict[str, Tensor]
Batches = list[tuple[list[int], Any]]


@dataclass(kw_only=True)
class Witness:
    """The result of a plain loop. Tensors are whole, on the host, by the model's names.

    Lists are over the steps: ``losses`` (sum over count of the global batch), ``counts`` (its divisor; the samples for
    a mean), ``norms`` (of all gradients, before clipping), ``skipped`` updates of fp16, the ``rates`` of each
    parameter, the numbers of the ``samples``, in order, and ``epochs``; for a job with phases those of the first, and
    ``phases`` has the loss of each by name. Moments are ``start``, before the first step, ``first``, after its update,
    and ``end``.

    Attributes:
        reduced: step → parameter → gradient of the loss, before clipping; ``used``: as the optimizer got it.
        state: moment (``first``, ``end``) → parameter → its optimizer state.
        options: parameter → the options of its group without the learning rate.
        evaluations: steps taken → ``loss``, ``samples`` and ``metrics``.
        drew: whether a forward has drawn random numbers.
        batches: epoch, and (sample numbers, batch) of the micro-batches, of each step; for a run to be varied.
    """

    losses: list[float] = field(default_factory=list[float])
    counts: list[float] = field(default_factory=list[float])
    norms: list[float] = field(default_factory=list[float])
    skipped: list[bool] = field(default_factory=list[bool])
    rates: list[dict[str, float]] = field(default_factory=list[dict[str, float]])
    phases: list[dict[str, float]] = field(default_factory=list[dict[str, float]])
    samples: list[list[int]] = field(default_factory=list[list[int]])
    epochs: list[int] = field(default_factory=list[int])
    values: dict[str, Tensors] = field(default_factory=dict[str, Tensors])
    buffers: dict[str, Tensors] = field(default_factory=dict[str, Tensors])
    reduced: dict[int, Tensors] = field(default_factory=dict[int, Tensors])
    used: dict[int, Tensors] = field(default_factory=dict[int, Tensors])
    state: dict[str, dict[str, dict[str, Any]]] = field(default_factory=dict[str, dict[str, dict[str, Any]]])
    options: dict[str, dict[str, Any]] = field(default_factory=dict[str, dict[str, Any]])
    evaluations: dict[int, dict[str, Any]] = field(default_factory=dict[int, dict[str, Any]])
    drew: bool = False
    batches: list[tuple[int, Batches]] = field(default_factory=list[tuple[int, Batches]])
    evaluation_data: Any = None

    @classmethod
    def of(
        cls,
        job: Job,
        steps: int,
        *,
        precision: str = "fp32",
        device: str | torch.device = "cpu",
        most: int | None = None,
        varied: Variation | None = None,
    ) -> Witness:
        """Train ``job`` for ``steps`` steps, or as many as it has.

        ``most``: continue, at most so far, until each parameter has had a nonzero gradient.

        It seeds the global generators of torch, numpy and Python, and needs a process of its own.

        Raises:
            ValueError: if ``why_not`` names a reason, or the data end before the first step.
        """
        loop = _PlainLoop(job, (steps, most or steps), precision, torch.device(device), varied)
        if varied:
            varied.prepare(loop.model, [part.optimizer for part in loop.parts])
        return loop.run()


def why_not(job: Job, optimizer: torch.optim.Optimizer | None = None) -> str:
    """Return the reason why ``job`` has no plain loop, in one sentence, or ""."""
    if optimizer is not None:
        first = next(iter(list(inspect.signature(type(optimizer).step).parameters.values())[1:]), None)
        if first is not None and first.default is inspect.Parameter.empty:
            return f"{type(optimizer).__name__} steps with a closure, which a plain loop over batches does not have"
    total = job.steps or job.lr_schedule.total_steps
    if total is None and job.lr_schedule.decay in ("linear", "cosine") and samples.is_stream(job.data()):
        return "the learning rate decays until the end of a stream, whose length nobody knows"
    return ""


class _PlainLoop:
    """The objects of the loop, each built with the job's seed."""

    def __init__(
        self, job: Job, steps: tuple[int, int], precision: str, device: torch.device, varied: Variation | None
    ) -> None:
        self.job, self.device, self.varied = job, device, varied
        self.evaluates = not (varied and varied.first_step)
        self.steps, self.most = steps
        self.half = _HALVES.get(precision)
        samples.seed_everything(seed := samples.stream_seed(job.seed, 0))
        self.data = job.data()
        samples.seed_everything(seed)
        evaluates = job.evaluate if self.evaluates else None
        self.evaluation_data = varied.evaluation if varied and varied.batches else evaluates and evaluates()
        samples.seed_everything(seed)
        self.model = initial_model(job)
        if not self.model.training:
            self.model.train()
        self.model.to(device)
        self.parts = parts_of(job, self.model, lambda rate: rates(rate, job.batch, self._total()))
        self.trained = {name: tensor for part in self.parts for name, tensor in part.trained.items()}
        for part in self.parts:
            if reason := why_not(job, part.optimizer):
                raise ValueError(reason)
        self.known_rates: dict[str, float] = {}
        # On sums, as the loss is one: the scale does not follow what the batch happens to count.
        self.scaler = torch.amp.GradScaler(device.type, init_scale=2.0 ** (12 - round(math.log2(job.batch))))
        self.scales = precision == "fp16"
        self.pending = set(self.trained)
        self.average = PlainAverage(job.average, self.model) if job.average else None
        self.witness = Witness(evaluation_data=self.evaluation_data)

    def run(self) -> Witness:
        witness, every = self.witness, self.job.evaluate_every if self.evaluates else 0
        self._look(START)
        for step, epoch, parts in self._batches():
            witness.epochs.append(epoch)
            witness.samples.append([number for ids, _ in parts for number in ids])
            for part in self.parts:
                if step % part.every == 0:
                    self._take_turn(step, part, parts)
            if self.average and not witness.skipped[-1]:
                self.average.stepped(step + 1)
            witness.rates.append(dict(self.known_rates))
            self._move_schedules_on()
            if step == 0:
                self._look(FIRST)
            if every and (step + 1) % every == 0:
                self._evaluate(step + 1)
                for part in self.parts:
                    if isinstance(part.schedule, torch.optim.lr_scheduler.ReduceLROnPlateau):
                        part.schedule.step(self._compared(step + 1))
        if not witness.losses:
            raise ValueError("the data gave no batch")
        if self.evaluation_data is not None and not (every and len(witness.losses) % every == 0):
            self._evaluate(len(witness.losses))
        self._look(END)
        if self.average:
            witness.values["average"] = self.average.copies(self.trained.items())
            witness.buffers["average"] = self.average.copies(self.model.named_buffers())
        return witness

    def _look(self, moment: str) -> None:
        witness = self.witness
        witness.values[moment] = _copied(self.model.named_parameters())
        witness.buffers[moment] = _copied(self.model.named_buffers())
        if moment == START:
            hidden = ("params", "lr", "initial_lr")  # the last is LambdaLR's own
            groups = [one for part in self.parts for one in _groups(part).items()]
            witness.options = {name: {key: one[key] for key in one if key not in hidden} for name, one in groups}
        else:
            witness.state[moment] = {
                name: {key: on_host(one) if isinstance(one, Tensor) else one for key, one in state[tensor].items()}
                for part in self.parts
                for state in [part.optimizer.state]
                for name, tensor in part.trained.items()
                if tensor in state
            }

    def _batches(self) -> Iterator[tuple[int, int, Batches]]:
        if self.varied and self.varied.batches:
            yield from ((step, *deepcopy(one)) for step, one in enumerate(self.varied.batches))
            return
        limits = [min(one, self.job.steps or one) for one in (self.steps, self.most)]
        step = 0
        for epoch, batches in samples.epochs_of(self.data, self.job):
            before = step
            for ids, batch in batches if epoch < (self.job.epochs or math.inf) else ():
                parts = self._cut(epoch, ids) or [(ids, batch)]
                self.witness.batches += [deepcopy((epoch, parts))] if self.varied else []
                yield step, epoch, parts
                step += 1
                if step == limits[1] or (step >= limits[0] and not self.pending):
                    return
            if step == before:
                return

    def _cut(self, epoch: int, ids: list[int]) -> Batches:
        """Read micro-batches one by one, because a collate may pad to the longest of its samples."""
        cut = self.varied and self.varied.cut
        if not cut or samples.is_stream(self.data) or self.job.transform or self.job.loss_over == "batch":
            return []
        parts = [ids[start:stop] for start, stop in cut(self.model, len(ids))]
        return list(samples.loaded(self.data, self.job, epoch, parts))

    def _take_turn(self, step: int, part: Part, batches: Batches) -> None:
        if part.name:
            for tensor in self.trained.values():
                tensor.requires_grad_(False)
            for tensor in part.trained.values():
                tensor.requires_grad_(True)
        self._backward(step, part, batches)
        grads = _gradients(part)
        came = {name for name in self.pending if name in grads and bool(dense(grads[name]).any())}
        self.pending -= came
        if step < WHOLE or came:
            wanted = grads if step < WHOLE else {name: grads[name] for name in grads if name in came}
            self.witness.reduced.setdefault(step, {}).update(_copied(wanted.items()))
        self._update(step, part)

    def _backward(self, step: int, part: Part, batches: Batches) -> None:
        generator = kind_of(self.device).generator(self.device)
        generator.manual_seed(samples.stream_seed(self.job.seed, step, 0, 0, *part.words))
        part.optimizer.zero_grad()
        before = generator.get_state()
        with torch.autocast(self.device.type, dtype=self.half, enabled=self.half is not None):
            there = [(len(ids), on_device(batch, self.device)) for ids, batch in batches]
            given = [(part.loss(part.call(self.model, batch), batch), size) for size, batch in there]
            total, count = sum_and_count(given)
        self.witness.drew |= not torch.equal(before, generator.get_state())
        times = self.varied.times if self.varied and not self.scales else 1
        loss = self.scaler.scale(total) if self.scales else total / count * times
        loss.backward()
        if self.scales:
            self.scaler.unscale_(part.optimizer)
        for grad in _gradients(part).values() if self.scales or times > 1 else ():
            grad.div_(float(count) if self.scales else times)
        for tensor in part.trained.values():
            if tensor.grad is not None and tensor.grad.is_sparse:
                tensor.grad = tensor.grad.coalesce()  # else a row is rounded as often as the batch uses it
        value = total.item() / float(count)
        if part is self.parts[0]:
            self.witness.losses.append(value)
            self.witness.counts.append(float(count))
            self.witness.phases.append({})
        if part.name:
            self.witness.phases[-1][part.name] = value
        for name in by_name(given[0][0]):
            one, counted = sum_and_count([(by_name(each)[name], held) for each, held in given])
            self.witness.phases[-1][f"{part.name}/{name}" if part.name else name] = one.item() / float(counted)

    def _update(self, step: int, part: Part) -> None:
        # In fp64: the fp32 norm of ten million elements is off by 3e-4 on a CPU.
        norm = torch.linalg.vector_norm(torch.stack([_norm(grad) for grad in _gradients(part).values()]))
        if part is self.parts[0]:
            self.witness.norms.append(float(norm))
            self.witness.skipped.append(self.scales and not math.isfinite(float(norm)))
        self.known_rates |= {name: float(group["lr"]) for name, group in _groups(part).items()}
        if self.job.clip is not None and not self.witness.skipped[-1]:
            clip(self.job.clip, part, norm)
        if not self.witness.skipped[-1] and step < WHOLE:
            self.witness.used.setdefault(step, {}).update(_copied(_gradients(part).items()))
        if self.scales:
            self.scaler.step(part.optimizer)
            self.scaler.update()
        else:
            part.optimizer.step()
        for tensor in part.trained.values() if part.name else ():
            tensor.grad = None

    def _move_schedules_on(self) -> None:
        with warnings.catch_warnings():
            # A first step that fp16 skips is a step of the schedule all the same.
            warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step\\(\\)` before")
            for part in self.parts:
                if not isinstance(part.schedule, torch.optim.lr_scheduler.ReduceLROnPlateau | None):
                    part.schedule.step()

    def _evaluate(self, step: int) -> None:
        with self.average.evaluated() if self.average else nullcontext():
            how: dict[str, Any] = {"device": self.device, "half": self.half}
            self.witness.evaluations[step] = evaluated(self.job, self.model, self.parts[0], self.evaluation_data, **how)

    def _compared(self, step: int) -> float:
        found, best = self.witness.evaluations[step], self.job.best
        return found["metrics"][best.metric] if best and best.metric != "loss" else found["loss"]

    def _total(self) -> int:
        if self.job.steps is not None or samples.is_stream(self.data):
            return self.job.steps or 1
        return samples.steps_of_epochs(self.data, self.job, self.job.epochs or 1)


def _gradients(part: Part) -> dict[str, Tensor]:
    return {name: tensor.grad for name, tensor in part.trained.items() if tensor.grad is not None}


def _groups(part: Part) -> dict[str, dict[str, Any]]:
    names = {id(tensor): name for name, tensor in part.trained.items()}
    return {names[id(tensor)]: group for group in part.optimizer.param_groups for tensor in group["params"]}


def rates(schedule: Schedule, batch: int, total: int) -> Any:
    """Return the factor on every learning rate, by step, for ``LambdaLR``."""
    warmup = schedule.warmup_samples / batch if schedule.warmup_samples else float(schedule.warmup_steps)
    end = float(total if schedule.total_steps is None else schedule.total_steps)

    def factor(step: int) -> float:
        if schedule.function is not None:
            return float(schedule.function(step)) * (min(step + 1.0, warmup) / warmup if warmup > step else 1.0)
        if warmup > step:
            return min(step + 1.0, warmup) / warmup
        if schedule.decay == "step":
            return math.prod(schedule.gamma for milestone in schedule.milestones if milestone <= step)
        if schedule.decay == "constant":
            return 1.0
        left = min(max((end - step) / max(end - warmup, 1.0), 0.0), 1.0)  # of the way down, 1 to 0
        share = left if schedule.decay == "linear" else math.sin(math.pi / 2 * left) ** 2
        return schedule.floor + (1.0 - schedule.floor) * share

    return factor


def _norm(grad: Tensor) -> Tensor:
    grad = dense(grad)
    return torch.linalg.vector_norm(torch.view_as_real(grad) if grad.is_complex() else grad, dtype=torch.float64)


def _copied(tensors: Any) -> Tensors:
    return {name: on_host(dense(tensor)) for name, tensor in tensors}


def on_host(tensor: Tensor) -> Tensor:
    """Return a copy on the host."""
    return tensor.detach().to("cpu", copy=True).contiguous()
