"""A user's own training loop without Phalanx, run beside a plan and observed from outside.

The loop is a function with any of these arguments:

- ``steps``: number of optimizer steps to take;
- ``model``: the job's model with its initial values, in training mode, on the device;
- ``samples``: the sample numbers of each step's global batch, in order: ``samples[step]``.

It yields the loss of each step, or returns them as ``losses``; at the end it returns the model, or a dict with
``losses`` and ``model``. Any optimizer is observed by torch's own hooks.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from phalanx.config import Job
from phalanx.witness import samples
from phalanx.witness.initial import initial_model
from phalanx.witness.plain_loop import END, FIRST, START, WHOLE, Witness, on_host

_FORM = (
    "a training loop yields the loss of each optimizer step and returns the model, "
    "or returns {'losses': [...], 'model': model}"
)


@dataclass(frozen=True, slots=True)
class OwnLoop:
    """A user's loop: ``function`` is called with those of ``steps``, ``model`` and ``samples`` that it names."""

    function: Callable[..., Any]

    def run(self, job: Job, steps: int, device: torch.device) -> Witness:
        """Run the loop and observe it. It seeds the global generators, and needs a process of its own.

        Raises:
            ValueError: if the loop returns a wrong type.
        """
        samples.seed_everything(samples.stream_seed(job.seed, 0))
        asked = inspect.signature(self.function).parameters
        # Built only where it is asked for: a loop that builds its own draws the same values from the same seeds.
        model: nn.Module | None = initial_model(job).train().to(device) if "model" in asked else None
        order = samples.numbers(job.data(), job, steps) if "samples" in asked else []
        offered = {"steps": steps, "model": model, "samples": order}
        if unknown := [name for name in asked if name not in offered]:
            raise ValueError(f"the loop asks for {', '.join(unknown)}; it may ask for {', '.join(offered)}")
        watch = _Steps()
        hooks = [register_optimizer_step_pre_hook(watch.before), register_optimizer_step_post_hook(watch.after)]
        try:
            losses, trained = _ended(self.function(**{name: offered[name] for name in asked}))
        finally:
            for hook in hooks:
                hook.remove()
        trained = model if trained is None else trained
        if len(losses) < steps or trained is None:
            gave = f"{len(losses)} losses for {steps} steps{'' if trained else ', and no model'}"
            raise ValueError(f"the loop gave {gave}; {_FORM}")
        return watch.witness(losses[:steps], trained)


def _ended(result: Any) -> tuple[list[float], nn.Module | None]:
    losses: list[float] = []
    if isinstance(result, Generator):
        running: Generator[Any, None, Any] = result
        while True:
            try:
                losses.append(_number(next(running)))
            except StopIteration as end:
                result = end.value
                break
    if isinstance(result, Mapping) and result.keys() <= {"losses", "model"}:
        losses += [_number(one) for one in result.get("losses", ())]
        result = result.get("model")
    if result is not None and not isinstance(result, nn.Module):
        raise ValueError(f"the loop gave a {type(result).__name__}; {_FORM}")
    return losses, result


def _number(loss: Any) -> float:
    if isinstance(loss, Tensor) and loss.numel() == 1:
        return float(loss.detach())
    if isinstance(loss, int | float):
        return float(loss)
    raise ValueError(f"the loop gave a loss that is a {type(loss).__name__}; {_FORM}")


class _Steps:
    """A follower of every optimizer in the process; parameters are identified once the model is known."""

    def __init__(self) -> None:
        self._start: dict[int, Tensor] = {}
        self._steps = 0
        self._used: dict[int, dict[int, Tensor]] = {}
        self._had: set[int] = set()
        self._rates: list[dict[int, float]] = []
        self._first: dict[int, Tensor] = {}
        self._options: dict[int, dict[str, Any]] = {}
        self._last: dict[int, dict[str, Any]] = {}

    def before(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        groups = [(tensor, group) for group in optimizer.param_groups for tensor in group["params"]]
        if not self._start:
            self._start = {id(tensor): on_host(tensor) for tensor, _ in groups}
            hidden = ("params", "lr", "initial_lr")
            self._options = {
                id(tensor): {key: value for key, value in group.items() if key not in hidden}
                for tensor, group in groups
            }
        self._rates.append({id(tensor): float(group["lr"]) for tensor, group in groups if "lr" in group})
        grads = {id(tensor): tensor.grad for tensor, _ in groups if tensor.grad is not None}
        came = {tensor for tensor, grad in grads.items() if tensor not in self._had and bool(grad.any())}
        self._had |= came
        if self._steps < WHOLE or came:
            wanted = grads if self._steps < WHOLE else came
            self._used[self._steps] = {tensor: on_host(grads[tensor]) for tensor in wanted}
        self._steps += 1

    def after(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        tensors = list(chain.from_iterable(group["params"] for group in optimizer.param_groups))
        if not self._first:
            self._first = {id(tensor): on_host(tensor) for tensor in tensors}
        self._last = {id(tensor): dict(optimizer.state[tensor]) for tensor in tensors if tensor in optimizer.state}

    def witness(self, losses: list[float], model: nn.Module) -> Witness:
        named = dict(model.named_parameters())
        names = {id(tensor): name for name, tensor in named.items()}
        if not self._start:
            raise ValueError("no step of a torch.optim.Optimizer was seen while the loop ran")
        if not any(tensor in names for tensor in self._start):
            raise ValueError(f"the loop's optimizer steps none of the parameters of the model; {_FORM}")
        end = {name: on_host(tensor) for name, tensor in named.items()}
        one_each = len(self._rates) == len(losses)  # several optimizers, or some steps left out
        state = {
            names[tensor]: {
                key: on_host(value) if isinstance(value, Tensor) else value for key, value in entries.items()
            }
            for tensor, entries in self._last.items()
            if tensor in names
        }
        return Witness(
            losses=losses,
            values={START: end | _by_name(self._start, names), FIRST: end | _by_name(self._first, names), END: end},
            used={step: _by_name(grads, names) for step, grads in self._used.items()} if one_each else {},
            rates=[_by_name(rates, names) for rates in self._rates] if one_each else [],
            buffers={END: {name: on_host(tensor) for name, tensor in model.named_buffers()}},
            state={END: state} if one_each else {},
            options=_by_name(self._options, names),
        )


def _by_name(found: Mapping[int, Any], names: Mapping[int, str]) -> dict[str, Any]:
    return {names[tensor]: value for tensor, value in found.items() if tensor in names}
