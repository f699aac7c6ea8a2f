"""A test whether the loss of a batch is the sum of its parts' losses, with the reason if not."""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Callable, Iterable, Sequence
from itertools import product
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves

from phalanx.config.losses import IGNORED
from phalanx.train.loss import LossReading

_SAME = 1e-4
"""Relative difference up to which results of fp32 on whole and on split samples are the same."""
Parts = dict[tuple[int, ...], LossReading]
"""By the indices of their samples: of the whole, which is the first, single samples, pairs, and what is left of one."""
COUNTED = "px.Loss(sum, count), as px.cross_entropy and px.next_token_loss give it, is exact."


def without_a_number(values: Parts) -> str:
    """Return the reason why single samples have no finite loss while all together have, or ""."""
    singles = [values[(index,)] for index in next(iter(values))]
    lost = [one for one in singles if not finite(one)]
    if not lost:
        return ""
    if len(lost) == len(singles):
        return _COUPLED
    return _SUM_OF_NONE if any(float(one.count) == 0 for one in lost) else _MEAN_OF_NONE


def of_weights(values: Parts, tokens: list[float]) -> str:
    """Return the reason why single samples' losses do not add up: weights in a mean, or comparisons."""
    if not all(one.mean for one in values.values()):
        return _COUPLED
    if all(
        close(sum(float(values[(index,)].value) for index in group), float(one.value)) for group, one in values.items()
    ):
        return _PLAIN_SUM
    ratios: dict[tuple[int, int], float] = {}
    for i, j in ((0, 1), (1, 2), (0, 2)):
        one, other, both = (float(values[group].value) for group in ((i,), (j,), (i, j)))
        if abs(one - both) <= _SAME * max(abs(one), 1e-6):
            return _COUPLED if not close(one, other) else _WEIGHTED
        ratios[i, j] = (both - other) / (one - both)
    if min(ratios.values()) <= 0 or not math.isclose(ratios[0, 1] * ratios[1, 2], ratios[0, 2], rel_tol=2e-2):
        return _COUPLED
    if tokens and all(
        tokens[j] and math.isclose(ratio, tokens[i] / tokens[j], rel_tol=2e-2) for (i, j), ratio in ratios.items()
    ):
        return (
            "mean over tokens: the loss is one mean over the tokens of a micro-batch, and samples have unlike numbers "
            f"of them, so that the mean of means is another. {COUNTED}"
        )
    return _WEIGHTED


_MEAN_OF_NONE = (
    "mean over what counts: the loss is one mean over the targets of a micro-batch that count, and there are samples "
    "of which none does (their labels are -100, or their mask is 0), so that the mean of means is another. "
    f"{COUNTED}"
)
_SUM_OF_NONE = (
    "no sum where nothing counts: the sum is not a finite number for a sample of which nothing is counted (the mean "
    "over none, times 0), and so for a micro-batch of such samples. A sum that is not made from a mean, as "
    'reduction="sum" gives it, is 0 there.'
)
_PLAIN_SUM = (
    "a sum without its count: the loss is the sum over the samples of a micro-batch, maybe divided by a number that is "
    'the same for all (reduction="sum", a batch size), and a plain number is taken for their mean. '
    "px.Loss(sum, count) is exact: the sum, and how many samples or tokens it is over, by which the whole batch's sum "
    "is divided; a learning rate that was right for a sum is too small for that."
)
_WEIGHTED = (
    "weighted mean: the loss is a mean in which samples weigh unlike (class weights, say), and weights of a "
    "micro-batch do not add up as samples do. px.Loss(sum, count) is exact where the weights do not depend on the "
    'model: for cross_entropy(..., weight=w), its sum with reduction="sum", and w[labels].sum().'
)
_COUPLED = (
    "the loss couples samples: it compares samples with each other (contrastive losses, statistics of the batch), so "
    'that it depends on how the batch is split. Give loss_over="batch": it is then of the whole global batch.'
)

_SPREAD = (
    "an output of shape {1} and a target of shape {0} broadcast, each sample against every other: likely they are to "
    "have one shape, as output.squeeze(-1) gives it. If not, "
)
_SIZES = re.compile(r"target size \(torch\.Size\((.*?)\)\) .* input size \(torch\.Size\((.*?)\)\)")


def with_shapes(why: str, loss: Callable[[Any, Any], Any], output: Any, batch: Any) -> str:
    """Return ``why``, and before it, if samples are coupled, suspicious shapes in ``loss``."""
    if why != _COUPLED:
        return why
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        loss(output, batch)
    told = [pair for one in caught for pair in _SIZES.findall(str(one.message))]
    sizes = ([list(one.shape) for one in tree_leaves(each) if isinstance(one, Tensor)] for each in (batch, output))
    told += [pair for pair in product(*sizes) if sorted(pair) == [pair[0][:1], [*pair[0][:1], 1]]]
    return _SPREAD.format(*told[0]) + why if told else why


def adds_up(values: Parts) -> bool:
    """Return True if the loss of the first group of samples is that of its parts, in sum and in count."""
    whole = next(iter(values))
    splits: Iterable[Sequence[tuple[int, ...]]] = ([(index,) for index in whole], [(0, 1), whole[2:]])
    total = values[whole]
    for groups in splits:
        parts = [values[group] for group in groups]
        if not close(sum(sum_of(one) for one in parts), sum_of(total)):
            return False
        if not close(sum(float(one.count) for one in parts), float(total.count)):
            return False
    return True


def sum_of(one: LossReading) -> float:
    """Return the sum over the counted items of a loss."""
    return float(one.value) * one.weight


def mean_of(one: LossReading) -> float:
    """Return the loss over its count."""
    return sum_of(one) / (float(one.count) or 1.0)


def close(one: float, other: float) -> bool:
    """Return True if two results differ by no more than rounding of fp32."""
    return math.isclose(one, other, rel_tol=_SAME, abs_tol=1e-6)


def finite(one: LossReading) -> bool:
    """Return True if the loss is a finite number."""
    return math.isfinite(float(one.value))


def is_counted(leaf: Any) -> bool:
    """Return True if a tensor of a batch holds integers or booleans for a sample or its tokens, or a mask."""
    if not isinstance(leaf, Tensor) or leaf.is_complex() or not leaf.dim() or not leaf.numel():
        return False
    return not leaf.is_floating_point() or bool(((leaf == 0) | (leaf == 1)).all())


def sizes_of(sample: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return for each tensor of tokens the number left by a mask or labels of -100, and the number unlike the last.

    For a tensor with one number a sample, the second is that number.
    """
    counted: list[int] = []
    ended: list[int] = []
    for leaf in filter(is_counted, tree_leaves(sample)):
        mask = int(leaf.min()) >= 0 and int(leaf.max()) <= 1
        counted.append(int(leaf.sum()) if mask else int((leaf != IGNORED).sum()))
        ended.append(int(leaf) if leaf.numel() == 1 else int((leaf != leaf.flatten()[-1]).sum()))
    return tuple(counted), tuple(ended)
