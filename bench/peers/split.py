"""A model split over ranks by hand, on torch's own parts: pipeline stages, tensor parallelism, FSDP2, for torchrun.

Usage: torchrun --nproc-per-node N split.py STEPS PLAN, where PLAN is such as "pp=2 fsdp=2 tp=2 micro=1". One model, the
GPT of the workload, whose blocks, heads and vocabulary divide evenly.
"""

from __future__ import annotations

import sys
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel

from stopwatch import Stopwatch
from workloads import CLIP, WORKLOADS, loss

SEED = 6017775124710473527  # phalanx.parallel.rng_streams.stream(0, 0): the same initial values as ours
WORKLOAD = WORKLOADS["gpt-split"]


class Part(nn.Module):
    """The blocks of one stage; the first has the embeddings too, the last the head."""

    def __init__(self, whole: Any, stage: int, stages: int) -> None:
        super().__init__()
        count = len(whole.blocks)
        self.first, self.last = stage == 0, stage == stages - 1
        if self.first:
            self.token, self.position = whole.token, whole.position
        self.blocks = whole.blocks[count * stage // stages : count * (stage + 1) // stages]
        if self.last:
            self.norm, self.head = whole.norm, whole.head

    def forward(self, x: Tensor) -> Tensor:
        if self.first:
            x = self.token(x) + self.position.weight[: x.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)) if self.last else x


def main(steps: int, plan: dict[str, str]) -> None:
    torch.manual_seed(SEED)
    sizes = [int(plan.get(name, 1)) for name in ("pp", "fsdp", "tp")]
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", tuple(sizes), mesh_dim_names=("pp", "fsdp", "tp"))
    stage = mesh.get_local_rank("pp")
    part = Part(WORKLOAD.model(), stage, sizes[0])
    if sizes[2] > 1:
        split_weights(part, mesh["tp"])
    if sizes[1] > 1:
        from torch.distributed.fsdp import fully_shard

        for block in part.blocks:
            fully_shard(block, mesh=mesh["fsdp"])
        fully_shard(part, mesh=mesh["fsdp"], reshard_after_forward=True)
    optimizer = WORKLOAD.optimizer(by_kind(part))
    inputs, target = (tensor[mesh.get_local_rank("fsdp") :: sizes[1]] for tensor in WORKLOAD.data()[: WORKLOAD.batch])
    run = pipelined(part, mesh, plan) if sizes[0] > 1 else at_once(part)
    cut = loss_parallel if sizes[2] > 1 else nullcontext
    watch, value = Stopwatch(), torch.zeros(())
    for _ in range(steps):
        watch.begin()
        optimizer.zero_grad()
        with cut():
            value = run(inputs, target)
        clip(list(part.parameters()), mesh)
        optimizer.step()
        value.item()
        watch.done()
    dist.all_reduce(value, group=mesh.get_group("fsdp"))
    if dist.get_rank() == dist.get_world_size() - 1:
        watch.report(loss=value.item() / sizes[1])
    dist.destroy_process_group()


def by_kind(part: Part) -> list[dict[str, list[Tensor]]]:
    """Parameters in a group for each kind: a fused optimizer does not take DTensors and tensors together."""
    groups: dict[bool, list[Tensor]] = {}
    for parameter in part.parameters():
        groups.setdefault(isinstance(parameter, DTensor), []).append(parameter)
    return [{"params": group} for group in groups.values()]


def split_weights(part: Part, mesh: DeviceMesh) -> None:
    """Megatron-LM's layout by torch's own styles; logits stay cut by vocabulary, for ``loss_parallel``."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    styles: dict[str, Any] = {
        "blocks.*.qkv": ColwiseParallel(),
        "blocks.*.out": RowwiseParallel(),
        "blocks.*.up": ColwiseParallel(),
        "blocks.*.down": RowwiseParallel(),
    }
    if part.first:
        styles["token"] = RowwiseParallel(input_layouts=Replicate())
    if part.last:
        styles["head"] = ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)
    for block in part.blocks:
        for tensor in (block.qkv.weight, block.qkv.bias):  # queries, keys and values of the same heads go together
            parts = tensor.data.view(3, mesh.size(), -1, *tensor.shape[1:])
            tensor.data = parts.transpose(0, 1).reshape(tensor.shape).contiguous()
    parallelize_module(part, mesh, styles)


def whole(value: Tensor) -> Tensor:
    """A loss that every rank of ``loss_parallel`` has, as a plain tensor."""
    return value.to_local() if isinstance(value, DTensor) else value


def at_once(part: Part) -> Any:
    """Forward and backward of the whole share."""

    def run(inputs: Tensor, target: Tensor) -> Tensor:
        value = loss(part(inputs), target)
        value.backward()
        return whole(value.detach())

    return run


def pipelined(part: Part, mesh: DeviceMesh, plan: dict[str, str]) -> Any:
    """Forward and backward of micro-batches in the order of a schedule."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

    kind = ScheduleGPipe if plan.get("schedule") == "gpipe" else Schedule1F1B
    share = WORKLOAD.batch // mesh.size(1)
    stage = PipelineStage(
        part, mesh.get_local_rank("pp"), mesh.size(0), torch.device("cpu"), group=mesh.get_group("pp")
    )
    schedule = kind(stage, n_microbatches=share // int(plan["micro"]), loss_fn=loss)

    def run(inputs: Tensor, target: Tensor) -> Tensor:
        losses: list[Tensor] = []
        given = (inputs,) if part.first else ()
        if part.last:
            schedule.step(*given, target=target, losses=losses)
            return torch.stack([whole(one.detach()) for one in losses]).mean()
        schedule.step(*given)
        return torch.zeros(())

    return run


def clip(parameters: list[Any], mesh: DeviceMesh) -> None:
    """By the norm over all ranks; what several ranks of tp hold counts once."""
    squares: dict[tuple[Any, ...], list[Tensor]] = {}
    held: list[Tensor] = []
    for parameter in parameters:
        grad, groups = parameter.grad, ()
        if hasattr(grad, "placements"):
            shards = (dim for dim, placement in enumerate(grad.placements) if placement.is_shard())
            groups, grad = tuple(grad.device_mesh.get_group(dim) for dim in shards), grad.to_local()
        squares.setdefault(groups, []).append(grad)
        held.append(grad)
    total = torch.zeros((), dtype=torch.float64)
    for groups, grads in squares.items():
        square = torch.stack(torch._foreach_norm(grads, 2, dtype=torch.float64)).square().sum()
        for group in groups:
            dist.all_reduce(square, group=group)
        total += square
    if mesh.size(0) > 1:
        dist.all_reduce(total, group=mesh.get_group("pp"))
    torch._foreach_mul_(held, torch.clamp(CLIP / (total.sqrt() + 1e-6), max=1.0))


if __name__ == "__main__":
    main(int(sys.argv[1]), dict(word.split("=") for word in sys.argv[2].split()))
