"""The search for the best cuts of a model's weights over ranks, by trying each on fake tensors.

A weight whose result can stay cut until a later product adds it up makes a pair with that product's weight: one is cut
by columns, the other by rows, and a block communicates once forward and once backward for each pair (Shoeybi et al.
2019, section 3). Pairs are found by the effect of the operations in between on slices, not by names or classes, so
heads, fused projections and gated layers need no rule of their own. A vocabulary is cut if the loss can be computed
from cut classes. Weights without a cut stay whole.
"""
# Runs of their own: whether two weights pair up shows only in what operations do to slices, so they run on slices.

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves

from phalanx.errors import Problem, RefusedError
from phalanx.parallel.local_shards import Axis, Cut, Placed, is_sliced
from phalanx.parallel.survey import Example
from phalanx.parallel.tensor.trial import Overrides, Trial, WeightCut, fixed, places_of, shown_as_slices, wishes
from phalanx.placement.limits import is_large_table, most_for_classes
from phalanx.trace.blocks import blocks, leave_cache_out, parts
from phalanx.trace.fake_tensors import faked, fakes, quiet


@dataclass(frozen=True, kw_only=True, slots=True)
class Split:
    """The cuts of weights, by name."""

    cuts: dict[str, tuple[int, Cut]]  # with the dimension
    whole: list[str]  # weights of two or more dimensions that every rank holds whole


def find(model: Model, ranks: int, *, across: bool = False) -> Split:
    """Return the cuts of a dry-run model's weights over this many ranks.

    ``across``: weights of different parts may pair up, in a model without repeated blocks.

    Raises:
        RefusedError: if the job wants impossible cuts.
    """
    said = wishes(model.module, model.example.tensor_parallel)
    chosen: dict[int, WeightCut] = {}
    known: dict[Any, tuple[nn.Module, list[WeightCut]]] = {}
    for block, calls in model.calls.items():
        for choice in _like(block, known, said, partial(_pairs, block, calls, ranks, said)):
            chosen.setdefault(id(choice.weight), choice)
    if across and not model.repeats:
        for choice in _pairs(model.module, model.call, ranks, said):
            chosen.setdefault(id(choice.weight), choice)
    for choice in [*_vocabulary(model, chosen, ranks, said), *_told(model, chosen, ranks, said)]:
        chosen.setdefault(id(choice.weight), choice)
    named = [(name, tensor, chosen.get(id(tensor))) for name, tensor in model.module.named_parameters()]
    return Split(
        cuts={name: (choice.dim, choice.cut) for name, _, choice in named if choice},
        whole=[name for name, tensor, choice in named if tensor.dim() > 1 and not choice],
    )


@contextmanager
def dry(module: nn.Module, example: Example) -> Iterator[Model]:
    """Yield the model after a run on fake tensors, or on itself if fakes cannot run it and it has values.

    Inside the block its parameters are the fakes. Searches along different axes share this run.

    Raises:
        Exception: any error of the model on fake tensors, such as from control flow that depends on data.
    """
    leave_cache_out(module)
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    try:
        with quiet(), faked(module, mode):
            yield Model(module, example, lambda value: fakes(mode, value))
            return
    except _UnfitError as error:
        if any(tensor.device.type == "meta" for tensor in module.parameters()):
            raise error.cause from None
    with torch.no_grad():
        yield Model(module, example, lambda value: value)


class _UnfitError(Exception):
    """Refusal of a model that does not run on fake tensors."""

    def __init__(self, cause: Exception) -> None:
        super().__init__(str(cause))
        self.cause = cause


Call = tuple[tuple[Any, ...], dict[str, Any]]


