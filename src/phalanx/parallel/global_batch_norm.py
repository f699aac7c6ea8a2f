"""BatchNorm over the global batch: mean and variance of all samples of an optimizer step, on any ranks.

Each replica takes the mean and variance of its own samples; these are gathered and joined by their element counts (Chan
et al. 1979), so that uneven shares have the right weight. In backward two sums a channel, of the gradient and of the
gradient times the normalised input, are added up over replicas: the derivative through the statistics, like torch's
SyncBatchNorm, here on any device. A replica without samples of a short last batch takes part with weight 0.

A layer stays the user's module with its own forward: its call of ``torch.nn.functional.batch_norm`` is replaced while
replicas are joined.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, final
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.function import once_differentiable
from torch.nn import functional
from torch.nn.modules.batchnorm import SyncBatchNorm, _BatchNorm, _NormBase
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.overrides import TorchFunctionMode

from phalanx.comm import Mesh
from phalanx.comm.process_group import all_gather_flat
from phalanx.config import Job, Plan
from phalanx.config.fields import DATA_AXES
from phalanx.device_kinds import kind_named, kind_of
from phalanx.errors import Problem
from phalanx.parallel.buffer_sync import statistics_of
from phalanx.placement.batch_split import largest_share
from phalanx.units import show_names

_PATIENCE = 600.0  # seconds that a thread waits for the others

_OWN = 'px.Job(..., batch_statistics="micro")'


def batch_norms(module: nn.Module) -> dict[str, Any]:
    """Map name to layer for layers that normalise by batch statistics, of torch or of another library."""
    return {
        name: layer
        for name, layer in module.named_modules()
        if (isinstance(layer, _NormBase) and not isinstance(layer, _InstanceNorm))
        or (not isinstance(layer, _NormBase) and statistics_of(layer))
    }


def problems(job: Job, plan: Plan, module: nn.Module) -> list[Problem]:
    """Return the problems of the layers of ``module``, which needs no values, with global statistics."""
    layers = batch_norms(module) if job.batch_statistics == "global" else {}
    if not layers:
        return []
    given = f'batch_statistics="global" ({show_names(list(layers))})'

    def problem(where: str, what: str, allowed: str, fix: Plan | str) -> Problem:
        return Problem(where=f"plan.{where}", given=f"{given} with {what}", allowed=allowed, fix=str(fix))

    found: list[Problem] = []
    if plan.server:
        allowed = "plans whose ranks compute a step together: workers of a server each take pieces at their own time"
        found.append(problem("server", f"server={plan.server}", allowed, Plan(dp=plan.dp)))
    if plan.sync != "each":
        allowed = "sync=each: replicas that step by themselves have no global batch in common"
        found.append(problem("sync", f"sync={plan.sync}", allowed, Plan(dp=plan.dp, fsdp=plan.fsdp, zero=plan.zero)))
    tokens = "plans whose ranks see whole samples: here a layer may see a part of each sample's tokens only"
    if plan.cp > 1:
        found.append(problem("cp", f"cp={plan.cp}", tokens, Plan(dp=plan.dp * plan.cp)))
    if plan.sequence:
        found.append(problem("sequence", "sequence=true", tokens, replace(plan, sequence=False)))
    most = largest_share(plan, job.batch)
    if plan.micro is not None and plan.micro < most:
        allowed = (
            f"a rank's share of the global batch ({most}) in one forward: what a layer normalises by depends on all "
            f"samples. recompute=full saves memory instead; {_OWN} takes the statistics of each micro-batch"
        )
        found.append(problem("micro", f"micro={plan.micro}", allowed, replace(plan, micro=None)))
    untracked = [name for name, layer in layers.items() if not statistics_of(layer)]
    if plan.threads > 1 and untracked and job.evaluate is not None:
        what = f"threads, for layers without running statistics ({show_names(untracked)}) in a job that evaluates"
        allowed = "processes, which evaluate a batch together; threads evaluate share by share"
        found.append(problem("threads", what, allowed, replace(plan, threads=1, dp=plan.threads)))
    return found


def sync_problems(job: Job, plan: Plan, module: nn.Module, kind: str) -> list[Problem]:
    """Return a problem for layers of SyncBatchNorm in processes on cores, which cannot run them."""
    if job.batch_statistics == "global" or not kind_named(kind).on_host or plan.processes == 1:
        return []
    names = [name for name, layer in module.named_modules() if type(layer) is SyncBatchNorm]
    if not names:
        return []
    given = f"SyncBatchNorm ({show_names(names)}) under {plan} on CPUs, where torch's own does not run"
    allowed = "statistics of the global batch by the job, which run on every device"
    return [Problem(where="job.model", given=given, allowed=allowed, fix='px.Job(..., batch_statistics="global")')]


class _Joining(ABC):
    """Statistics of a layer joined over replicas.

    Attributes:
        counts: True if the samples that the replica computes belong to the global batch, and are not fillers.
    """

    counts: bool = True

    @abstractmethod
    def rows(self, row: Tensor) -> Tensor:
        """Return every replica's ``row``, in order: (replicas, length)."""

    @abstractmethod
    def total(self, row: Tensor) -> Tensor:
        """Return the sum of every replica's ``row``; may be the same tensor."""


