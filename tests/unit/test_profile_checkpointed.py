"""Models that recompute by themselves or take blocks apart, and the lengths of samples: traced as they are."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import phalanx as px
from law_rows import in_one_test
from phalanx.config import Plan
from phalanx.config.model_costs import ModelPart, flops
from phalanx.forecast import Lengths, forecast
from phalanx.forecast.layouts import Layouts, for_memory, for_time
from phalanx.hardware import cluster
from phalanx.trace import ModelCall, Profile, trace
from phalanx.train.traced_job import work_of

WIDTH, LENGTH, LAYERS = 32, 16, 4
PRODUCTS = 2 * 2 * LENGTH * WIDTH * 4 * WIDTH  # FLOP of one sample in the two products of a block, forward


class Block(nn.Module):
    """A feed-forward network; ``inner`` runs what comes after the norm."""

    def __init__(self, inner: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(lambda y: self.down(F.gelu(self.up(y))), self.norm(x))


def plainly(call: Any, *args: Tensor) -> Tensor:
    return call(*args)


def recomputed(call: Any, *args: Tensor) -> Tensor:
    return checkpoint(call, *args, use_reentrant=False)


def reentrant(call: Any, *args: Tensor) -> Tensor:
    return checkpoint(call, *args, use_reentrant=True)


class Model(nn.Module):
    """Blocks that ``outer`` calls, one by one or two at a time."""

    def __init__(self, outer: Any = plainly, inner: Any = plainly, at_once: int = 1) -> None:
        super().__init__()
        self.table = nn.Embedding(64, WIDTH)
        self.blocks = nn.ModuleList([Block(inner) for _ in range(LAYERS)])
        self.head = nn.Linear(WIDTH, 64)
        self.outer, self.at_once = outer, at_once

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens)
        for at in range(0, LAYERS, self.at_once):
            x = self.outer(lambda x, at=at: nn.Sequential(*self.blocks[at : at + self.at_once])(x) + torch.tanh(x), x)
        return self.head(x)


def profile(model: nn.Module) -> Profile:
    tokens = torch.randint(64, (2, LENGTH))
    loss = lambda output, batch: F.cross_entropy(output.flatten(0, 1), batch.flatten())  # noqa: E731
    return trace(ModelCall(module=model, args=(tokens,), batch=tokens, loss=loss))


def block(found: Profile) -> ModelPart:
    return next(part for part in found.parts if part.role == "block")


def products(part: ModelPart, *, again: bool) -> float:
    return sum(flops(one, 1, LENGTH) for one in part.backward if one.again is again)


def kept(part: ModelPart) -> float:
    return sum(one.elements.at(1, LENGTH) for one in part.saved)


@in_one_test(("how", "at_once"), [(recomputed, 1), (reentrant, 2)])
def test_blocks_in_a_checkpoint_keep_what_enters_and_compute_again(how: Any, at_once: int) -> None:
    plain, found = profile(Model(at_once=at_once)), profile(Model(outer=how, at_once=at_once))
    assert (plain.recomputes, found.recomputes) == (False, True)
    assert found.blocks == plain.blocks == LAYERS
    assert found.parameters == plain.parameters
    assert found.flops(1) == plain.flops(1)  # those of the model, once
    assert kept(block(plain)) > 4 * kept(block(found)) == 0
    assert products(block(plain), again=True) == 0
    assert products(block(found), again=False) == products(block(plain), again=False) == 2 * PRODUCTS
    # A reentrant one computes all of it again, the other stops where nothing more was kept: before the last product.
    assert products(block(found), again=True) == (PRODUCTS if how is reentrant else PRODUCTS / 2)
    assert block(found).working.at(1, LENGTH) > block(plain).working.at(1, LENGTH)


@in_one_test("how", [recomputed, reentrant])
def test_a_checkpoint_inside_a_block_keeps_what_it_is_called_with(how: Any) -> None:
    plain, found = profile(Model()), profile(Model(inner=how))
    assert found.flops(1) == plain.flops(1)
    # the norm's output, which the checkpoint is called with, and its mean and scale of each token
    assert kept(block(found)) == LENGTH * WIDTH + 2 * LENGTH
    assert products(block(found), again=True) > 0


def job(model: Callable[[], nn.Module]) -> px.Job:
    return px.Job(
        model=model,
        data=lambda: px.Table(tokens=torch.randint(64, (64, LENGTH))),
        inputs=lambda batch: batch["tokens"],
        loss=lambda output, batch: px.cross_entropy(output, batch["tokens"]),
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        batch=64,
        steps=1,
    )


def test_a_model_that_recomputes_or_is_compiled_does_no_backward_in_halves() -> None:
    plan, there = Plan.parse("pp=4 micro=8 schedule=zero-bubble stages=2"), cluster("4xA100")
    work = work_of(job(lambda: Model(outer=recomputed)))
    assert work.profile.recomputes
    halves = forecast(_as_if_it_did_not(work), plan, there)
    assert forecast(work, plan, there).seconds["pipeline"] > halves.seconds["pipeline"]
    compiled = forecast(_as_if_it_did_not(work), replace(plan, compile=True), there)
    assert compiled.seconds["pipeline"] > halves.seconds["pipeline"]


def _as_if_it_did_not(work: Any) -> Any:
    return replace(work, profile=replace(work.profile, recomputes=False))


class Dissected(Model):
    """Calls what is inside its blocks, never a block."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens)
        each: Any
        for each in self.blocks:
            x = x + each.down(F.gelu(each.up(each.norm(x))))
        return self.head(x)


