"""Random streams: apart for whatever they are for, the same wherever they are computed."""

from __future__ import annotations

import pytest
import torch

from phalanx.parallel.rng_streams import reseed, stream
from phalanx.train.build_model import build_model

pytestmark = pytest.mark.quick


def test_streams_differ_by_every_word() -> None:
    seeds = {stream(seed, *words) for seed in range(20) for words in ((0,), (1,), (0, 0), (0, 1), (1, 0))}
    assert len(seeds) == 100


def test_neighbouring_seeds_give_other_initial_values() -> None:
    import phalanx as px

    def first(seed: int) -> float:
        job = px.Job(
            model=lambda: torch.nn.Linear(2, 2),
            data=list,
            loss=lambda output, batch: output,
            optimizer=lambda params: torch.optim.SGD(params, lr=1.0),
            batch=1,
            steps=1,
            seed=seed,
        )
        return float(next(build_model(job).parameters())[0, 0].detach())

    assert len({first(seed) for seed in range(6)}) == 6
    assert first(3) == first(3)


def test_reseeding_repeats() -> None:
    reseed(torch.device("cpu"), stream(1, 2, 3))
    first = torch.rand(3)
    reseed(torch.device("cpu"), stream(1, 2, 3))
    assert torch.equal(first, torch.rand(3))
