"""What selective recompute keeps is what a trace takes for dear: both ask one function."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from phalanx.config import Plan
from phalanx.parallel import activation_checkpointing

PRODUCTS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mm": lambda x, w: x @ w,
    "addmm": lambda x, w: torch.addmm(x, x, w),
    "bmm": lambda x, w: torch.bmm(x[None], w[None])[0],
    "mv": lambda x, w: torch.mv(x, w[0])[None] * x,
    "addbmm": lambda x, w: torch.addbmm(x, x[None], w[None]),
    "_grouped_mm": lambda x, w: torch._grouped_mm(
        x.bfloat16(), w.bfloat16()[None], torch.tensor([len(x)], dtype=torch.int32)
    ).float(),
}


class Counting(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls[func._schema.name.partition("::")[2]] += 1
        return func(*args, **(kwargs or {}))


class Block(nn.Module):
    def __init__(self, product: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(16, 16))
        self.product = product

    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(self.product(torch.cos(x), self.weight))


@pytest.mark.parametrize("name", PRODUCTS)
def test_products_are_not_computed_again(name: str) -> None:
    block = Block(PRODUCTS[name])
    activation_checkpointing.apply(block, Plan.parse("recompute=selective"), [block])
    x = torch.randn(16, 16, requires_grad=True)
    with Counting() as forward:
        loss = block(x).sum()
    with Counting() as backward:
        loss.backward()
    assert forward.calls[name] == 1
    assert forward.calls["cos"] == 1
    assert backward.calls["cos"] >= 1  # what is cheap is
    again = {"mm": 2, "bmm": 2, "mv": 1, "_grouped_mm": 2}  # products that the gradients are
    assert backward.calls[name] <= again.get(name, 0)
