"""Why a job differs where its batch is split: each cause planted, named before the run, and by a proof that fails."""

from __future__ import annotations

from collections import UserDict
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from small import Net, job, table
from torch import nn

import phalanx as px
from law_rows import longer
from phalanx.config import Plan
from phalanx.launch.side_process import look_ahead
from phalanx.parallel import ddp
from phalanx.train.findings import Findings
from phalanx.train.step import Step
from phalanx.verify import parity

WEIGHTS = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0])
LENGTHS = (3, 5, 8, 2, 7, 4, 6, 9)


class Counting(Net):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(9))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.mean.lerp_(x.mean(0).detach(), 0.1)
        return super().forward(x - self.mean)


class Ticking(Net):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return super().forward(x)


class Mixing(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x - x.mean(0, keepdim=True))


class Noisy(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x + 0.1 * torch.randn_like(x) * self.training)


class AlwaysNoisy(Net):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.dropout = nn.Dropout(dropout) if dropout else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(self.dropout(x) + 0.1 * torch.randn_like(x))


class Normalised(Net):
    def __init__(self, **how: Any) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(9, **how)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(self.norm(x))


class Tokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(16, 8), nn.Linear(8, 16)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.embed(ids))


def padded(samples: list[torch.Tensor]) -> UserDict[str, torch.Tensor]:
    ids = nn.utils.rnn.pad_sequence(samples, batch_first=True)
    return UserDict(ids=ids, labels=ids.masked_fill(ids == 0, -100))


def masked(samples: list[Any]) -> dict[str, torch.Tensor]:
    x, y = (torch.stack([one[key] for one in samples]) for key in ("x", "y"))
    return {"x": x * (torch.rand_like(x) > 0.3), "y": y}


def contrastive(output: torch.Tensor, batch: Any) -> torch.Tensor:
    unit = F.normalize(output, dim=-1)
    return F.cross_entropy(unit @ unit.T * 5, torch.arange(len(unit)))


def with_dice(output: torch.Tensor, batch: Any) -> torch.Tensor:
    found, wanted = output.softmax(-1)[:, 1:], F.one_hot(batch["y"], output.shape[-1])[:, 1:]
    overlap = (2 * (found * wanted).sum() + 1) / ((found + wanted).sum() + 1)
    return F.cross_entropy(output, batch["y"]) + 1 - overlap


def over_tokens(**how: Any) -> px.Job:
    given: dict[str, Any] = {
        "model": Tokens,
        "data": lambda: [1 + torch.arange(LENGTHS[index % 8]) % 15 for index in range(32)],
        "collate": padded,
        "inputs": lambda batch: batch["ids"],
        "optimizer": lambda params: torch.optim.SGD(params, lr=0.1),
        "batch": 4,
        "steps": 4,
        **how,
    }
    return px.Job(**given)


def of_tokens(output: torch.Tensor, batch: Any) -> torch.Tensor:
    return F.cross_entropy(output.flatten(0, 1), batch["labels"].flatten())


def of_tokens_summed(output: torch.Tensor, batch: Any) -> torch.Tensor:
    return F.cross_entropy(output.flatten(0, 1), batch["labels"].flatten(), reduction="sum") / 100


def of_padding(output: torch.Tensor, batch: Any) -> torch.Tensor:
    return F.cross_entropy(output.flatten(0, 1), batch["ids"].flatten())


def of_one_size(*lengths: int) -> px.Job:
    """Samples of these lengths by turns, but for four of one length, padded to one size that the loss skips."""

    def padded_to_nine(samples: list[torch.Tensor]) -> dict[str, torch.Tensor]:
        ids = torch.stack([F.pad(one, (0, 9 - len(one))) for one in samples])
        return {"ids": ids, "counts": ids != 0}

    def loss(output: torch.Tensor, batch: Any) -> torch.Tensor:
        labels = torch.where(batch["counts"], batch["ids"], -100)
        return F.cross_entropy(output.flatten(0, 1), labels.flatten())

    sizes = [lengths[index % len(lengths)] if index % 21 else 4 for index in range(64)]
    data = [1 + (index + torch.arange(size)) % 15 for index, size in enumerate(sizes)]
    return over_tokens(data=lambda: data, collate=padded_to_nine, loss=loss)


def partly_labelled(**how: Any) -> px.Job:
    whole = table(96)[:]
    counts = torch.tensor([index % 5 != 1 for index in range(96)])
    data = px.Table(**whole, labels=whole["y"].masked_fill(~counts, -100), counts=counts.float())
    return job(data=lambda: data, inputs=lambda batch: batch["x"], **how)


