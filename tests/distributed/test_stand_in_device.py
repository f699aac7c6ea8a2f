"""A kind of device without a file in Phalanx: its plans compute what plain PyTorch computes on one device."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import phalanx as px
from longer import longer
from phalanx.device_kinds import registered
from phalanx.errors import RefusedError
from phalanx.train.build_model import build_model
from stand_in_kind import KIND, StandIn

SAMPLES, BATCH, STEPS = 44, 16, 5  # the third batch of an epoch has 12
PLANS = (
    *("dp=2 micro=3", "fsdp=2 zero=3", "tp=2 pp=2"),
    *longer("single micro=5", "threads=2", "fsdp=2 zero=1", "fsdp=2 zero=2", "dp=2 fsdp=2", "pp=2 micro=4"),
)


class Net(nn.Module):
    """A table of words, a residual block whose two products tp shares out, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(9, 8)
        self.body = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
        self.head = nn.Linear(8, 9)

    def forward(self, words: Tensor) -> Tensor:
        inside = self.table(words)
        return self.head(inside + self.body(inside))


def table() -> px.Table:
    generator = torch.Generator().manual_seed(3)
    words = torch.randint(9, (SAMPLES, 6), generator=generator)
    labels = torch.randint(9, (SAMPLES, 6), generator=generator)
    lengths = torch.randint(1, 7, (SAMPLES, 1), generator=generator)  # means of unlike counts would be seen
    return px.Table(words=words, labels=labels.masked_fill(torch.arange(6) >= lengths, -100))


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-2)


def job() -> px.Job:
    return px.Job(
        model=Net,
        data=table,
        inputs=lambda batch: batch["words"],
        loss=lambda output, batch: px.cross_entropy(output, batch["labels"]),
        optimizer=adamw,
        batch=BATCH,
        steps=STEPS,
        shuffle=False,
    )