@final
class _OverRanks(_Joining):
    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def rows(self, row: Tensor) -> Tensor:
        found = row.new_empty(dist.get_world_size(self._group) * len(row))
        all_gather_flat(found, row, self._group)
        return found.view(-1, len(row))

    def total(self, row: Tensor) -> Tensor:
        dist.all_reduce(row, group=self._group)
        return row


@final
class _OverThreads(_Joining):
    def __init__(self, at: int, slots: list[Tensor | None], barrier: threading.Barrier) -> None:
        self._at, self._slots, self._barrier = at, slots, barrier

    def rows(self, row: Tensor) -> Tensor:
        self._slots[self._at] = row
        self._barrier.wait()
        found = torch.stack([slot.to(row.device) for slot in self._slots if slot is not None])
        self._barrier.wait()  # before a slot is used again
        return found

    def total(self, row: Tensor) -> Tensor:
        return self.rows(row).sum(0)


_EXCHANGES: WeakKeyDictionary[nn.Module, _Joining] = WeakKeyDictionary()
"""Of each layer whose replicas are joined. Not its attribute: a copy of the model is a plain model again."""


@final
class BatchStatistics:
    """The joined layers of one process: of its one replica, or of a replica in each thread."""

    def __init__(self, exchanges: Sequence[_Joining], barrier: threading.Barrier | None = None) -> None:
        self._exchanges, self._barrier = exchanges, barrier

    @classmethod
    def over_ranks(cls, module: nn.Module, group: dist.ProcessGroup) -> BatchStatistics:
        """Join the layers of ``module`` with those of the other ranks of ``group``."""
        exchange = _OverRanks(group)
        _EXCHANGES.update(dict.fromkeys(batch_norms(module).values(), exchange))
        return cls([exchange])

    @classmethod
    def over_threads(cls, replicas: Sequence[nn.Module]) -> BatchStatistics:
        """Join the layers of ``replicas``, each run by a thread."""
        barrier = threading.Barrier(len(replicas), timeout=_PATIENCE)
        slots: list[Tensor | None] = [None] * len(replicas)
        exchanges = [_OverThreads(at, slots, barrier) for at in range(len(replicas))]
        for replica, exchange in zip(replicas, exchanges, strict=True):
            _EXCHANGES.update(dict.fromkeys(batch_norms(replica).values(), exchange))
        return cls(exchanges, barrier)

    def begins(self, part: int, samples: int) -> None:
        """Begin a micro-batch of ``samples`` on this part; 0 for a filler."""
        self._exchanges[part].counts = samples > 0

    @contextmanager
    def together(self) -> Generator[None]:
        """Keep other threads from waiting for one that fails in the block."""
        try:
            yield
        except BaseException:
            if self._barrier is not None:
                self._barrier.abort()
            raise


