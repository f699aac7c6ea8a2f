"""Batches without padding: samples joined in one row, under several plans, beside a plain loop over padded batches."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from small import fit, job
from torch import nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from transformers import DataCollatorWithFlattening, LlamaConfig, LlamaForCausalLM

import phalanx as px
from phalanx.data.sampler import Permutation
from phalanx.errors import ProfileError
from phalanx.train.build_model import build_model
from phalanx.train.traced_job import work_of

WORDS, WIDTH, BATCH, STEPS = 11, 8, 8, 4
LENGTHS = [5, 3, 9, 2, 7, 4, 13, 3, 6, 8, 2, 5, 12, 3, 4, 6, 9, 2, 3, 7]


class Texts(torch.utils.data.Dataset[torch.Tensor]):
    """Token ids of unlike length."""

    def __len__(self) -> int:
        return len(LENGTHS)

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.randint(1, WORDS, (LENGTHS[index] + 1,), generator=torch.Generator().manual_seed(index))


Batch = dict[str, Any]


def padded(texts: list[torch.Tensor]) -> Batch:
    tokens = nn.utils.rnn.pad_sequence(texts, batch_first=True)
    places = torch.arange(tokens.shape[1] - 1).expand(len(texts), -1)
    labels = tokens[:, 1:].masked_fill(tokens[:, 1:] == 0, -100)
    return {"input_ids": tokens[:, :-1], "position_ids": places, "labels": labels}


def joined(texts: list[torch.Tensor]) -> Batch:
    return {
        "input_ids": torch.cat([text[:-1] for text in texts])[None],
        "position_ids": torch.cat([torch.arange(len(text) - 1) for text in texts])[None],
        "labels": torch.cat([text[1:] for text in texts])[None],
    }


def with_ends(texts: list[torch.Tensor]) -> Batch:
    ends = torch.tensor([0, *(len(text) - 1 for text in texts)]).cumsum(0).to(torch.int32)
    return {**joined(texts), "cu_seqlens": ends, "max_seqlen": int(ends.diff().max())}


class Block(nn.Module):
    """Attention within documents, and two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        heads = [layer(y).unflatten(-1, (4, -1)).transpose(1, 2) for layer in (self.query, self.key, self.value)]
        x = x + self.out(scaled_dot_product_attention(*heads, attn_mask=mask).transpose(1, 2).flatten(2))
        return x + self.down(nn.functional.gelu(self.up(x)))


class Net(nn.Module):
    """A document begins where positions do."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(WORDS, WIDTH), nn.Embedding(64, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        return self.attend(input_ids, position_ids, (position_ids == 0).cumsum(-1))

    def attend(self, tokens: torch.Tensor, places: torch.Tensor, documents: torch.Tensor) -> torch.Tensor:
        x, mask = self.embed(tokens) + self.place(places), px.document_mask(documents)
        for block in self.blocks:
            x = block(x, mask)
        return self.head(x)


class OfEnds(Net):
    """Documents by ``cu_seqlens``, as variable-length kernels take them."""

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, input_ids: torch.Tensor, position_ids: torch.Tensor, cu_seqlens: torch.Tensor, max_seqlen: int
    ) -> torch.Tensor:
        documents = torch.bucketize(torch.arange(input_ids.shape[-1]), cu_seqlens[1:], right=True)
        return self.attend(input_ids, position_ids, documents[None])


class Blind(Net):
    """Attends over all that is in its row."""

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        return self.attend(input_ids, position_ids, torch.zeros_like(position_ids))


HOW: dict[str, Any] = {
    "model": Net,
    "data": Texts,
    "collate": joined,
    "loss": lambda output, batch: px.cross_entropy(output, batch["labels"]),
    "optimizer": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "batch": BATCH,
    "epochs": None,
    "steps": STEPS,
}


def steps() -> list[list[int]]:
    size = len(LENGTHS)
    orders = [Permutation.keyed(size, 0, epoch)(torch.arange(size).numpy()).tolist() for epoch in range(2)]
    return [order[begin : begin + BATCH] for order in orders for begin in range(0, size, BATCH)][:STEPS]


def losses() -> list[float]:
    """Plain PyTorch on one device, over padded batches."""
    net, found, texts = Net(), list[float](), Texts()
    net.load_state_dict(build_model(job(**HOW)).state_dict())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    for ids in steps():
        batch = padded([texts[index] for index in ids])
        output = net(batch["input_ids"], batch["position_ids"])
        loss = cross_entropy(output.flatten(0, 1), batch["labels"].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


def told(run: px.Run) -> list[str]:
    """What a run says of one device's result, and warns of."""
    events = run.events()
    notes = [note for one in events if one["event"] == "start" for note in one["notes"]]
    return [*notes, *(one["message"] for one in events if one["event"] == "warning")]


