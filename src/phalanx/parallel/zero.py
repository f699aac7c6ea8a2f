"""ZeRO stages 1 and 2: whole parameters on every rank, optimizer state (1) and gradients (2) in shards.

Each parameter's rows are cut over the ranks of ``fsdp`` as ``fully_shard`` would cut them. A rank's shard is a view
into its own whole parameter, dressed as a DTensor, so that the optimizer steps just those rows, checkpoints know them
by name and offset, and norms are global. After the step one all-gather brings everybody's new rows to everybody.

Both stages sum and scatter gradients while backward runs, bucket by bucket, and drop the whole ones at once. Stage 2
does so with each micro-batch, so that whole gradients never exist; stage 1 with the last one, and sends no more than
plain data parallelism for any number of micro-batches (Rajbhandari et al. 2020, section 7). torch's own parts have no
such stages: FSDP2 without resharding keeps a shard beside each whole parameter, and ZeroRedundancyOptimizer adds up
whole gradients and assigns whole parameters, which one large embedding unbalances.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from phalanx.comm import all_gather_flat, data_mesh, reduce_scatter_sum
from phalanx.config import Job, Plan
from phalanx.parallel.advice import without_gradient
from phalanx.parallel.buffer_sync import BufferSync
from phalanx.parallel.deferred_init import fill, recipes
from phalanx.parallel.grad_reduce import buckets, found_anywhere
from phalanx.parallel.layout import Layout, MicroBatchWork, RankHoldings, each_micro_batch
from phalanx.placement.ownership import RowChunks, chunk_rows


class ShardedRows(Layout):
    """ZeRO-1 and 2: gradients summed and scattered during backward, each rank stepping its rows."""

    def __init__(self, module: nn.Module, device: torch.device, job: Job, plan: Plan) -> None:
        fill(module, recipes(module), device=device)
        self._module = module.to(device)
        self._device = device
        self._partition = Partition.over_all_ranks(self._module, device, plan)
        self._scattering = Scattering(self._partition, job, when="each" if plan.zero == 2 else "last")
        self.holdings = RankHoldings(module=self._module, parameters=self._partition.shards)

    def begin(self) -> None:
        super().begin()
        self._scattering.begin()

    def accumulate(self, parts: Sequence[Sequence[Any]], work: MicroBatchWork) -> None:
        each_micro_batch(self._module, self._device, parts[0], work, around=self._scattering.around)

    def finish(self) -> None:
        self._scattering.finish()

    def stepped(self) -> None:
        self._partition.stepped()


When = Literal["each", "last", "end"]
"""When gradients are scattered: in each micro-batch; in the last, whole until then; or after it, without hooks."""


class Scattering:
    """The summing and scattering of a partition's gradients, during backward or at the end of a step."""

    def __init__(self, partition: Partition, job: Job, *, when: When) -> None:
        self._partition, self._when = partition, when
        self._may_be_unused = job.unused == "allow"
        self._seen: set[str] = set()
        self._inside = False
        self._launched = 0
        self._where: dict[str, int] = {}
        for index, bucket in enumerate(partition.buckets):
            for piece in bucket.slices:
                self._where[piece.name] = index
                if when != "end":
                    piece.whole.register_post_accumulate_grad_hook(self._hook(piece))

    def begin(self) -> None:
        """Forget gradients of backwards between steps."""
        self._seen.clear()

    def around(self, last: bool) -> AbstractContextManager[None]:
        """Return a context for one micro-batch: at its turn, gradients are scattered on arrival, the rest at its
        end.
        """
        return self._scattered() if self._when == "each" or (self._when == "last" and last) else nullcontext()

    def finish(self) -> None:
        """Wait for the sums.

        Raises:
            GradientError: if parameters got no gradient on this rank, and the job does not allow it.
        """
        if self._when == "end":
            self._seen = {piece.name for piece in self._partition.slices if piece.whole.grad is not None}
        if not self._may_be_unused and len(self._seen) < len(self._partition.slices):
            unseen = [piece.name for piece in self._partition.slices if piece.name not in self._seen]
            raise without_gradient(unseen, "on this rank")
        if self._when == "end":
            with self._scattered():
                pass
        for bucket in self._partition.buckets:
            bucket.wait()
        seen = self._seen
        if self._may_be_unused and self._partition.world_size > 1:
            shards = self._partition.shards
            present = found_anywhere([name in seen for name in shards], shards, self._partition.everyone)
            seen = {name for name, there in zip(shards, present, strict=True) if there}
        for piece in self._partition.slices:
            if piece.name not in seen:
                piece.shard.grad = None  # as on one device: no gradient, not a gradient of zero
        self._seen.clear()

    @contextmanager
    def _scattered(self) -> Iterator[None]:
        self._launched, self._inside = 0, True
        for bucket in self._partition.buckets:
            bucket.expect()
        yield
        while self._launched < len(self._partition.buckets):
            self._launch_next()
        self._inside = False

    def _hook(self, piece: ParameterSlice) -> Any:
        def arrived(_: torch.Tensor) -> None:
            self._seen.add(piece.name)
            if not self._inside:
                return
            buckets = self._partition.buckets
            buckets[self._where[piece.name]].missing.discard(piece.name)
            # In bucket order, not in order of arrival: every rank must issue the same sequence of collectives.
            while self._launched < len(buckets) and not buckets[self._launched].missing:
                self._launch_next()

        return arrived

    def _launch_next(self) -> None:
        self._partition.buckets[self._launched].launch()
        self._launched += 1
        if self._launched >= 3:
            self._partition.buckets[self._launched - 3].wait()  # bounds the whole gradients alive to a few buckets


