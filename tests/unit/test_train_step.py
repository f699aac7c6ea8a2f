"""One step in this process: rates, counts, training mode, and numbers that arrive late."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from small import Net, job, table
from torch import nn

import phalanx as px
from law_rows import in_one_test
from phalanx.comm import Place
from phalanx.errors import LossError, RefusedError, SpecError
from phalanx.train.assembly import Assembly, build
from phalanx.train.evaluate import evaluate
from phalanx.train.loss_scaling import LossScale
from phalanx.train.lr_schedule import RunStart
from phalanx.train.metrics import Metrics, towards_host

CPU = torch.device("cpu")


def one_cycle(params: Any) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(params, lr=0.1)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.5, total_steps=20)
    optimizer.register_step_post_hook(lambda *_: scheduler.step())
    return optimizer


def assembled(*, lr_scale: float = 1.0, **how: Any) -> Assembly:
    return build(job(**how), px.Plan(), Place(), CPU, start=RunStart(lr_scale=lr_scale))


def steps(assembly: Assembly) -> list[Metrics]:
    return [assembly.step(batch) for batch in assembly.loader]


class Stream:
    """Its length is nobody's business."""

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        for index in range(96):
            yield {"x": torch.ones(9), "y": torch.tensor(index % 5)}


class TestRates:
    def test_a_decay_over_a_stream_needs_an_end(self) -> None:
        with pytest.raises(SpecError, match=r"job\.schedule: .*total_steps"):
            assembled(data=Stream, epochs=1, schedule=px.Schedule(decay="cosine"))

    def test_with_an_end_it_runs(self) -> None:
        rates = [one.lr for one in steps(assembled(data=Stream, epochs=1, schedule=linear(4)))]
        assert rates == pytest.approx([1e-2, 0.75e-2, 0.5e-2])
        by_steps = assembled(data=Stream, epochs=None, steps=2, schedule=px.Schedule(decay="linear"))
        assert [one.lr for one in steps(by_steps)] == pytest.approx([1e-2, 0.5e-2])
        assert len(steps(assembled(data=Stream, epochs=1))) == 3

    def test_a_scheduler_of_torch_that_is_stepped_by_a_hook_is_honoured(self) -> None:
        assembly = assembled(optimizer=one_cycle, epochs=None, steps=6)
        found = [metrics.lr for metrics in steps(assembly)]
        plain = nn.Parameter(torch.ones(1))
        optimizer = one_cycle([plain])
        expected: list[float] = []
        for _ in range(6):
            expected.append(optimizer.param_groups[0]["lr"])
            plain.grad = torch.ones(1)
            optimizer.step()
        assert found == pytest.approx(expected)
        assert len(set(expected)) == 6
        assert any("OneCycleLR" in note and "no checkpoint" in note for note in assembly.notes)

    def test_one_beside_a_schedule_is_refused(self) -> None:
        with pytest.raises(RefusedError, match="OneCycleLR on the optimizer and Schedule"):
            assembled(optimizer=one_cycle, schedule=px.Schedule(warmup_steps=3))

    def test_or_is_refused_where_a_schedule_sets_it(self) -> None:
        assembly = assembled(epochs=None, steps=3, schedule=px.Schedule(decay="linear"))
        first, second, _ = assembly.loader
        assembly.step(first)
        assembly.optimizer.param_groups[0]["lr"] = 0.5
        with pytest.raises(RefusedError, match=r"something else set to 0\.5 before step 1"):
            assembly.step(second)

    def test_a_rate_that_is_a_tensor(self) -> None:
        rate = torch.tensor(0.5)
        optimizer = lambda params: torch.optim.SGD(params, lr=rate)  # noqa: E731
        assembly = assembled(optimizer=optimizer, epochs=None, steps=4, schedule=px.Schedule(decay="linear"))
        rates = [one.lr for one in steps(assembly)]
        assert rates == [0.5, 0.375, 0.25, 0.125]
        assert all(type(one) is float for one in rates)
        (group,) = assembly.optimizer.param_groups
        assert isinstance(group["lr"], torch.Tensor)
        assert float(group["lr"]) == 0.125


