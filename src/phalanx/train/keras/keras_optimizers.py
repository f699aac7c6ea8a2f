"""Keras' optimizers by Keras' formulas, as torch's optimizers that plans can shard, split and save.

They are not torch's of the same names: Keras adds epsilon before the bias correction of Adam, RMSprop's is within the
root, momentum of SGD has the learning rate in it, and decay of weights comes before the step in all. State is kept like
the parameters (a ``DTensor`` for a ``DTensor``), so that a checkpoint can reshard it. Formulas are those of Keras 3,
``keras/src/optimizers``.
"""

# pyright: reportPrivateImportUsage=false
# torch's foreach functions have no public names; they turn hundreds of small kernels into a few.

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, final

import torch
from torch import Tensor
from torch.optim import Optimizer

from phalanx.comm import local
from phalanx.config import Clip, Schedule
from phalanx.errors import Problem, SpecError
from phalanx.train.keras.keras_own import is_keras_code
from phalanx.train.optimizers import local_gradient, state_of


class KerasFormula(Optimizer):
    """A Keras optimizer over parameters of torch.

    Args:
        params: parameters or parameter groups.
        lr: learning rate; the schedule of the job multiplies it.
        weight_decay: share of each weight removed by a step, times the learning rate; 0: none.
        options: of the formula, by Keras' names.
    """

    slots: ClassVar[Mapping[str, str]] = {"momentum": "_momentums"}
    """The name of a state here → Keras' attribute that has it of all variables."""

    read: ClassVar[tuple[str, ...]] = ()
    """The options that the formula reads, by Keras' names."""

    def __init__(self, params: Iterable[Any], lr: float = 1.0, *, weight_decay: float = 0.0, **options: Any) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, **options})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # pyrefly: ignore
        """Step all parameters with a gradient, and return the result of ``closure``."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            given = [one for one in group["params"] if one.grad is not None]
            if not given:
                continue
            lr = float(group["lr"])
            weights, grads = [*map(local, given)], [local_gradient("Keras", one) for one in given]
            if group["weight_decay"]:
                torch._foreach_mul_(weights, 1 - group["weight_decay"] * lr)
            self._update(given, weights, grads, group)
        return loss

    def _update(self, given: list[Tensor], weights: list[Tensor], grads: list[Tensor], group: dict[str, Any]) -> None:
        raise NotImplementedError

    def give_state(self, parameters: Iterable[Tensor], optimizer: Any) -> None:
        """Put the state of ``parameters`` into Keras' ``optimizer``, built over their variables in this order."""
        for at, parameter in enumerate(parameters):
            for name, attribute in self.slots.items():
                if name in self.state[parameter]:
                    getattr(optimizer, attribute)[at].assign(self.state[parameter][name])

    def _count(self, given: list[Tensor]) -> int:
        """Return the number of the current step, beginning with 1."""
        for one in given:
            if "step" not in self.state[one]:
                self.state[one]["step"] = torch.zeros((), dtype=torch.float32)
            self.state[one]["step"] += 1
        return int(self.state[given[0]]["step"])


@final
class KerasSGD(KerasFormula):
    """``v = momentum * v - lr * g``; ``w = w + v``, or with Nesterov's look ahead ``w + momentum * v - lr * g``."""

    slots: ClassVar[Mapping[str, str]] = {"momentum": "momentums"}
    read: ClassVar[tuple[str, ...]] = ("momentum", "nesterov")

    def _update(self, given: list[Tensor], weights: list[Tensor], grads: list[Tensor], group: dict[str, Any]) -> None:
        lr, momentum = float(group["lr"]), group["momentum"]
        if not momentum:
            torch._foreach_add_(weights, grads, alpha=-lr)
            return
        velocity = state_of(self, given, "momentum")
        torch._foreach_mul_(velocity, momentum)
        torch._foreach_add_(velocity, grads, alpha=-lr)
        if group["nesterov"]:
            torch._foreach_add_(weights, grads, alpha=-lr)
            torch._foreach_add_(weights, velocity, alpha=momentum)
        else:
            torch._foreach_add_(weights, velocity)