class Partition:
    """Every trainable parameter cut into rows over the ranks of ``fsdp``."""

    def __init__(
        self,
        module: nn.Module,
        shards: DeviceMesh,
        replicas: dist.ProcessGroup | None,
        everyone: dist.ProcessGroup | None,
        apart: Mapping[str, dist.ProcessGroup | None] | None = None,
    ) -> None:
        """Cut over ``shards``, with a copy for each rank of ``replicas``; ``everyone`` are the ranks of both.

        ``apart``: parameters with copies on other ranks than the rest's, by name.
        """
        trainable = [(name, tensor) for name, tensor in module.named_parameters() if tensor.requires_grad]
        self.everyone, self.world_size = everyone, dist.get_world_size(everyone)
        self._statistics = BufferSync(module, everyone)
        self.slices = [ParameterSlice(name, tensor, shards) for name, tensor in trainable]
        self.shards: dict[str, torch.Tensor] = {piece.name: piece.shard for piece in self.slices}
        # Backward reaches parameters roughly in reverse order of definition.
        others = apart or {}
        kinds: dict[dist.ProcessGroup | None, list[ParameterSlice]] = {}
        for piece in self.slices[::-1]:
            kinds.setdefault(others.get(piece.name, replicas), []).append(piece)
        self.buckets = [
            Bucket(run, shards.get_group(), copies)
            for copies, pieces in kinds.items()
            for run in buckets(pieces, lambda piece: piece.whole)
        ]
        for tensor in module.buffers():
            if self.world_size > 1 and tensor.is_floating_point():
                dist.broadcast(tensor, group=everyone, group_src=0)

    @classmethod
    def over_all_ranks(cls, module: nn.Module, device: torch.device, plan: Plan) -> Partition:
        mesh = data_mesh(plan, device)
        if plan.dp == 1:
            return cls(module, mesh, None, dist.group.WORLD)
        return cls(module, mesh["fsdp"], mesh["copies"].get_group(), dist.group.WORLD)

    def stepped(self) -> None:
        """Bring the rows stepped by the optimizer to all ranks, and drop the gradients."""
        self.gather()
        for piece in self.slices:
            piece.shard.grad = None

    def gather(self) -> None:
        """Bring every rank's rows to all ranks of its shard group, and rank 0's running statistics to all ranks."""
        for bucket in self.buckets:
            bucket.gather()
        self._statistics.share()


