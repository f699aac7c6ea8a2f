"""Handwritten digits on any number of devices: phalanx train after.py -n 2"""

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

import phalanx as px

BATCH, EPOCHS, TRAINING = 100, 10, 1500


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10))

    def forward(self, image):
        return self.layers(image)


def digits(training):
    images, labels = load_digits(return_X_y=True)
    part = slice(0, TRAINING) if training else slice(TRAINING, None)
    return TensorDataset(torch.tensor(images[part] / 16, dtype=torch.float32), torch.tensor(labels[part]))


def model():
    torch.manual_seed(0)  # to begin with the values that the script begins with
    return Net()


def order(seed, epoch):  # that of the script; without it a sample order of Phalanx's own
    return torch.randperm(TRAINING, generator=torch.Generator().manual_seed(seed + epoch))


def job():
    return px.Job(
        model=model,
        data=lambda: digits(training=True),
        sampler=order,
        loss=lambda output, batch: F.cross_entropy(output, batch[1]),
        optimizer=lambda params: torch.optim.AdamW(params, lr=3e-3),
        schedule=px.Schedule(decay="cosine"),
        clip=1.0,
        batch=BATCH,
        epochs=EPOCHS,
        seed=0,
        evaluate=lambda: digits(training=False),
        metrics=lambda output, batch: {"accuracy": px.accuracy(output, batch[1])},
    )
