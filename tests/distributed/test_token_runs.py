"""Runs over texts of unlike length: joined without padding, counted by tokens, and windows of token files."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from small import fit, job
from torch import nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from transformers import DataCollatorWithFlattening, LlamaConfig, LlamaForCausalLM

import phalanx as px
from chaos.run_equality import read_ledger
from law_rows import longer
from phalanx.data import GlobalBatchSampler
from phalanx.data.sampler import Permutation
from phalanx.report.samples_seen import samples_seen
from phalanx.train.build_model import build_model

WORDS, WIDTH, BATCH, STEPS = 19, 8, 8, 5
LENGTHS = [5, 3, 9, 2, 7, 4, 26, 3, 6, 8, 2, 5, 22, 3, 4, 6, 9, 2, 3, 7, 21, 4, 5, 3, 20, 8, 2, 31, 3, 4]
SAMPLES, TOKENS = len(LENGTHS), 20

Batch = dict[str, Any]


class Texts(torch.utils.data.Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.randint(1, WORDS, (LENGTHS[index] + 1,), generator=torch.Generator().manual_seed(index))


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
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(WORDS, WIDTH), nn.Embedding(64, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
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

    def forward(
        self, input_ids: torch.Tensor, position_ids: torch.Tensor, cu_seqlens: torch.Tensor, max_seqlen: int
    ) -> torch.Tensor:
        documents = torch.bucketize(torch.arange(input_ids.shape[-1]), cu_seqlens[1:], right=True)
        return self.attend(input_ids, position_ids, documents[None])


class OfIds(Net):
    """Documents by their numbers, as a ``TokenFile`` gives them."""

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor, document_ids: torch.Tensor) -> torch.Tensor:
        return self.attend(input_ids, position_ids, document_ids)


class Blind(Net):
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
BY_TOKENS = {**HOW, "collate": padded, "batch_tokens": px.TokenBatch(TOKENS, LENGTHS), "epochs": 2, "steps": None}


def order(epoch: int) -> list[int]:
    return Permutation.keyed(SAMPLES, 0, epoch)(torch.arange(SAMPLES).numpy()).tolist()


def by_samples() -> list[list[int]]:
    return [order(epoch)[begin : begin + BATCH] for epoch in range(2) for begin in range(0, SAMPLES, BATCH)][:STEPS]


def by_tokens() -> list[list[int]]:
    """Samples in the order of the epochs, one after the other, until they have the tokens."""
    found: list[list[int]] = []
    for epoch in range(2):
        taken: list[int] = []
        for index in order(epoch):
            taken.append(index)
            if sum(LENGTHS[one] for one in taken) >= TOKENS:
                found.append(taken)
                taken = []
        found += [taken] if taken else []
    return found


def logits_of(net: Any, text: torch.Tensor) -> torch.Tensor:
    return net.attend(text[None], torch.arange(len(text))[None], torch.zeros_like(text)[None])[0]


def logits_of_llama(net: Any, text: torch.Tensor) -> torch.Tensor:
    return net(input_ids=text[None], use_cache=False).logits[0]


def by_hand(
    steps: Iterable[Sequence[torch.Tensor]], how: dict[str, Any], logits: Callable[..., torch.Tensor] = logits_of
) -> list[float]:
    """Losses of plain PyTorch on one device, each document by itself."""
    net, found = how["model"](), list[float]()
    net.load_state_dict(build_model(job(**how)).state_dict())
    optimizer = how["optimizer"](net.parameters())
    for texts in steps:
        tokens, total = sum(len(text) - 1 for text in texts), 0.0
        optimizer.zero_grad()
        for text in texts:
            loss = cross_entropy(logits(net, text)[:-1], text[1:], reduction="sum") / tokens
            loss.backward()
            total += loss.item()
        optimizer.step()
        found.append(total)
    return found


def texts_of(steps: list[list[int]]) -> list[list[torch.Tensor]]:
    return [[Texts()[index] for index in ids] for ids in steps]


def told(run: px.Run) -> list[str]:
    """Notes on one device's result, and warnings."""
    events = run.events()
    notes = [note for one in events if one["event"] == "start" for note in one["notes"]]
    return [*notes, *(one["message"] for one in events if one["event"] == "warning")]