@pytest.fixture(scope="module")
def by_hand() -> tuple[list[float], dict[str, Tensor]]:
    """Losses, and the trained values, of plain PyTorch."""
    net = Net()
    net.load_state_dict(build_model(job()).state_dict())
    whole = torch.utils.data.default_collate([table()[index] for index in range(SAMPLES)])
    optimizer, losses = adamw(net.parameters()), list[float]()
    for step in range(STEPS):
        here = slice(first := step % 3 * BATCH, first + BATCH)
        loss = F.cross_entropy(net(whole["words"][here]).flatten(0, 1), whole["labels"][here].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, net.state_dict()


@pytest.fixture
def stand_in() -> Iterator[StandIn]:
    with registered(KIND):
        yield KIND


def fit(plan: str, folder: Path, **how: Any) -> px.Run:
    run = px.RunSpec(job="words", plan=px.Plan.parse(plan), folder=folder, forecast="none", unproven=True)
    return px.fit(job(), run=run, **how)


@pytest.mark.parametrize("plan", PLANS)
def test_it_computes_what_one_device_computes(
    plan: str, stand_in: StandIn, by_hand: tuple[list[float], dict[str, Tensor]], tmp_path: Path
) -> None:
    run = fit(f"{plan} device=standin", tmp_path / "run")
    losses, values = by_hand
    assert [event["loss"] for event in run.events("step")] == pytest.approx(losses, rel=2e-5)
    for name, value in run.state_dict().items():
        torch.testing.assert_close(value, values[name], rtol=2e-4, atol=2e-5)
    assert [event["device"] for event in run.events("start")] == ["standin"]


@pytest.mark.parametrize("plan", ["fsdp=2 zero=3", *longer("dp=2", "tp=2", "pp=2 micro=4")])
def test_an_accelerator_that_torch_calls_by_another_name(
    plan: str, by_hand: tuple[list[float], dict[str, Tensor]], tmp_path: Path
) -> None:
    """It is counted, forecast and followed as an accelerator is, a step late."""
    beside = type("Beside", (StandIn,), {"on_host": False})()
    with registered(beside):
        run = px.fit(job(), f"{plan} device=standin", folder=tmp_path / "run", unproven=True)
    losses, values = by_hand
    assert [event["loss"] for event in run.events("step")] == pytest.approx(losses, rel=2e-5)
    for name, value in run.state_dict().items():
        torch.testing.assert_close(value, values[name], rtol=2e-4, atol=2e-5)
    assert [event["device"] for event in run.events("start")] == ["standin"]


def test_its_processes_are_told_which_device_is_theirs(
    tmp_path: Path, by_hand: tuple[list[float], dict[str, Tensor]]
) -> None:
    class Told(StandIn):
        def use(self, device: torch.device) -> None:
            (tmp_path / f"{os.getpid()}.told").write_text(str(device))

    with registered(Told()):
        run = fit("dp=2 device=standin", tmp_path / "run")
    assert [event["loss"] for event in run.events("step")] == pytest.approx(by_hand[0], rel=2e-5)
    assert [path.read_text() for path in tmp_path.glob("*.told")] == ["cpu", "cpu"]


def test_another_kind_of_device_than_the_plans_is_not_taken(stand_in: StandIn, tmp_path: Path) -> None:
    run = fit("dp=2", tmp_path / "run")
    assert [event["device"] for event in run.events("start")] != ["standin"]


def test_a_proof_runs_on_it(stand_in: StandIn) -> None:
    assert px.prove(job(), "dp=2 device=standin", steps=2).equal


@pytest.mark.parametrize("changed", [{"most": 1}, {"forks": False}, {"precisions": ("fp32",)}])
def test_what_a_kind_cannot_is_refused_before_a_folder_is_made(changed: dict[str, Any], tmp_path: Path) -> None:
    kind = type("Limited", (StandIn,), {"on_host": False, **changed})()
    with registered(kind), pytest.raises(RefusedError) as caught:
        fit("dp=2 device=standin precision=bf16", tmp_path / "run")
    text = str(caught.value)
    assert "stand-in devices" in text
    assert not (tmp_path / "run").exists()


PACKAGE = """
import os
from stand_in_kind import StandIn

class Elsewhere(StandIn):
    forks = False

    def before_workers(self, machines, workers):
        os.environ["STAND_IN_WORKERS"] = f"{machines} {workers}"

    def device(self, index):
        assert os.environ["STAND_IN_WORKERS"] == "1 2", "nobody got this process ready"
        return super().device(index)

KIND = Elsewhere()
"""
JOB = """
import torch
import phalanx as px

def job():
    return px.Job(
        model=lambda: torch.nn.Linear(4, 3),
        data=lambda: px.Table(x=torch.arange(64.0).view(16, 4) / 64, y=torch.arange(16) % 3),
        inputs=lambda batch: batch["x"],
        loss=lambda output, batch: px.cross_entropy(output, batch["y"]),
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        batch=8,
        steps=3,
    )
"""


def test_an_installed_package_brings_a_kind_to_every_process(tmp_path: Path) -> None:
    """Its workers are processes of their own: they find it as the command does, and are got ready by it."""
    (tmp_path / "stand_in_package.py").write_text(PACKAGE)
    info = tmp_path / "stand_in_package-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: stand-in-package\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[phalanx.device_kinds]\nstandin = stand_in_package:KIND\n")
    (tmp_path / "job.py").write_text(textwrap.dedent(JOB))
    there = os.pathsep.join([str(tmp_path), str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    plan = ["--plan", "dp=2 device=standin"]

    def command(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "phalanx", "train", "job.py", *plan, *words],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": there},
            capture_output=True,
            text=True,
            check=False,
        )

    refused = command("--run", "forked")
    assert (refused.returncode, (tmp_path / "forked").exists()) == (2, False), refused.stderr
    assert "torchrun" in refused.stderr
    done = command("--run", "started", "--launcher", "torchrun", "--unproven")
    assert done.returncode == 0, done.stderr
    run = px.load(tmp_path / "started")
    assert [event["device"] for event in run.events("start")] == ["standin"]
