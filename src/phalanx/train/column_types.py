"""Columns of float64, NumPy's default, for a model of float32: PyTorch's error does not name the column."""

from __future__ import annotations

import re
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import keystr, tree_flatten_with_path

from phalanx.errors import PhalanxError, SpecError

_OF_TYPES = re.compile(r"\bdouble\b|float64", re.IGNORECASE)


@contextmanager
def float64_named(batch: Any, module: nn.Module) -> Generator[None]:
    """Name columns of float64 if PyTorch refuses types in the block.

    Raises:
        SpecError: in place of PyTorch's own error.
    """
    try:
        yield
    except RuntimeError as error:
        refuse_float64(error, batch, module)
        raise


def refuse_float64(error: RuntimeError, batch: Any, module: nn.Module) -> None:
    """Raise an error that names the columns of float64, if ``error`` is PyTorch's about types.

    Raises:
        SpecError: if it is, ``batch`` has such columns, and the model has no parameter of float64.
    """
    if isinstance(error, PhalanxError) or not _OF_TYPES.search(str(error)):
        return
    if any(one.dtype == torch.float64 for one in module.parameters()) or not (columns := _float64_in(batch)):
        return
    said = next(iter(str(error).strip().splitlines()))
    raise SpecError.of(
        where="job.data",
        given=f"float64 in {', '.join(columns)}, for a model that has none: {said}",
        allowed="the type of the model's parameters",
        fix='.astype("float32") where data are made by NumPy, which has float64 by default; .float() of a tensor',
    ) from error


def _float64_in(batch: Any) -> list[str]:
    found = tree_flatten_with_path(batch)[0]
    return [
        f"batch{keystr(path)}" for path, leaf in found if isinstance(leaf, torch.Tensor) and leaf.dtype == torch.float64
    ]
