"""Stages that replay their operations do what the model's own code would do, also where that code changes its mind."""

from __future__ import annotations

import copy
import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from law_rows import in_one_test
from phalanx.config import Plan
from phalanx.parallel import Example
from phalanx.parallel.pipeline import cut
from phalanx.parallel.pipeline.stage import Stage

CPU = torch.device("cpu")
WIDTH, RUNS = 8, 12
SCALES = {"all": 1.0}


class Settings:
    def __init__(self) -> None:
        self.scales = [1.0, 1.0, 1.0, 1.0]


class Layers(nn.Module):
    """Four layers with some code of the model's own between them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        for index, layer in enumerate(self.layers):
            x = self.between(index, layer(x), mask)
        return x

    def between(self, index: int, x: Tensor, mask: Tensor | None) -> Tensor:
        return torch.relu(x)


def layered(between: Callable[..., Tensor], **own: Any) -> Callable[[], Layers]:
    """Layers with other code between them, and attributes of their own."""
    kind = type("Made", (Layers,), {"between": between, "scale": 1.0})

    def make() -> Layers:
        model = kind()
        vars(model).update(copy.deepcopy(own))
        return model

    return make


def counting(self: Any, index: int, x: Tensor, mask: Tensor | None) -> Tensor:
    self.count += index == 0
    return x * self.count


def masking(self: Any, index: int, x: Tensor, mask: Any) -> Tensor:
    """As transformers' models leave a mask out that hides nothing."""
    return torch.relu(x) if mask.all() else x * mask


def in_place(self: Any, index: int, x: Tensor, mask: Tensor | None) -> Tensor:
    x = x.clone()
    x[:, 0] += 1.0
    return x.mul_(2.0)


def shaped_by_values(self: Any, index: int, x: Tensor, mask: Any) -> Tensor:
    """The last values are divided by the number of rows that the mask leaves."""
    return x if index < 3 or mask is None else x / max(mask[mask[:, 0].bool()].shape[0], 1)


SCALED = layered(lambda self, index, x, mask: x * self.scale)
BY_GLOBAL = layered(lambda self, index, x, mask: x * SCALES["all"])
BY_SETTINGS = layered(lambda self, index, x, mask: x * self.settings.scales[index], settings=Settings())
DROPPING = layered(lambda self, index, x, mask: F.dropout(x, 0.5, training=self.training))


