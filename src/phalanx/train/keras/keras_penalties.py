"""What regularisers of Keras layers come to, counted once a step where a plan has their weights at hand."""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportArgumentType=false, reportOptionalMemberAccess=false, reportIncompatibleMethodOverride=false
# Keras has no types that hold for the backend that it runs on.

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from keras.src.layers import GRU, LSTM, TimeDistributed
from torch import Tensor


class Penalties(threading.local):
    """What regularisers of the layers that run in this thread have come to, of each layer once a call of the model."""

    terms: list[Tensor] | None = None
    layers: set[int]

    def counted(self) -> frozenset[int] | None:
        """The layers whose penalty this call of the model has by now; ``None`` where it collects none."""
        return None if self.terms is None else frozenset(self.layers)

    @contextmanager
    def again(self, counted: frozenset[int] | None) -> Iterator[None]:
        """Have layers that backward calls again do what they did when ``counted`` was so; it was collected then."""
        if counted is None or self.terms is not None or torch._C._current_graph_task_id() < 0:
            yield
            return
        self.terms, self.layers = [], set(counted)
        try:
            yield
        finally:
            self.terms = None


PENALTIES = Penalties()


def penalise_within(layer: Any) -> None:
    """Have ``layer`` count the regularisers of the layer whose weights, or whose ``call``, it takes by itself."""
    if isinstance(layer, LSTM | GRU | TimeDistributed):
        within = (layer.layer if isinstance(layer, TimeDistributed) else layer.cell).__dict__
        layer.__dict__["_regularised"] += within["_regularised"]
        within["_regularised"] = []
