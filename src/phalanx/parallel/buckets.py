"""Slices of parameters by rows, and buckets that reduce or gather many slices in one collective."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from phalanx.comm import all_gather_flat, reduce_scatter_sum
from phalanx.config.sync import BUCKET_BYTES


class Slice:
    """One parameter's rows on this rank, as a view into the whole and as the DTensor the optimizer steps.

    Rows are cut like ``torch.chunk``: ceil(rows / ranks) each, the last ones fewer or none. A parameter without
    dimensions is held whole by every rank.
    """

    def __init__(self, name: str, whole: torch.Tensor, mesh: DeviceMesh) -> None:
        self.name, self.whole = name, whole
        self.ranks = mesh.size()
        self.rows = -(-whole.shape[0] // self.ranks) if whole.dim() else 1
        rank = mesh.get_local_rank()
        self.first = min(rank * self.rows, whole.shape[0]) if whole.dim() else 0
        self.last = min(self.first + self.rows, whole.shape[0]) if whole.dim() else 1
        self.width = whole[0].numel() if whole.dim() and whole.shape[0] else 1
        self.padded = self.rows * self.width
        self._mesh = mesh
        self._placement = [Shard(0)] if whole.dim() else [Replicate()]
        self.local = self._own(whole.detach())
        self.shard = nn.Parameter(self._dress(self.local))

    def add_gradient(self, flat: torch.Tensor) -> None:
        """Add this rank's rows of a reduced gradient, ``flat`` of length ``padded``, to the shard's gradient."""
        rows = flat[: self.local.numel()].view(self.local.shape)
        if self.shard.grad is None:
            self.shard.grad = self._dress(rows.clone())
        else:
            self.shard.grad.to_local().add_(rows)  # pyright: ignore[reportAttributeAccessIssue]

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

    def _own(self, whole: torch.Tensor) -> torch.Tensor:
        return whole[self.first : self.last] if whole.dim() else whole

    def _dress(self, local: torch.Tensor) -> torch.Tensor:
        return DTensor.from_local(
            local, self._mesh, self._placement, run_check=False, shape=self.whole.shape, stride=self.whole.stride()
        )


class Bucket:
    """Slices whose gradients are reduced, and whose values are gathered, in one collective."""

    def __init__(self, slices: list[Slice], group: dist.ProcessGroup, replicas: dist.ProcessGroup | None) -> None:
        self.slices = slices
        self._group, self._replicas = group, replicas
        self._ranks = slices[0].ranks
        self._padded = sum(piece.padded for piece in slices)
        self._missing: set[str] = set()
        self._running: tuple[dist.Work, torch.Tensor, torch.Tensor] | None = None

    @property
    def complete(self) -> bool:
        """Whether every gradient of this micro-batch is there."""
        return not self._missing

    def expect(self) -> None:
        """A new backward begins: no gradient is there yet."""
        self.wait()
        self._missing = {piece.name for piece in self.slices}

    def arrived(self, piece: Slice) -> None:
        """The whole gradient of ``piece`` is complete."""
        self._missing.discard(piece.name)

    def launch(self) -> None:
        """Pack the whole gradients, drop them, and start summing and scattering."""
        first = self.slices[0].whole
        flat = torch.empty(self._ranks, self._padded, dtype=first.dtype, device=first.device)
        offset = 0
        for piece in self.slices:
            piece.pack_whole(piece.whole.grad, flat[:, offset : offset + piece.padded])
            piece.whole.grad = None
            offset += piece.padded
        out = torch.empty(self._padded, dtype=first.dtype, device=first.device)
        self._running = (reduce_scatter_sum(out, flat.view(-1), self._group), out, flat)

    def wait(self) -> None:
        """Wait for the sum, and add it to the shards' gradients."""
        if self._running is None:
            return
        work, out, _ = self._running
        work.wait()
        if self._replicas is not None:
            dist.all_reduce(out, group=self._replicas)
        offset = 0
        for piece in self.slices:
            piece.add_gradient(out[offset : offset + piece.padded])
            offset += piece.padded
        self._running = None

    def gather(self) -> None:
        """Bring every rank's rows into the whole parameters."""
        first = self.slices[0].whole
        part = torch.zeros(self._padded, dtype=first.dtype, device=first.device)
        offset = 0
        for piece in self.slices:
            part[offset : offset + piece.local.numel()].copy_(piece.local.reshape(-1))
            offset += piece.padded
        out = torch.empty(self._ranks * self._padded, dtype=first.dtype, device=first.device)
        all_gather_flat(out, part, self._group)
        columns = out.view(self._ranks, self._padded)
        offset = 0
        for piece in self.slices:
            piece.unpack_whole(columns[:, offset : offset + piece.padded])
            offset += piece.padded


def cut(slices: list[Slice]) -> list[list[Slice]]:
    """Slices in runs of one dtype and about ``BUCKET_BYTES`` each; a larger one stands alone."""
    runs: list[list[Slice]] = []
    size = 0
    for piece in slices:
        bytes_ = piece.whole.numel() * piece.whole.element_size()
        if not runs or size + bytes_ > BUCKET_BYTES or piece.whole.dtype != runs[-1][0].whole.dtype:
            runs.append([])
            size = 0
        runs[-1].append(piece)
        size += bytes_
    return runs
