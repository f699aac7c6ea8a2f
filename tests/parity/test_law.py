"""The law: fp32 AdamW steps under every plan equal those on one device, and so does a run that resumes under another.

``make long``, ``make parity`` and ``make resumed`` take more plans, models and pairs of plans.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, replace
from functools import cache
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import table
import torch
from models import MODELS, own_gpt, plain
from table import APART, BAR, OFTEN, REFUSED, SHARES, SHORT, SHORT_STEPS
from torch import nn
from write_resumed import JOBS, ROWS, bound, difference, on_one_device, resumed, saved

import phalanx as px
from law_rows import longer
from phalanx.config import Plan
from phalanx.config.plan import Precision, words
from phalanx.errors import RefusedError
from phalanx.train.look_ahead import refusals
from phalanx.verify import OneDevice, Proof, ReferenceRun


@cache
def one_device(model: str) -> OneDevice:
    return OneDevice.run(MODELS[model](), SHORT_STEPS)


def equal(one: OneDevice, plan: str) -> Proof:
    """Prove ``plan`` and hold each step's loss and each first gradient to the bar."""
    proof = one.prove(Plan.parse(plan))
    assert proof.equal, f"{proof.first}\n{proof.cause}"
    assert max(proof.largest["loss"], proof.largest["gradient"]) <= BAR
    return proof


def rows_of(table: dict[str, tuple[str, ...]]) -> list[tuple[str, str]]:
    return [(model, plan) for model, plans in table.items() for plan in plans]


def often(table: dict[str, tuple[str, ...]]) -> list[Any]:
    rows = rows_of(table)
    return [*(row for row in rows if row in OFTEN), *longer(*(row for row in rows if row not in OFTEN))]


@pytest.mark.parametrize(("model", "plan"), rows_of(SHORT))
def test_a_plan_equals_one_device(model: str, plan: str) -> None:
    proof = equal(one_device(model), plan)
    assert len(proof.losses) == SHORT_STEPS
    assert len(proof.gradients) > len(proof.not_compared)


class ReadTwice(nn.Module):
    """A GPT of which the table is also the head, and the last norm the first: read for all tokens, and for each."""

    def __init__(self, gpt: Any) -> None:
        super().__init__()
        self.gpt = gpt
        gpt.head.weight = gpt.token.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.gpt.norm(self.gpt.token(tokens) + self.gpt.position(torch.arange(tokens.shape[1])))
        for block in self.gpt.blocks:
            x = block(x)
        return self.gpt.head(self.gpt.norm(x))


def of_whole_logits(logits: torch.Tensor, batch: Any) -> px.Loss:
    logs, labels = logits[:, :-1].log_softmax(-1), batch["labels"][:, 1:]
    counted = labels >= 0
    of_labels = logs.gather(-1, labels.clamp(min=0)[..., None])[..., 0]
    return px.Loss((-(0.9 * of_labels + 0.1 * logs.mean(-1)) * counted).sum(), counted.sum())


@pytest.mark.parametrize(
    "plan",
    [
        "tp=2 sequence=true",
        *longer(
            "cp=2",
            "tp=3 micro=5 sequence=true recompute=selective",
            "fsdp=2 tp=2 sequence=true recompute=full",
            "pp=2 tp=2 micro=4 sequence=true",
            "pp=2 cp=2 micro=4",
        ),
    ],
)
def test_what_is_read_for_all_tokens_and_for_each_counts_once(plan: str) -> None:
    job: Any = own_gpt()
    given = replace(job, model=lambda: ReadTwice(job.model()), loss=of_whole_logits)
    equal(OneDevice.run(given, SHORT_STEPS), plan)


def test_what_cannot_be_split_is_refused_with_the_reason() -> None:
    for model, plan, reason in REFUSED:
        found = RefusedError(refusals(MODELS[model](), Plan.parse(plan)))
        assert reason in str(found), (model, plan)
        assert "try:" in str(found), (model, plan)


HALVES = [(model, precision, "dp=2") for model, precision in zip(MODELS, cycle(("bf16", "fp16")))]


