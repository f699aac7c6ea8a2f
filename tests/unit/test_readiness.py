"""A process that compiles nothing loads no compiler, computes the same, and can still have it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from longer import longer

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
from torch._subclasses import FakeTensorMode
from phalanx.launch.torch_warmup import leave_compiler_out, make_ready
from phalanx.config import Plan

REAL = torch.ones(2, 4)
make_ready(PLAN)
assert "_dynamo" not in vars(torch)
leave_compiler_out()
print([train(name) for name in NAMES])
assert torch._dynamo.utils.get_optimize_ddp_mode() == "ddp_optimizer"
with FakeTensorMode(allow_non_fake_inputs=True):
    assert torch.nn.functional.linear(torch.ones(3, 4), REAL).shape == (3, 2)
    assert torch.nn.functional.linear(torch.ones(3, 3), REAL[:, 1:]).shape == (3, 2)
assert isinstance(torch._dynamo.config.optimize_ddp, bool)
assert "torch._dynamo.eval_frame" not in sys.modules
ASK
assert "torch._dynamo.eval_frame" in sys.modules
assert torch._dynamo is sys.modules["torch._dynamo"]
assert torch._dynamo.source is sys.modules["torch._dynamo.source"]
assert torch._dynamo.utils.get_optimize_ddp_mode() == "ddp_optimizer"
assert torch.compile(lambda x: x + 1, backend="eager")(torch.ones(1)).item() == 2
print([train(name) for name in NAMES])
"""

NAMES = ["SGD", "AdamW", "Adagrad", "RMSprop"]


@pytest.fixture(scope="module")
def as_torch_does() -> list[list[float]]:
    scope: dict[str, object] = {}
    exec(TRAIN, scope)
    torch.set_num_threads(1)
    return [scope["train"](name) for name in NAMES]  # pyright: ignore[reportCallIssue]


ASKED = {  # what more than a worker needs is asked by: an attribute, a module, a name of a module held ready
    "dp=2": "torch._dynamo.reset",
    "tp=2": "import torch._dynamo.convert_frame",
    "pp=2": "from torch._dynamo.source import GlobalSource",
    "fsdp=2": "import torch._dynamo.guards",
}


@pytest.mark.parametrize("plan", ["dp=2", "fsdp=2", *longer("tp=2", "pp=2")])
def test_no_compiler_until_asked_for(as_torch_does: list[list[float]], plan: str) -> None:
    fresh = FRESH.replace("PLAN", f"Plan.parse({plan!r})").replace("ASK", ASKED[plan])
    code = f"NAMES = {NAMES!r}\n{TRAIN}\ntorch.set_num_threads(1)\n{fresh}"
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [repr(as_torch_does)] * 2


@pytest.mark.parametrize(
    ("plan", "module"),
    [
        ("dp=2 compile=true", "torch._dynamo"),
        ("fsdp=2", "torch.distributed.tensor"),
        ("pp=2", "phalanx.parallel.split"),
    ],
)
def test_workers_are_forked_with_what_their_plan_needs(plan: str, module: str) -> None:
    code = (
        "import sys; from phalanx.launch.torch_warmup import make_ready; from phalanx.config import Plan; "
        f"make_ready(Plan.parse({plan!r})); assert {module!r} in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=100)


def test_the_launcher_keeps_torch_as_it_is_and_its_workers_do_not() -> None:
    code = """
import sys
import torch
import phalanx as px
from phalanx.launch import launch, make_ready

make_ready(px.Plan(dp=2))
changed = launch(lambda place, report: "_dynamo" in vars(torch), 2)
assert changed == [True, True], changed
assert "_dynamo" not in vars(torch)
assert "torch._dynamo" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=100)


RUN = """
import sys
from dataclasses import replace
import phalanx as px
from phalanx.demo.jobs.gpt import gpt_job

job = gpt_job(layers=2, width=16, heads=2, context=8, batch=4, steps=2)

def loss(output, batch):
    assert "torch._dynamo.eval_frame" not in sys.modules, "the compiler is loaded"
    return job.loss(output, batch)

px.fit(replace(job, loss=loss), sys.argv[1])
"""


@pytest.mark.parametrize("plan", ["dp=2", "fsdp=2", "tp=2", "pp=2", "cp=2", "pp=2 fsdp=2 tp=2"])
def test_no_rank_of_a_run_loads_the_compiler(tmp_path: Path, plan: str) -> None:
    done = subprocess.run([sys.executable, "-c", RUN, plan], cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr


def test_torch_of_an_unknown_version_is_left_alone() -> None:
    code = """
import torch
torch.__version__ = "2.14.0"
from phalanx.launch.torch_warmup import leave_compiler_out
leave_compiler_out()
assert "_dynamo" not in vars(torch)
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=100)