def linear(total: int) -> px.Schedule:
    return px.Schedule(decay="linear", total_steps=total)


class TestCounts:
    @in_one_test("count", [0, torch.tensor(0)])
    @in_one_test("plan", ["single", "micro=8"])
    def test_nothing_counted(self, count: Any, plan: str) -> None:
        assembly = build(
            job(loss=lambda output, batch: px.Loss(output.sum() * 0, count)), px.Plan.parse(plan), Place(), CPU
        )
        before = [tensor.clone() for tensor in assembly.layout.module.parameters()]
        with pytest.raises(LossError, match="nothing was counted in step 0"):
            steps(assembly)
        assert all(map(torch.equal, before, assembly.layout.module.parameters()))

    @in_one_test("count", [-3, math.inf, math.nan, torch.tensor(-1.0)])
    def test_a_count_that_is_none(self, count: Any) -> None:
        with pytest.raises(LossError, match=r"the count of the loss of step 0 is (-\d|inf|nan)"):
            steps(assembled(loss=lambda output, batch: px.Loss(output.sum(), count)))

    def test_counts_add_up_wide(self) -> None:
        def loss(output: torch.Tensor, batch: dict[str, torch.Tensor]) -> px.Loss:
            return px.Loss(output.square().sum(), torch.tensor(256.0 if len(output) > 1 else 1.0).bfloat16())

        (metrics,) = steps(
            build(job(loss=loss, batch=33, epochs=None, steps=1), px.Plan.parse("micro=32"), Place(), CPU)
        )
        assert metrics.count == 257  # bf16 has no such number


class TestForm:
    @in_one_test(
        ("second", "words"),
        [
            ({"accuracy": 1}, "a count that is a dict"),
            (None, "a count that is a NoneType"),
            (torch.zeros(3), r"a count that is a tensor of shape \(3,\)"),
        ],
    )
    @in_one_test("form", [lambda *parts: parts, px.Loss])
    def test_not_every_pair_is_a_sum_and_a_count(self, second: Any, words: str, form: Any) -> None:
        with pytest.raises(LossError, match=words):
            steps(assembled(loss=lambda output, batch: form(output.sum(), second)))

    def test_evaluation_reads_by_the_same_rule(self) -> None:
        wrong = {"loss": lambda output, batch: (output.sum(), {}), "evaluate": table}
        assembly = assembled(**wrong)
        with pytest.raises(LossError, match="a count that is a dict in the evaluation"):
            evaluate(job(**wrong), px.Plan(), assembly, table())

    def test_a_metric_called_loss(self) -> None:
        how = {"evaluate": table, "metrics": lambda output, batch: {"loss": px.Loss(output.sum() * 0, 1)}}
        with pytest.raises(LossError, match="a metric is called 'loss'"):
            evaluate(job(**how), px.Plan(), assembled(**how), table())


