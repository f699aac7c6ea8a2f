"""What a look found of a model before a run travels to its workers, who do not look again; and only to that model."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import phalanx as px
from phalanx.config import Plan
from phalanx.demo.jobs import gpt
from phalanx.launch import look_ahead
from phalanx.parallel import deferred_init, split, unwrapped_blocks
from phalanx.parallel.pipeline import StageCuts, cut, cutting
from phalanx.parallel.split_facts import Facts
from phalanx.parallel.survey import survey
from phalanx.train import refusals
from phalanx.train.build_model import build_model
from phalanx.train.few_samples import example_of

PLANS = {
    "tp=2": "look slice_problems",
    "tp=2 sequence=true": "look slice_problems",
    "cp=2": "look",
    "pp=2": "look units",
    "pp=2 micro=2 tp=2 recompute=full": "look look_inside slice_problems units",
    "fsdp=2 tp=2": "look look_inside slice_problems",
    "fsdp=2": "look_inside",
    "dp=2 recompute=full": "look_inside",
}
"""What each plan has to be looked for."""
LOOKS: tuple[tuple[Any, str], ...] = (
    (split, "look"),
    (deferred_init, "followed"),
    (unwrapped_blocks, "look_inside"),
    (cutting, "units"),
    (refusals, "slice_problems"),
)


def job() -> px.Job:
    given = gpt.gpt_job(layers=2, width=24, heads=4, context=12, batch=8, steps=2)
    return replace(given, evaluate=None)  # over all held-out text, which takes longer than the steps


def counted(monkeypatch: pytest.MonkeyPatch, log: Path) -> None:
    """Have every look write down which process takes it."""

    def noted(name: str, look: Callable[..., Any]) -> Callable[..., Any]:
        def looking(*args: Any, **kwargs: Any) -> Any:
            with log.open("a") as file:
                file.write(f"{name} {os.getpid()}\n")
            return look(*args, **kwargs)

        return looking

    for module, name in LOOKS:
        monkeypatch.setattr(module, name, noted(name, getattr(module, name)))


@pytest.mark.parametrize("text", PLANS)
def test_one_process_looks(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counted(monkeypatch, tmp_path / "looks")
    plan, folder = Plan.parse(text), tmp_path / "run"
    px.fit(job(), run=px.RunSpec(job="gpt", plan=plan, folder=folder, forecast="none"))
    looks = (tmp_path / "looks").read_text().splitlines()
    names, processes = zip(*(look.split() for look in looks), strict=True)
    assert sorted(names) == PLANS[text].split()
    assert len(set(processes)) == 1


@pytest.mark.parametrize("text", [text for text in PLANS if Plan.parse(text).kind == "split"])
def test_facts_are_the_same_after_they_have_travelled(text: str) -> None:
    plan, module = Plan.parse(text), build_model(job())
    found = look_ahead(job(), plan).facts
    assert found is not None
    facts = Facts.from_dict(found)
    assert json.loads(json.dumps(facts.to_dict())) == found
    example = example_of(job(), module)
    assert facts.parts == survey(module, plan, example)[1]


def test_facts_of_another_plan_or_model_are_not_used() -> None:
    plan = Plan.parse("tp=2")
    facts = look_ahead(job(), plan).facts
    assert facts is not None

    def of(made: px.Job, asked: str) -> Facts | None:
        return Facts.known(facts, build_model(made), Plan.parse(asked))

    assert of(job(), "tp=2") == Facts.from_dict(facts)
    assert of(job(), "tp=2 dp=2") is None
    assert of(job(), "tp=2 sequence=true") is None
    wider = gpt.gpt_job(layers=2, width=48, heads=4, context=12, batch=8, steps=2)
    assert of(wider, "tp=2") is None

    def renamed() -> nn.Module:
        module = job().model()
        module.other = module.head
        del module.head
        return module

    assert of(replace(job(), model=renamed), "tp=2") is None
    assert Facts.known(None, build_model(job()), plan) is None


def test_a_pipeline_is_cut_where_it_is_known_to_be_and_looked_for_where_that_cannot_be() -> None:
    plan, module = Plan.parse("pp=2"), build_model(job())
    example = example_of(job(), module)
    fresh = cut(module, example, plan)
    known = cut(module, example, plan, fresh.cuts)
    assert (known.regions, known.stages_of, known.cuts) == (fresh.regions, fresh.stages_of, fresh.cuts)
    inside = f"blocks.0.{next(name for name, _ in module.get_submodule('blocks.0').named_children())}"
    wrong = StageCuts(units=(*fresh.cuts.units, inside), starts=(0, 1))
    assert cut(module, example, plan, wrong).regions == fresh.regions
    earlier = StageCuts(units=fresh.cuts.units, starts=(0, 1))
    assert cut(module, example, plan, earlier).regions[0] == range(1)
