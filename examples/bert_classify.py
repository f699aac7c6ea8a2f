"""Hugging Face BERT, built from a configuration, tells which of Python's help texts a paragraph is from.

Paragraphs differ in length: each batch is padded to its longest, and an attention mask hides the padding. The model is
small and starts from random values, so nothing is downloaded; `transformers` must be installed. Run it with
``phalanx train examples/bert_classify.py -n 2``.

Shapes: B samples, T tokens.
"""

from __future__ import annotations

import re
from collections import Counter
from pydoc_data.topics import topics
from typing import Any

import torch
from torch import Tensor
from transformers import BertConfig, BertForSequenceClassification

import phalanx as px

CLASSES = ("compound", "debugger", "formatstrings", "specialnames", "string-methods", "typesmapping")
PAD, UNKNOWN, START = 0, 1, 2
WORDS, LONGEST = 1500, 64
HELD_OUT = 5  # every fifth paragraph is for evaluation


def paragraphs(*, training: bool) -> list[tuple[str, int]]:
    """(text, class) of each paragraph of more than three words."""
    found = [
        (text, label)
        for label, topic in enumerate(CLASSES)
        for text in topics[topic].split("\n\n")
        if len(text.split()) > 3
    ]
    return [pair for i, pair in enumerate(found) if (i % HELD_OUT != HELD_OUT - 1) == training]


def words(text: str) -> list[str]:
    """A tokenizer of one line: words, and every other sign by itself."""
    return re.findall(r"\w+|[^\w\s]", text.lower())


class Paragraphs(torch.utils.data.Dataset[dict[str, Any]]):
    """Samples ``{"input_ids": list of token numbers, "label": class}``, not padded yet."""

    def __init__(self, *, training: bool) -> None:
        counts = Counter(word for text, _ in paragraphs(training=True) for word in words(text))
        self.number = {word: START + 1 + i for i, (word, _) in enumerate(counts.most_common(WORDS))}
        self.paragraphs = paragraphs(training=training)

    def __len__(self) -> int:
        return len(self.paragraphs)

    def __getitem__(self, index: int) -> dict[str, Any]:
        text, label = self.paragraphs[index]
        tokens = [START, *(self.number.get(word, UNKNOWN) for word in words(text))]
        return {"input_ids": tokens[:LONGEST], "label": label}


def padded(samples: list[dict[str, Any]]) -> dict[str, Tensor]:
    """A batch as long as its longest sample, and the mask that says what is real.

    How far a sample is padded depends on its neighbours, and so on the plan. The mask keeps that from mattering.
    """
    tokens = [torch.tensor(sample["input_ids"]) for sample in samples]
    ids_BT = torch.nn.utils.rnn.pad_sequence(tokens, batch_first=True, padding_value=PAD)
    return {
        "input_ids": ids_BT,
        "attention_mask": (ids_BT != PAD).long(),
        "label": torch.tensor([sample["label"] for sample in samples]),
    }


def model() -> BertForSequenceClassification:
    """A BERT of 0.6 million parameters."""
    return BertForSequenceClassification(
        BertConfig(
            vocab_size=START + 1 + WORDS,
            hidden_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=256,
            max_position_embeddings=LONGEST,
            initializer_range=0.06,  # 0.02 is for widths near 768
            num_labels=len(CLASSES),
            pad_token_id=PAD,
            # Dropout draws other numbers under every plan; without it all plans compute the same.
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
    )


def job() -> px.Job:
    """What to train; the model takes ``input_ids`` and ``attention_mask`` from the batch by their names."""
    return px.Job(
        name="bert-classify",
        model=model,
        data=lambda: Paragraphs(training=True),
        collate=padded,
        loss=lambda output, batch: px.cross_entropy(output, batch["label"]),
        optimizer=lambda params: torch.optim.AdamW(params, lr=1e-3),
        schedule=px.Schedule(decay="linear", warmup_steps=10),
        clip=1.0,
        batch=64,
        epochs=6,
        evaluate=lambda: Paragraphs(training=False),
        metrics=lambda output, batch: {"accuracy": px.accuracy(output, batch["label"])},
    )