class Model:
    """A model that has run once on fake tensors, with the inputs and outputs of its blocks."""

    def __init__(self, module: nn.Module, example: Example, seen: Callable[[Any], Any]) -> None:
        self.module, self.example = module, example
        self.calls: dict[nn.Module, Call] = {}
        self.outputs: dict[nn.Module, Any] = {}
        self._args, self._kwargs, self._batch = seen((example.args, example.kwargs, example.batch))
        self.repeats = bool(blocks(module))
        try:
            with fixed({part: self._watched(part) for part in parts(module)}):
                self.run()
        except Exception as error:
            raise _UnfitError(error) from None

    @property
    def call(self) -> Call:
        """Return the arguments of the model's call."""
        return self._args, self._kwargs

    def run(self) -> Any:
        """Run the model and the loss."""
        return self.example.loss(self.module(*self._args, **self._kwargs), self._batch)

    def run_around_blocks(self) -> Any:
        """Run the same with every repeated block replaced by its former output."""
        if not self.repeats:
            return self.run()
        with fixed({block: lambda *_, block=block, **__: self.outputs[block] for block in self.calls}):
            return self.run()

    def _watched(self, part: nn.Module) -> Callable[..., Any]:
        forward = part.forward

        def watching(*args: Any, **kwargs: Any) -> Any:
            output = forward(*args, **kwargs)
            if part not in self.calls:
                self.calls[part] = (args, kwargs)
                self.outputs[part] = output
            return output

        return watching


def _like(
    block: nn.Module, known: dict[Any, Any], said: Overrides, look: Callable[[], list[WeightCut]]
) -> list[WeightCut]:
    shapes = tuple((name, type(child).__name__) for name, child in block.named_modules())
    key = (
        shapes,
        tuple((name, tuple(tensor.shape), tuple(said.dims(tensor))) for name, tensor in block.named_parameters()),
    )
    if key not in known:
        known[key] = (block, look())
    first, choices = known[key]
    by_name, its = dict(block.named_parameters()), {id(tensor): name for name, tensor in first.named_parameters()}
    return [WeightCut(by_name[its[id(one.weight)]], one.dim, one.cut) for one in choices if id(one.weight) in its]


def _pairs(block: nn.Module, call: Call, ranks: int, said: Overrides) -> list[WeightCut]:
    args, kwargs = call
    run = lambda: block(*args, **kwargs)  # noqa: E731
    found = _paired(block, run, ranks, said.dims)
    return found or (_paired(block, run, ranks, partial(said.dims, own=False)) if said.of_model else [])


def _paired(
    block: nn.Module, run: Callable[[], Any], ranks: int, dims: Callable[[nn.Parameter], Sequence[int]]
) -> list[WeightCut]:
    members: dict[tuple[int, ...], list[tuple[WeightCut, Trial]]] = {}
    for weight in block.parameters():
        for dim in dims(weight):
            found = _cut(block, weight, dim, run, ranks, partial(_ends_in_sums, dims))
            if found is not None and all(one.dim in dims(one.weight) for one in found[1].met):
                choice, trial = found
                members.setdefault(tuple(id(one.weight) for one in trial.met), []).append((choice, trial))
    chosen: dict[int, WeightCut] = {}
    for group in members.values():
        for choice in _fitting(block, group, run, ranks):
            chosen.setdefault(id(choice.weight), choice)
    return list(chosen.values())


def _cut(
    owner: nn.Module,
    weight: nn.Parameter,
    dim: int,
    run: Callable[[], Any],
    ranks: int,
    good: Callable[[Trial, Any], bool],
) -> tuple[WeightCut, Trial] | None:
    tries = _tries(owner, weight, dim, run, ranks)
    return next(((choice, trial) for choice, trial, result in tries if good(trial, result)), None)


def _tries(
    owner: nn.Module, weight: nn.Parameter, dim: int, run: Callable[[], Any], ranks: int
) -> Iterator[tuple[WeightCut, Trial, Any]]:
    size = weight.shape[dim]
    waiting, seen = [(1, 1)], {(1, 1)}
    while waiting:
        outer, inner = waiting.pop(0)
        if size % (outer * inner) or size // (outer * inner) < ranks:
            continue
        choice = WeightCut(weight, dim, Cut.even(size, ranks, outer=outer, inner=inner))
        trial, result = _outcome(owner, [choice], run, ranks)
        if trial is None:
            continue
        yield choice, trial, result
        # What is asked of a part of the dimension (one of three that are fused) holds within each of them.
        for grain in (*trial.grains, *((outer * o, i) for o, i in trial.grains)):
            if grain not in seen:
                seen.add(grain)
                waiting.append(grain)


