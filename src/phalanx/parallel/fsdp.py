"""Sharded data parallelism (ZeRO; Rajbhandari et al. 2020): ranks share out what data parallelism would hold many
times.

Training with AdamW in fp32 holds 16 bytes a parameter: 4 the value, 4 the gradient, 8 the optimizer's two moments.
Under ``dp`` every rank holds all of it. Over N ranks of ``fsdp``:

====== ============================== ======================= ==========================================
zero   sharded                        bytes a parameter       communication against ``dp``
====== ============================== ======================= ==========================================
1      optimizer state                4 + 4 + 8/N             1 ×; with one micro-batch the same as 2
2      and gradients                  4 + (4 + 8)/N           1 ×, and 0.5 × more for each further micro-batch
3      and parameters                 16/N                    1.5 ×: gathered for forward and for backward
====== ============================== ======================= ==========================================

Stage 3 is torch's ``fully_shard`` (FSDP2): each block's parameters are gathered just before the block runs and dropped
after it, in forward and again in backward; its gradient is summed and scattered as soon as it is complete. Stages 1
and 2 keep whole parameters on every rank; see ``zero.py``.

``dp=R fsdp=N`` is the hybrid: N ranks share one copy (over the fast links of a node), R such groups hold copies.
Use the lowest stage that fits; ``docs/explanation/zero.md`` weighs them.

A parameter that some ranks use in a step and others do not ends a run of stage 3: ``fully_shard`` sums a block's
gradients while backward runs, and a rank that has none does not take part. ``unused="allow"`` is here for parameters
that no rank uses; stages 1 and 2 allow both.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate

from phalanx.comm import data_mesh
from phalanx.config import Plan
from phalanx.device_kinds import kind_of
from phalanx.parallel.buffer_sync import BufferSync
from phalanx.parallel.deferred_init import fill, recipes
from phalanx.parallel.double_backward import refuse_differentiated
from phalanx.parallel.grad_reduce import add_up, found_anywhere
from phalanx.parallel.layout import Layout, MicroBatchWork, RankHoldings, drop_gradients, each_micro_batch, trainable
from phalanx.parallel.mixed_precision import gathered_type
from phalanx.trace.blocks import blocks


class FsdpLayout(Layout):
    """Parameters, gradients and optimizer state sharded over the mesh (ZeRO-3), block by block."""

    def __init__(self, module: nn.Module, device: torch.device, plan: Plan) -> None:
        known = recipes(module)
        mesh = data_mesh(plan, device)
        apply(module, device, plan, mesh, lambda part: fill(module, known, within=part))
        self._module = module
        self._device = device
        self._scalars = Scalars(module, mesh, dist.group.WORLD, plan)
        held = {**trainable(module), **self._scalars.held}
        self.holdings = RankHoldings(module=module, parameters=held, divisor=plan.world_size)
        self._statistics = BufferSync(module)

    def accumulate(self, parts: Sequence[Sequence[Any]], work: MicroBatchWork) -> None:
        # Every micro-batch scatters its gradient at once: kept for the last one, whole gradients would fill the memory.
        each_micro_batch(self._module, self._device, parts[0], work)

    def finish(self) -> None:
        """Finish the scalars; backward has summed all other gradients."""
        self._scalars.finish()

    def stepped(self) -> None:
        self._scalars.stepped()
        self._statistics.share()
        drop_gradients(self.parameters.values())


class Scalars:
    """Parameters without dimensions, which cannot be cut: whole on every rank, as DTensors for the optimizer."""

    def __init__(self, module: nn.Module, mesh: DeviceMesh, group: Any, plan: Plan) -> None:
        """Average their gradients over ``group``."""
        self._group, self._ranks = group, dist.get_world_size(group)
        self._whole = {name: one for name, one in trainable(module).items() if not one.dim()}
        self.held: dict[str, Any] = {}
        for name, one in self._whole.items():
            at = one.detach().cpu() if plan.offload == "parameters" else one.detach()
            self.held[name] = nn.Parameter(DTensor.from_local(at, mesh, [Replicate()] * mesh.ndim, run_check=False))

    def finish(self) -> None:
        """Average gradients over the ranks that have any."""
        there = found_anywhere([one.grad is not None for one in self._whole.values()], self._whole, self._group)
        used = [name for name, anywhere in zip(self._whole, there, strict=True) if anywhere]
        grads: dict[str, Any] = {name: self._whole[name].grad for name in used}
        grads |= {name: torch.zeros_like(self._whole[name]) for name, grad in grads.items() if grad is None}
        add_up(grads.values(), self._group)
        for name, grad in grads.items():
            held = self.held[name]
            mean = (grad / self._ranks).to(held.to_local())
            held.grad = DTensor.from_local(mean, held.device_mesh, held.placements, run_check=False)

    def stepped(self) -> None:
        """Copy new values into the module's parameters."""
        for name, one in self._whole.items():
            one.detach().copy_(self.held[name].detach().to_local())


def apply(
    module: nn.Module, device: torch.device, plan: Plan, mesh: DeviceMesh, values: Callable[[nn.Module], None]
) -> nn.Module:
    """Shard ``module`` over ``mesh`` in place: each repeated block by itself, then the rest.

    ``values(part)`` fills in a part's missing values just before it is moved to ``device`` and sharded, so that a rank
    never holds more than its shards and one part.

    With half precision, parameters are gathered in it and gradients are reduced in fp32.
    """
    # Outputs that are views (logits[:, 0], say) are read by the loss, not written to, and so are safe.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    dtype = gathered_type(plan)
    reduce = torch.float32 if dtype else None
    offload = OffloadPolicy()
    if plan.offload == "parameters":
        offload = CPUOffloadPolicy(pin_memory=kind_of(device).pinned)
    inner = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=reduce, cast_forward_inputs=False)
    for block in blocks(module):
        values(block)
        fully_shard(block, ignored_params=_scalars(block, device), mesh=mesh, mp_policy=inner, offload_policy=offload)
        block.register_forward_pre_hook(refuse_differentiated)
    values(module)
    # Also the root is resharded after forward: a forward without backward (evaluation) must not leave old
    # values gathered.
    how: dict[str, Any] = {"mp_policy": inner, "offload_policy": offload, "reshard_after_forward": True}
    fully_shard(module, ignored_params=_scalars(module, device), mesh=mesh, **how)
    return module


def _scalars(module: nn.Module, device: torch.device) -> set[nn.Parameter]:
    found = {one for one in module.parameters() if not one.dim()}
    for one in found:
        one.data = one.data.to(device)
    return found