class Frozen(Net):
    """Keeps one block out of training mode."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[1].eval()


class TestTrainingMode:
    def test_parts_kept_out_of_it_stay_out(self) -> None:
        how = {"model": Frozen, "evaluate": table}
        assembly = assembled(**how)
        flags = {name: part.training for name, part in assembly.layout.module.named_modules()}
        assert flags.pop("layers.1") is False
        assert all(flags.values())
        evaluate(job(**how), px.Plan(), assembly, table())
        after = {name: part.training for name, part in assembly.layout.module.named_modules()}
        assert after == {**flags, "layers.1": False}

    @in_one_test("broken", [False, True])
    def test_evaluation_is_without(self, broken: bool) -> None:
        seen: set[bool] = set()

        class Watched(Net):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                seen.update(part.training for part in self.modules())
                if broken:
                    raise RuntimeError("in forward")
                return super().forward(x)

        how = {"model": Watched, "evaluate": table}
        assembly = assembled(**how)
        if broken:
            with pytest.raises(RuntimeError, match="in forward"):
                evaluate(job(**how), px.Plan(), assembly, table())
        else:
            evaluate(job(**how), px.Plan(), assembly, table())
        assert seen == {False}
        assert all(part.training for part in assembly.layout.module.modules())

    @in_one_test("plan", ["single", "threads=2"])
    def test_a_model_loaded_for_evaluation_is_trained(self, plan: str) -> None:
        seen: set[bool] = set()

        class Watched(Net):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                seen.update(part.training for part in self.modules())
                return super().forward(x)

        steps(build(job(model=lambda: Watched().eval()), px.Plan.parse(plan), Place(), CPU))
        assert seen == {True}


class Late:
    """Stands for a CUDA event: the copy is there when somebody has waited for it."""

    def __init__(self, host: torch.Tensor, values: list[float]) -> None:
        self.host, self.values = host, values

    def query(self) -> bool:
        return False

    def synchronize(self) -> None:
        self.host.copy_(torch.tensor(self.values))


class TestLateNumbers:
    @in_one_test(
        ("values", "words"),
        [([math.nan, 4.0, 0.0], "the loss of step 1 is nan"), ([1.0, 0.0, 0.0], "nothing was counted in step 1")],
    )
    def test_they_are_waited_for_before_an_update_is_made(
        self, values: list[float], words: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        arriving = iter([[1.0, 4.0, 0.0], values])

        def slowly(totals: torch.Tensor, norm: torch.Tensor | None) -> Any:
            host = torch.zeros(3, dtype=torch.float64)
            return host[:2], host[2], Late(host, next(arriving))

        monkeypatch.setattr("phalanx.train.step.towards_host", slowly)
        assembly = assembled()
        batches = iter(assembly.loader)
        assembly.step(next(batches))
        before = [one.detach().clone() for one in assembly.layout.parameters.values()]
        with pytest.raises(LossError, match=words):
            assembly.step(next(batches))
        assert all(map(torch.equal, before, assembly.layout.parameters.values()))

    @pytest.mark.gpu
    def test_from_a_device(self) -> None:
        totals = torch.tensor([6.0, 4.0], dtype=torch.float64, device="cuda")
        numbers, norm, ready = towards_host(totals, torch.tensor(2.0, device="cuda"))
        assert ready is not None
        ready.synchronize()
        assert isinstance(numbers, torch.Tensor)
        assert norm is not None
        assert (numbers.tolist(), float(norm), numbers.device.type) == ([6.0, 4.0], 2.0, "cpu")


@in_one_test("dtype", [torch.bfloat16, torch.float16])
def test_a_model_that_would_train_in_half_precision_unsaid_is_refused(dtype: torch.dtype) -> None:
    with pytest.raises(SpecError, match=r"trainable parameters in .*float16(.|\n)*precision=bf16 in the plan"):
        assembled(model=lambda: Net().to(dtype))


def test_the_loss_scale_halves_at_once_and_doubles_after_its_patience() -> None:
    scale = LossScale(scale=8.0, patience=3)
    told = []
    for finite in (True, False, True, True, True, True):
        scale.update(finite)
        told.append(scale.scale)
    assert told == [8.0, 4.0, 4.0, 4.0, 8.0, 8.0]
    assert LossScale.for_batch(16).patience == 2000


@in_one_test(("precision", "dtype"), [("fp32", torch.float32), ("bf16", torch.bfloat16)])
def test_products_are_computed_in_the_plans_precision(precision: Any, dtype: torch.dtype) -> None:
    assembly = build(job(), px.Plan(precision=precision), Place(), CPU)
    seen: set[torch.dtype] = set()
    for part in assembly.layout.holdings.module.modules():
        if isinstance(part, torch.nn.Linear):
            part.register_forward_hook(lambda _, __, output: seen.add(output.dtype))
    assembly.step(next(iter(assembly.loader)))
    assert seen == {dtype}
