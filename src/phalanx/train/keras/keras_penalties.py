"""Penalties of Keras layers' regularisers, counted once a step at a time when a plan has their weights."""

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
    """The penalties of the layers that run in this thread, once a layer and call of the model."""

    terms: list[Tensor] | None = None
    layers: set[int]

    def counted(self) -> frozenset[int] | None:
        """Return the layers whose penalty this call of the model has; ``None`` if it collects none."""
        return None if self.terms is None else frozenset(self.layers)

    @contextmanager
    def again(self, counted: frozenset[int] | None) -> Iterator[None]:
        """Make layers repeated by backward act as at the time of ``counted``, without collecting again."""
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
    """Let ``layer`` count the regularisers of the inner layer whose weights or ``call`` it uses directly."""
    if isinstance(layer, LSTM | GRU | TimeDistributed):
        within = (layer.layer if isinstance(layer, TimeDistributed) else layer.cell).__dict__
        layer.__dict__["_regularised"] += within["_regularised"]
        within["_regularised"] = []
