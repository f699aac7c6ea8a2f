"""Looks on while servers train: what a proof needs to see."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping

import torch

from phalanx.train.metrics import Metrics


class Watcher(ABC):
    """Is told by server 0 of every update; tensors are whole, and on the host."""

    @abstractmethod
    def begun(self, parameters: Mapping[str, torch.Tensor], notes: list[str]) -> None:
        """The parameters before the first update."""

    @abstractmethod
    def gradients(self, gradients: Mapping[str, torch.Tensor], ids: list[list[int]]) -> None:
        """The gradients of the first update before clipping, and the samples of each piece."""

    @abstractmethod
    def updated(self, metrics: Metrics) -> None:
        """One update was made."""

    @abstractmethod
    def ended(self, parameters: Mapping[str, torch.Tensor]) -> None:
        """The parameters after the last."""
