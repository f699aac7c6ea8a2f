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
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from phalanx.comm import data_mesh
from phalanx.config import Plan
from phalanx.device_kinds import kind_of
from phalanx.errors import Problem
from phalanx.parallel.buffer_sync import BufferSync
from phalanx.parallel.deferred_init import fill, recipes
from phalanx.parallel.double_backward import refuse_differentiated
from phalanx.parallel.layout import Layout, MicroBatchWork, RankHoldings, drop_gradients, each_micro_batch, trainable
from phalanx.parallel.mixed_precision import gathered_type
from phalanx.trace.blocks import blocks


class FsdpLayout(Layout):
    """Parameters, gradients and optimizer state sharded over the mesh (ZeRO-3), block by block."""

    def __init__(self, module: nn.Module, device: torch.device, plan: Plan) -> None:
        known = recipes(module)
        apply(module, device, plan, data_mesh(plan, device), lambda part: fill(module, known, within=part))
        self._module = module
        self._device = device
        self.holdings = RankHoldings(module=module, parameters=trainable(module), divisor=plan.world_size)
        self._statistics = BufferSync(module)

    def accumulate(self, parts: Sequence[Sequence[Any]], work: MicroBatchWork) -> None:
        # Every micro-batch scatters its gradient at once: kept for the last one, whole gradients would fill the memory.
        each_micro_batch(self._module, self._device, parts[0], work)

    def finish(self) -> None:
        """Backward has summed all gradients."""

    def stepped(self) -> None:
        self._statistics.share()
        drop_gradients(self.parameters.values())


def scalar_problems(module: nn.Module, plan: Plan) -> list[Problem]:
    """Parameters without a dimension, which ``zero=3`` would have to shard."""
    scalars = [name for name, tensor in module.named_parameters() if tensor.dim() == 0]
    if plan.zero != 3 or not scalars:
        return []
    on_host = plan.offload == "parameters"  # possible with zero=3 only
    return [
        Problem(
            where="plan.zero",
            given=f"zero=3 and parameters without a dimension: {', '.join(scalars)}",
            allowed="zero=3 with parameters of one dimension or more",
            fix=str(replace(plan, zero=2, offload="none" if on_host else plan.offload)),
        )
    ]


def apply(
    module: nn.Module, device: torch.device, plan: Plan, mesh: DeviceMesh, values: Callable[[nn.Module], None]
) -> nn.Module:
    """Shard ``module`` over ``mesh`` in place: each repeated block by itself, then what is left.

    ``values(part)`` gives a part its values where it has none yet, just before it is moved to ``device`` and sharded:
    a rank never holds more than its shards and one part.

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
        fully_shard(block, mesh=mesh, mp_policy=inner, offload_policy=offload)
        block.register_forward_pre_hook(refuse_differentiated)
    values(module)
    # Also the root is resharded after forward: a forward without backward (evaluation) must not leave old
    # values gathered.
    fully_shard(module, mesh=mesh, mp_policy=inner, offload_policy=offload, reshard_after_forward=True)
    return module
