"""A process that compiles nothing loads no compiler, computes the same, and can still have it."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

TRAIN = """
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

def train(name):
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    ddp = DistributedDataParallel(net)
    optimizer = getattr(torch.optim, name)(ddp.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        ddp(torch.ones(3, 4) * step).square().sum().backward()
        optimizer.step()
    assert torch.is_grad_enabled()
    optimizer.load_state_dict(optimizer.state_dict())
    del ddp, optimizer  # as its group's last owner DDP may wait for ever for the interpreter's lock
    dist.destroy_process_group()
    return [parameter.detach().sum().item() for parameter in net.parameters()]
"""

FRESH = """
import sys
import torch
from phalanx.launch.torch_warmup import leave_compiler_out, make_ready
from phalanx.config import Plan

make_ready(Plan(dp=2))
assert "_dynamo" not in vars(torch)
leave_compiler_out()
print([train(name) for name in NAMES])
assert "torch._dynamo" not in sys.modules
assert torch._dynamo.utils.get_optimize_ddp_mode() == "ddp_optimizer"
assert "torch._dynamo" not in sys.modules
assert isinstance(torch._dynamo.config.optimize_ddp, bool)  # asks for more than is held ready: the real one comes
assert "torch._dynamo" in sys.modules
assert torch._dynamo is sys.modules["torch._dynamo"]
assert torch._dynamo.utils.get_optimize_ddp_mode() == "ddp_optimizer"
print([train(name) for name in NAMES])
"""

NAMES = ["SGD", "AdamW", "Adagrad", "RMSprop"]


@pytest.fixture(scope="module")
def as_torch_does() -> list[list[float]]:
    scope: dict[str, object] = {}
    exec(TRAIN, scope)
    torch.set_num_threads(1)
    return [scope["train"](name) for name in NAMES]  # pyright: ignore[reportCallIssue]


def test_no_compiler_until_asked_for(as_torch_does: list[list[float]]) -> None:
    code = f"NAMES = {NAMES!r}\n{TRAIN}\ntorch.set_num_threads(1)\n{FRESH}"
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [repr(as_torch_does)] * 2


def test_sharded_plan_gets_it_at_once() -> None:
    code = (
        "import sys; from phalanx.launch.torch_warmup import make_ready; from phalanx.config import Plan; "
        "make_ready(Plan(fsdp=2)); assert 'torch._dynamo' in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=100)


def test_the_launcher_keeps_torch_as_it_is_and_its_workers_do_not() -> None:
    code = """
import sys
import torch
import phalanx as px
from phalanx.launch import launch, make_ready

before = torch.optim.SGD.step, dict(vars(torch.optim.Optimizer))
make_ready(px.Plan(dp=2))
changed = launch(lambda place, report: [torch.optim.SGD.step is not before[0], "_dynamo" in vars(torch)], 2)
assert changed == [[True, True]] * 2, changed
assert "_dynamo" not in vars(torch)
assert torch.optim.SGD.step is before[0]
assert not hasattr(torch.optim.Optimizer.state_dict, "__dynamo_disable")
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=100)


def test_torch_of_an_unknown_version_is_left_alone() -> None:
    code = """
import torch
torch.__version__ = "2.14.0"
from phalanx.launch.torch_warmup import leave_compiler_out
leave_compiler_out()
assert "_dynamo" not in vars(torch)
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=100)
