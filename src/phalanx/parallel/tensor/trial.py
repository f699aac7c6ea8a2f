"""Asks of a model what would happen if one weight were cut: a dry run on fake tensors, nothing computed or sent."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import prod
from typing import Any

from torch import nn

from phalanx.parallel.sliced import Axis, Cut
from phalanx.parallel.tensor.weights import Places, shown_as_slices


@dataclass(frozen=True, slots=True)
class Met:
    """A product that added up what a cut had dealt out: the other weight, and how it would be cut."""

    weight: Any
    dim: int
    cut: Cut


@dataclass(slots=True)
class Trial:
    """What a dry run saw.

    Attributes:
        met: products in which the cut ended, in one sum over the ranks.
        beside: parameters added to a cut result, cut the same way: biases.
        sent: kinds of collectives, in order.
        grains: ways of reading the cut dimension that a view or split of the model asked for: (repeats, elements of a
            unit).
        tokens: whether attention was asked for, cut along the tokens.
        causal: whether that was causal.
        late: ids of parameters whose gradients are to be added up over the ranks at the end of a step.
    """

    met: list[Met] = field(default_factory=list[Met])
    beside: list[Met] = field(default_factory=list[Met])
    sent: list[str] = field(default_factory=list[str])
    grains: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    tokens: bool = False
    causal: bool = False
    late: set[int] = field(default_factory=set[int])

    def meets(self, weight: Any, cut: Cut, dim: int) -> None:
        """A product adds over the cut dimension."""
        self.met.append(Met(weight, dim, cut))

    def adds(self, bias: Any, cut: Cut) -> None:
        """A whole bias goes with a cut result."""
        self.beside.append(Met(bias, 0, cut))

    def viewed(self, cut: Cut, sizes: list[int]) -> None:
        """A dimension cut so is to be viewed as ``sizes``, which these slices cannot follow."""
        for index, size in enumerate(sizes):
            if size > 1:
                self.grains.append((prod(sizes[:index]), prod(sizes[index + 1 :])))

    def attends(self, causal: bool = False) -> None:
        """Attention over tokens that are dealt out."""
        self.tokens = True
        self.causal = self.causal or causal


def tried(run: Callable[[], Any], places: Callable[[Axis], Places], ranks: int, *, sums: bool = False) -> Trial:
    """What happens if ``run`` runs with the parameters in ``places`` shown as slices over a dry axis.

    Raises:
        Exception: whatever the model raises on fake tensors.
    """
    trial = Trial()
    axis = Axis("dry", size=ranks, rank=0, group=None, sums=sums, trial=trial)
    axis.notice = lambda kind, _: trial.sent.append(kind)
    with shown_as_slices(places(axis)):
        run()
    return trial


@contextmanager
def fixed(table: dict[nn.Module, Callable[..., Any]]) -> Iterator[None]:
    """Other forwards in place of some modules' own."""
    before = {module: module.__dict__.get("forward") for module in table}
    for module, forward in table.items():
        module.forward = forward
    try:
        yield
    finally:
        for module, forward in before.items():
            if forward is None:
                del module.forward
            else:
                module.forward = forward
