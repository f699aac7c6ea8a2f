"""LARS and LAMB: optimizers for large batches, right on whole, on sharded and on split parameters.

Both scale each parameter tensor's step by a *trust ratio*: the norm of the weights over the norm of their update. The
norms are of the whole tensor. If a parameter is a ``DTensor`` and each rank holds some rows, or a slice of tensor
parallelism (``elementwise.py``), a norm over the local elements alone would give every rank another ratio and the ranks
would drift apart silently. So the squared local norms of all parameters are summed over the ranks, in one all-reduce a
step; everything else is local arithmetic.

State is kept like the parameters (a ``DTensor`` for a ``DTensor``), so that a checkpoint can reshard it.
"""

# pyright: reportPrivateImportUsage=false
# torch's foreach functions have no public names; they turn hundreds of small kernels into a few.

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from phalanx.comm import local
from phalanx.errors import GradientError, Problem, SpecError
from phalanx.train.elementwise import SLICE_GROUPS

Tensors = tuple[Tensor, ...] | list[Tensor]


class _TrustRatioOptimizer(Optimizer):
    """The common base of LARS and LAMB."""

    adds_up_over_slices = True

    def __init__(self, params: Iterable[Any], **defaults: Any) -> None:
        super().__init__(params, defaults)
        _check_groups(type(self).__name__, self.param_groups)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # pyrefly: ignore
        """Step all parameters with a gradient, and return the result of ``closure``."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._update(_alike(type(self).__name__, self.param_groups))
        return loss

    def _update(self, alike: list[_AlikeParameters]) -> None:
        raise NotImplementedError


@final
class LARS(_TrustRatioOptimizer):
    """SGD with momentum whose step is scaled tensor by tensor (You, Gitman, Ginsburg 2017, Algorithm 1).

    With weight w, gradient g, velocity u and ``lr`` as the schedule has it::

        ratio = trust_coefficient * |w| / (|g| + weight_decay * |w|)       1 where |w| or |g| is 0
        u     = momentum * u + ratio * (g + weight_decay * w)
        w     = w - lr * u

    The learning rate stands outside the velocity, as in Goyal et al. 2017, equation 9, and in ``torch.optim.SGD``:
    a schedule then needs no momentum correction. ``lr_in_velocity=True`` puts it inside, as the LARS paper does;
    at a constant learning rate the two are the same.

    Args:
        params: parameters or parameter groups.
        lr: learning rate.
        momentum: from 0 to below 1.
        weight_decay: the L2 coefficient, inside the trust ratio.
        trust_coefficient: the paper's eta.
        nesterov: look ahead by one velocity step.
        lr_in_velocity: the paper's form instead of Goyal's.
        exclude_1d: tensors of one dimension or none (biases, norm weights) get neither trust ratio nor weight decay.

    Raises:
        SpecError: with every argument that is out of range.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        *,
        trust_coefficient: float = 0.001,
        nesterov: bool = False,
        lr_in_velocity: bool = False,
        exclude_1d: bool = True,
    ) -> None:
        kind = {"nesterov": nesterov, "lr_in_velocity": lr_in_velocity, "exclude_1d": exclude_1d}
        rates = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "trust_coefficient": trust_coefficient}
        super().__init__(params, **rates, **kind)

    def _update(self, alike: list[_AlikeParameters]) -> None:
        adapted = [part for part in alike if part.adapted]
        norms = _norms(adapted, [part.gradients for part in adapted])
        for part in alike:
            group = part.group
            direction: Tensors = part.gradients
            if part.decay:
                direction = torch._foreach_add(direction, part.weights, alpha=part.decay)
            if part.adapted:
                ratios = [
                    _ratio(group["trust_coefficient"] * weight, gradient + part.decay * weight, weight * gradient)
                    for weight, gradient in (next(norms) for _ in part.parameters)
                ]
                direction = torch._foreach_mul(direction, ratios)
            self._move(part, direction)

    def _move(self, part: _AlikeParameters, direction: Tensors) -> None:
        group = part.group
        if group["lr_in_velocity"]:
            direction = torch._foreach_mul(direction, group["lr"])
        if group["momentum"]:
            velocity = state_of(self, part.parameters, "momentum_buffer")
            torch._foreach_mul_(velocity, group["momentum"])
            torch._foreach_add_(velocity, direction)
            nesterov = group["nesterov"]
            direction = torch._foreach_add(direction, velocity, alpha=group["momentum"]) if nesterov else velocity
        torch._foreach_add_(part.weights, direction, alpha=-1.0 if group["lr_in_velocity"] else -group["lr"])


