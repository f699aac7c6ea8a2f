"""Which of Python's help texts a paragraph is from, by a small BERT: phalanx train after.py -n 2"""

import re
from collections import Counter
from pydoc_data.topics import topics

import torch
from transformers import BertConfig, BertForSequenceClassification

import phalanx as px

CLASSES = ("compound", "debugger", "formatstrings", "specialnames", "string-methods", "typesmapping")
WORDS, LONGEST, PAD, UNKNOWN, START = 1000, 32, 0, 1, 2


def paragraphs(training):
    every = [(text, label) for label, topic in enumerate(CLASSES) for text in topics[topic].split("\n\n")]
    long = [(re.findall(r"\w+|[^\w\s]", text.lower()), label) for text, label in every if len(text.split()) > 3]
    return [pair for i, pair in enumerate(long) if (i % 5 != 4) == training]


class Paragraphs(torch.utils.data.Dataset):
    def __init__(self, training):
        counts = Counter(word for words, _ in paragraphs(training=True) for word in words)
        self.number = {word: START + 1 + i for i, (word, _) in enumerate(counts.most_common(WORDS))}
        self.paragraphs = paragraphs(training)

    def __len__(self):
        return len(self.paragraphs)

    def __getitem__(self, index):
        words, label = self.paragraphs[index]
        ids = torch.full((LONGEST,), PAD)
        tokens = torch.tensor([START, *(self.number.get(word, UNKNOWN) for word in words)])[:LONGEST]
        ids[: len(tokens)] = tokens
        return {"input_ids": ids, "attention_mask": (ids != PAD).long(), "label": torch.tensor(label)}


def model():
    torch.manual_seed(0)  # to begin with the values that the script begins with
    return BertForSequenceClassification(
        BertConfig(
            vocab_size=START + 1 + WORDS,
            hidden_size=64,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=128,
            max_position_embeddings=LONGEST,
            initializer_range=0.06,
            num_labels=len(CLASSES),
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
    )


def order(seed, epoch):  # that of the Trainer's sampler; without it a sample order of Phalanx's own
    samples = len(paragraphs(training=True))
    return torch.randperm(samples, generator=torch.Generator().manual_seed(seed + epoch))


def job():
    return px.Job(
        model=model,
        data=lambda: Paragraphs(training=True),
        sampler=order,
        loss=lambda output, batch: px.cross_entropy(output, batch["label"]),
        optimizer=lambda params: torch.optim.AdamW(params, lr=2e-3, weight_decay=0.0),
        schedule=px.Schedule(decay="linear"),
        clip=1.0,
        batch=32,
        epochs=4,
        seed=0,
        evaluate=lambda: Paragraphs(training=False),
        metrics=lambda output, batch: {"accuracy": px.accuracy(output, batch["label"])},
    )