def of_counted(output: torch.Tensor, batch: Any) -> torch.Tensor:
    return (F.cross_entropy(output, batch["y"], reduction="none") * batch["counts"]).sum() / batch["counts"].sum()


def nearly_without_labels() -> px.Job:
    data = [1 + (index + torch.arange(6)) % 15 for index in range(64)]

    def collate(samples: list[torch.Tensor]) -> dict[str, torch.Tensor]:
        ids = torch.stack(samples)
        return {"ids": ids, "labels": ids.masked_fill(ids[:, :1] % 5 == 3, -100)}

    return over_tokens(data=lambda: data, collate=collate, loss=of_tokens, batch=16)


PLANTED: dict[str, tuple[px.Job, str]] = {
    "labels of some": (
        partly_labelled(loss=lambda output, batch: F.cross_entropy(output, batch["labels"])),
        "mean over what counts: ",
    ),
    "mask of some": (partly_labelled(loss=of_counted), "mean over what counts: "),
    "tokens of all but some": (nearly_without_labels(), "mean over what counts: "),
    "class weights": (
        job(loss=lambda output, batch: F.cross_entropy(output, batch["y"], weight=WEIGHTS)),
        "weighted mean: ",
    ),
    "contrastive": (job(loss=contrastive), "the loss couples samples"),
    "shapes": (
        partly_labelled(
            model=lambda: nn.Linear(9, 1), loss=lambda output, batch: (output - batch["y"]).square().mean()
        ),
        "an output of shape [4, 1] and a target of shape [4]",
    ),
    "buffer": (job(model=Counting), "buffers updated in forward: mean changes from the samples"),
    "batch": (job(model=Mixing), "the model mixes samples"),
    "collate": (job(data=lambda: [table()[i] for i in range(96)], collate=masked), "random collate: .*(x)"),
    "tokens": (over_tokens(loss=of_tokens), "mean over tokens: "),
    "tokens of some samples": (of_one_size(2, 9, 5, 7, 3), "mean over tokens: "),
    "padding": (over_tokens(loss=of_padding), "padded mean: "),
    "noise": (job(model=Noisy), "random numbers drawn in forward"),
    "noise in evaluation": (job(model=AlwaysNoisy), "random numbers drawn in forward"),
    "noise beside dropout": (job(model=lambda: AlwaysNoisy(dropout=0.2)), "random numbers drawn in forward"),
    "sum": (
        job(loss=lambda output, batch: F.cross_entropy(output, batch["y"], reduction="sum") / 100),
        "a sum without its count: ",
    ),
    "sum over padded tokens": (over_tokens(loss=of_tokens_summed), "a sum without its count: "),
    "dice": (job(loss=with_dice), "the loss couples samples"),
    "dice beside batch norm": (job(model=Normalised, loss=with_dice), "the loss couples samples"),
}

EXACT = {
    "mean": job(loss=lambda output, batch: F.cross_entropy(output, batch["y"])),
    "sum and count": job(),
    "class weights, counted": job(
        loss=lambda output, batch: px.Loss(
            F.cross_entropy(output, batch["y"], weight=WEIGHTS, reduction="sum"), WEIGHTS[batch["y"]].sum()
        )
    ),
    "labels of some, counted": partly_labelled(loss=lambda output, batch: px.cross_entropy(output, batch["labels"])),
    "labels of which all count": partly_labelled(loss=lambda output, batch: F.cross_entropy(output, batch["y"])),
    "tokens, counted": over_tokens(loss=lambda output, batch: px.cross_entropy(output, batch["labels"])),
    "tokens, as many in each": of_one_size(4),
    "a counter": job(model=Ticking),
    "batch norm": job(model=Normalised),
    "batch norm without running statistics": job(model=lambda: Normalised(track_running_stats=False)),
    "samples that draw": job(data=lambda: Drawing()),
}


class Drawing(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"x": torch.full((9,), index / 64) + torch.randn(9), "y": torch.tensor(index % 5)}


@pytest.mark.parametrize("name", PLANTED)
def test_a_cause_is_named_before_the_run(name: str) -> None:
    planted, words = PLANTED[name]
    (found,) = look_ahead(planted, Plan.parse("dp=2")).causes
    assert found.startswith(words.partition(".*")[0])


def test_a_cause_is_one_of_micro_batches_too_and_none_of_a_whole_batch() -> None:
    planted, words = PLANTED["contrastive"]
    assert look_ahead(planted, Plan.parse("micro=2")).causes[0].startswith(words)
    assert look_ahead(planted, Plan()).causes == ()


