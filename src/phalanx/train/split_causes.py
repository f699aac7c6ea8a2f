"""Causes of a different result when a job's batch is split: searched on a few samples, before any process starts.

A loss that is not a mean over samples, an output that depends on the other samples of its batch, buffers that forward
changes, random numbers that belong to a batch and not to a sample: each is common, and invisible in a loss curve. The
model and the loss are run on the first samples, whole and in parts, and the differences are named.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

from phalanx.config import Job, Plan
from phalanx.config.losses import IGNORED
from phalanx.data import Loader
from phalanx.data.step_batch import rows_of
from phalanx.errors import LossError, Problem
from phalanx.parallel import batch_statistics, dropouts
from phalanx.parallel.buffer_sync import statistics_of
from phalanx.parallel.pipeline.python_state import chance
from phalanx.train.evaluate import evaluation_mode
from phalanx.train.few_samples import PARTS
from phalanx.train.inputs import Inputs
from phalanx.train.loss import LossReading, read_loss
from phalanx.train.loss_parts import (
    COUNTED,
    Parts,
    adds_up,
    close,
    finite,
    is_counted,
    mean_of,
    of_weights,
    sizes_of,
    with_shapes,
    without_a_number,
)
from phalanx.train.padding_free import MIXES_JOINED, counted_tokens, mixes, row_lengths, unlike_alone
from phalanx.train.row_gather import RowGather
from phalanx.train.whole_batch import OutputPiece, WholeBatch
from phalanx.units import show_names

_COUNTED_SAMPLES, _LABELLED_SAMPLES = 64, 16
"""Samples of which the tokens are counted, where the first ones' losses add up: they may be of one length by chance.

