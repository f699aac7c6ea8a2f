"""The updates of a plain loop's step: one model with one optimizer, or, for a job with phases, each with its own.

Beside it the average of the weights, written out: of whole tensors, one by one.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from phalanx.config import Average, Clip, Job, Schedule


@dataclass(kw_only=True)
class Part:
    """One update of a step.

    Attributes:
        name: of the phase; empty if the job has none.
        trained: the parameters that it updates, by name.
        schedule: of torch's, stepped with every step of the run, whether the part has its turn in it or not.
        words: key of its random numbers, beside the step.
        every: it has its turn in the steps ``k`` with ``k % every == 0``.
    """

    name: str
    trained: dict[str, Tensor]
    loss: Callable[[Any, Any], Any]
    optimizer: torch.optim.Optimizer
    schedule: Any
    inputs: Callable[[Any], Any] | None
    words: tuple[int, ...] = ()
    every: int = 1

    def call(self, model: nn.Module, batch: Any) -> Any:
        """Return the output: the model's arguments are those of ``inputs``, or forward's names, or the batch."""
        taken, rest, wrapped = list[str](), True, model
        while rest:  # an adapter hands on what it does not name itself
            given = list(inspect.signature(type(wrapped).forward).parameters.values())[1:]
            taken += [one.name for one in given if one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)]
            rest, inner = any(one.kind is one.VAR_KEYWORD for one in given), [*wrapped.children()]
            if not taken or len(inner) != 1:
                break
            (wrapped,) = inner
        beside = {"phase": self.name} if self.name and "phase" in taken else {}
        if self.inputs is not None:
            given = self.inputs(batch)
            if isinstance(given, Mapping):
                return model(**given, **beside)
            return model(*given, **beside) if isinstance(given, tuple) else model(given, **beside)
        if isinstance(batch, Mapping):
            if not taken and rest:
                return model(**batch)
            return model(**{name: batch[name] for name in taken if name in batch and name not in beside}, **beside)
        return model(batch[0] if isinstance(batch, tuple | list) and batch else batch, **beside)


def parts_of(job: Job, model: nn.Module, factor: Callable[[Schedule], Any]) -> list[Part]:
    """Return the updates of a step of ``job``, in order; ``factor`` makes the learning-rate factor for ``LambdaLR``."""
    parameters: dict[str, Tensor] = {name: tensor for name, tensor in model.named_parameters() if tensor.requires_grad}
    if not job.phases:
        optimizer, schedule = _made(job.optimizer, parameters, job.lr_schedule, factor)
        whole = {"loss": job.loss, "optimizer": optimizer, "schedule": schedule, "inputs": job.inputs}
        return [Part(name="", trained=parameters, **whole)]
    every_name: dict[int, list[str]] = {}
    for name, tensor in model.named_parameters(remove_duplicate=False):
        every_name.setdefault(id(tensor), []).append(name)
    found: list[Part] = []
    for index, phase in enumerate(job.phases):
        patterns = [phase.parameters] if isinstance(phase.parameters, str) else phase.parameters
        own = {
            name: tensor
            for name, tensor in parameters.items()
            if any(fnmatchcase(known, pattern) for known in every_name[id(tensor)] for pattern in patterns)
        }
        rate = job.lr_schedule if phase.schedule is None else Schedule.of(phase.schedule)
        optimizer, schedule = _made(phase.optimizer, own, rate, factor)
        inputs = phase.inputs or job.inputs
        each: dict[str, Any] = {"loss": phase.loss, "optimizer": optimizer, "schedule": schedule, "inputs": inputs}
        found.append(Part(name=phase.name, trained=own, words=(index,), every=phase.every, **each))
    return found


def _made(
    build: Callable[[Any], Any], parameters: Mapping[str, Tensor], rate: Schedule, factor: Callable[[Schedule], Any]
) -> tuple[torch.optim.Optimizer, Any]:
    made: Any = build(_Named(parameters))
    optimizer, schedule = made if isinstance(made, tuple | list) else (made, None)
    if rate != Schedule():  # else what a scheduler of the job's own sets, by a hook, stands
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor(rate))
    return optimizer, schedule


class _Named(list[Tensor]):
    """The argument of a job's ``optimizer``: a list that also knows names."""

    def __init__(self, named: Mapping[str, Tensor]) -> None:
        super().__init__(named.values())
        self._pairs = list(named.items())

    def named(self) -> Iterator[tuple[str, Tensor]]:
        return iter(self._pairs)


def dense(tensor: Tensor) -> Tensor:
    """Return a sparse tensor with its zeros."""
    return tensor.to_dense() if tensor.is_sparse else tensor


def clip(how: float | Clip, part: Part, norm: Tensor) -> None:
    """Clip the gradients of ``part`` as ``job.clip`` says, by torch; ``norm`` is their global L2 norm in fp64."""
    limit: Any = how.norm if isinstance(how, Clip) else how
    if not isinstance(how, Clip) or (how.value is None and how.norm_type == 2 and how.per == "all"):
        torch.nn.utils.clip_grads_with_norm_(part.trained.values(), limit, norm)
    elif how.value is not None:
        for tensor in part.trained.values():  # as clip_grad_value_, which takes no sparse ones
            if (grad := tensor.grad) is not None:
                (grad.values() if grad.is_sparse else grad).clamp_(-how.value, how.value)
    else:
        each = part.optimizer.param_groups if how.per == "group" else [{"params": list(part.trained.values())}]
        for group in each:
            grads = [dense(one.grad) for one in group["params"] if one.grad is not None]
            norms = [torch.linalg.vector_norm(one, how.norm_type, dtype=torch.float64) for one in grads]
            if norms:
                whole = torch.linalg.vector_norm(torch.stack(norms), how.norm_type)
                torch.nn.utils.clip_grads_with_norm_(group["params"], limit, whole)


class PlainAverage:
    """The average of the parameters of ``model``, with its buffers at the last averaging."""

    def __init__(self, how: Average, model: nn.Module) -> None:
        self._how, self._model, self._made = how, model, 0
        self._values: dict[str, Tensor] = {}

    @torch.no_grad()
    def stepped(self, taken: int) -> None:
        """Include the weights after ``taken`` steps, if it is time."""
        how = self._how
        if taken < max(how.start, 1) or (taken - how.start) % how.every:
            return
        self._made += 1
        share = 1 / self._made if how.kind == "mean" else 1 - how.factor
        for name, tensor in self._model.named_parameters():
            before = self._values.get(name, tensor)
            self._values[name] = before + share * (tensor - before)
        self._values |= {name: tensor.clone() for name, tensor in self._model.named_buffers()}

    def copies(self, named: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
        """Return its values of these names, on the host; empty before it has begun."""
        return {name: self._values[name].detach().cpu().clone() for name, _ in named if name in self._values}

    @contextmanager
    def evaluated(self) -> Generator[None]:
        """Put the averaged weights into the model for an evaluation, if there are any and they are wanted."""
        if not (self._made and self._how.evaluate):
            yield
            return
        held = [*self._model.named_parameters(), *self._model.named_buffers()]
        own = [tensor.detach().clone() for _, tensor in held]
        with torch.no_grad():
            for name, tensor in held:
                tensor.copy_(self._values[name])
        yield
        with torch.no_grad():
            for (_, tensor), values in zip(held, own, strict=True):
                tensor.copy_(values)