class KerasAdam(KerasFormula):
    """Adam: ``w = w - lr * sqrt(1 - beta2^t) / (1 - beta1^t) * m / (sqrt(v) + epsilon)``.

    With ``amsgrad`` the largest ``v`` so far, without its bias correction, replaces ``v``.
    """

    slots: ClassVar[Mapping[str, str]] = {
        "momentum": "_momentums",
        "velocity": "_velocities",
        "velocity_hat": "_velocity_hats",
    }
    read: ClassVar[tuple[str, ...]] = ("beta_1", "beta_2", "epsilon", "amsgrad")

    def _update(self, given: list[Tensor], weights: list[Tensor], grads: list[Tensor], group: dict[str, Any]) -> None:
        first, second = group["beta_1"], group["beta_2"]
        alpha = _bias_correction(first, second, self._count(given)) * float(group["lr"])
        mean, square = state_of(self, given, "momentum"), state_of(self, given, "velocity")
        torch._foreach_mul_(mean, first)
        torch._foreach_add_(mean, grads, alpha=1 - first)
        torch._foreach_mul_(square, second)
        torch._foreach_add_(square, torch._foreach_mul(grads, grads), alpha=1 - second)
        if group["amsgrad"]:
            most = state_of(self, given, "velocity_hat")
            torch._foreach_maximum_(most, square)
            square = most
        root = torch._foreach_sqrt(square)
        torch._foreach_add_(root, group["epsilon"])
        torch._foreach_add_(weights, torch._foreach_div(torch._foreach_mul(mean, float(alpha)), root), alpha=-1)


def _bias_correction(first: float, second: float, step: int) -> Tensor:
    """Return ``sqrt(1 - beta2^t) / (1 - beta1^t)`` in fp32, as Keras computes it: 1e-5 off in the first step."""
    taken = torch.tensor(float(step))
    powers = [torch.pow(torch.tensor(beta), taken) for beta in (first, second)]
    return torch.sqrt(1 - powers[1]) / (1 - powers[0])


@final
class KerasAdamW(KerasAdam):
    """``KerasAdam``; weights decay before the step."""


@final
class KerasRMSprop(KerasFormula):
    """``v = rho * v + (1 - rho) * g^2``; ``w = w - lr * g / sqrt(v + epsilon)``, with momentum over the increments.

    ``centered`` subtracts the square of the mean gradient from ``v``.
    """

    slots: ClassVar[Mapping[str, str]] = {
        "momentum": "_momentums",
        "velocity": "_velocities",
        "average_gradient": "_average_gradients",
    }
    read: ClassVar[tuple[str, ...]] = ("rho", "momentum", "epsilon", "centered")

    def _update(self, given: list[Tensor], weights: list[Tensor], grads: list[Tensor], group: dict[str, Any]) -> None:
        rho = group["rho"]
        square = state_of(self, given, "velocity")
        torch._foreach_mul_(square, rho)
        torch._foreach_add_(square, torch._foreach_mul(grads, grads), alpha=1 - rho)
        root = list(torch._foreach_add(square, group["epsilon"]))
        if group["centered"]:
            mean = state_of(self, given, "average_gradient")
            torch._foreach_mul_(mean, rho)
            torch._foreach_add_(mean, grads, alpha=1 - rho)
            torch._foreach_addcmul_(root, mean, mean, -1.0)
        torch._foreach_sqrt_(root)
        moves = torch._foreach_div(torch._foreach_mul(grads, float(group["lr"])), root)
        if group["momentum"]:
            moved = state_of(self, given, "momentum")
            torch._foreach_mul_(moved, group["momentum"])
            torch._foreach_add_(moved, moves)
            moves = moved
        torch._foreach_add_(weights, moves, alpha=-1.0)


@final
class KerasLion(KerasFormula):
    """``w = w - lr * sign(beta1 * m + (1 - beta1) * g)``, then ``m = beta2 * m + (1 - beta2) * g``."""

    read: ClassVar[tuple[str, ...]] = ("beta_1", "beta_2")

    def _update(self, given: list[Tensor], weights: list[Tensor], grads: list[Tensor], group: dict[str, Any]) -> None:
        mean = state_of(self, given, "momentum")
        direction = list(torch._foreach_mul(mean, group["beta_1"]))
        torch._foreach_add_(direction, grads, alpha=1 - group["beta_1"])
        torch._foreach_sign_(direction)
        torch._foreach_add_(weights, direction, alpha=-float(group["lr"]))
        torch._foreach_mul_(mean, group["beta_2"])
        torch._foreach_add_(mean, grads, alpha=1 - group["beta_2"])


FORMULAS: Mapping[str, type[KerasFormula]] = {
    "SGD": KerasSGD,
    "Adam": KerasAdam,
    "AdamW": KerasAdamW,
    "RMSprop": KerasRMSprop,
    "Lion": KerasLion,
}
"""Keras' name of an optimizer → the formula."""

_INSTEAD = {
    "gradient_accumulation_steps": ("a batch of so many samples in all, and the plan's micro", "batch=256, micro=32"),
    "use_ema": ("px.Average, which keeps the average of the weights", "average=px.Average(decay=0.99)"),
    "loss_scale_factor": ("the plan's precision, which scales the loss where that needs it", "precision=fp16"),
    "clipnorm": ("global_clipnorm, of all gradients together", "global_clipnorm=1.0"),
}