def open_layers(module: nn.Module, *, compiles: bool = False) -> bool:
    """Make the layers of ``module`` ask for joined statistics later; return True if it has such layers.

    Call it before anything else takes their ``forward``. ``compiles``: leave them out of ``torch.compile``.
    """
    layers = batch_norms(module)
    for layer in layers.values():
        if type(layer) is SyncBatchNorm:
            # by its own forward ranks would meet that are no replicas, such as those of tp, and on CUDA only
            layer.__class__ = _AnyBatchNorm  # pyrefly: ignore
        forward: Callable[..., Any] = partial(_forward, layer, layer.forward)
        setattr(layer, "forward", torch.compiler.disable(forward) if compiles else forward)  # noqa: B010
    return bool(layers)


class _AnyBatchNorm(_BatchNorm):
    """BatchNorm that accepts any input shape, as SyncBatchNorm is in one process."""

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected at least 2D input (got {input.dim()}D input)")


def join(replicas: Sequence[nn.Module], plan: Plan, mesh: Mesh | None) -> BatchStatistics | None:
    """Join the layers of this process's ``replicas`` with all others of ``plan``; ``None`` for a single replica.

    Collective: every rank of the run calls it, for any layers.
    """
    if plan.threads > 1:
        return BatchStatistics.over_threads(replicas)
    if mesh is None or (group := mesh.group(*DATA_AXES)) is None:
        return None
    return BatchStatistics.over_ranks(replicas[0], group)


def joined_moments(layer: nn.Module, input: Tensor, axis: int) -> tuple[Tensor, Tensor] | None:
    """Return mean and biased variance (C,) of the global batch, for a layer that normalises by itself.

    ``None`` if its replicas are not joined: then the layer's own are right. Channels of ``input`` are along ``axis``.
    """
    exchange = _EXCHANGES.get(layer)
    if exchange is None or isinstance(input, FakeTensor) or input.is_meta:
        return None
    return _Moments.apply(_whole(input).movedim(axis, 1), exchange)  # pyrefly: ignore


