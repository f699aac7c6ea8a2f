"""Blocks of many sizes are all compiled."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest
import torch
from torch import nn

from phalanx.config import Plan
from phalanx.parallel import torch_compile


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # torch's own, while it compiles
def test_more_sizes_of_blocks_than_torch_compiles_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[int] = []

    def counted(graph: Any, _: Any) -> Any:
        compiled.append(len(graph.graph.nodes))
        return graph

    class Block(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.layer = nn.Linear(width, width + 1)

        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return self.layer(input).relu()

    def compile_with(self: Any) -> None:
        self._compiled_call_impl = torch.compile(self._call_impl, backend=counted, dynamic=False)

    config: Any = import_module("torch._dynamo").config
    monkeypatch.setattr(config, "recompile_limit", config.recompile_limit)  # put back afterwards
    monkeypatch.setattr(nn.Module, "compile", compile_with)
    sizes = range(3, 3 + config.recompile_limit + 4)
    model = nn.Sequential(*map(Block, sizes))
    torch_compile.apply(model, Plan.parse("compile=true"), model)
    model(torch.ones(2, 3))
    assert len(compiled) == len(sizes)
