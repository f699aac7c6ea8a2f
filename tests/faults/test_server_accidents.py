"""Numbers that are not finite under parameter servers: the worker that meets them says where, and keeps the batch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from test_accidents import (
    BAD,
    GRADIENT,
    LENGTH,
    LOSS,
    MARK,
    Net,
    job,
    planted,
    stopped,
    table,
)
from torch import nn

import phalanx as px
from phalanx.data.saved_batch import SavedBatch
from phalanx.events.schema import faults
from phalanx.parallel.parameter_server import FrameKind
from phalanx.parallel.parameter_server.protocol import FROM_WORKER, MOST_SAMPLES, MOST_TEXT, line
from phalanx.parallel.rng_streams import stream

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
    pytest.param(LOSS, "loss", "x of the batch", id="sample", marks=pytest.mark.long),
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


def test_what_cannot_be_run_again_hides_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> None:
        raise MemoryError("no\nroom")

    monkeypatch.setattr("phalanx.train.parameter_server.gradient_worker.first_sighting_here", fails)
    error = stopped("dp=2 server=1", "run", GRADIENT)
    assert "the gradient of step 0 is not finite, and its loss is 1." in str(error)
    assert "Where it comes from could not be found: no room" in str(error)
    assert BAD in accident()["samples"]


def sighting(**facts: Any) -> dict[str, Any]:
    told = {"order": [0, 0.0, 1.0], "where": "the output of a", "parameter": "", "trouble": "", "micro": 0}
    return {**told, "samples": [3], "kept": False, **facts}


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
