"""What placement says is what ranks do: the parameters each holds, and all that it sends, to whom and how often."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import phalanx as px
from law_rows import longer
from phalanx.comm import Place, default_process_group, local, place_within
from phalanx.config import Plan
from phalanx.config.model_costs import Profile
from phalanx.forecast import PHALANX
from phalanx.forecast.kernels import widths
from phalanx.launch.local import launch
from phalanx.placement.collective_bytes import Exchange
from phalanx.placement.step_traffic import parameters_held, peers, step_traffic
from phalanx.train.assembly import build
from phalanx.train.traced_job import work_of

sys.path.append(str(Path(__file__).parents[2] / "bench"))

from bytes_sent import dense
from counting import Sent

Counted = Counter[tuple[str, tuple[int, ...], int]]


def counted(plans: Sequence[str]) -> Callable[..., Any]:
    """A worker's work: the exchanges of the third step under each plan, when everything that is told once was told."""

    def work(place: Place, report: Any) -> list[list[Any]]:
        torch.set_num_threads(1)
        found: list[list[Any]] = []
        for text in plans:
            with default_process_group(place, torch.device("cpu")):
                assembly = build(job_for(text), Plan.parse(text), place, torch.device("cpu"))
                batches = iter(assembly.loader)
                for _ in range(2):
                    assembly.step(next(batches))
                batch = next(batches)
                with Sent() as sent:
                    assembly.step(batch)
                held = sum(local(one).numel() for one in assembly.layout.module.parameters())
                found.append([held, [[*key, times] for key, times in sent.exchanges.items()]])
        return found

    return work


def job_for(text: str) -> px.Job:
    """A small GPT with layers enough for the plan; under some its head shares the embedding's weight.

    It clips, but for in half precision: every step looks at the norm by itself.
    """
    job = small_gpt(layers(text), text in TIED)
    return replace(job, clip=None) if "precision" in text else job


def small_gpt(count: int, tied: bool) -> px.Job:
    job = dense(layers=count, width=32, context=16, batch=16, steps=4)[0]

    def model() -> Any:
        made = job.model()
        made.head.weight = made.token.weight
        return made

    return replace(job, model=model) if tied else job


def layers(text: str) -> int:
    """Six do not divide over four ranks."""
    return 6 if "pp=4" in text else 4 if "interleaved" in text else 2


@cache
def profile(count: int, tied: bool) -> Profile:
    """What a forecast knows of it."""
    return work_of(small_gpt(count, tied)).profile


@cache
def exchanges(ranks: int, often: bool) -> dict[str, list[list[Any]]]:
    """Plan of so many ranks → what each rank was counted to do, from processes started once."""
    every = [*PLANS, TIED[0]] if often else [*MORE_PLANS, *TIED[1:]]
    plans = [text for text in every if Plan.parse(text).world_size == ranks]
    each = launch(counted(plans), ranks)
    return {text: [rank[at] for rank in each] for at, text in enumerate(plans)}


def listed(found: list[Exchange], plan: Plan, rank: int) -> Counted:
    """What placement lists, as it is counted: a ring is messages, a message to either neighbour is one of a size."""
    every: Counted = Counter()
    for one in found:
        ranks = peers(plan, rank, one.over)
        ranks = (ranks[0], ranks[-1]) if one.ends else ranks
        kind, size, times = one.kind.replace("-", "_"), one.size, one.times
        if kind == "ring":
            kind, size, times = "send", size / len(ranks), times * (len(ranks) - 1)
        every[kind, () if kind == "send" else ranks, round(size)] += round(times)
    return every


def seen(rows: list[Any], plan: Plan, rank: int) -> Counted:
    """The same of what was counted; who gets a message has to stand along a dimension that sends some."""
    every: Counted = Counter()
    for kind, ranks, size, times in rows:
        if kind == "send":
            assert any(set(ranks) <= set(peers(plan, rank, (axis,))) for axis in ("pp", "cp"))
        every[kind, () if kind == "send" else tuple(ranks), size] += times
    return every


