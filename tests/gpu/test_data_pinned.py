"""Pinned memory, which needs an accelerator to pin for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import IterableDataset

from phalanx.config import Job
from phalanx.data import Lane, Loader, Table

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.accelerator.is_available(), reason="needs an accelerator"),
]


class Counting(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Any:
        return iter(torch.arange(32))


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("data", [Table(id=torch.arange(32)), Counting()])
def test_batches_are_pinned_and_complete(data: Any, workers: int) -> None:
    unused: Any = print
    job = Job(
        model=unused, data=unused, loss=unused, optimizer=unused, batch=8, epochs=1, shuffle=None, workers=workers
    )
    seen: list[int] = []
    for step in Loader(data, job, Lane(), micro=None, pin_memory=True):
        batch = step.parts[0][0].batch
        ids = batch["id"] if isinstance(batch, dict) else batch
        assert ids.is_pinned()
        seen += ids.tolist()
    assert sorted(seen) == list(range(32))