class Remembering(Layers):
    """Counts in a buffer, and scales by what it has counted."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def between(self, index: int, x: Tensor, mask: Tensor | None) -> Tensor:
        if index == 3:
            self.seen += 1
        return x * (1 + self.seen)


class Recomputed(Layers):
    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return x


class Averaging(nn.Module):
    """A layer that keeps a running mean, as normalisation does."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))
        self.register_buffer("mean", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.mean.copy_(x.detach().mean())
        return x * self.weight


class ReadsUnits(Layers):
    """Reads what its layers have written into their buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Averaging() for _ in range(4))

    def between(self, index: int, x: Tensor, mask: Tensor | None) -> Tensor:
        return x if index < 3 else x - self.layers[3].get_buffer("mean") * 1.0


CALLS = itertools.count()  # which nobody compares, as it is no value


class Told(Layers):
    def between(self, index: int, x: Tensor, mask: Tensor | None) -> Tensor:
        next(CALLS)
        return torch.relu(x)


def stages(model: nn.Module, args: tuple[Any, ...], count: int) -> tuple[list[Stage], list[nn.Module]]:
    """All stages of the model, each with a copy of it, in this one process."""
    found, modules = [], []
    for rank in range(count):
        module = copy.deepcopy(model)
        example = Example(args=args, kwargs={}, batch=None, loss=lambda output, _: output)
        found += cut(module, example, Plan(pp=count)).keep(rank, CPU)
        modules.append(module)
    return found, modules


def ran(found: list[Stage], args: tuple[Any, ...]) -> tuple[Tensor, list[Tensor]]:
    """The output of one run over all stages, and the gradients of their parameters."""
    values: Any = []
    for stage in found:
        torch.manual_seed(7)
        stage.receive = lambda fakes, values=values: values
        values = stage(*args)
    for stage in found:
        for tensor in stage.program.module.parameters():
            tensor.grad = None
    values.square().sum().backward()
    return values.detach(), [
        tensor.grad.clone()
        for stage in found
        for tensor in stage.program.module.parameters()
        if tensor.grad is not None
    ]


def masks(run: int) -> Tensor:
    mask = torch.ones(3, 1)
    mask[run % 3] = float(run % 2)
    return mask


def replayed(found: list[Stage]) -> list[bool]:
    return [bool(stage._tapes._ready) for stage in found]


def plain(self: Layers, index: int, x: Tensor, mask: Tensor | None) -> Tensor:
    return torch.relu(x)


def bounded(self: Layers, index: int, x: Tensor, mask: Tensor | None) -> Tensor:
    return torch.tanh(x)


@in_one_test(
    ("kind", "change", "replays"),
    [
        (Layers, None, True),
        (SCALED, lambda model, run: setattr(model, "scale", 1.0 + run // 3), True),
        (SCALED, lambda model, run: setattr(type(model), "scale", 1.0 + run // 3), True),
        (BY_GLOBAL, lambda model, run: SCALES.update(all=1.0 + run // 3), True),
        (BY_SETTINGS, lambda model, run: model.settings.scales.__setitem__(3, 1.0 + run // 3), True),
        (Layers, lambda model, run: setattr(Layers, "between", (plain, bounded)[run // 3 % 2]), True),
        (layered(counting, count=0), None, False),
        (layered(lambda self, index, x, mask: x * random.random()), lambda model, run: random.seed(run), False),
        (layered(masking), None, True),
        (DROPPING, None, True),
        (DROPPING, lambda model, run: model.train(run % 2 == 0), True),
        (layered(in_place), None, True),
        (Remembering, None, True),
        (ReadsUnits, None, True),
        (Recomputed, None, False),
        (layered(shaped_by_values), None, (True, False)),
    ],
)
def test_replays_are_what_the_models_code_does(
    kind: Callable[[], nn.Module],
    change: Callable[[Any, int], object] | None,
    replays: bool | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Layers, "between", plain)
    monkeypatch.setitem(SCALES, "all", 1.0)
    torch.manual_seed(1)
    model = kind()
    inputs = [(torch.randn(3, WIDTH), masks(run)) for run in range(RUNS)]
    replaying, modules = stages(model, inputs[0], 2)
    following, others = stages(model, inputs[0], 2)
    for stage in following:  # which never records
        monkeypatch.setattr(stage._tapes, "recorder", lambda *_, **__: None)
    for run, args in enumerate(inputs):
        for module in (*modules, *others):
            if change is not None:
                change(module, run)
        state = random.getstate()
        output, grads = ran(replaying, args)
        random.setstate(state)
        expected, its = ran(following, args)
        assert torch.equal(output, expected), run
        assert all(map(torch.equal, grads, its)), run
    wanted = list(replays if isinstance(replays, tuple) else (replays, replays))
    assert replayed(replaying) == wanted, [stage._tapes.trouble for stage in replaying]
    assert replayed(following) == [False, False]


def test_hooks_that_come_later_are_called() -> None:
    model = Layers()
    args = (torch.randn(3, WIDTH), None)
    found, modules = stages(model, args, 2)
    for _ in range(4):
        ran(found, args)
    assert replayed(found) == [True, True]
    called: list[str] = []
    modules[0].get_submodule("layers.0").register_forward_hook(lambda *_: called.append("unit"))
    modules[0].register_forward_hook(lambda *_: called.append("model"))
    ran(found, args)
    assert called == ["unit", "model"]


def test_the_models_code_is_not_run_again() -> None:
    model, args = Told(), (torch.randn(3, WIDTH), None)
    found, _ = stages(model, args, 2)
    for _ in range(3):
        ran(found, args)
    before = next(CALLS)
    ran(found, args)
    assert next(CALLS) == before + 1
