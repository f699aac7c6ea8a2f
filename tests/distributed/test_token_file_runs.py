"""Files of tokens under several plans, beside a plain loop that reads the files with numpy, document by document."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from small import fit
from torch import nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

import phalanx as px
from phalanx.data import GlobalBatchSampler, read_ledger
from phalanx.train.build_model import build_model

LENGTH, VOCABULARY, END, BATCH = 12, 19, 0, 4
SIZES = (100, 40, 7)  # tokens of each file: 8, 3 and no windows of 12; the rest of each is not read


class Packed(nn.Module):
    """Attention within documents, by what a ``TokenFile`` gives."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, 8), nn.Embedding(LENGTH, 8)
        self.layers = nn.ModuleList([Attention() for _ in range(2)])
        self.head = nn.Linear(8, VOCABULARY)

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor, document_ids: torch.Tensor) -> torch.Tensor:
        hidden, mask = self.tokens(input_ids) + self.places(position_ids), px.document_mask(document_ids)
        for layer in self.layers:
            hidden = layer(hidden, mask)
        return self.head(hidden)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.queries, self.keys, self.values = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, hidden: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        queries, keys, values = (of(hidden)[:, None] for of in (self.queries, self.keys, self.values))
        return hidden + scaled_dot_product_attention(queries, keys, values, attn_mask=mask)[:, 0]


def tokens(size: int) -> np.ndarray:
    """Documents of a few tokens each."""
    found = np.random.default_rng(size).integers(1, VOCABULARY, size=size)
    found[np.random.default_rng(size + 1).random(size) < 0.2] = END
    return found.astype("<u2")


def write(folder: Path) -> str:
    """The pattern of files that hold ``tokens``."""
    for number, size in enumerate(SIZES):
        tokens(size).tofile(folder / f"part-{number}.bin")
    return str(folder / "part-*.bin")


WINDOWS = [
    part[start : start + LENGTH].tolist()
    for part in map(tokens, SIZES)
    for start in range(0, len(part) - LENGTH + 1, LENGTH)
]
STEPS = [GlobalBatchSampler(length=len(WINDOWS), batch=BATCH, seed=0).ids(step).tolist() for step in range(6)]


def how(folder: Path, **options: Any) -> dict[str, Any]:
    pattern = write(folder)
    return {
        "model": Packed,
        "data": lambda: px.TokenFile(pattern, length=LENGTH, end_of_text=END, **options),
        "loss": lambda output, batch: px.cross_entropy(output[:, :-1], batch["labels"][:, 1:]),
        "optimizer": lambda params: torch.optim.SGD(params, lr=0.5),
        "batch": BATCH,
        "epochs": 2,
    }


def documents(window: list[int]) -> list[list[int]]:
    found: list[list[int]] = [[]]
    for token in window:
        found[-1].append(token)
        if token == END:
            found.append([])
    return [document for document in found if document]


def plain_losses(start: dict[str, torch.Tensor]) -> list[float]:
    """Plain PyTorch on one device, each document by itself."""
    net, losses = Packed(), list[float]()
    net.load_state_dict(start)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
    for ids in STEPS:
        total, count = torch.zeros(()), 0
        for document in (torch.tensor(one) for place in ids for one in documents(WINDOWS[place])):
            one = torch.zeros_like(document)[None]
            logits = net(document[None], torch.arange(len(document))[None], one)[0]
            total = total + cross_entropy(logits[:-1], document[1:], reduction="sum")
            count += len(document) - 1
        optimizer.zero_grad()
        (total / count).backward()
        optimizer.step()
        losses.append(total.item() / count)
    return losses


def start_of(job: dict[str, Any]) -> dict[str, torch.Tensor]:
    model = build_model(px.Job(**job))
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize("plan", ["single", "dp=2", "dp=2 micro=1", "fsdp=2 zero=3", "pp=2 micro=2"])
def test_packed_documents_train_as_each_by_itself(plan: str, tmp_path: Path) -> None:
    job = how(tmp_path)
    run = fit(plan, tmp_path / "run", **job)
    assert [sorted(ids.tolist()) for _, ids in read_ledger(run.folder / "ledger").values()] == [
        sorted(ids) for ids in STEPS
    ]
    assert run.losses == pytest.approx(plain_losses(start_of(job)), abs=2e-6)


@pytest.mark.parametrize(("before", "after"), [("dp=2", "fsdp=2"), ("single", "dp=2")])
def test_a_resume_in_mid_epoch_under_another_plan(before: str, after: str, tmp_path: Path) -> None:
    job = how(tmp_path)
    fit(before, tmp_path / "run", **{**job, "epochs": None, "steps": 2})
    run = fit(after, tmp_path / "run", resume=True, **job)
    assert run.losses[-4:] == pytest.approx(plain_losses(start_of(job))[-4:], abs=2e-6)


def test_next_tokens_as_labels_give_the_same_losses(tmp_path: Path) -> None:
    """The window's last label is one more target, unless a document begins there or the file ends."""
    job = how(tmp_path, shifted=True)
    data = job["data"]()
    flat = np.concatenate([tokens(size)[: size // LENGTH * LENGTH + 1] for size in SIZES[:2]])
    assert len(data) == len(WINDOWS)
    assert data[0]["labels"].tolist() == [
        after if before != END else -100 for before, after in pairwise(flat[: LENGTH + 1])
    ]
    job["loss"] = lambda output, batch: px.cross_entropy(output[:, :-1], batch["labels"][:, :-1])
    assert fit("dp=2", tmp_path / "run", **job).losses == pytest.approx(plain_losses(start_of(how(tmp_path))), abs=2e-6)


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, num_key_value_heads=2, **sizes))


def plain_llama_losses(start: dict[str, torch.Tensor]) -> list[float]:
    net, losses = llama(), list[float]()
    net.load_state_dict(start)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
    for ids in STEPS:
        total, count = torch.zeros(()), 0
        for document in (torch.tensor(one) for place in ids for one in documents(WINDOWS[place])):
            total = total + cross_entropy(net(document[None]).logits[0, :-1], document[1:], reduction="sum")
            count += len(document) - 1
        optimizer.zero_grad()
        (total / count).backward()
        optimizer.step()
        losses.append(total.item() / count)
    return losses


@pytest.mark.parametrize("plan", ["single", "dp=2", "fsdp=2 zero=3", "pp=2 micro=2", "tp=2", "cp=2"])
def test_transformers_keep_documents_apart_by_positions(plan: str, tmp_path: Path) -> None:
    job = how(tmp_path)
    job["model"] = llama
    job["loss"] = lambda output, batch: px.cross_entropy(output.logits[:, :-1], batch["labels"][:, 1:])
    job["inputs"] = lambda batch: {name: batch[name] for name in ("input_ids", "position_ids")}
    run = fit(plan, tmp_path / "run", **job)
    assert run.losses == pytest.approx(plain_llama_losses(start_of(job)), abs=5e-6)


def test_packed_documents_are_proven(tmp_path: Path) -> None:
    job = how(tmp_path)
    job["model"] = llama
    job["loss"] = lambda output, batch: px.cross_entropy(output.logits[:, :-1], batch["labels"][:, 1:])
    job["inputs"] = lambda batch: {name: batch[name] for name in ("input_ids", "position_ids")}
    assert px.prove(px.Job(**job), "dp=2", steps=2).equal
