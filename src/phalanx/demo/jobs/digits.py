"""A small convolutional net on real handwritten digits: 1,797 images of 8 x 8 pixels.

Reaches 99 % on the 297 images it is not trained on. Run it with ``phalanx train examples/digits.py -n 2``.

The images are in ``digits.csv.gz`` beside this file: 64 pixels from 0 to 16 and the label in each line. They are the
same numbers as scikit-learn's ``load_digits``, written as integers. Source: E. Alpaydin and C. Kaynak, "Optical
Recognition of Handwritten Digits" (test set), UCI Machine Learning Repository, 1998,
https://doi.org/10.24432/C50P49. Licence: CC BY 4.0, https://creativecommons.org/licenses/by/4.0/.

Shapes: B samples, C channels, H and W pixels.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import phalanx as px
from phalanx.demo import jobs

IMAGES = Path(jobs.__file__).with_name("digits.csv.gz")
TRAINING = 1500  # images; the other 297 are for evaluation


class ConvNet(nn.Module):
    """Three convolutions and a linear layer; 98,250 parameters.

    GroupNorm, not BatchNorm: it looks at one sample at a time, so that no split of a batch can change it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 32, 3, padding=1),
            nn.GroupNorm(4, 32),
            nn.ReLU(),
            nn.Conv2d(32, 64, 3, padding=1),
            nn.GroupNorm(8, 64),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(64, 128, 3, padding=1),
            nn.GroupNorm(8, 128),
            nn.ReLU(),
        )
        self.classify = nn.Linear(128 * 2 * 2, 10)

    def forward(self, image: Tensor) -> Tensor:
        """Return logits of shape (B, 10) for images of shape (B, 1, 8, 8)."""
        features_BCHW = F.max_pool2d(self.features(image), 2)
        return self.classify(features_BCHW.flatten(1))


def digits(*, training: bool) -> px.Table:
    """Return the images, from 0 to 1, and their labels; the split into training and evaluation is always the same."""
    table = torch.from_numpy(np.loadtxt(IMAGES, delimiter=",", dtype=np.int64))
    order = torch.randperm(len(table), generator=torch.Generator().manual_seed(0))
    chosen = order[:TRAINING] if training else order[TRAINING:]
    return px.Table(
        image=table[chosen, :64].float().view(-1, 1, 8, 8) / 16,
        label=table[chosen, 64],
    )


def job() -> px.Job:
    """Return the job; no part of it depends on the number of devices."""
    return px.Job(
        name="digits",
        model=ConvNet,
        data=lambda: digits(training=True),
        loss=lambda output, batch: px.cross_entropy(output, batch["label"]),
        optimizer=lambda params: torch.optim.AdamW(params, lr=3e-3),
        schedule=px.Schedule(decay="cosine", warmup_steps=5),
        batch=128,
        epochs=6,
        evaluate=lambda: digits(training=False),
        metrics=lambda output, batch: {"accuracy": px.accuracy(output, batch["label"])},
    )
