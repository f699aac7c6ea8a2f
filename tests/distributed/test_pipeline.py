"""The law of pipelines: whatever the model, the schedule and the ranks, losses and gradients are one process's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from phalanx.comm import Mesh, Place, default_process_group
from phalanx.config import Plan
from phalanx.config.plan import Schedule
from phalanx.demo.jobs.gpt import GPT, Size
from phalanx.launch.local import launch
from phalanx.parallel import Example, MicroBatchWork
from phalanx.parallel.local_shards import Axis, Cut, Placed, Sliced, is_sliced
from phalanx.parallel.pipeline import PipelineRunner, cut, messages
from phalanx.parallel.pipeline.messages import Parcels

CPU = torch.device("cpu")
SCHEDULES: tuple[Schedule, ...] = ("gpipe", "1f1b", "interleaved", "zero-bubble", "zbv", "dualpipev")
Micro = tuple[tuple[Any, ...], dict[str, Any]]


class Squares(MicroBatchWork):
    """A loss of any output: the squares of its first tensor; keeps the losses."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def forward(self, module: nn.Module, device: torch.device, micro: Micro) -> Any:
        args, kwargs = micro
        return module(*args, **kwargs)

    def loss(self, output: Any, device: torch.device, micro: Micro, last: bool) -> Tensor:
        value = first(output).float().square().mean()
        self.losses.append(value.item())
        return value


def first(output: Any) -> Tensor:
    output = getattr(output, "logits", output)
    return output if isinstance(output, Tensor) else output[0]


@dataclass(kw_only=True)
class Result:
    """What a rank found."""

    losses: list[float]
    wrong: list[str]
    grads: list[str]
    stages: list[list[str]]
    tied: dict[str, list[int]]
    events: list[list[Any]]


@dataclass(frozen=True)
class Alone:
    """What one process found."""

    losses: list[float]
    grads: dict[str, Tensor]
    outputs: list[Tensor]


def piped(make: Callable[[], nn.Module], micros: list[Micro], plans: list[Plan], **how: Any) -> list[list[Result]]:
    """Results by plan, then by rank, from workers started once."""

    def work(place: Place, report: Callable[[int], None]) -> list[dict[str, Any]]:
        return [under(plan, place) for plan in plans]

    def under(plan: Plan, place: Place) -> dict[str, Any]:
        with default_process_group(place, CPU):
            expected = alone(make, micros)  # here: some builds of torch cannot fork once they have run backward
            module = seeded(make)
            events: list[list[Any]] = []
            pipeline = cut(module, example(micros), plan)
            runner = PipelineRunner(pipeline, Mesh(plan, place.rank), CPU, **how)
            runner.on_event = lambda kind, stage, micro, begin, end: events.append([kind, stage, micro])
            squares = Squares()
            runner.run(micros, squares)
            names = dict(module.named_parameters())
            wrong = [] if list(names) == pipeline.owned(place.rank) else [f"holds {list(names)}"]
            grads = [name for name, tensor in names.items() if tensor.grad is not None]
            if squares.losses and squares.losses != pytest.approx(expected.losses, abs=1e-6):
                wrong.append(f"losses are {squares.losses}, not {expected.losses}")
            wrong += [f"{name} has a gradient" for name in grads if name not in expected.grads]
            for name, whole in expected.grads.items():
                grad = names[name].grad if name in grads else None
                added = torch.zeros_like(whole) if grad is None else grad.clone()
                dist.all_reduce(added)  # of a tied parameter each stage has a part
                if not torch.allclose(added, whole, atol=1e-6, rtol=1e-5):
                    wrong.append(f"gradient of {name} is off by {float((added - whole).abs().max()):.1g}")
            module.eval()
            for output, whole in zip(runner.evaluate(micros, squares), expected.outputs, strict=False):
                if not torch.allclose(first(output), whole, atol=1e-6):
                    wrong.append("an evaluated output differs")
            stages = [pipeline.names(stage) for stage in runner.stages_here]
            found = Result(
                losses=squares.losses, wrong=wrong, grads=grads, stages=stages, tied=pipeline.tied, events=events
            )
            return vars(found)

    ranks = launch(work, plans[0].pp)
    return [[Result(**rank[at]) for rank in ranks] for at in range(len(plans))]


def example(micros: list[Micro]) -> Example:
    return Example(args=micros[0][0], kwargs=micros[0][1], batch=None, loss=lambda output, _: output)