@final
class LAMB(_TrustRatioOptimizer):
    """Adam whose step is scaled tensor by tensor (You et al. 2020, Algorithm 2).

    With weight w, gradient g, moments m and v, and t counted from 1::

        m = beta1 * m + (1 - beta1) * g               v = beta2 * v + (1 - beta2) * g^2
        r = (m / (1 - beta1^t)) / (sqrt(v / (1 - beta2^t)) + eps) + weight_decay * w
        ratio = |w| / |r|                                                  1 where |w| or |r| is 0
        w = w - lr * ratio * r

    Args:
        params: parameters or parameter groups.
        lr: learning rate.
        betas: decay rates of the two moments, each from 0 to below 1.
        eps: keeps the division finite; 0 or more.
        weight_decay: decoupled from the moments, inside the trust ratio.
        bias_correction: divide the moments by 1 - beta^t.
        trust_clip: least and greatest trust ratio; ``None`` leaves it as it is.
        exclude_1d: tensors of one dimension or none (biases, norm weights) get neither trust ratio nor weight decay.

    Raises:
        SpecError: with every argument that is out of range.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        *,
        bias_correction: bool = True,
        trust_clip: tuple[float, float] | None = None,
        exclude_1d: bool = True,
    ) -> None:
        kind = {"bias_correction": bias_correction, "trust_clip": trust_clip, "exclude_1d": exclude_1d}
        super().__init__(params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, **kind)

    def _update(self, alike: list[_AlikeParameters]) -> None:
        directions = [self._direction(part) for part in alike]
        adapted = [(part, direction) for part, direction in zip(alike, directions, strict=True) if part.adapted]
        norms = _norms([part for part, _ in adapted], [direction for _, direction in adapted])
        for part, direction in zip(alike, directions, strict=True):
            if part.adapted:
                clip = part.group["trust_clip"]
                ratios = [
                    _ratio(weight, update, weight * update) for weight, update in (next(norms) for _ in part.parameters)
                ]
                torch._foreach_mul_(direction, [ratio.clamp(*clip) for ratio in ratios] if clip else ratios)
            torch._foreach_add_(part.weights, direction, alpha=-part.group["lr"])

    def _direction(self, part: _AlikeParameters) -> list[Tensor]:
        """Return Adam's update of these parameters with weight decay, before the trust ratio."""
        group, gradients = part.group, part.gradients
        beta1, beta2 = group["betas"]
        first = state_of(self, part.parameters, "exp_avg")
        second = state_of(self, part.parameters, "exp_avg_sq")
        steps = [self._count(parameter) for parameter in part.parameters]
        torch._foreach_lerp_(first, gradients, 1 - beta1)
        torch._foreach_mul_(second, beta2)
        torch._foreach_addcmul_(second, gradients, gradients, 1 - beta2)
        root = torch._foreach_sqrt(second)
        if group["bias_correction"]:
            torch._foreach_div_(root, [math.sqrt(1 - beta2**step) for step in steps])
            direction = torch._foreach_div(first, [1 - beta1**step for step in steps])
        else:
            direction = [moment.clone() for moment in first]
        torch._foreach_add_(root, group["eps"])
        torch._foreach_div_(direction, root)
        if part.decay:
            torch._foreach_add_(direction, part.weights, alpha=part.decay)
        return list(direction)

    def _count(self, parameter: Tensor) -> float:
        state = self.state[parameter]
        if "step" not in state:
            state["step"] = torch.zeros((), dtype=torch.float32)
        state["step"] += 1
        return state["step"].item()


@dataclass(frozen=True, slots=True)
class _AlikeParameters:
    """Parameters of one group that are stepped alike, with or without trust ratio. Tensors are local."""

    group: dict[str, Any]
    adapted: bool
    parameters: list[Tensor]
    weights: list[Tensor]
    gradients: list[Tensor]

    @property
    def decay(self) -> float:
        return self.group["weight_decay"] if self.adapted else 0.0


def _alike(name: str, groups: list[dict[str, Any]]) -> list[_AlikeParameters]:
    found: list[_AlikeParameters] = []
    for group in groups:
        with_gradient = [parameter for parameter in group["params"] if parameter.grad is not None]
        for adapted in (True, False):
            if chosen := [p for p in with_gradient if (p.ndim > 1 or not group["exclude_1d"]) is adapted]:
                gradients = [local_gradient(name, parameter) for parameter in chosen]
                found.append(_AlikeParameters(group, adapted, chosen, [*map(local, chosen)], gradients))
    return found


def local_gradient(name: str, parameter: Tensor) -> Tensor:
    """Return this rank's part of a parameter's gradient, cut like the parameter; for the optimizer ``name``."""
    gradient = parameter.grad
    assert gradient is not None
    if gradient.is_sparse:
        raise GradientError(f"{name} takes no sparse gradients\n    try: nn.Embedding(..., sparse=False)")
    if not isinstance(gradient, DTensor):
        return gradient
    if isinstance(parameter, DTensor) and gradient.placements != parameter.placements:
        gradient = gradient.redistribute(parameter.device_mesh, parameter.placements)
    return gradient.to_local()


