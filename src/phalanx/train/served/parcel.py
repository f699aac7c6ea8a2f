"""Tensors by name over a connection, for a receiver that does not know their shapes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from phalanx.comm.frames import Connection, Frame, views
from phalanx.parallel.server import Kind

_NAMES = {str(dtype): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}


def send(connection: Connection, kind: Kind, meta: dict[str, Any], tensors: Mapping[str, torch.Tensor]) -> None:
    """One frame with ``tensors`` (on the host), what they are, and ``meta``."""
    dense = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
    described = [[name, list(tensor.shape), str(tensor.dtype)] for name, tensor in dense.items()]
    connection.send(kind, {**meta, "tensors": described}, views(dense.values()))


def receive(connection: Connection, frame: Frame) -> dict[str, torch.Tensor]:
    """The tensors that came with ``frame``."""
    found = {name: torch.empty(shape, dtype=_NAMES[dtype]) for name, shape, dtype in frame.meta.get("tensors", [])}
    connection.fill(frame, views(found.values()))
    return found
