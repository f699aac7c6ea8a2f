"""A model's parameters in groups of consecutive blocks, and as flat tensors."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from phalanx.errors import RefusedError
from phalanx.parallel.diloco import Fragment, divide, owners

pytestmark = pytest.mark.quick

SIZES = {"embed": 8, "b0.w": 4, "b0.b": 1, "b1.w": 4, "b1.b": 1, "b2.w": 4, "b2.b": 1, "head": 8}
OWNERS = {name: int(name[1]) for name in SIZES if name[0] == "b"}


def test_groups_are_consecutive_blocks_with_the_least_largest_sum() -> None:
    assert divide(SIZES, OWNERS, 1) == [list(SIZES)]
    assert divide(SIZES, OWNERS, 3) == [["embed"], ["b0.w", "b0.b", "b1.w", "b1.b"], ["b2.w", "b2.b", "head"]]
    two = divide(SIZES, OWNERS, 2)
    assert [sum(SIZES[name] for name in group) for group in two] == [13, 18]
    assert [name for group in two for name in group] == list(SIZES)


def test_blocks_are_cut_where_there_are_too_few() -> None:
    assert divide({"a": 1, "b": 1, "c": 2}, {"a": 0, "b": 0, "c": 0}, 2) == [["a", "b"], ["c"]]
    with pytest.raises(RefusedError, match="fragments=4 for 3 parameters"):
        divide({"a": 1, "b": 1, "c": 2}, {}, 4)


def test_parameters_know_their_blocks() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.ModuleList([nn.Linear(2, 2) for _ in range(2)]))
    assert owners(model) == {"1.0.weight": 0, "1.0.bias": 0, "1.1.weight": 1, "1.1.bias": 1}


def test_a_fragment_reads_and_writes_what_it_names() -> None:
    half = nn.Parameter(torch.arange(4.0).reshape(2, 2).to(torch.bfloat16))
    transposed = nn.Parameter(torch.arange(6.0).reshape(2, 3).t())  # not contiguous
    fragment = Fragment(
        {"half": half, "other": nn.Parameter(torch.ones(3)), "transposed": transposed}, ["half", "transposed"]
    )
    flat = fragment.read()
    assert flat.dtype == torch.float32
    assert flat.tolist() == [0, 1, 2, 3, 0, 3, 1, 4, 2, 5]
    with torch.no_grad():
        fragment.write(flat + 1)
    assert half.tolist() == [[1, 2], [3, 4]]
    assert transposed.tolist() == [[1, 4], [2, 5], [3, 6]]
    pieces = dict(fragment.cut(flat))
    assert pieces["transposed"].tolist() == [[0, 3], [1, 4], [2, 5]]
    assert torch.equal(fragment.flat(pieces), flat)
