"""The first samples of a job's data, on the host, for trials of its model and its loss before training."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from phalanx.config import Job
from phalanx.data import Lane, Loader, MicroBatch
from phalanx.parallel import Example
from phalanx.train.build_model import make_data
from phalanx.train.inputs import Inputs

FEW = 2
"""Samples that a model is looked at with: more than one, for what depends on how many there are."""
PARTS = 4
"""Samples whose losses are compared, of all of them together with those of parts."""

HOST = torch.device("cpu")


def whole_loader(job: Job) -> Loader:
    """Return a loader of the data of ``job`` from the first step on, as one device reads them."""
    return Loader(make_data(job, job.data), job, Lane(), micro=None)


def few_of(loader: Loader) -> MicroBatch:
    """Return the first samples, ``FEW`` at most, as one micro-batch. It takes them from a stream."""
    size = FEW if loader.length is None else min(FEW, loader.length)
    return MicroBatch(batch=loader.example(size), ids=tuple(range(size)), samples=size)


def example_of(job: Job, module: nn.Module, loader: Loader | None = None) -> Example:
    """Return the first samples for a trial of ``module``. A stream is made anew, so ``loader`` keeps its place."""
    if loader is None or loader.length is None:
        loader = whole_loader(job)
    return example_from(job, Inputs(job, module), loader.example(FEW))


def example_from(job: Job, inputs: Inputs, batch: Any) -> Example:
    """Return the model's arguments for ``batch``, which holds a few samples, and the loss to use."""
    args, kwargs, batch = inputs(batch, HOST)
    return Example(args=args, kwargs=kwargs, batch=batch, loss=job.loss, tensor_parallel=job.tensor_parallel)