class _Moments(torch.autograd.Function):
    """Mean and variance over all replicas' inputs, differentiable across replicas."""

    @staticmethod
    def forward(ctx: Any, *given: Any) -> tuple[Tensor, Tensor]:
        input, exchange = given
        mean, var, count = (one.to(torch.promote_types(input.dtype, torch.float32)) for one in _statistics(*given))
        ctx.save_for_backward(input, mean)
        ctx.count, ctx.exchange = count, exchange
        return mean.to(input.dtype), var.to(input.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        input, mean = ctx.saved_tensors
        both = ctx.exchange.total(torch.cat(grads).to(mean.dtype)) / ctx.count
        shape = [1, -1, *[1] * (input.dim() - 2)]
        first, second = both.view(2, *shape)
        return (first + 2 * second * (input - mean.view(shape))).to(input.dtype), None


def _forward(layer: _NormBase, plain: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if (exchange := _EXCHANGES.get(layer)) is None:
        return plain(*args, **kwargs)
    with _Joined(exchange):
        return plain(*args, **kwargs)


@final
class _Joined(TorchFunctionMode):
    """A replacement for ``torch.nn.functional.batch_norm`` inside a layer's forward."""

    def __init__(self, exchange: _Joining) -> None:
        super().__init__()
        self._exchange = exchange

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return (self._batch_norm if func is functional.batch_norm else func)(*args, **(kwargs or {}))

    def _batch_norm(
        self,
        input: Tensor,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        training: bool = False,
        momentum: float = 0.1,
        eps: float = 1e-5,
    ) -> Tensor:
        if not training or isinstance(input, FakeTensor) or input.is_meta:
            given = (input, running_mean, running_var, weight, bias, training, momentum, eps)
            return functional.batch_norm(*given)
        input, weight, bias = _whole(input), _whole(weight), _whole(bias)
        with torch.no_grad():
            mean, var, count = _statistics(input.detach(), self._exchange)
            # Where this replica has two values or more there is nothing to ask, which on a GPU would wait for it.
            if (not self._exchange.counts or input.numel() <= input.shape[1]) and count <= 1:
                raise ValueError(f"BatchNorm over a global batch of one value a channel, input {tuple(input.shape)}")
            if running_mean is not None:
                running_mean.lerp_(mean.to(running_mean.dtype), momentum)
            if running_var is not None:
                running_var.lerp_((var * (count / (count - 1))).to(running_var.dtype), momentum)
        kind = torch.promote_types(input.dtype, torch.float32)
        stats = (mean.to(kind), var.to(kind), count.to(kind))
        return _Normalised.apply(input, weight, bias, *stats, eps, self._exchange)  # pyrefly: ignore


def _whole(tensor: Any) -> Any:
    return tensor.whole() if hasattr(tensor, "whole") else tensor


def _statistics(input: Tensor, exchange: _Joining) -> tuple[Tensor, Tensor, Tensor]:
    """Return the global batch's mean and biased variance (C,) in fp64, and the number of values a channel."""
    channels = input.shape[1]
    row = torch.zeros(2 * channels + 1, dtype=kind_of(input.device).widest(), device=input.device)
    if exchange.counts and input.numel():
        values = input.to(torch.promote_types(input.dtype, torch.float32))
        var, mean = torch.var_mean(values, _but_channels(input), correction=0)
        row[:channels], row[channels:-1], row[-1] = mean, var, input.numel() / channels
    rows = exchange.rows(row)
    means, variances, counts = rows[:, :channels], rows[:, channels:-1], rows[:, -1:]
    count = counts.sum().clamp(min=1)
    mean = (means * counts).sum(0) / count
    var = ((variances + (means - mean).square()) * counts).sum(0) / count
    return mean, var, count


def _but_channels(tensor: Tensor) -> list[int]:
    return [dim for dim in range(tensor.dim()) if dim != 1]


class _Normalised(torch.autograd.Function):
    """Output ``(input - mean) / sqrt(var + eps) * weight + bias``; the statistics depend on all replicas' inputs."""

    @staticmethod
    def forward(ctx: Any, *given: Any) -> Tensor:
        input, weight, bias, mean, var, count, eps, exchange = given
        ctx.save_for_backward(input, weight, mean, (var + eps).rsqrt())
        ctx.count, ctx.exchange, ctx.counts = count, exchange, exchange.counts
        weight, bias = (None if one is None else one.to(mean.dtype) for one in (weight, bias))
        return functional.batch_norm(input, mean, var, weight, bias, False, 0.0, eps)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        input, weight, mean, scale = ctx.saved_tensors
        grad, over = grads[0].to(mean.dtype), _but_channels(input)
        shape = [1, -1, *[1] * (input.dim() - 2)]
        normalised = (input.to(mean.dtype) - mean.view(shape)) * scale.view(shape)
        of_bias, of_weight = grad.sum(over), (grad * normalised).sum(over)
        found: Tensor | None = None
        if ctx.needs_input_grad[0]:
            both = torch.cat((of_bias, of_weight))
            both = ctx.exchange.total(both if ctx.counts else torch.zeros_like(both)) / ctx.count
            first, second = both.view(2, *shape)
            if ctx.counts:
                grad = grad - first - normalised * second
            times = scale if weight is None else scale * weight.to(mean.dtype)
            found = (grad * times.view(shape)).to(input.dtype)
        learns = [ctx.needs_input_grad[1], ctx.needs_input_grad[2]]
        kind = input.dtype if weight is None else weight.dtype
        rest = [one.to(kind) if yes else None for one, yes in zip((of_weight, of_bias), learns, strict=True)]
        return found, *rest, *[None] * 5
