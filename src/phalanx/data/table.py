"""Data that fit in memory, as columns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

import numpy as np
import torch

from phalanx.data.dataset_facts import MapStyle
from phalanx.errors import Problem, SpecError


@final
class Table(MapStyle):
    """A map-style dataset of equally long columns: ``Table(image=images, label=labels)``.

    A sample is a dict with one row of each column. A batch is taken out of each column at once, which is many times
    faster than collating single samples.

    Raises:
        SpecError: if there is no column, if one is no tensor or array, or if their lengths differ.
    """

    def __init__(self, **columns: torch.Tensor | np.ndarray) -> None:
        if problems := _problems(columns):
            raise SpecError(problems)
        self.columns = {name: torch.as_tensor(column) for name, column in columns.items()}
        self._columns = tuple(self.columns.items())
        self._length = len(next(iter(self.columns.values())))

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {name: column[index] for name, column in self._columns}

    def __getitems__(self, ids: Sequence[int] | np.ndarray) -> dict[str, torch.Tensor]:
        """Return the batch of these rows: name → tensor of shape (len(ids), ...)."""
        index = torch.from_numpy(ids) if isinstance(ids, np.ndarray) else torch.tensor(ids)
        return {name: column.index_select(0, index) for name, column in self._columns}

    @staticmethod
    def collate(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the batch unchanged: the ``collate_fn`` for a plain torch ``DataLoader`` over a Table."""
        return batch


def _problems(columns: dict[str, Any]) -> list[Problem]:
    example = "Table(image=images, label=labels)"
    if not columns:
        return [Problem(where="Table", given="no column", allowed="one column or more", fix=example)]
    found: list[Problem] = []
    for name, column in columns.items():
        if not isinstance(column, torch.Tensor | np.ndarray) or column.ndim == 0:
            fix, allowed = f"{name}=torch.tensor({name})", "a tensor or array with one row a sample"
            found.append(Problem(where=f"Table.{name}", given=type(column).__name__, allowed=allowed, fix=fix))
    if not found and len({len(column) for column in columns.values()}) > 1:
        lengths = ", ".join(f"{name} has {len(column)}" for name, column in columns.items())
        found.append(Problem(where="Table", given=lengths, allowed="columns of one length", fix=example))
    return found
