"""What a job's loss gives back, and whose it is: a function's, or the model's own."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from phalanx.errors import Problem

IGNORED = -100
"""The label that does not count, as torch and transformers have it."""


class Loss(NamedTuple):
    """A loss as a sum and a count, so that any split of a batch adds up to the same number.

    A mean cannot be added up: the mean over 3 tokens and the mean over 5 are not the mean over 8. Sums and
    counts can: Phalanx adds both over micro-batches and ranks and divides once.

    Attributes:
        sum: scalar tensor, the loss summed over what is counted (tokens, samples, pixels). Backward runs on it.
        count: how many were summed: a number or a scalar tensor. May differ per micro-batch and may be 0.
    """

    sum: Any
    count: Any


@dataclass(frozen=True, slots=True)
class ModelLoss(ABC):
    """A loss that the model computes itself; ``px.model_loss`` makes it.

    Attributes:
        count: ``count(batch)`` gives the tokens or samples that the mean is over; ``None``: known by the model's class.
    """

    count: Callable[[Any], Any] | None = None

    @abstractmethod
    def __call__(self, output: Any, batch: Any) -> Loss:
        """The model's own mean, times what it is a mean over, of what the model gave for ``batch``."""


def loss_problems(loss: Any, loss_over: Any) -> list[Problem]:
    """What is wrong with ``job.loss``, a function or the model's own."""
    if (itself := _makes_model_losses(loss)) or isinstance(loss, str):
        given = "px.model_loss itself" if itself else repr(loss)
        allowed = "px.model_loss(), called, for the model's own; or a function of the output and the batch"
        return [Problem(where="job.loss", given=given, allowed=allowed, fix="loss=px.model_loss()")]
    if not callable(loss):
        fix = "loss=lambda output, batch: px.cross_entropy(output, batch['label'])"
        return [Problem(where="job.loss", given=repr(loss), allowed="a function that builds it when called", fix=fix)]
    if isinstance(loss, ModelLoss) and loss_over == "batch":
        given = 'loss_over="batch" with px.model_loss(): the model computes it, of one micro-batch at a time'
        allowed = "a function of the outputs of the whole batch"
        return [Problem(where="job.loss", given=given, allowed=allowed, fix='loss_over="samples"')]
    return []


def _makes_model_losses(loss: Any) -> bool:
    """Whether it is ``px.model_loss``, which has to be called to give a loss."""
    name, module = getattr(loss, "__name__", ""), str(getattr(loss, "__module__", ""))
    return name == "model_loss" and module.startswith("phalanx.")
