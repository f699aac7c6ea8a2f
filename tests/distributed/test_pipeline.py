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

from longer import longer
from phalanx.comm import Mesh, Place, default_process_group
from phalanx.config import Plan
from phalanx.config.plan import Schedule
from phalanx.demo.jobs.gpt import GPT, Size
from phalanx.launch import launch
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


def t5() -> nn.Module:
    import transformers

    config = transformers.T5Config(
        vocab_size=50,
        d_model=16,
        d_kv=8,
        d_ff=32,
        num_layers=2,
        num_heads=2,
        dropout_rate=0.0,
        decoder_start_token_id=0,
    )
    return transformers.T5ForConditionalGeneration(config)


def convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.ReLU(inplace=True),
        nn.BatchNorm2d(8),
        nn.ReLU(inplace=True),
        nn.Conv2d(8, 8, 3, padding=1, stride=2),
        nn.GroupNorm(2, 8),
        nn.ReLU(inplace=True),
        nn.Conv2d(8, 8, 3),
        nn.Flatten(),
        nn.Linear(32, 16),
        nn.ReLU(inplace=True),
        nn.Linear(16, 4),
    )


class Irregular(nn.Module):
    """Branches, a module called twice, skips over several stages, parameters of its own, writing in place, lists."""

    def __init__(self) -> None:
        super().__init__()
        self.start = nn.Parameter(torch.randn(1, 1, 8))
        self.scale = nn.Parameter(torch.ones(8))
        self.left = nn.Linear(8, 8)
        self.right = nn.GRU(8, 8, batch_first=True)
        self.shared = nn.Linear(8, 8)
        self.middle = nn.Sequential(nn.Linear(16, 8), nn.LayerNorm(8))
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.low = nn.Linear(8, 2)
        self.high = nn.Linear(2, 8)
        self.pair = Pair()
        self.head = nn.Linear(8, 3)
        self.register_buffer("positions", torch.linspace(-1, 1, 8))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        x = x + self.positions * x.shape[0]
        kept = [x]
        padded = torch.zeros(x.shape[0], x.shape[1] + 1, 8)
        padded[:, :1] = self.start
        left = self.left(x)
        padded[:, 1:] = left
        right, last = self.right(padded)
        kept.append(right[:, 1:])
        x = self.shared(left) * self.scale
        x += kept[1]
        both = torch.cat([x, last[0].unsqueeze(1).expand_as(x)], -1)
        x = self.middle(both)
        x = x.add_(self.frozen(kept[0]))
        x = self.high(F.relu(self.low(x), inplace=True))
        skip = {"sum": x + self.shared(x)}
        one, two = self.pair(x, skip["sum"])
        out = self.head(one + two * self.scale + kept[1].mean(1, keepdim=True))
        return out, one.detach().argmax(-1), left


class Pair(nn.Module):
    """Gives one of its inputs back as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return self.linear(x), y


class Changing(nn.Module):
    """Blocks that write into what they are called with."""

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
    "t5": (
        t5,
        lambda count: [
            (args, {**given, "decoder_input_ids": given["input_ids"][:, :5]}) for args, given in texts(count)
        ],
    ),
    "convolutions": (convolutions, lambda count: inputs(count, 3, 8, 8)),
    "irregular": (Irregular, lambda count: inputs(count, 4, 8)),
    "changing": (Changing, lambda count: inputs(count, 4, 8)),
}


@pytest.fixture(scope="module", autouse=True)
def _warm() -> None:
    """What fakes import is imported here once, not by every worker."""
    plan = Plan(pp=2)
    micros = inputs(1, 3, 8, 8)
    cut(convolutions(), example(micros), plan)


@pytest.mark.parametrize("model", ["gpt", "irregular"])
def test_every_schedule_equals_one_process(model: str) -> None:
    make, micros = MODELS[model]
    plans = [Plan(pp=2, schedule=schedule) for schedule in SCHEDULES]
    assert_same(make, micros(5 if model == "gpt" else 3), *plans)


@pytest.mark.parametrize(
    ("model", "schedule"), [("gpt", "dualpipev"), ("convolutions", "gpipe"), *longer(("irregular", "1f1b"))]
)
def test_four_ranks(model: str, schedule: Schedule) -> None:
    make, micros = MODELS[model]
    assert_same(make, micros(3), Plan(pp=4, schedule=schedule))


@pytest.mark.parametrize("model", ["t5", "changing", *longer("gpt2", "convolutions")])
def test_models_of_all_kinds(model: str) -> None:
    make, micros = MODELS[model]
    assert_same(make, micros(3), Plan(pp=2))


def test_a_model_of_three_stages_a_rank() -> None:
    make, micros = MODELS["irregular"]
    results = assert_same(make, micros(2), Plan(pp=2, schedule="interleaved", stages=3))
    assert [len(one.stages) for one in results] == [3, 3]


def test_fewer_micro_batches_than_stages() -> None:
    make, micros = MODELS["gpt"]
    assert_same(make, micros(1), Plan(pp=2), Plan(pp=2, schedule="zbv"))


def test_tied_parameters_are_on_each_stage_that_uses_them() -> None:
    make, micros = MODELS["gpt2"]
    first, last = assert_same(make, micros(2), Plan(pp=2))
    assert first.tied == last.tied == {"transformer.wte.weight": [0, 1]}
    assert "transformer.wte.weight" in first.grads
    assert "transformer.wte.weight" in last.grads


def test_stages_begin_where_the_plan_says() -> None:
    make, micros = MODELS["gpt"]
    first, last = assert_same(make, micros(2), Plan(pp=2, split="blocks.1"))
    assert first.stages == [["token", "position", "blocks.0"]]
    assert last.stages[0][0] == "blocks.1"


def test_whole_backwards_where_halves_are_not_wanted() -> None:
    make, micros = MODELS["gpt"]
    assert_same(make, micros(3), Plan(pp=2, schedule="zero-bubble"), halves=False)


@pytest.mark.parametrize(("model", "schedule"), [("gpt", "dualpipev"), ("irregular", "1f1b")])
def test_messages_in_one_order_where_there_are_no_tags(
    model: str, schedule: Schedule, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(messages, "wants_order", lambda *_: True)
    make, micros = MODELS[model]
    assert_same(make, micros(4), Plan(pp=2, schedule=schedule))


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


def test_every_piece_of_work_is_told() -> None:
    make, micros = MODELS["gpt"]
    results = assert_same(make, micros(3), Plan(pp=2))
    assert results[1].events[:6] == [[kind, 1, micro] for micro in range(3) for kind in "FB"]


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
    """Keeps the mask that the model gives beside its output."""

    def __init__(self, masks: list[list[bool]]) -> None:
        super().__init__()
        self.masks = masks

    def loss(self, output: Any, device: torch.device, micro: Micro, last: bool) -> Tensor:
        self.masks.append(output[1].flatten().tolist())
        return super().loss(output, device, micro, last)
