"""Hugging Face GPT-2, built from a configuration, learns to continue the help texts which every Python carries.

Each text is cut into windows of 128 bytes; the last one of a text is shorter and padded, so samples hold different
numbers of tokens. The loss counts real tokens and is divided once by their number in the whole global batch. The
model is small and starts from random values, so nothing is downloaded; `transformers` must be installed. Run it with
``phalanx train examples/gpt2.py -n 2``.

Shapes: N samples, T positions.
"""

from __future__ import annotations

from pydoc_data.topics import topics

import torch
from transformers import GPT2Config, GPT2LMHeadModel

import phalanx as px

CONTEXT = 128  # bytes
HELD_OUT = 20  # every 20th window is for evaluation


def windows(*, training: bool) -> px.Table:
    """Windows of one text each, with a mask that is 1 where a byte is real."""
    cut = [
        text[start : start + CONTEXT]
        for _, topic in sorted(topics.items())
        for text in [topic.encode()]
        for start in range(0, len(text) - 1, CONTEXT)
    ]
    chosen = [window for i, window in enumerate(cut) if (i % HELD_OUT != HELD_OUT - 1) == training]
    ids_NT = torch.tensor([list(window.ljust(CONTEXT, b"\0")) for window in chosen])
    lengths_N1 = torch.tensor([[len(window)] for window in chosen])
    return px.Table(input_ids=ids_NT, attention_mask=(torch.arange(CONTEXT) < lengths_N1).long())


def model() -> GPT2LMHeadModel:
    """A GPT-2 of 0.45 million parameters over bytes."""
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=256,
            n_positions=CONTEXT,
            n_embd=128,
            n_layer=2,
            n_head=4,
            initializer_range=0.06,  # 0.02 is for widths near 768
            use_cache=False,  # a cache serves generation; training would only fill it
            # Dropout draws other numbers under every plan; without it all plans compute the same.
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            resid_pdrop=0.0,
            bos_token_id=0,
            eos_token_id=0,
        )
    )


def job() -> px.Job:
    """What to train; the model takes ``input_ids`` and ``attention_mask`` from the batch by their names."""
    return px.Job(
        name="gpt2",
        model=model,
        data=lambda: windows(training=True),
        loss=lambda output, batch: px.next_token_loss(output, batch["input_ids"], batch["attention_mask"]),
        optimizer=lambda params: torch.optim.AdamW(params, lr=6e-3, betas=(0.9, 0.95), weight_decay=0.1),
        schedule=px.Schedule(decay="cosine", warmup_steps=10, floor=0.1),
        clip=1.0,
        batch=16,
        steps=160,
        evaluate=lambda: windows(training=False),
    )