PLANS = [
    *("dp=2 micro=2", "fsdp=2 zero=1 micro=2", "fsdp=2 zero=2 micro=2", "fsdp=2 micro=2", "fsdp=2 precision=fp16"),
    *("tp=2 sequence=true precision=bf16", "tp=2 recompute=selective", "pp=2 micro=2 schedule=interleaved"),
    *("pp=2 micro=2 schedule=zbv", "pp=2 micro=4 precision=bf16", "cp=2 micro=4", "cp=2 attention=gather"),
    *("cp=2 attention=alltoall recompute=selective", "pp=2 tp=2 micro=2 sequence=true"),
]
MORE_PLANS = [
    *("dp=2", "dp=2 fsdp=2 micro=2", "dp=2 fsdp=2 zero=2 micro=2", "fsdp=2 precision=bf16", "tp=2 micro=4"),
    *("tp=2 sequence=true", "tp=2 sequence=true recompute=full", "tp=2 precision=fp16", "pp=2 micro=2", "pp=4 micro=2"),
    *("pp=2 micro=2 recompute=full", "cp=2 attention=alltoall", "cp=2 micro=8 precision=bf16", "fsdp=2 cp=2"),
    *("fsdp=2 tp=2 recompute=full", "cp=2 tp=2 recompute=full", "pp=2 fsdp=2 micro=2", "pp=2 fsdp=2 zero=1 micro=2"),
    *("cp=2 pp=2 micro=4", "pp=2 tp=2 fsdp=2 micro=4 precision=bf16"),
]
TIED = ["pp=2 micro=8", "pp=2 tp=2 micro=8", "pp=2 fsdp=2 zero=1 micro=8", "pp=4 micro=8", "pp=2 micro=8 schedule=zbv"]


@pytest.mark.parametrize("text", [*PLANS, TIED[0], *longer(*MORE_PLANS, *TIED[1:])])
def test_ranks_hold_and_exchange_what_placement_says(text: str) -> None:
    plan, job = Plan.parse(text), job_for(text)
    wide = widths(PHALANX, plan.precision, np.array(float(plan.zero)))  # as forecasts have them
    known = profile(layers(text), text in TIED)
    for rank, (held, rows) in enumerate(exchanges(plan.world_size, text in (*PLANS, TIED[0]))[text]):
        assert held == parameters_held(known, plan, rank)
        said = listed(step_traffic(known, plan, job.batch, rank, wide), plan, rank)
        real = seen(rows, plan, rank)
        assert said == real, f"rank {rank}: listed alone {said - real}, counted alone {real - said}"


def contrastive(output: torch.Tensor, batch: Any) -> torch.Tensor:
    """Of sequences whose first tokens are alike, and which are not."""
    pooled = output.mean(1)
    alike = (batch["tokens"][:, :1] == batch["tokens"][:, 0]).float()
    return torch.nn.functional.binary_cross_entropy_with_logits(pooled @ pooled.T, alike)


@pytest.mark.parametrize("text", ["dp=2 micro=2", *longer("dp=2", "fsdp=2 micro=2", "fsdp=2 zero=2")])
def test_a_loss_over_the_whole_batch_gathers_what_placement_says(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    job = replace(small_gpt(2, False), loss=contrastive, loss_over="batch")
    plan, known = Plan.parse(text), work_of(job).profile
    assert len(known.compared) == 2
    wide = widths(PHALANX, plan.precision, np.array(float(plan.zero)))
    with monkeypatch.context() as patched:
        patched.setattr(sys.modules[__name__], "job_for", lambda _: job)
        each = launch(counted([text]), 2)
    for rank, ((_, rows),) in enumerate(each):
        said, real = listed(step_traffic(known, plan, job.batch, rank, wide), plan, rank), seen(rows, plan, rank)
        assert said == real, f"rank {rank}: listed alone {said - real}, counted alone {real - said}"


SECONDS = 77.0


def timeouts(group: Any) -> list[float]:
    backend = group._get_backend(torch.device("cpu"))
    return [backend.options._timeout / timedelta(seconds=1)] if hasattr(backend, "options") else []


@pytest.mark.parametrize(
    ("text", "groups"),
    [
        ("dp=2 compress=fp16", 2),
        ("dp=2 sync=local", 1),
        *longer(("fsdp=2 tp=2 recompute=full", 3), ("pp=2 fsdp=2 micro=2", 3)),
    ],
)
def test_every_group_has_the_timeout_of_the_run(text: str, groups: int) -> None:
    plan = Plan.parse(text)

    def work(place: Place, report: Callable[[int], None]) -> list[float]:
        torch.set_num_threads(1)
        cpu = torch.device("cpu")
        with default_process_group(place_within(plan, place), cpu):
            assembly = build(job_for(text), plan, place, cpu)
            assembly.step(next(iter(assembly.loader)))
            found = [one for group in dist.distributed_c10d._world.pg_map for one in timeouts(group)]
            if assembly.local_sgd:
                found += timeouts(assembly.local_sgd.across.group)
        return found

    for found in launch(work, plan.world_size, timeout=SECONDS):
        assert len(found) >= groups
        assert set(found) == {SECONDS}