def seeded(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(1)
    return make().train()


def alone(make: Callable[[], nn.Module], micros: list[Micro]) -> Alone:
    module, squares = seeded(make), Squares()
    for micro in micros:
        squares.run(module, CPU, micro, False)
    grads = {name: one.grad for name, one in module.named_parameters() if one.grad is not None}
    module.eval()
    with torch.no_grad():
        outputs = [first(squares.forward(module, CPU, micro)) for micro in micros]
    return Alone(squares.losses, grads, outputs)


def assert_same(make: Callable[[], nn.Module], micros: list[Micro], *plans: Plan, **how: Any) -> list[Result]:
    """Losses, gradients and outputs of the plans are those of one process; the results of the last plan."""
    each = piped(make, micros, list(plans), **how)
    for plan, results in zip(plans, each, strict=True):
        assert [one.wrong for one in results] == [[]] * plan.pp, plan
        assert [len(one.losses) for one in results if one.losses] == [len(micros)]
    return each[-1]


def text(samples: int, length: int) -> Tensor:
    return torch.randint(50, (samples, length))


def texts(count: int) -> list[Micro]:
    """Micro-batches of different sizes, padded."""
    torch.manual_seed(2)
    found: list[Micro] = []
    for index in range(count):
        ids = text(2 if index + 1 < count else 1, 6 if index == 1 else 8)
        mask = torch.ones_like(ids)
        mask[0, 4:] = 0
        found.append(((), {"input_ids": ids, "attention_mask": mask}))
    return found


def inputs(count: int, *shape: int) -> list[Micro]:
    torch.manual_seed(2)
    return [((torch.randn(2 if index + 1 < count else 1, *shape),), {}) for index in range(count)]


def gpt() -> nn.Module:
    return GPT(Size(layers=6, width=16, heads=2, context=8))


def gpt2() -> nn.Module:
    import transformers

    none = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
    config = transformers.GPT2Config(
        vocab_size=50, n_embd=16, n_layer=4, n_head=2, n_positions=16, bos_token_id=1, eos_token_id=1, **none
    )
    return transformers.GPT2LMHeadModel(config)


class Changing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Adding() for _ in range(5))
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = x.clone()
        for index, layer in enumerate(self.layers):
            if index % 2:
                layer(x)
            else:
                x = layer(x)
        return self.head(x)


class Adding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x += torch.tanh(self.linear(x.clone()))
        return x


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], list[Micro]]]] = {
    "gpt": (gpt, lambda count: [((text(2 if i + 1 < count else 1, 8),), {}) for i in range(count)]),
    "gpt2": (gpt2, texts),
    "changing": (Changing, lambda count: inputs(count, 4, 8)),
}


def test_every_schedule_equals_one_process() -> None:
    make, micros = MODELS["gpt"]
    assert_same(make, micros(3), *(Plan(pp=2, schedule=schedule) for schedule in SCHEDULES))
    assert_same(make, micros(1), Plan(pp=2, schedule="zbv"))  # fewer than stages


def test_blocks_that_write_into_what_they_are_called_with() -> None:
    make, micros = MODELS["changing"]
    assert_same(make, micros(3), Plan(pp=2))


def test_a_model_of_three_stages_a_rank() -> None:
    make, micros = MODELS["gpt"]
    results = assert_same(make, micros(2), Plan(pp=2, schedule="interleaved", stages=3))
    assert [len(one.stages) for one in results] == [3, 3]


def test_tied_parameters_are_on_each_stage_that_uses_them() -> None:
    make, micros = MODELS["gpt2"]
    first, last = assert_same(make, micros(2), Plan(pp=2))
    assert first.tied == last.tied == {"transformer.wte.weight": [0, 1]}
    assert "transformer.wte.weight" in first.grads
    assert "transformer.wte.weight" in last.grads


def test_messages_in_one_order_where_there_are_no_tags(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(messages, "wants_order", lambda *_: True)
    make, micros = MODELS["gpt"]
    assert_same(make, micros(4), Plan(pp=2, schedule="dualpipev"))


def test_slices_pass_as_slices() -> None:
    axis = Axis("cp", size=2, rank=1, group=None, sums=True)
    cut_in_two = Cut.zigzag(8, 2)
    whole, part = torch.randn(2, 3), Sliced(torch.randn(2, 4, 3), [Placed(axis, 1, cut_in_two)])
    sender, receiver = Parcels(), Parcels()
    sender.axes = receiver.axes = {"cp": axis}
    fakes = [torch.empty(2, 3, device="meta"), torch.empty(2, 8, 3, device="meta")]
    travels, told = sender.packed(1, [whole, part])
    assert told is not None
    assert receiver.unknown(1, fakes)
    receiver.learn(1, fakes, told)
    assert [tuple(one.shape) for one in receiver.sizes(1, fakes)] == [(2, 3), (2, 4, 3)]
    one, two = receiver.unpacked(1, fakes, travels)
    assert one is whole
    assert is_sliced(two)
    assert two.placed == part.placed
    assert axis.length == 8
    assert sender.packed(1, [whole, part])[1] is None


class Dropping(nn.Module):
    """Equal layers that drop out, and a mask drawn at the beginning and used at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        mask = torch.rand_like(x) < 0.5
        for layer in self.layers:
            x = layer(F.dropout(x, 0.5))
        return x * mask, mask


def test_random_numbers_are_drawn_once_and_differ_between_stages() -> None:
    plan, micros = Plan(pp=2), inputs(1, 64)

    def work(place: Place, report: Callable[[int], None]) -> list[list[bool]]:
        with default_process_group(place, CPU):
            module = seeded(Dropping)
            runner = PipelineRunner(cut(module, example(micros), plan), Mesh(plan, place.rank), CPU)
            zeros: list[list[bool]] = []
            for layer in module.get_submodule("layers").children():
                layer.register_forward_pre_hook(lambda layer, args: zeros.append((args[0] == 0).flatten().tolist()))
            torch.manual_seed(5)
            runner.run(micros, Masked(zeros))
            return zeros

    *dropped, mask = [one for rank in launch(work, 2) for one in rank]
    torch.manual_seed(5)
    assert mask == (torch.rand(1, 64) < 0.5).flatten().tolist()
    assert len({tuple(one) for one in dropped}) == 4


class Masked(Squares):
    def __init__(self, masks: list[list[bool]]) -> None:
        super().__init__()
        self.masks = masks

    def loss(self, output: Any, device: torch.device, micro: Micro, last: bool) -> Tensor:
        self.masks.append(output[1].flatten().tolist())
        return super().loss(output, device, micro, last)
