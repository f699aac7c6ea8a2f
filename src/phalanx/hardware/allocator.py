"""The host's memory allocator, where its habits would undo what a plan saves."""

from __future__ import annotations

import ctypes
import sys

_M_MMAP_THRESHOLD = -3  # malloc.h
_THRESHOLD = 2**20


def return_freed_memory() -> None:
    """Have pieces of 1 MiB and more go back to the kernel when they are freed.

    glibc otherwise raises that size, up to 32 MiB, with each piece freed. What sharding gathers and drops in each step
    would then leave holes in the heap, and the resident set would grow to several times what is held. Costs page
    faults; does nothing where the C library is another one.
    """
    if sys.platform != "linux":
        return
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return
    mallopt(_M_MMAP_THRESHOLD, _THRESHOLD)
