"""Bytes that plans send, counted; and gradients sent in a smaller form, with which runs learn as well."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from small import Net, OfOutput, fit, job, table
from torch import Tensor, nn

import phalanx as px
from longer import longer
from phalanx.comm import Place, default_process_group
from phalanx.config import Plan
from phalanx.config.sync import BUCKET_BYTES
from phalanx.errors import RefusedError, WorkerError
from phalanx.events import read
from phalanx.launch import launch
from phalanx.parallel import assemble
from phalanx.report.summary import RunSummary, summarise
from phalanx.train.assembly import build

sys.path.append(str(Path(__file__).parents[2] / "bench"))

from bytes_sent import dense, measured
from counting import Sent
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
    """Large enough that sizes show."""

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
        [
            ("int8", 3.85, 0.02),
            ("topk:0.01", 49.5, 0.9),
            ("powersgd:2", 15, 0.2),
            *longer(("fp16", 1.99, 0.01), ("bf16", 1.99, 0.01)),
        ],
    )
    def test_learn_nearly_as_well_and_count_what_they_send(
        self, compress: str, ratio: float, worse: float, tmp_path: Path, whole: RunSummary
    ) -> None:
        fit(f"dp=2 compress={compress}", tmp_path, **LEARNABLE)
        found = summarise(tmp_path)
        assert whole.loss is not None
        assert found.loss is not None
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
        assert found.loss is not None
        assert told.loss == pytest.approx(found.loss, rel=2e-3)
        assert told.notes == (Plan.parse(plan).exact_note,)
        assert whole

    def test_say_where_there_is_nothing_to_go_on_with(self, tmp_path: Path) -> None:
        fit("dp=2 compress=int8", tmp_path, epochs=1)
        fit("dp=2 compress=topk:0.1", tmp_path, epochs=2, resume=True)
        _, note = summarise(tmp_path).notes
        assert "compress=topk:0.1 over 2 ranks" in note
        fit("dp=2", tmp_path, epochs=3, resume=True)
        assert not summarise(tmp_path).notes

    @pytest.mark.parametrize("compress", ["int8", "powersgd:1", *longer("fp16", "topk:0.5")])
    def test_a_loss_scale_that_overflows_skips_on_every_rank(self, compress: str, tmp_path: Path) -> None:
        def loss(output: Tensor, batch: dict[str, Tensor]) -> px.Loss:
            whole = px.cross_entropy(output, batch["y"])
            return px.Loss(whole.sum * 2.0**9, whole.count)

        plan = f"dp=2 precision=fp16 compress={compress}"
        fit(plan, tmp_path, loss=loss, epochs=6, optimizer=lambda params: torch.optim.SGD(params, lr=2.0**-12))
        steps = [event for event in read(tmp_path / "events.jsonl") if event["event"] == "step"]
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
        steps = [event for event in read(tmp_path / "events.jsonl") if event["event"] == "step"]
        assert [step["skipped"] for step in steps] == [False, True, *[False] * 13]
        assert steps[-1]["loss"] == -10 * 2.0**-6

    def test_a_worker_that_dies_ends_the_run(self, tmp_path: Path) -> None:
        def optimizer(params: Any) -> torch.optim.Optimizer:
            if dist.get_rank() == 1:
                next(iter(params)).register_hook(lambda _: os._exit(9))
            return torch.optim.SGD(params, lr=0.1)

        with pytest.raises(WorkerError):
            fit("dp=2 compress=int8", tmp_path, optimizer=optimizer)


class TestRefusals:
    def test_what_a_step_does_not_use_drops_what_was_left_out(self, tmp_path: Path) -> None:
        with pytest.raises(RefusedError, match=r"plan\.compress") as caught:
            fit("dp=2 compress=powersgd:2", tmp_path, unused="allow")
        fit(caught.value.problems[0].fix, tmp_path / "fixed", unused="allow", epochs=1)

    def test_sparse_gradients(self, tmp_path: Path) -> None:
        class Sparse(Net):
            def __init__(self) -> None:
                super().__init__()
                self.names = nn.Embedding(3, 9, sparse=True)

        with pytest.raises(RefusedError, match="sparse gradients of names"):
            fit("dp=2 compress=int8", tmp_path, model=Sparse)

    def test_an_optimizer_that_takes_zeros_for_rest(self, tmp_path: Path) -> None:
        how: dict[str, Any] = {"optimizer": lambda params: torch.optim.Rprop(params, lr=1e-3), "epochs": 1}
        with pytest.raises(RefusedError, match="Rprop with compress=topk"):
            fit("dp=2 compress=topk:0.1", tmp_path, **how)
        fit("dp=2 compress=int8", tmp_path / "fixed", **how)


class Heavy(nn.Module):
    """Seven layers of 4.8 MiB, of which five fill a bucket."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.head = nn.Linear(9, 1120, bias=False), nn.Linear(1120, 5, bias=False)
        self.layers = nn.ModuleList([nn.Linear(1120, 1120, bias=False) for _ in range(7)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.enter(x)
        for layer in self.layers:
            x = torch.relu(layer(x))
        return self.head(x)


def scattered(place: Place, report: Any) -> list[tuple[int, int]]:
    """Bytes of each message in which a step scatters gradients, and how many there are."""
    torch.set_num_threads(1)
    with default_process_group(place, torch.device("cpu")):
        assembly = build(job(model=Heavy, batch=4), Plan.parse("fsdp=2 zero=1"), place, torch.device("cpu"))
        with Sent() as sent:
            assembly.step(next(iter(assembly.loader)))
    return [(size, times) for (kind, _, size), times in sent.exchanges.items() if kind == "reduce_scatter"]


class TestBytes:
    @pytest.mark.parametrize(
        "text",
        [
            "pp=2 micro=2",
            "cp=2 attention=alltoall",
            "fsdp=2 tp=2",
            *longer("dp=2", "fsdp=2", "tp=2", "cp=2", "fsdp=2 cp=2"),
        ],
    )
    def test_plans_send_what_the_papers_say(self, text: str) -> None:
        job, model = dense(layers=2, width=32, context=16, batch=4)
        plan = Plan.parse(text)
        due = sum(term.size for term in terms(plan, model, job.batch))
        assert due <= sum(measured(job, plan).values()) <= due + 500  # of loss, count and norm

    def test_gradients_go_in_buckets_as_large_as_forecasts_have_them(self) -> None:
        found, _ = launch(scattered, 2)
        whole = 4 * sum(tensor.numel() for tensor in Heavy().parameters())
        assert sum(size * times for size, times in found) == pytest.approx(whole, rel=0.001)  # rows of five are padded
        layer = 4 * 1120 * 1120
        full = BUCKET_BYTES // layer * layer  # as ``forecast.memory`` has them
        assert max(found)[0] == pytest.approx(full, rel=0.01)
        assert max(found)[0] <= BUCKET_BYTES
        assert sum(times for _, times in found) == 2