@pytest.mark.parametrize("name", EXACT)
def test_nothing_is_said_of_a_job_that_can_be_split(name: str) -> None:
    assert look_ahead(EXACT[name], Plan.parse("dp=2")).causes == ()


def test_a_sum_made_from_a_mean_over_nothing_is_named() -> None:
    def loss(output: torch.Tensor, batch: Any) -> px.Loss:
        count = (batch["labels"] != -100).sum()
        return px.Loss(F.cross_entropy(output, batch["labels"]) * count, count)

    (found,) = look_ahead(partly_labelled(loss=loss), Plan.parse("dp=2")).causes
    assert found.startswith("no sum where nothing counts: ")


def test_a_counter_of_forwards_is_named_where_there_are_more_of_them() -> None:
    (found,) = look_ahead(job(model=Ticking), Plan.parse("dp=2 micro=4")).causes
    assert found.startswith("buffers updated in forward: calls changes once a micro-batch")


PROVEN = ("buffer", "collate", "tokens", "dice beside batch norm")


@pytest.mark.parametrize("name", [*PROVEN, *longer(*(name for name in PLANTED if name not in PROVEN))])
def test_a_proof_that_fails_gives_the_same_cause(name: str) -> None:
    said: list[str] = []
    proof = px.prove(PLANTED[name][0], "dp=2", steps=4, say=said.append)
    assert not proof.equal
    assert proof.cause.startswith(said[-1])  # behind what is known of a model with batch normalisation
    assert ("BatchNorm" in proof.cause) == ("batch norm" in name)
    assert said[-1] in proof.notes


def test_the_log_of_a_run_has_it(tmp_path: Path) -> None:
    run = px.fit(PLANTED["class weights"][0], "dp=2", folder=tmp_path / "run")
    (start,) = run.events("start")
    assert start["notes"][0].startswith("weighted mean: ")


def test_looking_leaves_this_process_as_it_was() -> None:
    shared = Counting()
    before, state = shared.mean.clone(), torch.get_rng_state()
    look_ahead(job(model=lambda: shared), Plan.parse("dp=2"))
    assert torch.equal(shared.mean, before)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(one.grad is None for one in shared.parameters())


def test_a_fault_of_the_split_is_said_before_what_the_job_differs_by(monkeypatch: pytest.MonkeyPatch) -> None:
    def alone(ddp: Any, device: Any, micros: Any, work: Any) -> None:
        with ddp.no_sync():
            for index, micro in enumerate(micros):
                work.run(ddp, device, micro, index == len(micros) - 1)

    monkeypatch.setattr(ddp, "accumulate", alone)
    planted, words = PLANTED["class weights"]
    cause = px.prove(planted, "dp=2", steps=2).cause
    assert cause.startswith("ranks of dp have different gradients")
    assert f"Also: {words}" in cause
    assert "no fault of the split" not in cause


def test_a_plain_mean_that_differs_at_once_is_suspected_before_random_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parity, "look_ahead", lambda job, plan: Findings())
    cause = px.prove(PLANTED["tokens of some samples"][0], "dp=2", steps=2).cause
    assert "likely it is over something that samples have unlike numbers of (tokens" in cause
    assert "random" not in cause


def before_batch_norm(optimizer: type[torch.optim.Optimizer]) -> px.Job:
    return job(
        model=lambda: nn.Sequential(nn.Linear(9, 8), nn.BatchNorm1d(8), nn.Linear(8, 5)),
        inputs=lambda batch: batch["x"],
        optimizer=lambda params: optimizer(params, lr=1e-2),
        batch_statistics="global",
        evaluate=lambda: table(20, seed=1),
    )


def test_a_running_mean_may_follow_a_bias_that_rounding_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    proof = px.prove(before_batch_norm(torch.optim.AdamW), "dp=2", steps=4)
    assert proof.equal, proof
    assert proof.not_compared == ["0.bias"]
    right = Step.update

    def shifted(self: Step, batch: Any, totals: Any) -> Any:
        metrics = right(self, batch, totals)
        if dist.is_initialized() and dist.get_world_size() > 1:
            self.layout.module.get_buffer("1.running_mean").add_(0.3)  # more than 4 steps of 0.01 make
        return metrics

    monkeypatch.setattr(Step, "update", shifted)
    assert "running_mean" in px.prove(before_batch_norm(torch.optim.AdamW), "dp=2", steps=4).first
