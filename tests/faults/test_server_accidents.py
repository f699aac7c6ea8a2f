"""Numbers that are not finite under parameter servers: the worker that meets them says where, and keeps the batch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from test_accidents import (
    BAD,
    BATCH,
    GRADIENT,
    LENGTH,
    LOSS,
    MARK,
    Net,
    Normed,
    job,
    planted,
    run,
    stopped,
    table,
    values,
)
from torch import nn

import phalanx as px
from longer import longer
from phalanx.data.loader import BatchPieces
from phalanx.data.saved_batch import SavedBatch
from phalanx.events.schema import faults
from phalanx.parallel.layout import SingleLayout
from phalanx.parallel.parameter_server import BatchPiece, FrameKind, Report
from phalanx.parallel.parameter_server.protocol import FROM_WORKER, MOST_SAMPLES, MOST_TEXT, line
from phalanx.parallel.rng_streams import stream
from phalanx.train.accidents import Accidents
from phalanx.train.nonfinite_trace import Sighting
from phalanx.train.parameter_server.gradient_worker import Computer
from phalanx.train.parameter_server.piece_accidents import PieceAccidents, discard, first_of, take_over

PLAN = "dp=2 server=1 micro=8"


class Planted(Net):
    """Marked samples go through ``bad``."""

    def __init__(self, bad: nn.Module) -> None:
        super().__init__()
        self.bad = bad

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.bad(self.layers[0](x.clamp(max=5.0)), (x[:, :1] < MARK).float())
        for layer in self.layers[1:]:
            hidden = torch.relu(layer(hidden))
        return self.head(hidden)


class Log(nn.Module):
    """Its output is NaN where the mark is."""

    def forward(self, hidden: torch.Tensor, clean: torch.Tensor) -> torch.Tensor:
        return hidden + 0 * torch.log(clean)


class Steep(nn.Module):
    """Its output is finite, and its gradient infinite where the mark is."""

    def forward(self, hidden: torch.Tensor, clean: torch.Tensor) -> torch.Tensor:
        return hidden + torch.sqrt(clean + (hidden - hidden.detach()))


FORWARD: dict[str, Any] = {"model": lambda: Planted(Log()), "data": lambda: planted(MARK)}
BACKWARD: dict[str, Any] = {"model": lambda: Planted(Steep()), "data": lambda: planted(MARK)}
KINDS = [
    pytest.param(FORWARD, "loss", "the output of bad", id="forward"),
    pytest.param(BACKWARD, "gradient", "the backward of bad", id="backward"),
    pytest.param(LOSS, "loss", "x of the batch", id="sample"),
]


def accident(folder: str = "run") -> dict[str, Any]:
    (event,) = px.Run(folder=Path(folder)).events("accident")
    assert faults(event) == []
    return event


def kept(event: dict[str, Any]) -> SavedBatch:
    """The one batch that the run of ``event`` left, and nothing beside it."""
    assert event["path"] == f"accidents/step-{event['step']:08d}"
    (saved,) = px.Run(folder=Path("run")).accidents
    assert [path.name for path in Path("run/accidents").iterdir()] == [saved.folder.name]
    assert saved.folder == Path("run") / event["path"]
    return saved


@pytest.mark.parametrize(("how", "kind", "where"), KINDS)
def test_stop(how: dict[str, Any], kind: str, where: str) -> None:
    error = stopped(PLAN, "run", how)
    assert error.kind == {"loss": "LossError", "gradient": "GradientError"}[kind]
    event = accident()
    saved = kept(event)
    place = f"First not finite: {where}, in micro-batch {saved.micro} on rank {saved.rank} (samples {BAD})."
    if how is LOSS:
        place = f"First not finite: {where}, sample {BAD}, on rank {saved.rank}."
    assert (event["kind"], event["action"], event["samples"], event["where"]) == (kind, "stop", [BAD], place)
    assert f"    {place}\n    The batch is kept in run/accidents/step-00000000.\n" in str(error)
    assert (saved.step, saved.where, len(saved.samples), BAD in saved.samples) == (0, where, 8, True)
    bad = saved.batch["x"][saved.samples.index(BAD), 0]
    assert bad.isnan() if how is LOSS else bad == MARK
    assert f"the {kind} of part " in saved.reason


@pytest.mark.parametrize(("how", "kind", "where"), [KINDS[0], *longer(*(one.values for one in KINDS[1:]))])
def test_skip(how: dict[str, Any], kind: str, where: str) -> None:
    found = run("dp=2 server=2", "run", how, on_nonfinite="skip")
    event = accident()
    assert (event["kind"], event["action"], event["samples"]) == (kind, "skip", [BAD])
    of = f"sample {BAD}," if how is LOSS else "in micro-batch 0"
    assert event["where"].startswith(f"First not finite: {where}, {of} on rank ")
    assert len(kept(event).samples) == BATCH // 2
    assert [one["step"] for one in found.events("step") if one["skipped"]] == [0]
    assert all(tensor.isfinite().all() for tensor in values(found).values())


def test_of_two_workers_the_first_piece_is_named() -> None:
    def spoilt() -> px.Table:
        rows = table()[range(LENGTH)]
        return px.Table(x=torch.full_like(rows["x"], float("nan")), y=rows["y"])

    stopped("dp=2 server=1", "run", {"data": spoilt})
    event = accident()
    saved = kept(event)
    assert event["samples"] == list(saved.samples)
    assert event["where"].endswith(f" on rank {saved.rank}.")
    assert saved.seed == stream(job().seed, 0, 0, 0)


class Spoils(torch.optim.SGD):
    """Makes the first number of what it steps infinite."""

    def step(self, closure: Any = None) -> None:
        super().step()
        with torch.no_grad():
            self.param_groups[0]["params"][0].view(-1)[0] = torch.inf


@pytest.mark.parametrize(
    ("steps", "answer"), [(1, "stop"), (3, "skip")]
)  # it is met before the checkpoint; by the workers
def test_a_parameter(steps: int, answer: Any) -> None:
    how = {"optimizer": lambda params: Spoils(params, lr=0.1), "steps": steps}
    error = stopped("dp=2 server=1", "run", how, on_nonfinite=answer)
    assert "the parameter layers.0.weight is not finite after step 0" in str(error)
    event = accident()
    assert (event["kind"], event["step"], event["path"]) == ("parameter", 1, "")
    assert not px.Run(folder=Path("run")).accidents


def test_a_spike_names_the_piece() -> None:
    def spiky(output: torch.Tensor, batch: Any) -> px.Loss:
        loss = px.cross_entropy(output, batch["y"])
        return px.Loss(loss.sum * (1 + 1e4 * (batch["x"][:, 0] >= MARK).any()), loss.count)

    model = type("Clamped", (Net,), {"forward": lambda self, x: Net.forward(self, x.clamp(max=5.0))})
    how = {"data": lambda: planted(MARK), "loss": spiky, "model": model, "batch": 4, "steps": 60}
    found = run("dp=2 server=1", "run", how, spike=20.0, on_spike="skip")
    events = list(found.events("accident"))
    assert events
    for event in events:
        assert event["where"].startswith("Its largest part is the loss of the piece of rank ")
        assert len(event["samples"]) <= 2
        assert BAD in event["samples"]
        assert event["path"] == ""


def test_what_cannot_be_run_again_hides_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> None:
        raise MemoryError("no\nroom")

    monkeypatch.setattr("phalanx.train.parameter_server.gradient_worker.first_sighting_here", fails)
    error = stopped("dp=2 server=1", "run", GRADIENT)
    assert "the gradient of step 0 is not finite, and its loss is 1." in str(error)
    assert "Where it comes from could not be found: no room" in str(error)
    assert BAD in accident()["samples"]


class Dropped(Normed):
    """Draws numbers, too."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(nn.functional.dropout(x, 0.5))


