"""A second process group of all ranks, for what talks beside everything else and in an order of its own."""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist

_left: list[object] = []


def own_group(timeout: timedelta = timedelta(minutes=10)) -> dist.ProcessGroup:
    """A new group of all ranks of the default one, with its backends. Collective."""
    group = dist.new_group(timeout=timeout)
    assert isinstance(group, dist.ProcessGroup)
    _left.append(group)  # a gloo group's destructor waits for threads that may be waiting for the interpreter's lock
    return group
