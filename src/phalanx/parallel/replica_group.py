"""Equal replicas of one slice of a split model: whole, or sharded over ``fsdp`` at a ZeRO stage."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.distributed as dist
from torch import nn

from phalanx.comm import Mesh, local
from phalanx.config import Job
from phalanx.parallel.advice import without_gradient
from phalanx.parallel.buffer_sync import BufferSync
from phalanx.parallel.expert import DispatchedExperts
from phalanx.parallel.grad_reduce import add_up, found_anywhere
from phalanx.parallel.layout import drop_gradients, trainable
from phalanx.placement.collective_bytes import COPIES, EXPERT_COPIES


class Replicas(ABC):
    """The synchronisation of one slice's copies: gradients added up, then stepped, then new values distributed."""

    parameters: Mapping[str, torch.Tensor]  # by name, what the optimizer steps
    averaged = 1  # what gradients have been divided by after ``finish``

    def begin(self) -> None:
        """Begin a step; gradients of other code are dropped."""
        return

    def around(self, last: bool) -> AbstractContextManager[object]:
        """Return a context for the backward of each micro-batch, outside of pipelines."""
        return nullcontext()

    @abstractmethod
    def finish(self) -> None:
        """Add gradients up over the copies."""

    @abstractmethod
    def stepped(self) -> None:
        """Distribute the values stepped by the optimizer."""


class Whole(Replicas):
    """Every rank's whole slice, stepped whole."""

    def __init__(self, module: nn.Module, job: Job, mesh: Mesh, dealt: DispatchedExperts) -> None:
        self.parameters = trainable(module)
        self._may_be_unused = job.unused == "allow"
        self._group = mesh.group("fsdp", *COPIES)
        self._apart = dict.fromkeys(dealt.slices, mesh.group("fsdp", *EXPERT_COPIES))
        self._statistics = BufferSync(module, self._group, alone=self._group is None)

    def finish(self) -> None:
        groups: dict[dist.ProcessGroup | None, dict[str, torch.Tensor]] = {}
        for name, tensor in self.parameters.items():
            groups.setdefault(self._apart.get(name, self._group), {})[name] = tensor
        for group, parameters in groups.items():
            if group is not None:
                self._add_up(parameters, group)

    def _add_up(self, parameters: Mapping[str, torch.Tensor], group: dist.ProcessGroup) -> None:
        missing = [name for name, tensor in parameters.items() if tensor.grad is None]
        if self._may_be_unused:
            _fill(parameters, group)
        elif missing:
            raise without_gradient(missing, "on this rank")
        add_up([tensor.grad for tensor in parameters.values()], group)

    def stepped(self) -> None:
        self._statistics.share()
        drop_gradients(self.parameters.values())


class Rows(Replicas):
    """Slices held whole by ranks of ``fsdp``, each stepping some rows: ZeRO-1 and 2."""

    def __init__(self, module: nn.Module, device: torch.device, job: Job, mesh: Mesh, dealt: DispatchedExperts) -> None:
        from phalanx.parallel.zero import Partition, Scattering

        everyone = mesh.group("fsdp", *COPIES)
        apart = dict.fromkeys(dealt.slices, mesh.group(*EXPERT_COPIES))
        self._partition = Partition(module, mesh.sharding(device, ()), mesh.group(*COPIES), everyone, apart)
        self.parameters = self._partition.shards
        # The stages of a pipeline run backward at different times, and some in two halves, which hooks do not see.
        when = "end" if mesh.plan.pp > 1 else "each" if mesh.plan.zero == 2 else "last"
        self._scattering = Scattering(self._partition, job, when=when)

    def begin(self) -> None:
        self._scattering.begin()

    def around(self, last: bool) -> AbstractContextManager[object]:
        return self._scattering.around(last)

    def finish(self) -> None:
        self._scattering.finish()

    def stepped(self) -> None:
        self._partition.stepped()


class Sharded(Replicas):
    """Slices shared out over ``fsdp`` by torch's ``fully_shard``, with copies along the other dimensions."""

    def __init__(
        self,
        module: nn.Module,
        device: torch.device,
        mesh: Mesh,
        dealt: DispatchedExperts,
        values: Callable[[nn.Module], None],
    ) -> None:
        """Shard the module; ``values(part)`` fills in a part's missing values."""
        from phalanx.parallel.fsdp import Scalars, apply

        plan = mesh.plan
        for name in dealt.modules if plan.ep > 1 else ():
            apply(module.get_submodule(name), device, plan, mesh.sharding(device, EXPERT_COPIES), values)
        apply(module, device, plan, mesh.sharding(device, COPIES), values)
        # Reads parameters as they are, which from now on the model's own code may see as wholes of their slices.
        module._get_fsdp_state()._lazy_init()  # pyrefly: ignore
        copies = mesh.group("fsdp", *COPIES)
        self._scalars = Scalars(module, mesh.sharding(device, ()), copies, plan)
        self.parameters = {**trainable(module), **self._scalars.held}
        self.averaged = mesh.size("fsdp", *COPIES)
        self._experts, self._owners = mesh.group("ep"), mesh.size("ep")
        apart = [name for name in dealt.inside if plan.ep > 1 and name in self.parameters]
        self._apart = [self.parameters[name] for name in apart]
        self._beside = [self.parameters[name] for name in apart if name not in dealt.slices]
        self._statistics = BufferSync(module, copies, alone=copies is None)

    def finish(self) -> None:
        self._scalars.finish()
        # FSDP has added gradients of experts up over the ranks that hold the same ones, and divided by their number.
        if self._beside and self._experts is not None:
            add_up(_locals(self._beside), self._experts)
        for grad in _locals(self._apart):
            grad.div_(self._owners)

    def stepped(self) -> None:
        self._scalars.stepped()
        self._statistics.share()
        drop_gradients(self.parameters.values())


def _fill(parameters: Mapping[str, torch.Tensor], group: dist.ProcessGroup) -> None:
    """Fill in zeros for gradients that another rank has and this one lacks. Collective."""
    present = found_anywhere([tensor.grad is not None for tensor in parameters.values()], parameters, group)
    for tensor, there in zip(parameters.values(), present, strict=True):
        if there and tensor.grad is None:
            tensor.grad = torch.zeros_like(tensor)


def _locals(parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    return [local(tensor.grad) for tensor in parameters if tensor.grad is not None]