def computed(model: Any, data: Any) -> tuple[Computer, SingleLayout, tuple[float, float]]:
    """Both micro-batches of the first part of the first step."""
    given, device = job(model=model, data=data), torch.device("cpu")
    torch.manual_seed(0)
    layout = SingleLayout(model(), device)
    computer = Computer(given, px.Plan.parse(PLAN), layout, device, 1.0)
    sums, samples = computer.gradients(BatchPieces(data(), given, 2, micro=8), 0, 0)
    assert samples == 16
    return computer, layout, sums["loss"]


class TestRunningAgain:
    def test_the_same_numbers_come_out_and_buffers_stay(self) -> None:
        computer, layout, (total, _) = computed(Dropped, table)
        assert computer.finite(0, total)
        buffers = {name: one.clone() for name, one in layout.module.named_buffers()}
        gradients = {name: one.grad.clone() for name, one in layout.parameters.items() if one.grad is not None}
        seen = computer.first_sighting(0, 0)
        assert seen.where == ""
        assert all(torch.equal(one, buffers[name]) for name, one in layout.module.named_buffers())
        assert all(
            torch.equal(one.grad, gradients[name]) for name, one in layout.parameters.items() if name in gradients
        )

    def test_parameters_are_looked_at_now_and_then(self) -> None:
        computer, layout, (total, _) = computed(Net, table)
        with torch.no_grad():
            layout.parameters["head.bias"][0] = torch.nan
        assert [computer.finite(step, total) for step in (1, 49, 50)] == [True, True, False]
        assert computer.first_sighting(50, 0).parameter == "head.bias"


def report(loss: float, sighting: dict[str, Any] | None = None, worker: int = 0) -> Report:
    sums = {"loss": (loss, 2.0)}
    return Report(worker=worker, version=0, gradient_sums=sums, samples=2, seconds=0.1, sighting=sighting)


def sighting(**facts: Any) -> dict[str, Any]:
    told = {"order": [0, 0.0, 1.0], "where": "the output of a", "parameter": "", "trouble": "", "micro": 0}
    return {**told, "samples": [3], "kept": False, **facts}