@dataclass(frozen=True, slots=True)
class OptimizerParts:
    """The parts of a Keras optimizer: an optimizer of a job, its schedule and its clipping."""

    kind: str
    options: Mapping[str, Any]
    weight_decay: float
    without_decay: Any  # a compiled pattern of Keras' names of variables that do not decay, or None
    rate: float
    schedule: Schedule
    clip: Clip | None

    def __call__(self, params: Any) -> KerasFormula:
        """Build the optimizer, as ``Job.optimizer``."""
        made = FORMULAS[self.kind]
        if not self.weight_decay or self.without_decay is None:
            return made(list(params), self.rate, weight_decay=self.weight_decay, **self.options)
        named = list(params.named())
        out = [one for name, one in named if self.without_decay.search(name.rpartition(".")[2].rstrip("_"))]
        kept = [one for _, one in named if all(one is not other for other in out)]
        groups = [{"params": kept}, {"params": out, "weight_decay": 0.0}]
        groups = [group for group in groups if group["params"]]
        return made(groups, self.rate, weight_decay=self.weight_decay, **self.options)


def parts_of(optimizer: Any) -> OptimizerParts:
    """Return the parts of Keras' ``optimizer``.

    Raises:
        SpecError: there is no formula for it here, or it has an option that belongs to the plan or the job.
    """
    kind = type(optimizer).__name__
    if kind == "LossScaleOptimizer":
        given, allowed = "LossScaleOptimizer", "the optimizer within; a plan of precision=fp16 scales the loss"
        raise SpecError.of("optimizer", given, allowed, f'optimizer="{type(optimizer.inner_optimizer).__name__}"')
    if kind not in FORMULAS or not is_keras_code(type(optimizer)):
        given = f"{kind}, of which there is no formula here"
        allowed = f"{', '.join(FORMULAS)} of Keras; or any of torch's by the job"
        fix = 'compile with "sgd", then replace(job, optimizer=lambda params: torch.optim.Adamax(params))'
        raise SpecError.of("optimizer", given, allowed, fix)
    problems = [
        Problem(where=f"optimizer.{name}", given=repr(value), allowed=allowed, fix=fix)
        for name, (allowed, fix) in _INSTEAD.items()
        if (value := getattr(optimizer, name, None))
    ]
    if getattr(optimizer, "_exclude_from_weight_decay", None):
        allowed = "names: variables of one model are not those of another that is built alike"
        fix = 'optimizer.exclude_from_weight_decay(var_names=["bias"])'
        problems.append(
            Problem(where="optimizer", given="exclude_from_weight_decay(var_list)", allowed=allowed, fix=fix)
        )
    if taken := int(optimizer.iterations):
        given = f"an optimizer that has taken {taken} steps: a run begins with none of its moments, at the first rate"
        allowed = "one that has taken none; an interrupted run can resume by itself"
        fix = 'model.compile(optimizer="adam", loss="mse") in the function, after the model is loaded'
        problems.append(Problem(where="optimizer", given=given, allowed=allowed, fix=fix))
    if problems:
        raise SpecError(problems)
    rate, schedule = _rates(optimizer._learning_rate)
    pattern = getattr(optimizer, "_exclude_from_weight_decay_pattern", None)
    clip = None
    if optimizer.global_clipnorm:
        clip = Clip(norm=float(optimizer.global_clipnorm))
    elif optimizer.clipvalue:
        clip = Clip(value=float(optimizer.clipvalue))
    return OptimizerParts(
        kind=kind,
        options={name: getattr(optimizer, name) for name in FORMULAS[kind].read},
        weight_decay=float(optimizer.weight_decay or 0.0),
        without_decay=re.compile(pattern) if pattern else None,
        rate=rate,
        schedule=schedule,
        clip=clip,
    )


def _rates(given: Any) -> tuple[float, Schedule]:
    """Return the learning rate and the schedule that multiplies it; a Keras schedule has rate 1."""
    from keras.optimizers.schedules import LearningRateSchedule

    if isinstance(given, LearningRateSchedule):
        return 1.0, Schedule(function=lambda step: float(given(step)))
    if callable(given) and not hasattr(given, "assign"):
        name = getattr(given, "__name__", type(given).__name__)
        allowed = "a number, or a keras.optimizers.schedules.LearningRateSchedule, which is of the step alone"
        raise SpecError.of("optimizer.learning_rate", f"the function {name}", allowed, "CosineDecay(1e-3, 1000)")
    rate: Any = given
    return float(rate), Schedule()
