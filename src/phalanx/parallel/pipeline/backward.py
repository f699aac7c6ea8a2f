"""Backward in two halves: the gradients needed by the previous stage first, the weights' gradients later.

The first half runs autograd towards the stage's inputs only. At an operation on a weight and on a value that leads to
the inputs, the arriving gradient is kept, and the second half continues from there towards the weights (Qi et al. 2024,
section 2). Both halves together do the work of one backward, each product once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node


@dataclass(slots=True)
class _Fork:
    """A node of the graph with one path to the inputs and another to weights."""

    node: Node
    sides: tuple[Node, ...]  # what it leads to outside the ways to the inputs
    onward: tuple[Node, ...]  # its next nodes on the ways to the inputs
    repeats: bool  # whether a weight beside it is also met further on
    arrived: tuple[Tensor | None, ...] = ()  # the gradients of its outputs

    def keep(self, grads: tuple[Tensor | None, ...]) -> None:
        self.arrived = grads


class WeightHalf:
    """The second half of a backward, to be run when there is time."""

    def __init__(self, forks: list[_Fork], weights: dict[Node, tuple[Node, ...]]) -> None:
        self._forks, self._weights = forks, weights

    def run(self) -> None:
        """Add the weights' gradients to their ``grad``."""
        for fork in self._forks:
            arrived = {index: grad for index, grad in enumerate(fork.arrived) if grad is not None}
            targets = list(dict.fromkeys(leaf for side in fork.sides for leaf in self._weights[side]))
            if not arrived or not targets:
                continue
            # A weight that is also met further on is reached from there by a fork of its own.
            stops = [node.register_prehook(lambda grads: (None,) * len(grads)) for node in fork.onward if fork.repeats]
            try:
                found = torch.autograd.grad(
                    [GradientEdge(fork.node, index) for index in arrived],
                    [GradientEdge(leaf, 0) for leaf in targets],
                    list(arrived.values()),
                    retain_graph=True,  # two forks may share what a weight was computed by
                    allow_unused=True,
                )
            finally:
                for stop in stops:
                    stop.remove()
            for leaf, grad in zip(targets, found, strict=True):
                _add(leaf.variable, grad)  # pyrefly: ignore
        self._forks = []


def input_half(
    outputs: Sequence[Tensor], grads: Sequence[Tensor | None], inputs: Sequence[Tensor]
) -> tuple[list[Tensor | None], WeightHalf]:
    """Return the gradients of ``inputs`` (leaves), given those of ``outputs``, and the remaining half."""
    roots = [(output, grad) for output, grad in zip(outputs, grads, strict=True) if output.grad_fn is not None]
    order = _inputs_last([output.grad_fn for output, _ in roots if output.grad_fn is not None])
    leaves = {torch.autograd.graph.get_gradient_edge(tensor).node for tensor in inputs}
    inner, weights, beyond = _reach(order, leaves)
    forks: list[_Fork] = []
    for node in order:
        if node in inner and node not in leaves:
            following = [one for one, _ in node.next_functions if one is not None]
            sides = tuple(one for one in following if one not in inner and weights[one])
            if sides:
                onward = tuple(dict.fromkeys(one for one in following if one in inner))
                beside = {leaf for one in sides for leaf in weights[one]}
                repeats = any(beside & beyond[one] for one in onward)
                forks.append(_Fork(node, sides, onward, repeats))
    hooks = [fork.node.register_prehook(fork.keep) for fork in forks]
    towards = [pair for pair in roots if pair[0].grad_fn in inner]
    try:
        found = (
            torch.autograd.grad(
                [output for output, _ in towards],
                list(inputs),
                [_or_ones(output, grad) for output, grad in towards],
                retain_graph=True,
                allow_unused=True,
            )
            if towards
            else (None,) * len(inputs)
        )
    finally:
        for hook in hooks:
            hook.remove()
    for output, grad in roots:
        node = output.grad_fn
        if node is not None and node not in inner:  # an output that does not depend on the inputs at all
            arrived = [None] * output.output_nr + [_or_ones(output, grad)]
            forks.append(_Fork(node, (node,), (), False, tuple(arrived)))
    return list(found), WeightHalf(forks, {node: tuple(leaves) for node, leaves in weights.items()})


def _or_ones(output: Tensor, grad: Tensor | None) -> Tensor:
    return torch.ones_like(output) if grad is None else grad


def _add(weight: Tensor, grad: Tensor | None) -> None:
    if grad is None:
        return
    with torch.no_grad():
        weight.grad = grad if weight.grad is None else weight.grad.add_(grad)


def _inputs_last(roots: Sequence[Node]) -> list[Node]:
    seen: set[Node] = set()
    after: list[Node] = []
    waiting: list[tuple[Node, bool]] = [(root, False) for root in roots]
    while waiting:
        node, done = waiting.pop()
        if done:
            after.append(node)
        elif node not in seen:
            seen.add(node)
            waiting.append((node, True))
            waiting += [(one, False) for one, _ in node.next_functions if one is not None and one not in seen]
    return after[::-1]


def _reach(
    order: list[Node], leaves: set[Node]
) -> tuple[set[Node], dict[Node, frozenset[Node]], dict[Node, frozenset[Node]]]:
    inner: set[Node] = set()
    weights: dict[Node, frozenset[Node]] = {}
    known: dict[frozenset[Node], frozenset[Node]] = {}
    for node in reversed(order):
        following = [one for one, _ in node.next_functions if one is not None]
        if node in leaves or any(one in inner for one in following):
            inner.add(node)
        if not following and hasattr(node, "variable") and node not in leaves:
            weights[node] = frozenset((node,))
            continue
        reached: frozenset[Node] = frozenset()
        for one in following:
            reached = weights[one] if not reached else reached | weights[one] if weights[one] - reached else reached
        weights[node] = known.setdefault(reached, reached)
    return inner, weights, {node: weights[node] for node in inner}
