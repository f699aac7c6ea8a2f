"""What keeps a plan from a job or a machine; what is recomputed and compiled."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from law_rows import in_one_test
from phalanx.config import Job, Plan
from phalanx.parallel import activation_checkpointing, check, device_kind, torch_compile
from phalanx.train.refusals import model_problems


@pytest.fixture
def job() -> Job:
    unused: Any = print
    return Job(model=unused, data=unused, loss=unused, optimizer=unused, batch=64, steps=1)


def devices(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)


def fixes(job: Job, plan: str, here: int | None = None) -> list[str]:
    return [problem.fix for problem in check(job, Plan.parse(plan), here)]


@in_one_test(
    ("plan", "there", "here", "kind"),
    [
        ("single", 0, None, "cpu"),
        ("dp=4", 4, None, "cuda"),
        ("dp=4", 3, None, "cpu"),
        ("dp=16", 8, 8, "cuda"),  # two machines of eight
        ("dp=16", 8, None, "cpu"),
        ("dp=16 device=cpu", 8, 8, "cpu"),
    ],
)
def test_devices_are_counted_on_this_machine(
    plan: str, there: int, here: int | None, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    devices(monkeypatch, there)
    assert device_kind(Plan.parse(plan), here) == kind


def test_asking_for_cuda_counts_this_machine_too(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    devices(monkeypatch, 8)
    assert fixes(job, "dp=16 device=cuda", here=8) == []
    assert fixes(job, "dp=16 micro=2 device=cuda") == ["dp=16 micro=2 device=cpu"]
    assert fixes(job, "dp=32 device=cuda", here=16) == ["dp=32 device=cpu"]


def test_compiling_asks_for_a_compiler_on_cpus_only(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    devices(monkeypatch, 2)
    assert fixes(job, "dp=2 compile=true") == []
    assert fixes(job, "dp=4 compile=true") == ["dp=4"]
    assert fixes(job, "compile=true device=cpu") == ["device=cpu"]


def test_threads_do_not_recompute_on_a_cpu(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    devices(monkeypatch, 2)
    assert fixes(job, "threads=2 recompute=full") == []  # each CUDA device has a generator of its own
    assert fixes(job, "threads=3 recompute=selective micro=2") == ["dp=3 micro=2 recompute=selective"]
    assert fixes(job, "recompute=full device=cpu") == []


def test_a_parameter_without_dimension_is_no_problem(job: Job) -> None:
    module = nn.Linear(2, 2)
    module.gain = nn.Parameter(torch.ones(()))
    assert [model_problems(job, Plan.parse(plan), module) for plan in ("fsdp=2", "fsdp=2 zero=1")] == [[], []]


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


@in_one_test("name", PRODUCTS)
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
