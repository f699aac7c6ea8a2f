"""What a plan would train otherwise than one device, unseen by any look at the job, stops the run in its first step."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import small
import torch
import torch.distributed as dist
from small import LENGTH, Blocks, Net, Normal
from torch import Tensor, nn

from phalanx.errors import WorkerError
from phalanx.launch import first_step


class Clamped(Net):
    """Clamps gradients of activations on their way back."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.layers[0](x)
        if hidden.requires_grad:
            hidden.register_hook(lambda grad: grad.clamp(-1e-3, 1e-3))
        return self.head(torch.relu(self.layers[2](torch.relu(self.layers[1](torch.relu(hidden))))))


class Weighed(Blocks):
    """Adds the norm of all weights to the output."""

    def forward(self, x: Tensor) -> Tensor:
        norm = torch.stack([one.square().sum() for one in self.parameters()]).sum().sqrt()
        return super().forward(x) * norm


class Listed(Blocks):
    """Keeps what blocks give by forward hooks, and scales the output by it."""

    def __init__(self) -> None:
        super().__init__(4)
        self.kept: list[Tensor] = []
        for block in self.layers:
            block.register_forward_hook(lambda module, given, output: self.kept.append(output))

    def forward(self, x: Tensor) -> Tensor:
        self.kept.clear()
        return super().forward(x) * torch.stack(self.kept).square().sum((0, 2))[:, None]


class Table(nn.Module):
    """Brings rows of a table to a norm in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(40, 9, max_norm=0.5), nn.Linear(9, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.table((x.abs() * 13).long() % 40).mean(1))


class Remembering(Net):
    """Keeps the mean of what it is given, and does not use it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(9))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.mean = x.detach().mean(0)
        return super().forward(x)


class Normed(torch.optim.SGD):
    """Divides by the norm of all gradients that it has."""

    def step(self, closure: Any = None) -> Any:
        grads = [one.grad for group in self.param_groups for one in group["params"] if one.grad is not None]
        norm = torch.stack([grad.square().sum() for grad in grads]).sum().sqrt()
        for grad in grads:
            grad.div_(norm)
        return super().step(closure)


class OfRank(torch.utils.data.Dataset[Any]):
    """Every second row, from that of this rank on, as scripts for DDP cut their data."""

    def __init__(self) -> None:
        self.rows = small.table()

    def __len__(self) -> int:
        return LENGTH // 2

    def __getitem__(self, index: int) -> Any:
        return self.rows[2 * index + (dist.get_rank() if dist.is_initialized() else 0)]


class Dropping(Net):
    """Drops, in a layer of its own and in a recurrent one."""

    def __init__(self) -> None:
        super().__init__()
        self.layers.append(nn.Dropout(0.5))
        self.rnn = nn.LSTM(9, 9, num_layers=2, dropout=0.5)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.rnn(x[None])[0][0])


class Complex(Net):
    """Has complex weights, as Fourier layers do."""

    def __init__(self) -> None:
        super().__init__()
        self.turned = nn.Parameter(torch.ones(9, dtype=torch.complex64))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return super().forward((torch.fft.fft(x) * self.turned).real + y[:, None])


class Adapter(nn.Module):
    """Names a part of what the model in it takes, and hands on the rest."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Complex()

    def forward(self, x: Tensor, **rest: Tensor) -> Tensor:
        return self.inner(x, **rest)


class Counting(Net):
    """Weighs what it gives by how often it was called, as annealing does."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x) * (1 + self.calls / 10)


class Scaled(Blocks):
    """Has parameters of no dimension, one of them frozen and one in a block."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.tensor(1.5)), nn.Parameter(torch.tensor(0.5), requires_grad=False)
        self.layers[0].gate = nn.Parameter(torch.tensor(2.0))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * self.layers[0].gate) * self.scale + self.shift


OVER_ALL = partial(Normed, lr=0.1)
ANOTHER = r"sample \d+ on rank [01] is another one"
SILENT: dict[str, tuple[Callable[[], nn.Module], str, str, dict[str, Any]]] = {
    "gradients clamped in backward": (Clamped, "dp=2", "gradients do not grow with the loss", {}),
    "a count of calls": (Counting, "dp=2 micro=4", "forward changes calls, which ranks", {}),
    "the norm of all weights": (Weighed, "tp=2", "weights or features that are in parts", {}),
    "forward hooks of blocks": (Listed, "pp=2", "forward changes kept, which ranks", {}),
    "a table brought to a norm": (Table, "dp=2", "forward changes table.weight, which ranks", {}),
    "an optimizer over all": (Net, "pp=2", "a number of all", {"optimizer": OVER_ALL}),
    "an optimizer beside BatchNorm": (Normal, "pp=2 micro=4", "same micro-batches", {"optimizer": OVER_ALL}),
    "data cut by rank": (Net, "dp=2", ANOTHER, {"data": OfRank}),
    "data of now": (Blocks, "tp=2 precision=bf16", ANOTHER, {"data": lambda: small.table(seed=time.time_ns())}),
}


@pytest.mark.parametrize("kind", SILENT)
def test_what_no_look_finds_stops_the_run(kind: str, tmp_path: Path) -> None:
    model, plan, cause, how = SILENT[kind]
    with pytest.raises(WorkerError, match="the first step differs from one device") as stopped:
        small.fit(plan, tmp_path / "run", model=model, **how)
    assert re.search(cause, str(stopped.value))
    assert f'px.prove(job, "{plan}")' in str(stopped.value)
    assert not list((tmp_path / "run" / "checkpoints").glob("step-*"))


@pytest.mark.parametrize(
    ("model", "plan"),
    [
        *((Dropping, "dp=2 micro=8"), (Normal, "fsdp=2 zero=2"), (Blocks, "tp=2 precision=bf16"), (Blocks, "micro=4")),
        *((Adapter, "dp=2"), (Scaled, "fsdp=2"), (Normal, "dp=2 micro=4"), (Normal, "pp=2 micro=4")),
    ],
)
def test_sound_plans_equal_one_device(model: Callable[[], nn.Module], plan: str, tmp_path: Path) -> None:
    how: dict[str, Any] = {"batch_statistics": "global"} if plan == "fsdp=2 zero=2" else {}
    run = small.fit(plan, tmp_path / "run", model=model, epochs=None, steps=2, clip=0.5, **how)
    (told,) = run.events("check")
    assert told["equal"] is True, told["message"]
    same = " that takes the same micro-batches" if model is Normal and not how else ""
    found = re.fullmatch(rf"first step equals one device{same} \(gradients to (.*), allowed (.*)\)", told["message"])
    assert found
    assert float(found[1]) < float(found[2]) < (0.3 if "bf16" in plan else 1e-4)


def test_a_known_difference_is_said_and_trained(tmp_path: Path) -> None:
    (told,) = small.fit("dp=2", tmp_path / "run", model=Remembering).events("check")
    assert told["equal"] is False
    assert "first step differs from one device" in told["message"]


def test_a_large_model_is_not_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(first_step, "LARGEST", 10)
    (told,) = small.fit("dp=2", tmp_path / "run", epochs=None, steps=2).events("check")
    assert told["equal"] is None
    assert "more than 10 parameters; phalanx prove --small" in told["message"]
    (told,) = small.fit("dp=2 sync=local every=2", tmp_path / "two", epochs=None, steps=2).events("check")
    assert "no step of the plan is one device's" in told["message"]
