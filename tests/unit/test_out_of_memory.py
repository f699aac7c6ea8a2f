"""Every message by which memory runs out is known as one, wherever it is asked."""

from __future__ import annotations

import pytest

from phalanx.errors import is_out_of_memory

MESSAGES = [
    ("RuntimeError", "[enforce fail at alloc_cpu.cpp:124] DefaultCPUAllocator: can't allocate memory: you tried"),
    ("OSError", "[Errno 12] Cannot allocate memory"),
    ("_ArrayMemoryError", "Unable to allocate 745. GiB for an array with shape (100000000000,) and data type float64"),
    ("OutOfMemoryError", "CUDA out of memory. Tried to allocate 20.00 MiB"),
    ("RuntimeError", "[enforce fail] not enough memory: you tried to allocate 4000 bytes"),
    ("MemoryError", ""),
]


@pytest.mark.parametrize(("kind", "message"), MESSAGES)
def test_messages_of_memory_that_ran_out(kind: str, message: str) -> None:
    assert is_out_of_memory(kind, message)


def test_other_messages_are_not() -> None:
    assert not is_out_of_memory("RuntimeError", "mat1 and mat2 shapes cannot be multiplied")