def test_blocks_that_a_model_takes_apart_are_priced_as_the_runtime_takes_them() -> None:
    """What is gathered and recomputed at once is what the model calls."""
    found = work_of(job(Dissected)).profile
    assert found.blocks == 3 * LAYERS
    names = [part.name for part in found.parts if part.role == "block"]
    assert names[:3] == ["blocks.0.norm", "blocks.0.up", "blocks.0.down"]
    assert found.flops(1) == work_of(job(Model)).profile.flops(1)


SHORT, LONG = 8, 64


class Text(torch.utils.data.Dataset[Tensor]):
    """Samples of ``SHORT`` tokens first, the others of ``LONG``."""

    def __init__(self, short: int, size: int = 200, seconds: float = 0.0) -> None:
        self.short, self.size, self.seconds, self.read = short, size, seconds, 0

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Tensor:
        self.read += 1
        time.sleep(self.seconds)
        return torch.full((SHORT if index < self.short else LONG,), index % 50 + 1)


class TextStream(torch.utils.data.IterableDataset[Tensor]):
    def __init__(self, size: int) -> None:
        self.size = size

    def __iter__(self) -> Iterator[Tensor]:
        return (torch.full((SHORT if index % 2 else LONG,), index % 50 + 1) for index in range(self.size))


class PerToken(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.inner, self.head = nn.Embedding(64, 32), nn.Linear(32, 32), nn.Linear(32, 64)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(torch.relu(self.inner(self.table(ids))))


def padded(samples: list[Tensor]) -> Tensor:
    return torch.nn.utils.rnn.pad_sequence(samples, batch_first=True)


def job_of(data: Any) -> px.Job:
    return px.Job(
        model=PerToken,
        data=lambda: data,
        collate=padded,
        loss=lambda output, batch: output.float().square().mean(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        batch=8,
        steps=2,
    )


def activations(data: Any) -> float:
    return forecast(work_of(job_of(data)), Plan(), cluster("1xA100-80GB")).memory["activations"]


def test_short_samples_at_the_beginning_hide_no_memory() -> None:
    assert activations(Text(short=4)) == pytest.approx(activations(Text(short=0)), rel=0.01)


def test_of_a_stream_the_first_hundred_are_looked_at() -> None:
    found = work_of(job_of(TextStream(500))).lengths
    assert found is not None
    assert (len(found.tokens), found.tokens[0], found.longest, found.padded) == (100, SHORT, LONG, True)


def test_padded_batches_are_as_long_as_their_longest_sample() -> None:
    seen = (10, 20, 30, 40)
    expected = {1.0: 25.0, 2.0: 31.25, 1000.0: 40.0}  # of two draws: 10/16 + 20 * 3/16 + 30 * 5/16 + 40 * 7/16
    lengths = Lengths(seen, padded=True)
    assert lengths.of_batch(np.array(list(expected))) == pytest.approx(list(expected.values()))
    assert Lengths(seen).of_batch(np.array([1.0, 9.0])) == pytest.approx([25.0, 25.0])


def test_time_is_of_the_mean_and_memory_of_the_longest() -> None:
    layouts = Layouts.of([Plan(), Plan(micro=1)], 4, 10)
    lengths = Lengths((10, 30), padded=False)
    assert for_time(lengths, layouts).length.tolist() == [20.0, 20.0]
    assert for_memory(lengths, layouts).length.tolist() == [30.0, 30.0]
    assert for_time(None, layouts) is layouts
