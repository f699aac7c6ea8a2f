"""Adds gradients over ranks, many in one message."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist

_BYTES = 25 * 2**20


def add_up(gradients: Iterable[torch.Tensor | None], group: dist.ProcessGroup) -> None:
    """Sum each gradient over the ranks of ``group``, in place. Every rank must have the same ones."""
    waiting: list[tuple[dist.Work, torch.Tensor, list[torch.Tensor]]] = []
    for bucket in _buckets([grad for grad in gradients if grad is not None]):
        flat = bucket[0].reshape(-1) if len(bucket) == 1 else torch.cat([grad.reshape(-1) for grad in bucket])
        work = dist.all_reduce(flat, group=group, async_op=True)
        assert work is not None
        waiting.append((work, flat, bucket))
    for work, flat, bucket in waiting:
        work.wait()
        pieces = flat.split([grad.numel() for grad in bucket])
        for grad, piece in zip(bucket, pieces, strict=True):
            if grad.data_ptr() != piece.data_ptr():
                grad.copy_(piece.view(grad.shape))


def _buckets(gradients: list[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Runs of gradients of one type, of about 25 MiB each."""
    bucket: list[torch.Tensor] = []
    size = 0
    for grad in gradients:
        nbytes = grad.numel() * grad.element_size()
        if bucket and (size + nbytes > _BYTES or bucket[0].dtype != grad.dtype):
            yield bucket
            bucket, size = [], 0
        bucket.append(grad)
        size += nbytes
    if bucket:
        yield bucket
