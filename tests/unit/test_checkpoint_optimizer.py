"""Three steps, a checkpoint, a fresh model and optimizer and three more steps equal six steps, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from law_rows import longer
from phalanx import checkpoint
from phalanx.errors import CheckpointError


@pytest.fixture(autouse=True)
def no_waiting_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.fsync", lambda handle: None)


class Nested(Optimizer):
    """State of every form: nested dicts, lists, tuples, None, flags and numbers, and a factored second moment."""

    def __init__(self, parameters, lr: float = 0.01) -> None:
        super().__init__(parameters, {"lr": lr, "window": (2, 3), "schedule": lambda step: 1.0})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    rows = torch.zeros(parameter.shape[:1])
                    state.update(step=0, warm=False, none=None, moments={"rows": rows, "pair": (rows.clone(), 0.5)})
                    state["history"] = []
                state["step"] += 1
                state["warm"] = state["step"] > 2
                rows = (
                    state["moments"]["rows"].mul_(0.9).add_(parameter.grad.reshape(len(parameter), -1).pow(2).mean(1))
                )
                before, rate = state["moments"]["pair"]
                state["moments"]["pair"] = (before.add(rows), rate * 0.9)
                state["history"] = [*state["history"], rows.clone()][-2:]
                scale = (sum(state["history"]) + before * rate).sqrt().add_(1e-8)
                parameter.sub_(group["lr"] * parameter.grad / scale.view(-1, *[1] * (parameter.ndim - 1)))


OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], Optimizer]] = {
    "sgd": lambda p: SGD(p, lr=0.1),
    "momentum": lambda p: SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=1e-2),
    "adamw": lambda p: AdamW(p, lr=1e-2),
    "adamw-foreach": lambda p: AdamW(p, lr=1e-2, foreach=True),
    "adamw-fused": lambda p: AdamW(p, lr=1e-2, fused=True),
    "adamw-tensor-lr": lambda p: AdamW(p, lr=torch.tensor(1e-2)),
    "amsgrad": lambda p: Adam(p, lr=1e-2, amsgrad=True),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=1e-2),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2),
    "adadelta": lambda p: torch.optim.Adadelta(p),
    "adamax": lambda p: torch.optim.Adamax(p),
    "asgd": lambda p: torch.optim.ASGD(p, t0=2),
    "nadam": lambda p: torch.optim.NAdam(p),
    "radam": lambda p: torch.optim.RAdam(p),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-2, centered=True, momentum=0.9),
    "rprop": lambda p: torch.optim.Rprop(p),
    "lbfgs": lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=3, history_size=4),
    "nested": lambda p: Nested(p),
}
EACH_TIME = ("momentum", "adamw-fused", "adamw-tensor-lr", "adafactor", "asgd", "lbfgs", "nested")


def model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))


def train(module: nn.Module, optimizer: Optimizer, first: int, last: int) -> None:
    for step in range(first, last):
        x = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))

        def closure(x=x):
            optimizer.zero_grad()
            loss = module(x).square().mean()
            loss.backward()
            return loss

        if isinstance(optimizer, torch.optim.LBFGS):
            optimizer.step(closure)
        else:
            closure()
            optimizer.step()


def save(folder: Path, module: nn.Module, optimizer: Optimizer) -> Path:
    tensors, state = checkpoint.optimizer_tensors(optimizer, dict(module.named_parameters()))
    tensors |= {f"model.{name}": value for name, value in module.state_dict().items()}
    return checkpoint.save(folder, step=3, tensors=tensors, state={"optimizer": state})


def restore(path: Path, module: nn.Module, optimizer: Optimizer) -> None:
    checkpoint.load(path, module.state_dict(prefix="model."))
    checkpoint.restore_optimizer(optimizer, dict(module.named_parameters()), path)


def scrambled() -> nn.Module:
    module = model()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_()
    return module


@pytest.mark.parametrize("name", [*EACH_TIME, *longer(*(name for name in OPTIMIZERS if name not in EACH_TIME))])
def test_goes_on_bit_for_bit(name: str, tmp_path: Path) -> None:
    straight, first, second = model(), model(), scrambled()
    make = OPTIMIZERS[name]
    train(straight, make(list(straight.parameters())), 0, 6)
    optimizer = make(list(first.parameters()))
    train(first, optimizer, 0, 3)
    path = save(tmp_path, first, optimizer)
    assert checkpoint.verify(path) == []
    again = make(list(second.parameters()))
    restore(path, second, again)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    train(second, again, 3, 6)
    for a, b in zip(straight.parameters(), second.parameters(), strict=True):
        assert torch.equal(a, b)


def test_no_state_yet_and_frozen_parameters(tmp_path: Path) -> None:
    module, other = model(), scrambled()
    module[0].requires_grad_(False)
    other[0].requires_grad_(False)
    optimizer = AdamW(module[2].parameters(), lr=0.3)
    path = save(tmp_path, module, optimizer)
    again = AdamW(other[2].parameters(), lr=0.1)
    train(other, again, 0, 1)
    restore(path, other, again)
    assert not again.state
    assert again.param_groups[0]["lr"] == 0.3


def groups(module: nn.Module, lr: float = 0.1, decay: float = 0.0) -> list[dict]:
    weights = [p for p in module.parameters() if p.ndim > 1]
    biases = [p for p in module.parameters() if p.ndim == 1]
    return [{"params": weights, "lr": lr, "weight_decay": decay}, {"params": biases, "lr": lr / 2}]


def test_groups_get_their_own_values_in_whatever_order(tmp_path: Path) -> None:
    module, other = model(), scrambled()
    optimizer = AdamW(groups(module, lr=0.1 + 0.2, decay=0.01), betas=(0.8, 0.95))
    train(module, optimizer, 0, 3)
    optimizer.param_groups[0]["initial_lr"] = 0.7
    path = save(tmp_path, module, optimizer)
    again = AdamW(groups(other)[::-1])
    restore(path, other, again)
    assert again.param_groups[1]["lr"] == 0.1 + 0.2
    assert again.param_groups[0]["lr"] == (0.1 + 0.2) / 2
    assert again.param_groups[1]["weight_decay"] == 0.01
    assert again.param_groups[1]["initial_lr"] == 0.7
    assert again.param_groups[0]["betas"] == (0.8, 0.95)


def test_tensor_lr_is_filled_in_place_and_own_choices_stay(tmp_path: Path) -> None:
    module, other = model(), scrambled()
    path = save(tmp_path, module, AdamW(module.parameters(), lr=torch.tensor(0.3), fused=True))
    rate = torch.tensor(0.1)
    again = AdamW(other.parameters(), lr=rate, amsgrad=True, foreach=False)
    restore(path, other, again)
    assert again.param_groups[0]["lr"] is rate
    assert rate == torch.tensor(0.3)
    assert again.param_groups[0]["foreach"] is False
    assert again.param_groups[0]["fused"] is None
    assert again.param_groups[0]["amsgrad"] is False
    plain = AdamW(other.parameters(), lr=0.1)
    restore(path, other, plain)
    assert plain.param_groups[0]["lr"] == torch.tensor(0.3).item()


class TestRefusals:
    def test_groups_of_other_names(self, tmp_path: Path) -> None:
        module = model()
        path = save(tmp_path, module, SGD(groups(module)))
        again = SGD(module.parameters(), lr=5.0)
        with pytest.raises(CheckpointError, match=r"0.bias, 0.weight, 2.bias"):
            restore(path, module, again)
        assert again.param_groups[0]["lr"] == 5.0
        part = SGD(module[0].parameters(), lr=5.0)
        with pytest.raises(CheckpointError, match=r"2.bias, 2.weight"):
            restore(path, module, part)

    def test_another_kind(self, tmp_path: Path) -> None:
        module = model()
        path = save(tmp_path, module, SGD(module.parameters(), lr=0.1))
        with pytest.raises(CheckpointError, match="AdamW"):
            restore(path, module, AdamW(module.parameters()))

    def test_what_is_neither_tensor_nor_json_is_named(self) -> None:
        module = model()
        optimizer = SGD(module.parameters(), lr=0.1)
        optimizer.param_groups[0]["where"] = Path("a")
        optimizer.param_groups[0]["many"] = torch.ones(2)
        optimizer.state[module[0].weight]["what"] = {1: 2}
        optimizer.state[module[0].bias]["who"] = {"x": [object()]}
        with pytest.raises(CheckpointError) as caught:
            checkpoint.optimizer_tensors(optimizer, dict(module.named_parameters()))
        text = str(caught.value)
        assert "group 0: PosixPath at where; group 0: Tensor at many" in text
        assert "state of 0.weight: a key of type int at what[1]" in text
        assert "state of 0.bias: object at who.x[0]" in text

    def test_nothing_saved(self, tmp_path: Path) -> None:
        module = model()
        path = checkpoint.save(tmp_path, step=1, tensors=module.state_dict(prefix="model."), state={})
        with pytest.raises(CheckpointError, match="holds no optimizer state"):
            restore(path, module, AdamW(module.parameters()))
