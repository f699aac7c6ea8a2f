"""What is given in place of a model, data, a sampler, a plan or an output is named as what it is."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import phalanx as px
from phalanx.errors import SpecError
from phalanx.train.build_model import build_model

X, Y = torch.zeros(20, 3), torch.zeros(20, dtype=torch.long)


class Splits(dict[str, Any]):
    """As ``DatasetDict`` of datasets."""


class Columns(list[int]):
    column_names = ("a", "b")


def job(**how: Any) -> px.Job:
    given: dict[str, Any] = {
        "model": lambda: nn.Linear(3, 2),
        "data": lambda: px.Table(input=X, label=Y),
        "loss": lambda output, batch: px.cross_entropy(output, batch["label"]),
        "optimizer": lambda params: torch.optim.SGD(params, lr=0.1),
        "batch": 10,
        "epochs": 1,
    }
    return px.Job(**{**given, **how})


@pytest.mark.filterwarnings("ignore:.*script_method:DeprecationWarning")  # of torch's own import
def test_a_compiled_model() -> None:
    net = nn.Linear(3, 2)
    with pytest.raises(SpecError, match=r"a model in torch\.compile(?s:.*)compile=true in the plan"):
        build_model(job(model=lambda: torch.compile(net)))