@pytest.mark.parametrize(
    ("plan", "collate", "model"),
    [
        ("single micro=2", with_ends, OfEnds),
        ("cp=2", joined, Net),
        *longer(
            ("dp=2 shares=3,1", joined, Net),
            ("fsdp=3 zero=1", with_ends, OfEnds),
            ("tp=2 sequence=true", joined, Net),
            ("pp=2 micro=2", with_ends, OfEnds),
        ),
    ],
)
def test_joined_samples_are_trained_as_by_themselves(plan: str, collate: Any, model: Any, tmp_path: Path) -> None:
    how = {**HOW, "collate": collate, "model": model}
    run = fit(plan, tmp_path / "run", **how)
    assert run.losses == pytest.approx(by_hand(texts_of(by_samples()), how), abs=3e-6)
    assert not [one for one in told(run) if "tp=2 leaves" not in one]


def llama() -> LlamaForCausalLM:
    sizes: dict[str, Any] = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=WORDS, num_attention_heads=2, num_key_value_heads=2, **sizes))


class Ids(Texts):
    def __getitem__(self, index: int) -> Any:
        return {"input_ids": super().__getitem__(index)}


FLATTENED: dict[str, Any] = {
    **HOW,
    "model": llama,
    "data": Ids,
    "collate": DataCollatorWithFlattening(),
    "loss": px.model_loss(),
}


@pytest.mark.parametrize("plan", ["pp=2 micro=2", *longer("fsdp=2 micro=2", "single", "tp=2", "cp=2")])
def test_a_model_and_a_collator_of_transformers(plan: str, tmp_path: Path) -> None:
    run = fit(plan, tmp_path / "run", **FLATTENED)
    assert run.losses == pytest.approx(by_hand(texts_of(by_samples()), FLATTENED, logits_of_llama), abs=3e-6)
    assert not [one for one in told(run) if "tp=2 leaves" not in one]


def test_a_wrong_count_of_a_model_s_own_loss_is_refused(tmp_path: Path) -> None:
    how = {**FLATTENED, "loss": px.model_loss(count=lambda batch: batch["labels"].numel())}
    with pytest.raises(px.PhalanxError, match="4 samples' loss is"):
        fit("dp=2", tmp_path / "run", **how)


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
    assert (found["loss"], found["samples"]) == (pytest.approx(must["loss"], abs=3e-6), SAMPLES)


def test_joined_samples_in_steps_by_tokens_are_proven() -> None:
    assert px.prove(job(**{**BY_TOKENS, "collate": joined}), "dp=2 micro=2", steps=3).equal


def drawn_for_all(texts: list[torch.Tensor]) -> Batch:
    batch = joined(texts)
    return {**batch, "input_ids": batch["input_ids"].where(torch.rand(batch["input_ids"].shape) < 0.5, 0)}


def mean(output: torch.Tensor, batch: Batch) -> torch.Tensor:
    return cross_entropy(output.flatten(0, 1), batch["labels"].flatten())


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model": Blind}, "the model mixes samples"),
        ({"collate": drawn_for_all}, "random collate"),
        ({"loss": mean}, "mean over tokens"),
    ],
)
def test_what_depends_on_the_split_is_told(change: dict[str, Any], words: str, tmp_path: Path) -> None:
    run = fit("dp=2", tmp_path / "run", **{**HOW, **change})
    assert [one for one in told(run) if words in one], told(run)


def seen_by(folder: Path) -> list[list[int]]:
    return [ids.tolist() for _, ids in read_ledger(folder / "ledger").values()]


@pytest.mark.parametrize(
    "plan", ["single micro=2", "dp=2 server=1", *longer("tp=2", "fsdp=3 zero=1", "pp=2 micro=2", "dp=2 shares=3,1")]
)
def test_as_many_samples_as_come_to_the_tokens(plan: str, tmp_path: Path) -> None:
    sizes = [len(ids) for ids in by_tokens()]
    assert {1, 2, 5} <= set(sizes)  # one by itself, and none that the most samples end
    assert max(sizes) < BATCH
    run = fit(plan, tmp_path / "run", **BY_TOKENS)
    assert seen_by(run.folder) == [sorted(ids) for ids in by_tokens()]
    assert [event["samples"] for event in run.events() if event["event"] == "step"] == sizes
    assert run.losses == pytest.approx(by_hand(texts_of(by_tokens()), BY_TOKENS), abs=3e-6)
    seen = samples_seen(run.folder)
    assert (seen.once, seen.epochs) == (True, 2), seen.answer