@pytest.mark.parametrize(
    ("model", "precision", "plan"),
    [
        ("MLP", "fp16", "fsdp=2 zero=2"),
        ("own GPT", "bf16", "dp=2 micro=3"),
        *longer(("MLP", "fp16", "fsdp=2"), ("MLP", "bf16", "fsdp=2 zero=2"), *HALVES),
    ],
)
def test_half_precision_equals_within_its_rounding(model: str, precision: Precision, plan: str) -> None:
    one = OneDevice.run(MODELS[model](), 3, ReferenceRun(precision=precision))
    proof = one.prove(Plan.parse(f"{plan} precision={precision}"))
    assert proof.equal, f"{proof.first}\n{proof.cause}"
    assert proof.largest["gradient"] > 0, "half precision that rounds nothing was not half precision"
    assert max(check.largest for check in proof.checks if check.kind == "scale") < 0.02


@cache
def with_a_last_sample(model: str) -> OneDevice:
    # 40 samples in batches of 13: three whole ones and a last one of a single sample
    return OneDevice.run(replace(MODELS[model](), batch=13), 5)


@pytest.mark.parametrize(
    ("model", "plan"),
    [
        ("MLP", "fsdp=4 zero=2"),
        *longer(*(("MLP", plan) for plan in ("dp=4", "fsdp=4", "threads=4")), ("own GPT", "fsdp=4 zero=2")),
    ],
)
def test_a_last_batch_with_fewer_samples_than_ranks(model: str, plan: str) -> None:
    equal(with_a_last_sample(model), plan)


@pytest.mark.parametrize(("model", "plan"), often(SHARES))
def test_uneven_shares_equal_one_device(model: str, plan: str) -> None:
    equal(with_a_last_sample(model), plan)


@pytest.mark.parametrize(("model", "plan"), often(APART))
def test_plain_steps_averaged_each_time_equal_one_device(model: str, plan: str) -> None:
    equal(OneDevice.run(plain(replace(MODELS[model](), batch=13)), 5), plan)


def test_steps_before_replicas_go_apart_equal_one_device() -> None:
    equal(OneDevice.run(replace(MODELS["MLP"](), batch=13), 8), "dp=3 sync=local every=5 after=8")


def test_a_model_in_channels_last_equals_one_device() -> None:
    given = MODELS["ConvNet"]()
    last: Any = {"memory_format": torch.channels_last}
    equal(OneDevice.run(replace(given, model=lambda: given.model().to(**last)), 2), "micro=5")


# Each plan goes on from what the one before it has saved.
PAIRS = [(job, plans[at - 1], plan) for job, plans in ROWS.items() for at, plan in enumerate(plans)]
RESUMED = ("fsdp=3 zero=2 micro=2", "ep=2")


@pytest.mark.parametrize(
    ("job", "first", "then"),
    [*(pair for pair in PAIRS if pair[2] in RESUMED), *longer(*(pair for pair in PAIRS if pair[2] not in RESUMED))],
)
def test_a_run_goes_on_under_another_plan_as_on_one_device(job: str, first: str, then: str, tmp_path: Path) -> None:
    run = saved(JOBS[job], first, tmp_path / "first")
    last = resumed(JOBS[job], then, run, tmp_path / "then")
    assert difference(last, on_one_device(JOBS[job])) <= bound(first, then)


ELSEWHERE = {
    "device": "says where, not how; the GPU tests have theirs",
    "compile": "tests/distributed/test_inputs_of_train.py runs it: a compiler's kernels round otherwise",
    "precision": "half precision has its own test here",
    "staleness": "not exact but for 0, which servers have without it",
    "backup": "leaves samples out, so not exact",
    "stages": "tests/distributed/test_pipeline.py: more of them on a rank than the schedule needs",
    "every": "of replicas apart, so not exact",
    "after": "the test of steps before replicas go apart",
    "outer_lr": "of the outer optimizer, so not exact",
    "outer_momentum": "of the outer optimizer, so not exact",
    "compress": "not exact: tests/distributed/test_gradients.py",
}


def texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, (dict, tuple)):
        for one in value.values() if isinstance(value, dict) else value:
            yield from texts(one)


def test_each_key_of_a_plan_has_a_row_or_a_reason() -> None:
    every = [one for name, value in vars(table).items() if name.isupper() and name != "REFUSED" for one in texts(value)]
    used = {word.partition("=")[0] for one in every if "=" in one for word in words(one)}
    assert {one.name for one in fields(Plan)} - used == set(ELSEWHERE)