def _outcome(
    owner: nn.Module, choices: Sequence[WeightCut], run: Callable[[], Any], ranks: int
) -> tuple[Trial | None, Any]:
    trial = Trial()
    axis = Axis("dry", size=ranks, rank=0, group=None, trial=trial)
    axis.notice = lambda kind, _: trial.sent.append(kind)
    try:
        with shown_as_slices(places_of(owner, {id(one.weight): (Placed(axis, one.dim, one.cut),) for one in choices})):
            return trial, run()
    except Exception:  # what the model or a rule cannot do with this cut
        return None, None


def _ends_in_sums(dims: Callable[[nn.Parameter], Sequence[int]], trial: Trial, result: Any) -> bool:
    two = lambda weight: weight.dim() == 2 or len(dims(weight)) > 2  # noqa: E731
    weights = all(isinstance(one.weight, nn.Parameter) and two(one.weight) for one in trial.met)
    return bool(trial.met) and weights and trial.sent == ["all_reduce"] * len(trial.met) and not _any_sliced(result)


def _fitting(
    block: nn.Module, group: list[tuple[WeightCut, Trial]], run: Callable[[], Any], ranks: int
) -> list[WeightCut]:
    group = sorted(group, key=lambda pair: -pair[0].weight.numel())
    while group:
        ends = {id(one.weight): one for one in group[0][1].met}
        group = [pair for pair in group if all(one.cut.same(ends[id(one.weight)].cut) for one in pair[1].met)]
        rows = [one for one in ends.values() if isinstance(one.weight, nn.Parameter)]
        biases = {id(one.weight): one for _, trial in group for one in trial.beside}
        choices = [*(choice for choice, _ in group), *rows, *biases.values()]
        if len({id(one.weight) for one in choices}) == len(choices):
            trial, result = _outcome(block, choices, run, ranks)
            if trial is not None and trial.sent == ["all_reduce"] * len(ends) and not _any_sliced(result):
                return choices
        group = group[:-1]
    return []


def _vocabulary(model: Model, chosen: dict[int, WeightCut], ranks: int, said: Overrides) -> list[WeightCut]:
    inside = set(chosen)
    if model.repeats:
        inside |= {id(tensor) for block in model.calls for tensor in block.parameters()}
    found: list[WeightCut] = []
    heads: set[int] = set()
    tables: list[tuple[WeightCut, Trial]] = []
    for weight in model.module.parameters():
        few = weight.dim() != 2 or ranks > most_for_classes(weight.shape[0])
        if id(weight) in inside or few or 0 not in said.dims(weight):
            continue
        result = _cut(model.module, weight, 0, model.run_around_blocks, ranks, _only_reduces)
        if result is None:
            continue
        choice, trial = result
        if len(trial.sent) >= 3:  # the largest logit, the sum of exponentials, the target's logit
            heads.add(weight.shape[0])
            found += [choice, *trial.beside]
        else:
            tables.append((choice, trial))
    found += [one for one, _ in tables if one.weight.shape[0] in heads or is_large_table(one.weight.shape[0])]
    return found


def _told(model: Model, chosen: dict[int, WeightCut], ranks: int, said: Overrides) -> list[WeightCut]:
    found: list[WeightCut] = []
    for name, weight in model.module.named_parameters():
        dim = said.of_job.get(id(weight))
        if dim is None or id(weight) in chosen:
            continue
        tries = list(_tries(model.module, weight, dim, model.run, ranks))
        if not tries:
            raise RefusedError([_uncut(name, weight, dim, ranks)])
        choice, trial, _ = min(tries, key=lambda one: len(one[1].sent))
        found += [choice, *trial.beside]
    return found


def _uncut(name: str, weight: nn.Parameter, dim: int, ranks: int) -> Problem:
    return Problem(
        where="job.tensor_parallel",
        given=f"a cut along dimension {dim} of {name} of shape {tuple(weight.shape)} over tp={ranks}",
        allowed="cuts that give every rank a row, and that the operations on the weight can follow",
        fix=f"tensor_parallel={{{name!r}: 'whole'}}",
    )


def _only_reduces(trial: Trial, result: Any) -> bool:
    return bool(trial.sent) and set(trial.sent) == {"all_reduce"} and not trial.met and not _any_sliced(result)


def _any_sliced(value: Any) -> bool:
    return any(is_sliced(leaf) for leaf in tree_leaves(value))
