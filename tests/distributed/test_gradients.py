"""Gradients of a step: of its batch alone, none that one rank leaves out, and in which form plans send them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.fsdp  # once here, not in every worker
from small import Blocks, Net, OfOutput, fit, job, table
from torch import Tensor, nn

import phalanx as px
from law_rows import longer
from phalanx.comm import Place, default_process_group
from phalanx.config import Plan
from phalanx.errors import RefusedError, WorkerError
from phalanx.events import RunLog
from phalanx.launch.local import launch
from phalanx.parallel import assemble
from phalanx.report.summary import RunSummary, summarise
from phalanx.train.assembly import build

sys.path.append(str(Path(__file__).parents[2] / "bench"))

from bytes_sent import dense, measured
from textbook import terms


def gradients(place: Place, report: Any) -> list[list[float]]:
    """The sum of the gradients of 3 steps under each plan, what is left out at the end, and what they should be."""
    torch.set_num_threads(1)
    found: list[list[float]] = []
    with default_process_group(place, torch.device("cpu")):
        for text in ("none", "fp16", "int8", "topk:0.2", "powersgd:1", "powersgd:3"):
            torch.manual_seed(0)
            plan = Plan.parse(f"dp={place.world_size} device=cpu compress={text}")
            layout = assemble(Net(), job(), plan, place.rank, torch.device("cpu"))
            work = OfOutput(lambda output: output.square().sum())
            total = torch.zeros(sum(tensor.numel() for tensor in layout.parameters.values()))
            generator = torch.Generator().manual_seed(place.rank)
            for _ in range(3):
                layout.accumulate([[torch.randn(6, 9, generator=generator) for _ in range(2)]], work)
                layout.finish()
                total += torch.cat([tensor.grad.reshape(-1) for tensor in layout.parameters.values()])
                layout.stepped()
            late = layout.holdings.sender.tensors() if layout.holdings.sender else {}
            owed = [late.get(f"left_out.{name}", torch.zeros(one.shape)) for name, one in layout.parameters.items()]
            total += torch.cat([one.reshape(-1) for one in owed])
            found.append(total.tolist())
    return found


@pytest.mark.parametrize("ranks", [3, *longer(2)])
def test_gradients_are_the_sum_over_ranks_but_for_what_comes_later(ranks: int) -> None:
    first, *others = launch(gradients, ranks)
    assert all(other == first for other in others)
    exact, halves, *fed_back = (torch.tensor(one) for one in first)
    assert (halves - exact).abs().max() < 0.01 * exact.abs().max()
    for one in fed_back:
        assert (one - exact).abs().max() < 1e-5 * exact.abs().max()


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(9, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 5))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def learnable() -> px.Table:
    x = table(512).columns["x"]
    return px.Table(x=x, y=x[:, :5].argmax(dim=1))


LEARNABLE: dict[str, Any] = {"model": Wide, "data": learnable, "epochs": 3}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> RunSummary:
    """A run with whole gradients."""
    folder = tmp_path_factory.mktemp("whole")
    fit("dp=2", folder, **LEARNABLE)
    return summarise(folder)


class TestRuns:
    @pytest.mark.parametrize(
        ("compress", "ratio", "worse"),
        [("int8", 3.85, 0.02), ("topk:0.01", 49.5, 0.9), ("powersgd:2", 15, 0.2), *longer(("fp16", 1.99, 0.01))],
    )
    def test_learn_nearly_as_well_and_count_what_they_send(
        self, compress: str, ratio: float, worse: float, tmp_path: Path, whole: RunSummary
    ) -> None:
        fit(f"dp=2 compress={compress}", tmp_path, **LEARNABLE)
        found = summarise(tmp_path)
        assert whole.loss < 0.1  # 1.6 before
        assert abs(found.loss - whole.loss) < worse
        assert len(found.sent) == 2
        assert all(every / sent > ratio for sent, every in zip(found.sent, found.whole, strict=True))
        assert whole.sent == ()

    @pytest.mark.parametrize("compress", ["powersgd:2", *longer("int8")])
    def test_go_on_with_what_was_left_out(self, compress: str, tmp_path: Path) -> None:
        plan = f"dp=2 compress={compress}"
        whole = fit(plan, tmp_path / "whole", model=Wide, epochs=4)
        fit(plan, tmp_path / "parts", model=Wide, epochs=2)
        fit(plan, tmp_path / "parts", model=Wide, epochs=4, resume=True)
        found, told = summarise(tmp_path / "whole"), summarise(tmp_path / "parts")
        assert told.loss == pytest.approx(found.loss, rel=2e-3)
        assert told.notes == (Plan.parse(plan).exact_note,)
        assert whole

    @pytest.mark.parametrize("compress", ["powersgd:1", *longer("int8", "fp16", "topk:0.5")])
    def test_a_loss_scale_that_overflows_skips_on_every_rank(self, compress: str, tmp_path: Path) -> None:
        def loss(output: Tensor, batch: dict[str, Tensor]) -> px.Loss:
            whole = px.cross_entropy(output, batch["y"])
            return px.Loss(whole.sum * 2.0**9, whole.count)

        plan = f"dp=2 precision=fp16 compress={compress}"
        fit(plan, tmp_path, loss=loss, epochs=6, optimizer=lambda params: torch.optim.SGD(params, lr=2.0**-12))
        steps = [event for event in RunLog(tmp_path).events if event["event"] == "step"]
        assert steps[0]["skipped"]
        assert not steps[-1]["skipped"]
        assert steps[-1]["loss"] < steps[0]["loss"]

    def test_what_is_left_out_follows_a_loss_scale(self, tmp_path: Path) -> None:
        """A gradient of ten elements, one that overflows, and none: one element goes at a time, and all arrive."""

        class Ten(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.layer = nn.Linear(10, 1, bias=False)
                nn.init.zeros_(self.layer.weight)

            def forward(self, x: Tensor) -> Tensor:
                return self.layer(x)

        def rows() -> px.Table:
            one, overflow, probe = 2.0**-6 * torch.ones(1, 10), 6e4 * torch.ones(1, 10), torch.ones(1, 10)
            return px.Table(x=torch.cat([one, overflow, *[torch.zeros(1, 10)] * 12, probe]).repeat_interleave(2, 0))

        how: dict[str, Any] = {
            "loss": lambda output, batch: px.Loss(output.float().sum(), len(output)),
            "inputs": lambda batch: batch["x"],
            "optimizer": lambda params: torch.optim.SGD(params, lr=1.0),
        }
        plan = "dp=2 precision=fp16 compress=topk:0.1"
        fit(plan, tmp_path, model=Ten, data=rows, batch=2, epochs=1, shuffle=False, **how)
        steps = [event for event in RunLog(tmp_path).events if event["event"] == "step"]
        assert [step["skipped"] for step in steps] == [False, True, *[False] * 13]
        assert steps[-1]["loss"] == -10 * 2.0**-6


class TestRefusals:
    def test_what_a_step_does_not_use_drops_what_was_left_out(self, tmp_path: Path) -> None:
        with pytest.raises(RefusedError, match=r"plan\.compress") as caught:
            fit("dp=2 compress=powersgd:2", tmp_path, unused="allow")
        fit(caught.value.problems[0].fix, tmp_path / "fixed", unused="allow", epochs=1)

    def test_an_optimizer_that_takes_zeros_for_rest(self, tmp_path: Path) -> None:
        how: dict[str, Any] = {"optimizer": lambda params: torch.optim.Rprop(params, lr=1e-3), "epochs": 1}
        with pytest.raises(RefusedError, match="Rprop with compress=topk"):
            fit("dp=2 compress=topk:0.1", tmp_path, **how)
        fit("dp=2 compress=int8", tmp_path / "fixed", **how)


class TestBytes:
    @pytest.mark.parametrize(
        "text", ["pp=2 micro=2", "cp=2 attention=alltoall", "tp=2", *longer("fsdp=2 tp=2", "dp=2", "fsdp=2", "cp=2")]
    )
    def test_plans_send_what_the_papers_say(self, text: str) -> None:
        job, model = dense(layers=2, width=32, context=16, batch=4)
        plan = Plan.parse(text)
        due = sum(term.size for term in terms(plan, model, job.batch))
        assert due <= sum(measured(job, plan).values()) <= due + 500  # of loss, count and norm


PLANS = ("fsdp=2 zero=2 micro=8", *longer("threads=2", "pp=2 micro=8", "single", "dp=2", "fsdp=2", "tp=2"))


# gradients that others leave of the parameters that zero=1, 2 and threads keep beside those that the optimizer steps
BACKWARDS = ("dp=2", "fsdp=2 zero=1", *longer("single", "fsdp=2 zero=2 micro=8"))


def losses(plan: str, spoil: Callable[[Any], None]) -> list[list[float]]:
    """Of a run that nobody disturbs, and of one with ``spoil`` before each step."""
    chosen = Plan.parse(f"{plan} device=cpu")

    def work(place: Place, report: Callable[[int], None]) -> list[list[float]]:
        torch.set_num_threads(1)
        with default_process_group(place, torch.device("cpu")):
            found: list[list[float]] = []
            for disturb in (lambda layout: None, spoil):
                assembly = build(job(model=Blocks, clip=0.05, epochs=1), chosen, place, torch.device("cpu"))
                found.append([])
                for batch in assembly.loader:
                    disturb(assembly.layout)
                    found[-1].append(assembly.step(batch).loss)
            return found

    return launch(work, chosen.world_size)[0]


def leave_gradients(layout: Any) -> None:
    for tensor in (*layout.holdings.module.parameters(), *layout.parameters.values()):
        tensor.grad = torch.full_like(tensor, 1000.0)


def run_backward(layout: Any) -> None:
    layout.holdings.module(torch.ones(4, 9)).sum().mul(1000.0).backward()


@pytest.mark.parametrize("plan", PLANS)
def test_gradients_that_lie_about_are_dropped(plan: str) -> None:
    clean, spoilt = losses(plan, leave_gradients)
    assert spoilt == clean


@pytest.mark.parametrize("plan", BACKWARDS)
def test_a_backward_between_steps_leaves_nothing(plan: str) -> None:
    clean, spoilt = losses(plan, run_backward)
    assert spoilt == clean


class Branching(Net):
    """Leaves its branch out where the first value of the data is 0."""

    def __init__(self) -> None:
        super().__init__()
        self.branch = nn.Linear(9, 9)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x if float(x[0, 0]) == 0 else x + self.branch(x))


def three_steps(plan: Plan, unused: str, left_out: list[bool]) -> Callable[[Place, Any], list[float]]:
    """A worker's work: in the second step rank 1 leaves the branch out in those of its micro-batches."""

    backward = OfOutput(lambda output: output.square().sum())

    def work(place: Place, report: Any) -> list[float]:
        torch.set_num_threads(1)
        with default_process_group(place, torch.device("cpu")):
            torch.manual_seed(0)
            layout = assemble(Branching(), job(unused=unused), plan, place.rank, torch.device("cpu"))
            optimizer = torch.optim.SGD(layout.parameters.values(), lr=0.01)
            for step in range(3):
                report(step)
                micros = [torch.ones(4, 9) * (0.5 + place.rank) for _ in left_out]
                for micro, out in zip(micros, left_out, strict=True):
                    micro[0, 0] *= not (out and step == 1 and place.rank == 1)
                layout.accumulate([micros], backward)
                layout.finish()
                optimizer.step()
                layout.stepped()
            return [float(tensor.detach().double().sum()) for tensor in layout.module.parameters()]

    return work


@pytest.mark.parametrize(
    ("plan", "left_out"),
    [("dp=2", [False, True]), ("fsdp=2 zero=2", [True, True]), *longer(("fsdp=2 zero=1", [True]), ("dp=2", [True]))],
)
def test_left_out_by_one_rank_in_a_later_step(plan: str, left_out: list[bool]) -> None:
    with pytest.raises(WorkerError) as caught:
        launch(three_steps(Plan.parse(f"{plan} device=cpu"), "error", left_out), 2)
    assert (caught.value.rank, caught.value.step, caught.value.kind) == (1, 1, "GradientError")
    assert ("branch.weight, branch.bias" in str(caught.value)) == all(left_out)
    assert 'unused="allow"' in str(caught.value)


@pytest.mark.parametrize("plan", ["fsdp=2 zero=2", *longer("dp=2", "fsdp=2 zero=1")])
def test_allowed_it_takes_the_gradient_of_the_ranks_that_have_one(plan: str) -> None:
    first, second = launch(three_steps(Plan.parse(f"{plan} device=cpu"), "allow", [True]), 2)
    assert first == second
