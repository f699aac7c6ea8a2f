"""How far rounding may move what a proof compares, and what the first step of a run is held against."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from io import BytesIO
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import phalanx as px
from law_rows import in_one_test
from phalanx.config import Plan
from phalanx.errors import RefusedError
from phalanx.launch.first_step import why_unchecked
from phalanx.verify.compare import Bounds, Way, parameters
from phalanx.verify.judge import Pair, judged
from phalanx.verify.record import END, START, RunRecord
from phalanx.verify.references import _flat, _record, small_copy, varied
from phalanx.witness.reference_step import FirstStepOfOne, signed, take_first_step

pytestmark = pytest.mark.quick
LR = 1e-3


def job_with(model: Callable[[], nn.Module], data: Callable[[], Any] | None = None) -> px.Job:
    columns = {"x": torch.randn(16, 6, generator=torch.Generator().manual_seed(0)), "y": torch.arange(16) % 4}
    return px.Job(
        model=model,
        data=data or (lambda: px.Table(**columns)),
        inputs=lambda batch: batch["x"],
        loss=lambda output, batch: px.cross_entropy(output, batch["y"]),
        optimizer=lambda params: torch.optim.AdamW(params, lr=LR),
        batch=16,
        steps=3,
    )


def normalised() -> nn.Module:
    """The gradient of the first bias is nothing but rounding: BatchNorm takes away what it adds."""
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4))


def record_of(job: px.Job) -> RunRecord:
    one, noise = varied(job, 3, {"precision": "fp32", "device": "cpu"})
    return replace(_record(*_flat(one)), noise=noise)


def judged_beside(one: RunRecord, other: RunRecord) -> list[str]:
    pair = Pair(one=one, other=other, plan=Plan(), bounds=Bounds(noise=one.noise))
    return [check.kind for check in judged(pair) if check.first]


def test_a_bias_that_rounding_alone_moves_may_go_elsewhere_and_a_running_mean_with_it() -> None:
    one = record_of(job_with(normalised))
    assert Pair(one=one, other=one, plan=Plan(), bounds=Bounds(noise=one.noise)).silent == ["0.bias"]
    way = one.values[END]["0.bias"] - one.values[START]["0.bias"]
    assert float(way.norm()) > 0.1 * LR, "Adam makes whole steps of rounding"
    mean = one.buffers[END]["1.running_mean"]
    moved = {"0.bias": one.values[END]["0.bias"] - 2 * way}
    there = {"1.running_mean": mean - 0.1 * way}
    other = replace(one, values=one.values | {END: one.values[END] | moved}, noise={})
    other = replace(other, buffers=one.buffers | {END: one.buffers[END] | there})
    assert judged_beside(one, other) == []
    assert judged_beside(replace(one, noise={"": 0.0}), other) == ["buffer"]
    there = {"1.running_mean": mean - 100 * LR}
    assert judged_beside(one, replace(other, buffers=one.buffers | {END: one.buffers[END] | there})) == ["buffer"]


@in_one_test("share", [0.0, 1e-6, 1e-3])
def test_a_gradient_may_be_off_by_its_floor_and_not_by_more(share: float) -> None:
    one = record_of(job_with(normalised))
    grads = {name: grad * (1 + share) for name, grad in one.reduced[0].items()}
    found = judged_beside(one, replace(one, reduced={**one.reduced, 0: grads}))
    assert found == (["scale", "gradient"] if share > 1e-5 else [])


def test_adam_may_step_in_either_direction_where_the_gradient_is_rounding() -> None:
    grad, start = torch.tensor([1.0, 1e-8, -1.0, 1.0]), {"w": torch.zeros(4)}
    here, there = {"w": LR * torch.tensor([1.0, 1, -1, 1])}, {"w": LR * torch.tensor([1.0, -1, -1, 1])}
    for noise, beyond in ((1e-6, False), (1e-9, True)):
        way = Way(start=start, moved=here, first={"w": (grad, noise)}, moment=END)
        (found,) = parameters(here, there, way, Bounds())
        assert found.beyond == beyond


def test_a_job_that_does_not_repeat_itself_is_not_acquitted() -> None:
    def unseeded() -> px.Table:
        (draws := torch.Generator()).seed()
        return px.Table(x=torch.rand(16, 6, generator=draws), y=torch.arange(16) % 4)

    one = record_of(job_with(normalised, unseeded))
    assert max(one.noise[f"reduced|0|{name}"] for name in one.reduced[0]) < 1e-5, "variations take the same batches"
    wild = dict.fromkeys(one.noise, 1000.0)
    other = replace(one, reduced={**one.reduced, 0: {name: 1.1 * grad for name, grad in one.reduced[0].items()}})
    assert "gradient" in judged_beside(replace(one, noise=wild), other), "no noise hides a first gradient that is off"


@in_one_test(
    ("plan", "why"),
    [
        ("dp=2", ""),
        ("micro=2 precision=bf16", ""),
        ("dp=2 server=1", "no step"),
        ("dp=2 sync=local every=2", "no step"),
        ("dp=2 compress=int8", "no step"),
        ("dp=2 precision=tf32", "plain loop"),
    ],
)
def test_which_plans_have_a_first_step_to_compare(plan: str, why: str) -> None:
    job: Any = SimpleNamespace(phases=())
    assert why in (found := why_unchecked(job, Plan.parse(plan)))
    assert bool(found) == bool(why)


class Noise(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + torch.randn_like(x)


def test_of_a_model_that_draws_there_is_no_first_step() -> None:
    taken = list[bool]()
    for last in (nn.Dropout(0.5), Noise()):
        job = job_with(partial(nn.Sequential, nn.Linear(6, 4), last))
        taken.append("without" in next(take_first_step(job, "fp32", torch.device("cpu"), BytesIO())))
    assert taken == [False, True], "dropout is off, other numbers cannot be had"


def test_a_small_copy_has_two_layers_of_a_kind() -> None:
    layer = partial(nn.TransformerEncoderLayer, 6, 2, 8)
    encoder = partial(nn.TransformerEncoder, layer(), 4, enable_nested_tensor=False)
    for made in (encoder, lambda: nn.Sequential(nn.Linear(6, 6), layer(), layer(), layer())):
        copy = small_copy(job_with(made), Plan()).model()
        assert [type(one) for one in copy.modules()].count(nn.TransformerEncoderLayer) == 2
        assert copy(torch.rand(3, 2, 6)).shape == (3, 2, 6)
    with pytest.raises(RefusedError, match="more than 4 modules of one class"):
        small_copy(job_with(encoder), Plan(pp=4)).model()


@in_one_test(
    ("by", "says"),
    [
        (0.0, ""),
        (5e-6, ""),
        (1e-3, "of weight on rank 1, by 0.000"),
        (float("nan"), "of weight on rank 1, by nan of its norm"),
        (None, "no rank has the {} of weight"),
    ],
)
def test_the_first_step_is_compared_on_every_rank(by: float | None, says: str) -> None:
    """Of two ranks with two rows of the weight each; ``by``: how far off the second is, relatively; none: without."""
    file = BytesIO()
    *_, answer = take_first_step(job_with(lambda: nn.Linear(6, 4)), "fp32", torch.device("cpu"), file)
    one = FirstStepOfOne.read(answer, file, "fp32")
    for kind in ("gradient", "update"):
        weight, bias = (one.tensors[f"{kind}.{name}"] for name in ("weight", "bias"))
        ranks: list[dict[str, Any]] = [{"bias": [(), signed(bias, (), bias.shape)]} for _ in range(2)]
        for rank in range(2) if by is not None else ():
            cuts, part = ((0, ((2 * rank, 2 * rank + 2),)),), weight[2 * rank : 2 * rank + 2] * (1 + rank * (by or 0))
            ranks[rank]["weight"] = [cuts, signed(part, cuts, weight.shape)]
        words, apart, allowed = one.judged(kind, answer["loss"], ranks)
        assert says.format(kind) in words
        assert bool(words) == bool(says)
        assert says or (by or 0) / 4 <= apart <= 1e-5 <= allowed < (1e-4 if kind == "gradient" else 1)
        assert "its loss is" in one.judged(kind, answer["loss"] * 1.001, ranks)[0]


def test_a_loss_whose_terms_cancel_may_be_off_as_they_are() -> None:
    """The weights' noise says nothing of it where a head is zero; other numbers have bounds of their own size."""
    bounds = Bounds(noise={"loss|0|": 0.0, "norm|0|": 0.0})
    assert bounds.of_sum("loss|0|", 0.0) == bounds.of_sum("loss|0|", 1.0) > 0
    assert bounds.of_sum("norm|0|", 1e-9) < 1e-12
    told = {"loss": 0.0, "off": 0.0, "noise": {}, "sizes": {}, "eps": {}, "samples": {}, "micro": []}
    one = FirstStepOfOne(answer=told, tensors={}, precision="fp32")
    assert [bool(one.judged("gradient", loss, [])[0]) for loss in (-1.5e-8, 1e-3)] == [False, True]
