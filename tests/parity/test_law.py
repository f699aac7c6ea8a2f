"""The law: fp32 AdamW steps under every plan equal those on one device. ``make parity`` takes more of both."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import cycle
from typing import Any

import pytest
import torch
from models import MODELS, own_gpt, plain
from table import APART, APART_AFTER, BAR, LONGER, MORE, REFUSED, SHARES, SHORT, SHORT_SPLIT, SHORT_STEPS
from torch import nn

import phalanx as px
from longer import longer
from phalanx.config import Plan
from phalanx.config.plan import Precision
from phalanx.errors import RefusedError
from phalanx.verify import OneDevice, ReferenceRun


@cache
def one_device(model: str) -> OneDevice:
    return OneDevice.run(MODELS[model](), SHORT_STEPS)


def rows_of(*tables: dict[str, tuple[str, ...]]) -> list[tuple[str, str]]:
    return [(model, plan) for table in tables for model, plans in table.items() for plan in plans]


@pytest.mark.parametrize(("model", "plan"), [*rows_of(SHORT, SHORT_SPLIT), *longer(*rows_of(MORE))])
def test_a_plan_equals_one_device(model: str, plan: str) -> None:
    proof = one_device(model).prove(Plan.parse(plan))
    assert proof.equal, f"{proof.first}\n{proof.cause}"
    assert proof.largest["loss"] <= BAR
    assert proof.largest["gradient"] <= BAR
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
    """Smoothed labels, for which nobody can cut the table along the vocabulary."""
    logs, labels = logits[:, :-1].log_softmax(-1), batch["labels"][:, 1:]
    counted = labels >= 0
    of_labels = logs.gather(-1, labels.clamp(min=0)[..., None])[..., 0]
    return px.Loss((-(0.9 * of_labels + 0.1 * logs.mean(-1)) * counted).sum(), counted.sum())


@cache
def read_twice() -> OneDevice:
    job: Any = own_gpt()
    return OneDevice.run(replace(job, model=lambda: ReadTwice(job.model()), loss=of_whole_logits), SHORT_STEPS)


@pytest.mark.parametrize(
    "plan",
    [
        "tp=2 sequence=true",
        "cp=2",
        *longer(
            "tp=2",
            "tp=3 micro=5 sequence=true recompute=selective",
            "fsdp=2 tp=2 sequence=true recompute=full",
            "pp=2 tp=2 micro=4 sequence=true",
            "pp=2 cp=2 micro=4",
        ),
    ],
)
def test_what_is_read_for_all_tokens_and_for_each_counts_once(plan: str) -> None:
    proof = read_twice().prove(Plan.parse(plan))
    assert proof.equal, f"{proof.first}\n{proof.cause}"
    assert max(proof.largest["loss"], proof.largest["gradient"]) <= BAR


@pytest.mark.parametrize(("model", "plan", "reason"), REFUSED)
def test_what_cannot_be_split_is_refused_with_the_reason(model: str, plan: str, reason: str) -> None:
    with pytest.raises(RefusedError, match=reason) as caught:
        one_device(model).prove(Plan.parse(plan))
    assert caught.value.exit_code == 2
    assert "try:" in str(caught.value)


@pytest.mark.parametrize(
    ("plan", "precision"),
    [
        *(("dp=2 micro=3", precision) for precision in ("bf16", "fp16")),
        ("fsdp=2", "bf16"),
        ("fsdp=2 zero=2", "fp16"),
        *longer(("fsdp=2", "fp16"), ("fsdp=2 zero=2", "bf16")),
    ],
)
def test_half_precision_equals_within_its_rounding(plan: str, precision: str) -> None:
    one = OneDevice.run(MODELS["MLP"](), 5, ReferenceRun(precision=precision))
    proof = one.prove(Plan.parse(f"{plan} precision={precision}"))
    assert proof.equal, f"{proof.first}\n{proof.cause}"
    assert proof.largest["gradient"] > 0, "half precision that rounds nothing was not half precision"


HALVES = list(zip(MODELS, cycle(("bf16", "fp16"))))  # of each kind one: the MLP above has both
OFTEN = ("ConvNet", "irregular", "own GPT", "HF BERT, padded", "HF Mixtral")


@pytest.mark.parametrize(
    ("model", "precision"),
    [*(row for row in HALVES if row[0] in OFTEN), *longer(*(row for row in HALVES if row[0] not in OFTEN))],
)
def test_every_model_in_half_precision_equals_within_its_rounding(model: str, precision: Precision) -> None:
    plan = "dp=2" if precision == "bf16" else "dp=2 micro=3"
    one = OneDevice.run(MODELS[model](), 3, ReferenceRun(precision=precision))
    proof = one.prove(Plan.parse(f"{plan} precision={precision}"))
    assert proof.equal, f"{proof.first}\n{proof.cause}"
    assert max(check.largest for check in proof.checks if check.kind == "scale") < 0.02


@cache
def with_a_last_sample(model: str) -> OneDevice:
    # 40 samples in batches of 13: three whole ones and a last one of a single sample
    return OneDevice.run(replace(MODELS[model](), batch=13), 5)


@pytest.mark.parametrize(
    ("model", "plan"),
    [
        *(("MLP", plan) for plan in ("fsdp=4", "threads=4")),
        *(("own GPT", plan) for plan in ("dp=4", "fsdp=4 zero=2")),
        *longer(*(("MLP", plan) for plan in ("dp=4", "fsdp=4 zero=2"))),
        *longer(*(("own GPT", plan) for plan in ("fsdp=4", "threads=4"))),
    ],
)
def test_a_last_batch_with_fewer_samples_than_ranks(model: str, plan: str) -> None:
    assert with_a_last_sample(model).prove(Plan.parse(plan)).equal


def but_longer(table: dict[str, tuple[str, ...]]) -> list[Any]:
    rows = rows_of(table)
    return [*(row for row in rows if row not in LONGER), *longer(*(row for row in rows if row in LONGER))]


@pytest.mark.parametrize(("model", "plan"), but_longer(SHARES))
def test_uneven_shares_equal_one_device(model: str, plan: str) -> None:
    proof = with_a_last_sample(model).prove(Plan.parse(plan))
    assert proof.equal, f"{proof.first}\n{proof.cause}"
    assert proof.largest["loss"] <= BAR
    assert proof.largest["gradient"] <= BAR


@cache
def with_plain_steps(model: str) -> OneDevice:
    return OneDevice.run(plain(replace(MODELS[model](), batch=13)), 5)


@pytest.mark.parametrize(("model", "plan"), but_longer(APART))
def test_plain_steps_averaged_each_time_equal_one_device(model: str, plan: str) -> None:
    proof = with_plain_steps(model).prove(Plan.parse(plan))
    assert proof.equal, f"{proof.first}\n{proof.cause}"
    assert proof.largest["loss"] <= BAR
    assert proof.largest["gradient"] <= BAR


@pytest.mark.parametrize("plan", APART_AFTER)
def test_steps_before_replicas_go_apart_equal_one_device(plan: str) -> None:
    proof = OneDevice.run(replace(MODELS["MLP"](), batch=13), 8).prove(Plan.parse(plan))
    assert proof.equal, f"{proof.first}\n{proof.cause}"
    assert max(proof.largest["loss"], proof.largest["gradient"]) <= BAR


def test_a_model_in_channels_last_equals_one_device() -> None:
    given = MODELS["ConvNet"]()
    last: Any = {"memory_format": torch.channels_last}
    proof = OneDevice.run(replace(given, model=lambda: given.model().to(**last)), 2).prove(Plan.parse("micro=5"))
    assert proof.equal, f"{proof.first}\n{proof.cause}"