class TestWhichPiece:
    def test_the_first_place_counts(self) -> None:
        later = sighting(order=[1, 0.0, -3.0])
        assert first_of({0: report(1.0, later), 1: report(1.0, sighting(), worker=4)}, spike=False)[0] == 1
        part, seen = first_of({0: report(9.0, later), 1: report(1.0)}, spike=False)
        assert (part, seen.where, seen.micro) == (0, "the output of a", 0)

    def test_where_nobody_saw_anything_it_is_the_largest(self) -> None:
        reports = {0: report(1.0), 1: report(1e30, worker=7), 2: report(5.0, sighting())}
        assert first_of(reports, spike=True)[0] == 1
        del reports[2]
        part, seen = first_of(reports, spike=False)
        assert (part, seen.rank, seen.micro) == (1, 7, -1)
        accidents = Accidents()
        found = accidents.judge(3, 1.0, float("inf"))
        assert found is not None
        with pytest.raises(
            px.PhalanxError, match=r"In every piece by itself(?s:.*)the piece of rank 7 \(samples 5, 6\)"
        ):
            accidents.answer(found, seen, samples=[5, 6])


class TestBatches:
    def test_one_takes_the_place_of_the_step_and_the_others_go(self, tmp_path: Path) -> None:
        computer, _, _ = computed(Net, table)
        seen = Sighting(order=(0.0, 1.0, 0.0), where="the output of a", part=0, micro=1)
        for part, rank in ((0, 0), (1, 1), (2, 1)):  # rank 1 has computed two pieces of the step
            piece = BatchPiece(4, part)
            told = PieceAccidents(folder=tmp_path, rank=rank, seed=0).tell(seen, piece, 1.0, computer.micros)
            assert told["kept"]
            assert told["samples"] == list(computer.micros[1].ids)
        assert take_over(tmp_path, 4, 1, 1) == "accidents/step-00000004"
        saved = SavedBatch.read(tmp_path / "accidents" / "step-00000004")
        assert (saved.rank, saved.seed) == (1, stream(0, 4, 1, 1))
        assert len(list((tmp_path / "accidents").iterdir())) == 1
        assert take_over(tmp_path, 4, 1, 1) == ""  # there is none, and what is there stays
        assert SavedBatch.read(tmp_path / "accidents" / "step-00000004").rank == 1

    def test_there_are_not_too_many(self, tmp_path: Path) -> None:
        computer, _, _ = computed(Net, table)
        seen = Sighting(order=(), where="", part=0, micro=0)
        worker = PieceAccidents(folder=tmp_path, rank=0, seed=0)
        told = [worker.tell(seen, BatchPiece(step, 0), 1.0, computer.micros)["kept"] for step in range(21)]
        assert told == [True] * 20 + [False]
        discard(tmp_path)
        assert list((tmp_path / "accidents").iterdir()) == []


DONE: dict[str, Any] = {"step": 1, "part": 0, "term": 0, "ticket": "a" * 64, "what": "train", "version": 1}
DONE |= {"sums": {"loss": [1.0, 2.0]}, "samples": 2, "seconds": 0.1}


class TestTheFrame:
    def fault(self, **facts: Any) -> str:
        return FROM_WORKER[FrameKind.ASK].fault({"done": {**DONE, "sighting": sighting(**facts)}})

    def test_what_may_stand_in_it(self) -> None:
        assert not FROM_WORKER[FrameKind.ASK].fault({"done": DONE})
        assert not self.fault()
        assert not self.fault(where="x" * MOST_TEXT, samples=[1 << 53] * MOST_SAMPLES, micro=-1)

    def test_what_may_not(self) -> None:
        wrong: dict[str, list[Any]] = {
            "where": ["x" * (MOST_TEXT + 1), 1],
            "parameter": ["a\x1b[2J"],
            "trouble": ["two\nlines"],
            "samples": [[1] * (MOST_SAMPLES + 1), [-1], {"1": 1}],
            "order": [[0, 1], [0, 1, "2"]],
            "micro": [-2, 1.5],
            "kept": ["/etc/passwd"],
            "path": ["accidents/x"],
        }
        taken = [(name, value) for name, values in wrong.items() for value in values if not self.fault(**{name: value})]
        assert taken == []

    def test_the_largest_is_within_what_a_frame_may_hold(self) -> None:
        text = line("\U0001f600" * 10_000)
        facts = dict.fromkeys(("where", "parameter", "trouble"), text)
        told = sighting(**facts, samples=[1 << 53] * MOST_SAMPLES)
        meta = {"done": {**DONE, "sighting": told}}
        assert not FROM_WORKER[FrameKind.ASK].fault(meta)
        assert len(json.dumps(meta)) < FROM_WORKER[FrameKind.ASK].most * 3 / 4

    def test_any_text_becomes_one_that_may(self) -> None:
        assert not any(self.fault(where=line(text)) for text in ("", "a\nb\x1b[0m", "\udcff", "ä" * 5000))