Fewer where each has a label or a weight and no tokens.
"""
LARGEST = 5e7
"""Elements of parameters up to which a model is looked at so: a fraction of a second."""


def splits_batches(job: Job, plan: Plan) -> bool:
    """Return True if ``plan`` computes a global batch of ``job`` in more than one piece."""
    return plan.replicas > 1 or (plan.micro is not None and plan.micro < job.batch)


def causes(job: Job, plan: Plan, module: nn.Module, loader: Loader) -> list[str]:
    """Return a sentence for each cause that makes ``job`` differ from one device when its batches are split.

    If ``plan`` does not split them, only new draws of a pipeline are searched for; with servers, whose pieces have
    other sizes, only draws at all: different sums are left to the proof. Draws random numbers, so call it where that is
    harmless.
    """
    split = splits_batches(job, plan)
    if not split and plan.pp == 1:
        return []
    look = _CauseSearch(job, module, loader)
    with torch.no_grad():
        if plan.server or not split:
            return look.random() if plan.server else look.random_behind()
        found = [*look.samples(), *look.buffers(plan)]
        found += look.random()
        return found if job.loss_over == "batch" else [*found, *(look.output() or look.loss())]


def compared_before(job: Job, plan: Plan, module: nn.Module, loader: Loader) -> list[Problem]:
    """Return the problem of a loss over the whole batch if the model itself compares samples.

    Draws random numbers, as ``causes`` does.
    """
    if job.loss_over == "samples" or not splits_batches(job, plan):
        return []
    with torch.no_grad():
        why = _CauseSearch(job, module, loader).compared()
    if not why:
        return []
    given = f'loss_over="batch" and micro-batches: {why}'
    allowed = "a model that gives what is compared, a row for each sample, and job.loss that compares"
    fix = "loss=lambda output, batch: contrastive(output.image, output.text)"
    return [Problem(where="job.model", given=given, allowed=allowed, fix=fix)]


class _CauseSearch:
    """A search on the first samples of a job, with its model and its loss."""

    def __init__(self, job: Job, module: nn.Module, loader: Loader) -> None:
        self._job, self._module = job, module
        self._inputs = Inputs(job, module)
        looked_at = list(loader.spread(PARTS if loader.length is None else min(PARTS, loader.length)))
        self._places, self._alone = [place for place, _ in looked_at], [batch for _, batch in looked_at]
        self._loader = loader
        self._batch = loader.collate(self._places)
        self._joined = bool(row_lengths(self._batch, self._alone))
        # samples of a stream are read once, and a transform mixes them with those beside them
        self._sliced = loader.length is None or job.transform is not None
        self._training = not _draws(module)
        self._unseen = _always_of_batch(module)
        self._changed: dict[str, torch.Tensor] = {}

    def samples(self) -> list[str]:
        if len(self._places) < 2 or self._job.transform is not None:
            return []
        again = self._loader.collate(self._places)
        if names := _unlike(self._batch, again):
            self._sliced = True
            return [
                f"data: a sample read twice is not the same ({names}): job.data or job.collate draws from a source "
                "that Phalanx cannot seed, so that nothing repeats."
            ]
        if self._joined:
            names = unlike_alone(self._batch, self._alone)
        else:
            names = _unlike(self._batch, tree_map(self._flipped, self._loader.collate(self._places[::-1])))
        if names:
            self._sliced = True
            where = "collate" if self._job.collate is not None else "__getitems__ of the data"
            return [
                f"random {where}: it draws random numbers for a whole micro-batch ({names}), so that what a sample "
                "gets depends on those beside it. Drawn in the data's __getitem__ they would be each sample's own."
            ]
        return []

    def buffers(self, plan: Plan) -> list[str]:
        """Return buffers that a training forward changes, except those of normalisations."""
        known = batch_statistics(self._module)
        self._forward(self._batch, training=True)
        if "(the model itself)" in known:
            return []
        changed = {name: one for name, one in self._changed.items() if name.rpartition(".")[0] not in known}
        if not changed:
            return []
        self._forward(self._part(self._places[:1]), training=True)
        of_samples = [name for name, one in changed.items() if not torch.equal(one, self._changed.get(name, one + 1))]
        self._training = self._training and not of_samples  # what follows is then looked for where they stay
        names = of_samples or (list(changed) if plan.micro is not None else [])
        if not names:
            return []
        what = "from the samples of each micro-batch" if of_samples else "once a micro-batch"
        return [
            f"buffers updated in forward: {show_names(names)} {'changes' if len(names) == 1 else 'change'} {what}, not "
            "of the global batch; after a step all ranks go on with rank 0's."
        ]

    def random(self) -> list[str]:
        if not self._differs():
            return []
        drew, self._training = self._drew, False
        # What is drawn in evaluation mode as well hides whatever else differs between a whole and its parts.
        self._unseen = self._unseen or self._differs()
        found = "random numbers drawn in forward or in the loss: other ones than on one device for the same sample."
        return [found] if drew else []

    def _differs(self) -> bool:
        first, second = (self._value(self._batch, seed) for seed in (0, 1))
        return first is not None and second is not None and not close(mean_of(first), mean_of(second))

    def random_behind(self) -> list[str]:
        """Return random draws behind the first layer: a later stage has its own random stream."""
        if dropouts(self._module) or not self._training:
            return []
        first, drew = self._value(self._batch, 0), self._drew
        layers = [one for one in self._module.modules() if any(True for _ in one.parameters(recurse=False))]
        left = [1]  # a seed for the first of them that is called

        def reseed(*_: object) -> None:
            if left:
                torch.manual_seed(left.pop())

        hooks = [one.register_forward_hook(reseed) for one in layers]
        try:
            second = self._value(self._batch, 0)
        finally:
            for hook in hooks:
                hook.remove()
        if not drew or first is None or second is None or close(mean_of(first), mean_of(second)):
            return []
        return [
            "random numbers drawn in forward behind its first layer, or in the loss: on a later stage of the pipeline "
            "other ones than on one device for the same sample."
        ]

    def output(self) -> list[str]:
        if len(self._places) < 2 or self._unseen:
            return []
        whole = self._forward(self._batch)
        if self._joined:
            return [MIXES_JOINED] if mixes(whole, [self._forward(one) for one in self._alone]) else []
        for index in range(len(self._places)):
            part = self._forward(rows_of(self._batch, [index], len(self._places)))
            for one, other in zip(_tensors(whole), _tensors(part), strict=False):
                of_samples = one.dim() and one.shape[0] == len(self._places)
                own = one[index : index + 1] if of_samples else one
                if of_samples and own.shape == other.shape and not torch.allclose(own, other, rtol=1e-3, atol=1e-4):
                    return [
                        "the model mixes samples: its output for a sample depends on the others of its micro-batch "
                        "(statistics of the batch, attention over it)."
                    ]
        return []

    def loss(self) -> list[str]:
        if len(self._places) < 3 or self._unseen:
            return []
        values = self._values(self._part)
        if self._tells_nothing(values) and self._others(values):
            values = self._values(self._part)
        if self._tells_nothing(values):
            return []
        if why := without_a_number(values):
            return [why]
        aligned = values if self._joined else self._values(self._rows)
        if adds_up(aligned):
            return [
                "padded mean: the loss is a mean over tokens with those that pad a sample to the longest of its "
                f"micro-batch, whose number depends on how the batch is split. {COUNTED}"
            ]
        why = of_weights(aligned if all(map(finite, aligned.values())) else values, self._token_counts())
        return [with_shapes(why, self._job.loss, self._forward(self._batch), self._batch)]

    def _tells_nothing(self, values: Parts) -> bool:
        return not finite(next(iter(values.values()))) or adds_up(values)

    def compared(self) -> str:
        size = len(self._places)
        if size < 2 or self._unseen:
            return ""
        self._training = False  # statistics and running means of training have notes of their own
        expected, again = (self._value(self._batch, seed) for seed in (0, 1))
        if expected is None or again is None or not close(mean_of(expected), mean_of(again)):
            return ""
        halves = [range(size // 2), range(size // 2, size)]
        parts = [self._piece(half) for half in halves]
        pieces = [
            OutputPiece(output=self._forward(part), batch=part, samples=len(half))
            for half, part in zip(halves, parts, strict=True)
        ]
        try:
            whole = WholeBatch(pieces, RowGather(torch.device("cpu")), torch.device("cpu"), size)
            found = read_loss(self._job.loss(whole.output, whole.batch), size, "a look at a few samples")
        except LossError as error:
            return str(error).splitlines()[0]
        except Exception:  # errors of the job's loss with other shapes
            return _MIXED_BEFORE
        return "" if close(mean_of(expected), mean_of(found)) else _MIXED_BEFORE

    def _others(self, values: Parts) -> bool:
        """Go on with samples that count different numbers, if the loss is a plain mean and such samples exist.

        They include a sample that counts none, if there is one.
        """
        counted = [leaf for leaf in tree_leaves(self._batch) if is_counted(leaf)]
        if not counted or self._sliced or not all(one.mean for one in values.values()):
            return False
        looked_at = _COUNTED_SAMPLES if any(leaf.dim() > 1 for leaf in counted) else _LABELLED_SAMPLES
        sizes = {place: sizes_of(sample) for place, sample in self._loader.spread(looked_at)}
        for column in (0, 1):  # by what is counted; where that is the same in all, by where padding begins
            firsts: dict[tuple[int, ...], int] = {}
            for place, size in sizes.items():
                firsts.setdefault(size[column], place)
            if len(firsts) > 1:
                none = [place for counts, place in firsts.items() if 0 in counts]
                some = [place for place in firsts.values() if place not in none]
                others = [place for place in sizes if place not in firsts.values()]
                places = [*none[:1], *some, *none[1:], *others][:PARTS]
                self._places, self._batch = places, self._loader.collate(places)
                self._alone = [self._loader.collate([place]) for place in places]
                return True
        return False

    def _values(self, batch_of: Callable[[Sequence[int]], Any]) -> Parts:
        every = range(len(self._places))
        groups = [tuple(every), *((one,) for one in every), (0, 1), (1, 2), (0, 2), tuple(every)[2:]]
        return {
            group: self._read(batch_of([self._places[index] for index in group]), 0, len(group))
            for group in dict.fromkeys(groups)
        }

    def _value(self, batch: Any, seed: int) -> LossReading | None:
        torch.manual_seed(seed)
        before = chance(), bytes(torch.get_rng_state())
        read = self._read(batch, seed, len(self._places))
        self._drew = before != (chance(), bytes(torch.get_rng_state()))
        return read if finite(read) else None

    def _read(self, batch: Any, seed: int, samples: int) -> LossReading:
        output = self._forward(batch, seed=seed)
        return read_loss(self._job.loss(output, batch), samples, "a look at a few samples")

    def _forward(self, batch: Any, *, training: bool | None = None, seed: int = 0) -> Any:
        args, kwargs, _ = self._inputs(batch, torch.device("cpu"))
        torch.manual_seed(seed)
        before = [one.clone() for one in self._module.buffers()]
        as_built = self._training if training is None else training
        with nullcontext() if as_built else evaluation_mode(self._module):
            output = self._module(*args, **kwargs)
        self._changed = {}
        for (name, one), value in zip(self._module.named_buffers(), before, strict=True):
            if not torch.equal(one, value):
                self._changed[name] = one.clone()
                one.copy_(value)
        return output

    def _part(self, places: Sequence[int]) -> Any:
        return self._rows(places) if self._sliced and not self._joined else self._loader.collate(list(places))

    def _piece(self, half: range) -> Any:
        if self._joined:
            return self._part([self._places[index] for index in half])
        return rows_of(self._batch, list(half), len(self._places))

    def _rows(self, places: Sequence[int]) -> Any:
        return rows_of(self._batch, [self._places.index(one) for one in places], len(self._places))

    def _flipped(self, leaf: Any) -> Any:
        rows = isinstance(leaf, torch.Tensor) and leaf.dim() and leaf.shape[0] == len(self._places)
        return leaf.flip(0) if rows else leaf

    def _token_counts(self) -> list[float]:
        if self._joined:
            return counted_tokens(self._batch, self._alone)
        leaves = [one for one in tree_leaves(self._batch) if isinstance(one, torch.Tensor) and one.dim() == 2]
        for one in leaves:
            if not one.is_floating_point() and bool((one == IGNORED).any()):
                return (one != IGNORED).sum(-1).double().tolist()
        for one in leaves:
            if not one.is_floating_point() and bool((one == 0).any()) and int(one.max()) == 1:
                return one.sum(-1).double().tolist()
        return []


_MIXED_BEFORE = "the model compares samples in its forward, so that the loss depends on how the batch is split"


def _draws(module: nn.Module) -> bool:
    """Return True if only training draws random numbers; then the trial runs in evaluation mode."""
    recurrent = any(isinstance(child, nn.RNNBase) and child.dropout for child in module.modules())
    return bool(dropouts(module)) or recurrent or bool(batch_statistics(module))


def _always_of_batch(module: nn.Module) -> bool:
    """Return True if the module normalises by the batch in evaluation mode, too, which hides other causes."""
    children = dict(module.named_modules())
    norms = (children.get(name, module) for name in batch_statistics(module))  # the model itself has no name
    return any(not statistics_of(norm) for norm in norms)


def _tensors(value: Any) -> list[torch.Tensor]:
    return [one for one in tree_leaves(value) if isinstance(one, torch.Tensor) and one.is_floating_point()]


def _unlike(one: Any, other: Any) -> str:
    if isinstance(one, dict) and isinstance(other, dict):
        names = [str(key) for key in one if key in other and not _equal(one[key], other[key])]
        return show_names(names) if names else ""
    return "" if _equal(one, other) else type(one).__name__


def _equal(one: Any, other: Any) -> bool:
    pairs = zip(tree_leaves(one), tree_leaves(other), strict=False)
    return all(
        torch.equal(a, b) or (a.is_floating_point() and torch.allclose(a, b, equal_nan=True))
        for a, b in pairs
        if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)
    )