@pytest.mark.parametrize("stop", [9, *longer(3)])
def test_a_resume_in_mid_epoch_under_another_plan(stop: int, tmp_path: Path) -> None:
    how = {**BY_TOKENS, "collate": joined}
    fit("dp=2", tmp_path / "run", **{**how, "epochs": None, "steps": stop})
    run = fit("threads=2 micro=1", tmp_path / "run", resume=True, **how)
    assert run.losses == pytest.approx(by_hand(texts_of(by_tokens()), how), abs=3e-6)
    assert seen_by(run.folder) == [sorted(ids) for ids in by_tokens()]
    assert samples_seen(tmp_path / "run").once


@pytest.mark.parametrize("other", [px.TokenBatch(21, LENGTHS), px.TokenBatch(TOKENS, [*LENGTHS[:-1], 3])])
def test_other_tokens_or_lengths_mean_other_samples(other: px.TokenBatch, tmp_path: Path) -> None:
    fit("single", tmp_path / "run", **{**BY_TOKENS, "epochs": None, "steps": 3})
    with pytest.raises(px.PhalanxError, match=r"batch_tokens: 20 there, 21 now|lengths .* there"):
        fit("single", tmp_path / "run", resume=True, **{**BY_TOKENS, "batch_tokens": other})


def test_the_most_samples_end_a_step_and_that_is_told(tmp_path: Path) -> None:
    run = fit("dp=2", tmp_path / "run", **{**BY_TOKENS, "batch": 3, "epochs": 1})
    sizes = [event["samples"] for event in run.events("step")]
    assert (max(sizes), sum(sizes)) == (3, SAMPLES)
    assert any("batch=3" in event.get("message", "") for event in run.events())


def test_a_loop_of_ones_own_and_workers() -> None:
    step, loader = px.build(job(**BY_TOKENS, workers=1), "single")
    seen = [(batch.samples, step(batch).loss) for batch in loader]
    assert [samples for samples, _ in seen] == [len(ids) for ids in by_tokens()]
    assert [found for _, found in seen] == pytest.approx(by_hand(texts_of(by_tokens()), BY_TOKENS), abs=3e-6)
    assert (loader.steps_per_epoch, loader.total_steps) == (None, len(by_tokens()))


LENGTH, END, WINDOWS_A_STEP = 12, 0, 4
SIZES = (100, 40, 7)  # tokens of each file: 8, 3 and no windows of 12; the rest of each is not read


def tokens(size: int) -> np.ndarray:
    """Documents of a few tokens each."""
    found = np.random.default_rng(size).integers(1, WORDS, size=size)
    found[np.random.default_rng(size + 1).random(size) < 0.2] = END
    return found.astype("<u2")


WINDOWS = [
    part[start : start + LENGTH].tolist()
    for part in map(tokens, SIZES)
    for start in range(0, len(part) - LENGTH + 1, LENGTH)
]
READ = [GlobalBatchSampler(length=len(WINDOWS), batch=WINDOWS_A_STEP, seed=0).ids(step).tolist() for step in range(6)]


def of_files(folder: Path, **options: Any) -> dict[str, Any]:
    for number, size in enumerate(SIZES):
        tokens(size).tofile(folder / f"part-{number}.bin")
    pattern = str(folder / "part-*.bin")
    return {
        "model": OfIds,
        "data": lambda: px.TokenFile(pattern, length=LENGTH, end_of_text=END, **options),
        "loss": lambda output, batch: px.cross_entropy(output[:, :-1], batch["labels"][:, 1:]),
        "optimizer": lambda params: torch.optim.SGD(params, lr=0.5),
        "batch": WINDOWS_A_STEP,
        "epochs": 2,
    }


def documents(window: list[int]) -> list[torch.Tensor]:
    found: list[list[int]] = [[]]
    for token in window:
        found[-1].append(token)
        if token == END:
            found.append([])
    return [torch.tensor(document) for document in found if document]


WINDOWS_READ = [[one for place in ids for one in documents(WINDOWS[place])] for ids in READ]


@pytest.mark.parametrize("plan", ["dp=2 micro=1", *longer("pp=2 micro=2", "single", "fsdp=2 zero=3")])
def test_packed_documents_train_as_each_by_itself(plan: str, tmp_path: Path) -> None:
    how = of_files(tmp_path)
    run = fit(plan, tmp_path / "run", **how)
    assert seen_by(run.folder) == [sorted(ids) for ids in READ]
    assert run.losses == pytest.approx(by_hand(WINDOWS_READ, how), abs=2e-6)
