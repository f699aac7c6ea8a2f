"""Steps that take samples until they come to so many tokens, under several plans, beside a plain loop on one device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from small import fit, job
from torch import nn
from torch.nn.functional import cross_entropy

import phalanx as px
from phalanx.data import read_ledger
from phalanx.data.sampler import Permutation
from phalanx.errors import SpecError
from phalanx.report.samples_seen import samples_seen
from phalanx.train.build_model import build_model

LENGTHS = [5, 3, 9, 2, 7, 4, 26, 3, 6, 8, 2, 5, 22, 3, 4, 6, 9, 2, 3, 7, 21, 4, 5, 3, 20, 8, 2, 31, 3, 4]
TOKENS, SAMPLES, EPOCHS, WORDS = 20, len(LENGTHS), 2, 11


class Texts(torch.utils.data.Dataset[torch.Tensor]):
    """Token ids of unlike length."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.randint(1, WORDS, (LENGTHS[index] + 1,), generator=torch.Generator().manual_seed(index))


def padded(texts: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    tokens = nn.utils.rnn.pad_sequence(texts, batch_first=True)
    return {"tokens": tokens[:, :-1], "labels": tokens[:, 1:].masked_fill(tokens[:, 1:] == 0, -100)}


class Block(nn.Module):
    """Two layers that share out their weights under tp."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x.cumsum(1) / 8)))


class Net(nn.Module):
    """Tokens of any number between an embedding and a head; each sees those before it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(WORDS, 8), nn.Linear(8, WORDS)
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


HOW: dict[str, Any] = {
    "model": Net,
    "data": Texts,
    "collate": padded,
    "inputs": lambda batch: batch["tokens"],
    "loss": lambda output, batch: px.cross_entropy(output, batch["labels"]),
    "optimizer": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "batch": 8,
    "batch_tokens": px.TokenBatch(TOKENS, LENGTHS),
    "epochs": EPOCHS,
}


def steps() -> list[list[int]]:
    """Samples in the order of the epochs, one after the other, until they have the tokens."""
    found: list[list[int]] = []
    for epoch in range(EPOCHS):
        taken: list[int] = []
        for index in Permutation.keyed(SAMPLES, 0, epoch)(torch.arange(SAMPLES).numpy()).tolist():
            taken.append(index)
            if sum(LENGTHS[one] for one in taken) >= TOKENS:
                found.append(taken)
                taken = []
        found += [taken] if taken else []
    return found


def losses() -> list[float]:
    """Plain PyTorch on one device: accumulate over single samples, divide by the tokens of the step, update."""
    net, found, texts = Net(), list[float](), Texts()
    net.load_state_dict(build_model(job(**HOW)).state_dict())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    for ids in steps():
        tokens, total = sum(LENGTHS[index] for index in ids), 0.0
        optimizer.zero_grad()
        for index in ids:
            text = texts[index]
            loss = cross_entropy(net(text[None, :-1])[0], text[1:], reduction="sum") / tokens
            loss.backward()
            total += loss.item()
        optimizer.step()
        found.append(total)
    return found


PLANS = ["single", "single micro=2", "dp=2", "fsdp=2 micro=1", "pp=2 micro=2", "tp=2", "fsdp=3 zero=1", "threads=2"]


def seen_by(folder: Path) -> list[list[int]]:
    return [ids.tolist() for _, ids in read_ledger(folder / "ledger").values()]


@pytest.mark.parametrize("plan", [*PLANS, "dp=2 shares=3,1", "dp=2 server=1"])
def test_as_many_samples_as_come_to_the_tokens(plan: str, tmp_path: Path) -> None:
    sizes = [len(ids) for ids in steps()]
    assert {1, 2, 5} <= set(sizes)  # one by itself, and none that the most samples end
    assert max(sizes) < 8
    run = fit(plan, tmp_path / "run", **HOW)
    assert seen_by(run.folder) == [sorted(ids) for ids in steps()]
    assert [event["samples"] for event in run.events() if event["event"] == "step"] == sizes
    assert run.losses == pytest.approx(losses(), abs=3e-6)
    seen = samples_seen(run.folder)
    assert (seen.once, seen.epochs) == (True, EPOCHS), seen.answer


@pytest.mark.parametrize("stop", [3, 9])
def test_a_resume_in_mid_epoch_under_another_plan(stop: int, tmp_path: Path) -> None:
    fit("dp=2", tmp_path / "run", **{**HOW, "epochs": None, "steps": stop})
    run = fit("fsdp=3 micro=1", tmp_path / "run", resume=True, **HOW)
    assert run.losses == pytest.approx(losses(), abs=3e-6)
    assert seen_by(run.folder) == [sorted(ids) for ids in steps()]
    assert samples_seen(tmp_path / "run").once


@pytest.mark.parametrize("other", [px.TokenBatch(21, LENGTHS), px.TokenBatch(TOKENS, [*LENGTHS[:-1], 3])])
def test_other_tokens_or_lengths_mean_other_samples(other: px.TokenBatch, tmp_path: Path) -> None:
    fit("single", tmp_path / "run", **{**HOW, "epochs": None, "steps": 3})
    with pytest.raises(px.PhalanxError, match=r"batch_tokens: 20 there, 21 now|their order: lengths .* there, lengths"):
        fit("single", tmp_path / "run", resume=True, **{**HOW, "batch_tokens": other})


def test_the_most_samples_end_a_step_and_that_is_told(tmp_path: Path) -> None:
    how = {**HOW, "batch": 3, "epochs": 1}
    run = fit("dp=2", tmp_path / "run", **how)
    plain = fit("single", tmp_path / "plain", **how)
    assert run.losses == pytest.approx(plain.losses, abs=3e-6)
    assert max(event["samples"] for event in run.events() if event["event"] == "step") == 3
    assert any("end with 3 samples, the most by batch=3" in event.get("message", "") for event in run.events())


def test_a_loop_of_ones_own_and_workers() -> None:
    step, loader = px.build(job(**HOW, workers=1), "single")
    seen = [(batch.samples, step(batch).loss) for batch in loader]
    assert [samples for samples, _ in seen] == [len(ids) for ids in steps()]
    assert [found for _, found in seen] == pytest.approx(losses(), abs=3e-6)
    assert (loader.steps_per_epoch, loader.total_steps) == (None, len(steps()))


def test_proven() -> None:
    assert px.prove(job(**HOW), "fsdp=2 micro=2", steps=4).equal


@pytest.mark.parametrize("plan", ["single", "dp=2", "dp=2 server=1"])
def test_lengths_that_are_not_the_data_s_are_refused_before_the_run(plan: str, tmp_path: Path) -> None:
    words = f"{SAMPLES - 1} lengths; allowed: one for each of the {SAMPLES} samples"
    with pytest.raises(SpecError, match=words):
        fit(plan, tmp_path / "run", **{**HOW, "batch_tokens": px.TokenBatch(TOKENS, LENGTHS[1:])})
    assert not (tmp_path / "run" / "events.jsonl").exists()