PLANS = [
    *("single micro=2", "dp=2", "dp=2 micro=3", "fsdp=2 micro=2", "fsdp=3 zero=1", "pp=2 micro=2", "tp=2"),
    *("tp=2 sequence=true", "cp=2", "threads=2", "dp=2 shares=3,1", "dp=2 server=1"),
]


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize(("collate", "model"), [(joined, Net), (with_ends, OfEnds)])
def test_joined_samples_are_trained_as_padded_ones(plan: str, collate: Any, model: Any, tmp_path: Path) -> None:
    run = fit(plan, tmp_path / "run", **{**HOW, "collate": collate, "model": model})
    assert run.losses == pytest.approx(losses(), abs=3e-6)
    assert not [one for one in told(run) if "tp=2 leaves" not in one]


def llama() -> LlamaForCausalLM:
    sizes: dict[str, Any] = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    return LlamaForCausalLM(LlamaConfig(vocab_size=WORDS, **sizes))


class Ids(Texts):
    """The same as transformers has them."""

    def __getitem__(self, index: int) -> Any:
        return {"input_ids": super().__getitem__(index)}


FLATTENED: dict[str, Any] = {
    **HOW,
    "model": llama,
    "data": Ids,
    "collate": DataCollatorWithFlattening(),
    "loss": px.model_loss(),
}


def llama_losses() -> list[float]:
    net, found, texts = llama(), list[float](), Texts()
    net.load_state_dict(build_model(job(**FLATTENED)).state_dict())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    for ids in steps():
        optimizer.zero_grad()
        tokens, total = sum(LENGTHS[index] for index in ids), 0.0
        for text in (texts[index] for index in ids):
            logits = net(input_ids=text[None], use_cache=False).logits[0]
            loss = cross_entropy(logits[:-1], text[1:], reduction="sum") / tokens
            loss.backward()
            total += loss.item()
        optimizer.step()
        found.append(total)
    return found


@pytest.mark.parametrize("plan", ["single", "dp=2", "fsdp=2 micro=2", "pp=2 micro=2", "tp=2", "cp=2"])
def test_a_model_and_a_collator_of_transformers(plan: str, tmp_path: Path) -> None:
    run = fit(plan, tmp_path / "run", **FLATTENED)
    assert run.losses == pytest.approx(llama_losses(), abs=3e-6)
    assert not [one for one in told(run) if "tp=2 leaves" not in one]


def test_a_wrong_count_of_a_model_s_own_loss_is_refused(tmp_path: Path) -> None:
    how = {**FLATTENED, "loss": px.model_loss(count=lambda batch: batch["labels"].numel())}
    with pytest.raises(px.PhalanxError, match="4 samples' loss is"):
        fit("dp=2", tmp_path / "run", **how)


def test_with_steps_of_so_many_tokens_and_a_resume(tmp_path: Path) -> None:
    how = {**HOW, "batch_tokens": px.TokenBatch(20, LENGTHS), "steps": 6}
    plain = fit("single", tmp_path / "plain", **{**how, "collate": padded})
    fit("dp=2", tmp_path / "run", **{**how, "steps": 2})
    run = fit("fsdp=3 micro=1", tmp_path / "run", resume=True, **how)
    assert run.losses == pytest.approx(plain.losses, abs=3e-6)