def state_of(optimizer: Optimizer, parameters: list[Tensor], key: str) -> list[Tensor]:
    """Return the local part of each parameter's state with this name, first zeros."""
    for parameter in parameters:
        if key not in optimizer.state[parameter]:
            optimizer.state[parameter][key] = torch.zeros_like(parameter)
    return [local(optimizer.state[parameter][key]) for parameter in parameters]


def _ratio(above: Tensor, below: Tensor, both: Tensor) -> Tensor:
    """Return ``above / below``, or 1 if ``both``, the product of the two norms, is 0. Does not wait for the device."""
    return torch.where(both > 0, above / below, 1.0)


def _norms(parts: list[_AlikeParameters], updates: list[list[Tensor]]) -> Iterator[tuple[Tensor, ...]]:
    """Return L2 norms in fp32 of whole weights and of whole updates, a pair for each parameter of ``parts``.

    Parameters sharded over the same ranks share one all-reduce.
    """
    parameters = [parameter for part in parts for parameter in part.parameters]
    columns = [weight for part in parts for weight in part.weights], list(chain.from_iterable(updates))
    rows: list[tuple[Tensor, ...]] = [()] * len(parameters)
    together: dict[tuple[torch.device, tuple[dist.ProcessGroup, ...]], list[int]] = {}
    for index, parameter in enumerate(parameters):
        together.setdefault((columns[0][index].device, _sharding_groups(parameter)), []).append(index)
    for (device, groups), indices in together.items():
        local = [column[index] for column in columns for index in indices]
        # On CPUs torch adds fp32 squares one after another: at ten million elements the norm is 3e-4 off, and by
        # another amount for every way to cut the tensor.
        dtype = torch.float64 if device.type == "cpu" else torch.float32
        table = torch.stack(torch._foreach_norm(local, 2, dtype=dtype)).square_()
        for group in groups:
            dist.all_reduce(table, group=group)
        norms = table.sqrt_().float().view(len(columns), -1)
        for row, index in zip(norms.unbind(1), indices, strict=True):
            rows[index] = row.unbind()
    return iter(rows)


def _sharding_groups(parameter: Tensor) -> tuple[dist.ProcessGroup, ...]:
    slices: tuple[dist.ProcessGroup, ...] = SLICE_GROUPS.get(parameter) or ()
    if not isinstance(parameter, DTensor):
        return slices
    if any(placement.is_partial() for placement in parameter.placements):
        raise GradientError(f"a parameter is placed as {parameter.placements}; allowed: sharded or replicated")
    mesh = parameter.device_mesh
    sharded = (dim for dim, placement in enumerate(parameter.placements) if placement.is_shard() and mesh.size(dim) > 1)
    return (*slices, *(mesh.get_group(dim) for dim in sharded))


_RANGES: dict[str, tuple[Callable[[Any], bool], str, str]] = {
    "lr": (lambda value: _within(value, 0.0, math.inf), "a number, 0 or more", "lr=0.1"),
    "momentum": (lambda value: _within(value, 0.0, 1.0), "from 0 to below 1", "momentum=0.9"),
    "weight_decay": (lambda value: _within(value, 0.0, math.inf), "a number, 0 or more", "weight_decay=1e-4"),
    "trust_coefficient": (
        lambda value: _within(value, 0.0, math.inf) and value > 0,
        "a number above 0",
        "trust_coefficient=0.001",
    ),
    "eps": (lambda value: _within(value, 0.0, math.inf), "a number, 0 or more", "eps=1e-6"),
    "betas": (
        lambda value: _is_pair(value) and all(_within(beta, 0.0, 1.0) for beta in value),
        "two numbers, each from 0 to below 1",
        "betas=(0.9, 0.999)",
    ),
    "trust_clip": (
        lambda value: value is None or (_is_pair(value) and 0 <= value[0] < value[1]),
        "a least and a greatest ratio, or None",
        "trust_clip=(0.0, 10.0)",
    ),
}


def _within(value: Any, least: float, below: float) -> bool:
    return isinstance(value, int | float) and least <= value < below


def _is_pair(value: Any) -> bool:
    return isinstance(value, tuple | list) and len(value) == 2


def _check_groups(name: str, groups: list[dict[str, Any]]) -> None:
    problems = [
        Problem(where=f"{name}.{key}", given=repr(group[key]), allowed=allowed, fix=fix)
        for group in groups
        for key, (right, allowed, fix) in _RANGES.items()
        if key in group and not right(group[key])
    ]
    for group in groups:
        if group.get("nesterov") and group["momentum"] == 0:
            given, fix = "nesterov without momentum", "momentum=0.9, nesterov=True"
            problems.append(Problem(where=f"{name}.nesterov", given=given, allowed="momentum above 0", fix=fix))
    if problems:
        raise SpecError(problems)
