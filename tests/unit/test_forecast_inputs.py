"""No input of a forecast is ignored: a key of a plan or a field of a job or cluster, changed by itself, gives another
answer, a refusal, or a sentence that names it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import fields, replace
from functools import cache
from typing import Any

import pytest
import torch

import phalanx as px
from law_rows import longer as rows_of_long
from phalanx.config import Cluster, Device, Group, Host, Job, Link, Network, Plan
from phalanx.demo.jobs import gpt
from phalanx.errors import PhalanxError
from phalanx.forecast import Work, forecast
from phalanx.planner import Question
from phalanx.planner.advise import forecast_plan
from phalanx.planner.rules import refuse
from phalanx.planner.scale import forecast_to_dict
from phalanx.train.traced_job import steps_of, work_of

PLAIN = "dp=4 fsdp=2"
PLANS: Mapping[str, tuple[str, str]] = {
    "dp": ("dp=8", "dp=4"),
    "fsdp": ("dp=8", "dp=4 fsdp=2"),
    "tp": ("dp=8", "dp=4 tp=2"),
    "pp": ("dp=8", "dp=4 pp=2"),
    "cp": ("dp=8", "dp=4 cp=2"),
    "ep": ("dp=8", "dp=4 ep=2"),
    "threads": ("dp=8", "threads=8"),
    "schedule": ("dp=4 pp=2 micro=1", "dp=4 pp=2 micro=1 schedule=gpipe"),
    "stages": ("dp=4 pp=2 micro=1 schedule=interleaved stages=1", "dp=4 pp=2 micro=1 schedule=interleaved stages=2"),
    "sequence": ("dp=4 tp=2", "dp=4 tp=2 sequence=true"),
    "attention": ("dp=4 cp=2", "dp=4 cp=2 attention=gather"),
    "zero": ("fsdp=8 zero=3", "fsdp=8 zero=1"),
    "micro": ("dp=8", "dp=8 micro=1"),
    "precision": ("dp=8", "dp=8 precision=bf16"),
    "recompute": ("dp=8", "dp=8 recompute=full"),
    "offload": ("dp=8", "dp=8 offload=optimizer"),
    "compile": ("dp=8", "dp=8 compile=true"),
    "device": ("dp=8", "dp=8 device=cpu"),
    "sync": ("dp=8 sync=local every=4", "dp=8 sync=diloco every=4"),
    "every": ("dp=8 sync=local every=4", "dp=8 sync=local every=8"),
    "after": ("dp=8 sync=local every=4", "dp=8 sync=local every=4 after=10"),
    "outer": ("dp=8 sync=diloco every=4", "dp=8 sync=diloco every=4 outer=sgd"),
    "outer_lr": ("dp=8 sync=diloco every=4", "dp=8 sync=diloco every=4 outer_lr=0.5"),
    "outer_momentum": ("dp=8 sync=diloco every=4", "dp=8 sync=diloco every=4 outer_momentum=0.5"),
    "server": ("server=1 dp=8", "server=2 dp=8"),
    "staleness": ("server=1 dp=8", "server=1 dp=8 staleness=4"),
    "backup": ("server=1 dp=8", "server=1 dp=8 backup=1"),
    "compress": ("dp=8", "dp=8 compress=int8"),
    "shares": ("dp=8", "dp=8 shares=3,1,1,1,1,1,1,1"),
}
MORE = (
    ("attention", "dp=4 cp=2", "dp=4 cp=2 attention=alltoall"),
    ("outer", "dp=8 sync=diloco every=4 outer=sgd", "dp=8 sync=diloco every=4 outer=nesterov"),
    ("offload", "fsdp=8 zero=3", "fsdp=8 zero=3 offload=parameters"),
    ("device", "dp=8", "dp=8 device=cuda"),
)


@cache
def work() -> Work:
    return work_of(gpt.job())


def machines() -> Cluster:
    """Two nodes of four, every field stated."""
    device = Device(
        name="A100-80GB",
        kind="cuda",
        peak={"fp32": 19.5e12, "bf16": 312e12},
        memory=80 * 2**30,
        bandwidth=2e12,
        kept=2**30,
        power=400.0,
        launch=5e-6,
        processors=108,
    )
    host = Host(
        name="host", slots=4, link=Link(name="bus", bandwidth=25e9, latency=5e-6), cores=64, memory=2**38, numa=2
    )
    group = Group(device=device, link=Link(name="link", bandwidth=3e11, latency=3e-6), host=host, per_node=4, nodes=2)
    return Cluster(groups=(group,), network=Network(name="net", bandwidth=5e10, latency=14e-6))


def answer(text: str, there: Cluster, what: Work | None = None) -> tuple[Any, tuple[str, ...]]:
    """Every number of a forecast, or its refusal; and its sentences."""
    plan, what = Plan.parse(text), what or work()
    try:
        refuse(plan, what, there)
    except PhalanxError as error:
        return str(error), ()
    found = forecast_to_dict(forecast(what, plan, there))
    notes = tuple(found.pop("notes"))
    return {name: value for name, value in found.items() if name not in ("plan", "cluster")}, notes


def counts(before: tuple[Any, tuple[str, ...]], after: tuple[Any, tuple[str, ...]], name: str) -> bool:
    """Whether the second answer is another, or names what it leaves out, and says what becomes of it."""
    becomes = "not priced|is priced as|priced with|changes what is learnt|take longer"
    said = re.compile(rf"\b{re.escape(name)}\b.*({becomes})")
    return before[0] != after[0] or any(said.search(note) for note in after[1])


def test_every_key_of_a_plan_is_looked_at() -> None:
    assert set(PLANS) == {one.name for one in fields(Plan)}


def test_no_key_of_a_plan_is_ignored() -> None:
    ignored = list[str]()
    for name, before, after in (*((name, *texts) for name, texts in PLANS.items()), *MORE):
        base = answer(before, machines())
        assert not isinstance(base[0], str), base[0]
        if not counts(base, answer(after, machines()), "first 10 steps" if name == "after" else name):
            ignored.append(after)
    assert ignored == ["dp=8 device=cuda"]  # which they are


def longer() -> px.Table:
    return px.Table(tokens=torch.zeros(200, 81, dtype=torch.long))


JOBS: Mapping[str, Mapping[str, Any]] = {
    "model": {"model": lambda: gpt.GPT(gpt.Size(width=256))},
    "data": {"data": longer, "model": lambda: gpt.GPT(gpt.Size(context=80))},
    "loss": {"loss": lambda output, batch: output.square().mean()},
    "optimizer": {"optimizer": lambda params: torch.optim.SGD(params, lr=0.1)},
    "batch": {"batch": 64},
    "batch_ramp": {"batch": 64, "batch_ramp": {0: 16, 5: 64}},
    "batch_tokens": {"batch_tokens": px.TokenBatch(160, [80] * len(gpt.job().data()))},
    "epochs": {"epochs": 3, "steps": None},
    "steps": {"steps": 7},
    "loss_over": {"loss_over": "batch"},
    "batch_statistics": {"batch_statistics": "global"},
    "seed": {"seed": 3},
    "inputs": {
        "inputs": lambda batch: batch["tokens"][:, :32],
        "loss": lambda output, batch: px.cross_entropy(output, batch["tokens"][:, 1:33], ignore_index=None),
    },
    "transform": {"transform": lambda batch, keys: batch},
    "collate": {"collate": torch.utils.data.default_collate},
    "shuffle": {"shuffle": False},
    "sampler": {"sampler": lambda seed, epoch: range(5)},
    "drop_last": {"drop_last": True},
    "workers": {"workers": 2},
    "prefetch": {"workers": 2, "prefetch": 7},
    "schedule": {"schedule": px.Schedule(warmup_steps=5)},
    "clip": {"clip": 0.5},
    "evaluate": {"evaluate": longer},
    "metrics": {"metrics": lambda output, batch: {}},
    "evaluate_every": {"evaluate_every": 3},
    "best": {"evaluate": longer, "best": px.Best()},
    "average": {"average": px.Average()},
    "unused": {"unused": "allow"},
    "tensor_parallel": {"tensor_parallel": {"blocks.*.up": "whole"}},
}


def test_every_field_of_a_job_is_looked_at() -> None:
    # a job with phases is not priced: forecast and plan refuse it
    assert set(JOBS) | {"name", "initial", "callbacks", "phases"} == {one.name for one in fields(Job)}


def of_job(given: Job) -> tuple[Any, tuple[str, ...]]:
    there = machines()
    question = Question(work=work_of(given), cluster=there, precision="fp32", steps=steps_of(given) or 0)
    found = forecast_plan(question, Plan.parse("dp=8")).to_dict()
    notes = tuple(found.pop("notes"))
    return found, notes


@cache
def of_the_job() -> tuple[Any, tuple[str, ...]]:
    return of_job(gpt.job())


LATER = ("seed", "collate", "prefetch", "workers", "evaluate_every", "average", "unused", "epochs", "shuffle")


@pytest.mark.parametrize("name", [*(name for name in JOBS if name not in LATER), *rows_of_long(*LATER)])
def test_no_field_of_a_job_is_ignored(name: str) -> None:
    assert counts(of_the_job(), of_job(replace(gpt.job(), **JOBS[name])), name)


CLUSTERS: Mapping[tuple[type, str], tuple[Any, str]] = {
    (Device, "name"): ("H100", PLAIN),
    (Device, "kind"): ("rocm", "dp=8 device=cuda"),
    (Device, "peak"): ({"fp32": 30e12, "bf16": 312e12}, PLAIN),
    (Device, "memory"): (40 * 2**30, PLAIN),
    (Device, "bandwidth"): (1e12, PLAIN),
    (Device, "kept"): (2 * 2**30, PLAIN),
    (Device, "power"): (500.0, PLAIN),
    (Device, "launch"): (20e-6, PLAIN),
    (Device, "processors"): (64, PLAIN),
    (Device, "measured"): ({"product": 0.5}, PLAIN),
    (Link, "bandwidth"): (1e11, "dp=2 tp=4"),
    (Link, "latency"): (10e-6, "dp=2 tp=4"),
    (Network, "bandwidth"): (1e10, PLAIN),
    (Network, "latency"): (50e-6, PLAIN),
    (Host, "slots"): (16, "tp=4 dp=2"),
    (Host, "link"): (Link(name="bus", bandwidth=5e9, latency=5e-6), "dp=8 offload=optimizer"),
    (Host, "cores"): (32, PLAIN),
    (Host, "memory"): (2**20, "dp=8 offload=optimizer"),
    (Host, "numa"): (1, PLAIN),
    (Group, "per_node"): (8, PLAIN),
    (Group, "nodes"): (1, PLAIN),
}
LABELS = {(Link, "name"), (Network, "name"), (Host, "name")}
PARTS = {(Group, "device"), (Group, "link"), (Group, "host"), (Cluster, "groups"), (Cluster, "network")}


def test_every_field_of_a_cluster_is_looked_at() -> None:
    every = {(kind, one.name) for kind in (Device, Link, Network, Host, Group, Cluster) for one in fields(kind)}
    assert set(CLUSTERS) | LABELS | PARTS == every


def changed(part: Any, kind: type, name: str, value: Any) -> Any:
    """``part`` with a field of its part of that kind changed."""
    if isinstance(part, kind):
        return replace(part, **{name: value})
    if isinstance(part, Cluster):
        network = changed(part.network, kind, name, value) if kind is Network else part.network
        return Cluster(groups=tuple(changed(group, kind, name, value) for group in part.groups), network=network)
    if isinstance(part, Group):
        inner = {one: changed(getattr(part, one), kind, name, value) for one in ("device", "link", "host")}
        return replace(part, **inner)
    return part


def test_no_field_of_a_cluster_is_ignored() -> None:
    ignored = list[tuple[type, str]]()
    for (kind, name), (value, plan) in CLUSTERS.items():
        there = changed(machines(), kind, name, value)
        assert there != machines()
        word = {"numa": "NUMA", "kind": "rocm"}.get(name, name)
        if not counts(answer(plan, machines()), answer(plan, there), word):
            ignored.append((kind, name))
    assert ignored == []


def test_a_host_without_memory_for_what_is_offloaded_does_not_fit() -> None:
    text = "dp=8 offload=optimizer"
    small = changed(machines(), Host, "memory", 2**20)
    before, after = answer(text, machines())[0], answer(text, small)[0]
    assert before["fits"]
    assert not after["fits"]
    elements = sum(one.numel() for one in gpt.GPT(gpt.Size()).parameters())
    assert before["host"] == pytest.approx(
        4 * elements * 16
    )  # four ranks, each with values, gradients and Adam's state