def test_evaluation_and_metrics(tmp_path: Path) -> None:
    how = {
        **HOW,
        "evaluate": Texts,
        "metrics": lambda output, batch: {"accuracy": px.accuracy(output, batch["labels"])},
    }
    run = fit("dp=2 micro=2", tmp_path / "run", **how)
    plain = fit("single", tmp_path / "plain", **{**how, "collate": padded})
    (found,), (must,) = run.evaluations(), plain.evaluations()
    assert found["metrics"] == pytest.approx(must["metrics"])
    assert (found["loss"], found["samples"]) == (pytest.approx(must["loss"], abs=3e-6), len(LENGTHS))


def test_proven() -> None:
    assert px.prove(job(**HOW), "fsdp=2 micro=2", steps=3).equal


def drawn_for_all(texts: list[torch.Tensor]) -> Batch:
    batch = joined(texts)
    return {**batch, "input_ids": batch["input_ids"].where(torch.rand(batch["input_ids"].shape) < 0.5, 0)}


def mean(output: torch.Tensor, batch: Batch) -> torch.Tensor:
    return cross_entropy(output.flatten(0, 1), batch["labels"].flatten())


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model": Blind}, "the model mixes samples: job.collate joins those of a micro-batch in one row"),
        ({"collate": drawn_for_all}, "random collate: it draws random numbers for a whole micro-batch (input_ids)"),
        ({"loss": mean}, "mean over tokens: the loss is one mean over the tokens of a micro-batch"),
    ],
)
def test_what_depends_on_the_split_is_told(change: dict[str, Any], words: str, tmp_path: Path) -> None:
    run = fit("dp=2", tmp_path / "run", **{**HOW, **change})
    assert [one for one in told(run) if words in one], told(run)


def test_a_loss_over_the_whole_batch_of_tokens_is_refused(tmp_path: Path) -> None:
    with pytest.raises(px.PhalanxError, match="differs in its shape from one micro-batch to another"):
        fit("dp=2", tmp_path / "run", **{**HOW, "loss": mean, "loss_over": "batch"})
    assert not (tmp_path / "run" / "events.jsonl").exists()


class Pooled(OfEnds):
    """A row for each document."""

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        ends = kwargs["cu_seqlens"]
        x = super().forward(*args, **{name: one for name, one in kwargs.items() if name != "labels"})[0].cumsum(0)
        return x[ends[1:].long() - 1] - torch.cat([torch.zeros(1, WORDS), x[ends[1:-1].long() - 1]])


def alike(output: torch.Tensor, batch: Batch) -> torch.Tensor:
    return torch.cdist(output, output).mean()


def test_a_row_for_each_document_can_be_compared(tmp_path: Path) -> None:
    how = {**HOW, "model": Pooled, "collate": with_ends, "loss": alike, "loss_over": "batch"}
    found = [fit(plan, tmp_path / plan, **how).losses for plan in ("single", "dp=2", "dp=2 micro=2")]
    assert found[1] == pytest.approx(found[0], abs=3e-5)
    assert found[2] == pytest.approx(found[0], abs=3e-5)


def test_a_forecast_prices_samples_as_rows_of_their_own() -> None:
    work, beside = work_of(job(**HOW)), work_of(job(**{**HOW, "collate": padded}))
    assert beside.lengths is not None
    assert work.lengths == replace(beside.lengths, padded=False)
    assert work.length == beside.length
    assert any("each is priced as a row of its own" in note for note in work.profile.notes)
    flat = {**HOW, "collate": lambda texts: {name: one[0] for name, one in joined(texts).items()}}
    with pytest.raises(ProfileError, match="joined along the first dimension"):
        work_of(job(**{**flat, "inputs": lambda batch: (batch["input_ids"], batch["position_ids"])}))