class ParameterSlice:
    """One parameter's rows on this rank, as a view into the whole and as the DTensor the optimizer steps.

    Rows are cut as ``placement.ownership.RowChunks`` says. A parameter without dimensions is held whole by every rank.
    """

    def __init__(self, name: str, whole: torch.Tensor, mesh: DeviceMesh) -> None:
        self.name, self.whole = name, whole
        self.ranks = mesh.size()
        rows = whole.shape[0] if whole.dim() else 0
        self.rows = chunk_rows(rows, self.ranks) if whole.dim() else 1
        own = RowChunks(rows, self.ranks)[mesh.get_local_rank()]
        self.first, self.last = (own[0] if own else (rows, rows)) if whole.dim() else (0, 1)
        self.padded = self.rows * (whole[0].numel() if whole.dim() and whole.shape[0] else 1)
        self._mesh = mesh
        self._placement = [Shard(0)] if whole.dim() else [Replicate()]
        self.local = whole.detach()[self.first : self.last] if whole.dim() else whole.detach()
        self.shard = nn.Parameter(self._dress(self.local))

    def add_gradient(self, flat: torch.Tensor) -> None:
        """Add this rank's rows of a reduced gradient, ``flat`` of length ``padded``, to the shard's gradient."""
        rows = flat[: self.local.numel()].view(self.local.shape)
        if self.shard.grad is None:
            self.shard.grad = self._dress(rows.clone())
        else:
            self.shard.grad.to_local().add_(rows)  # pyrefly: ignore

    def pack_whole(self, source: torch.Tensor | None, out: torch.Tensor) -> None:
        """Write ``source``'s rows into ``out`` (ranks × padded), rank by rank; zeros where there are none."""
        if source is None:
            out.zero_()
        elif not self.whole.dim():
            out.copy_(source.expand(out.shape))
        elif self.whole.shape[0] == self.rows * self.ranks:
            out.copy_(source.reshape(self.ranks, self.padded))
        else:
            out.zero_()
            for rank in range(self.ranks):
                rows = source[rank * self.rows : (rank + 1) * self.rows]
                out[rank, : rows.numel()].copy_(rows.reshape(-1))

    def unpack_whole(self, gathered: torch.Tensor) -> None:
        """Write all ranks' rows (ranks × padded) into the whole parameter."""
        whole = self.whole.detach()
        if not whole.dim():
            return
        for rank in range(self.ranks):
            rows = whole[rank * self.rows : (rank + 1) * self.rows]
            rows.copy_(gathered[rank, : rows.numel()].view(rows.shape))

    def _dress(self, local: torch.Tensor) -> torch.Tensor:
        return DTensor.from_local(
            local, self._mesh, self._placement, run_check=False, shape=self.whole.shape, stride=self.whole.stride()
        )


class Bucket:
    """Slices with one collective for their gradients and one for their values."""

    def __init__(
        self, slices: list[ParameterSlice], group: dist.ProcessGroup, replicas: dist.ProcessGroup | None
    ) -> None:
        self.slices = slices
        self._group, self._replicas = group, replicas
        self._ranks = slices[0].ranks
        self._sizes = [piece.padded for piece in slices]
        self.missing: set[str] = set()  # names whose gradients of this micro-batch are not there yet
        self._running: tuple[dist.Work, torch.Tensor, torch.Tensor] | None = None

    def expect(self) -> None:
        """Begin a new backward without gradients."""
        self.wait()
        self.missing = {piece.name for piece in self.slices}

    def launch(self) -> None:
        """Pack the whole gradients, drop them, and start summing and scattering."""
        first = self.slices[0].whole
        flat = torch.empty(self._ranks, sum(self._sizes), dtype=first.dtype, device=first.device)
        for piece, columns in zip(self.slices, flat.split(self._sizes, 1), strict=True):
            piece.pack_whole(piece.whole.grad, columns)
            piece.whole.grad = None
        out = torch.empty(sum(self._sizes), dtype=first.dtype, device=first.device)
        self._running = (reduce_scatter_sum(out, flat.view(-1), self._group), out, flat)

    def wait(self) -> None:
        """Wait for the sum, and add it to the shards' gradients."""
        if self._running is None:
            return
        work, out, _ = self._running
        work.wait()
        if self._replicas is not None:
            dist.all_reduce(out, group=self._replicas)
        for piece, part in zip(self.slices, out.split(self._sizes), strict=True):
            piece.add_gradient(part)
        self._running = None

    def gather(self) -> None:
        """Bring every rank's rows into the whole parameters."""
        first = self.slices[0].whole
        flat = torch.zeros(sum(self._sizes), dtype=first.dtype, device=first.device)
        for piece, part in zip(self.slices, flat.split(self._sizes), strict=True):
            part[: piece.local.numel()].copy_(piece.local.reshape(-1))
        out = torch.empty(self._ranks * len(flat), dtype=first.dtype, device=first.device)
        all_gather_flat(out, flat, self._group)
        for piece, columns in zip(self.slices, out.view(self._ranks, len(flat)).split(self._sizes, 1), strict=True):
            piece.unpack_whole(columns)
