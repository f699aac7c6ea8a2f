"""Matrix products of slices, and their communication.

Each dimension of a product is named by a letter, as in ``einsum``. A letter in both operands and not in the result is
added over; sliced there, each rank has a part of the sum (a row-split layer), and one reduction makes it whole. A
letter of one operand alone stays sliced in the result (a column-split layer), without communication in forward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from string import ascii_letters
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from phalanx.parallel.local_shards.axis import Axis, Placed, parameter_of, reduce_scattered, total
from phalanx.parallel.local_shards.cut import Cut
from phalanx.parallel.local_shards.tensor import RULES, arguments, brought, gathered, is_sliced, local_of, sliced


def linear(func: Any, args: Any, kwargs: Any) -> Any:
    """Compute ``x W^T + b``."""
    x, weight, bias = arguments(args, kwargs, input=None, weight=None, bias=None)
    if x.dim() < 1 or weight.dim() != 2:
        return NotImplemented
    batch = ascii_letters[: x.dim() - 1]
    return product((batch + "Y", "ZY", batch + "Z"), x, weight, F.linear, bias)


def addmm(func: Any, args: Any, kwargs: Any) -> Any:
    """Compute ``b + x W``, as in transformers' ``Conv1D``."""
    bias, x, weight = arguments(args, kwargs, input=None, mat1=None, mat2=None)
    if any(kwargs.get(name, 1) != 1 for name in ("alpha", "beta")):
        return NotImplemented

    def run(a: Tensor, b: Tensor, beside: Tensor | None = None) -> Tensor:
        return a @ b if beside is None else torch.addmm(beside, a, b)

    return product(("XY", "YZ", "XZ"), x, weight, run, bias)


def baddbmm(func: Any, args: Any, kwargs: Any) -> Any:
    """Compute ``beta b + alpha x y``."""
    bias, x, y = arguments(args, kwargs, input=None, batch1=None, batch2=None)
    alpha, beta = kwargs.get("alpha", 1), kwargs.get("beta", 1)
    found = product(("BXY", "BYZ", "BXZ"), x, y, torch.bmm)
    found = found * alpha if alpha != 1 else found
    return found + bias * beta if beta else found


def matmul(func: Any, args: Any, kwargs: Any) -> Any:
    """Compute ``a b`` over the last two dimensions, the others broadcast."""
    a, b, *_ = [*args, *(kwargs[name] for name in ("input", "other", "mat2", "vec") if name in kwargs)]
    if func.__name__ == "__rmatmul__":
        a, b = b, a
    if a.dim() < 2 or b.dim() < 2:
        return NotImplemented
    batch = ascii_letters[: max(a.dim(), b.dim()) - 2]
    left, right = batch[len(batch) - a.dim() + 2 :] + "XY", batch[len(batch) - b.dim() + 2 :] + "YZ"
    return product((left, right, batch + "XZ"), a, b, torch.matmul)


def einsum(func: Any, args: Any, kwargs: Any) -> Any:
    """Compute a product of two operands with every letter written out."""
    equation, *operands = args
    if len(operands) == 1 and isinstance(operands[0], tuple | list):
        operands = list(operands[0])
    if not isinstance(equation, str) or "->" not in equation or "." in equation or len(operands) != 2:
        return NotImplemented
    inputs, out = equation.replace(" ", "").split("->")
    letters = inputs.split(",")
    if any(len(set(one)) != len(one) for one in (*letters, out)):
        return NotImplemented
    left, right = operands
    return product((letters[0], letters[1], out), left, right, lambda a, b: torch.einsum(equation, a, b))


Letters = tuple[str, str, str]
"""Letters of the first operand, of the second, of the result."""


def product(letters: Letters, a: Tensor, b: Tensor, run: Callable[..., Tensor], bias: Any = None) -> Any:
    """Compute ``run(a, b)`` with sliced operands; ``run(a, b, bias)`` with a bias over the result's last letter."""
    axes = {id(one.axis): one.axis for operand in (a, b, bias) if is_sliced(operand) for one in operand.placed}
    cuts: list[tuple[Axis, str, Cut]] = []
    sums: list[Axis] = []
    for axis in sorted(axes.values(), key=lambda axis: axis.name):
        a, b, found = _arranged(letters, a, b, axis)
        if found is None:
            continue
        if found[0] in letters[2]:
            cuts.append((axis, *found))
        else:
            sums.append(axis)
    out = letters[2]
    placed = [Placed(axis, out.index(letter), cut) for axis, letter, cut in cuts]
    if not sums:
        return sliced(run(*map(local_of, (a, b, *_beside(bias, out, axes.values(), cuts)))), placed)
    local = run(local_of(a), local_of(b))
    for axis in sums:
        local, more = _summed(local, axis, placed)
        placed += more
    found = sliced(local, placed)
    return found if bias is None else found + bias


def _summed(local: Tensor, axis: Axis, placed: list[Placed]) -> tuple[Tensor, list[Placed]]:
    tokens = local.dim() - 2
    if not axis.tokens or tokens < 0 or any(one.dim == tokens for one in placed):
        return total(local, axis), []
    samples, rest = divmod(local.shape[tokens], axis.length or 1)  # more than one where samples and tokens are merged
    if rest or not axis.length:
        return total(local, axis), []
    cut = Cut.even(local.shape[tokens], axis.size, outer=samples)
    return reduce_scattered(local, tokens, cut, axis), [Placed(axis, tokens, cut)]


def _beside(bias: Any, out: str, axes: Iterable[Axis], cuts: list[tuple[Axis, str, Cut]]) -> list[Any]:
    if bias is None:
        return []
    for axis in axes:
        letter, cut = next(((letter, cut) for one, letter, cut in cuts if one is axis), (None, None))
        if cut is None:  # every rank does all of the work, and has the whole gradient
            bias = gathered(bias, axis, partly=False)
        elif letter != out[-1]:
            bias = gathered(bias, axis, partly=True)
        else:
            if axis.trial is not None and not is_sliced(bias):
                axis.trial.adds(bias, cut)
            bias = brought(bias, axis, -1, cut)
    return [bias]


def _arranged(letters: Letters, a: Any, b: Any, axis: Axis) -> tuple[Any, Any, tuple[str, Cut] | None]:
    left, right, out = letters
    at_a, at_b = _cut_letter(a, left, axis), _cut_letter(b, right, axis)
    if at_a is None and at_b is None:
        return a, b, None
    if at_a is not None and at_b is not None:
        if at_a[0] == at_b[0]:
            return a, brought(b, axis, right.index(at_a[0]) - len(right), at_a[1]), at_a
        if axis.trial is not None:
            axis.trial.attends()  # such as queries cut along their tokens meeting keys cut along theirs
        # Each has a letter of its own: one is gathered. A weight stays, activations move; else the smaller one moves.
        if _is_weight(b) or (not _is_weight(a) and _bytes(a) < _bytes(b)):
            return _beside_cut(a, left, at_b, axis), b, at_b
        return a, _beside_cut(b, right, at_a, axis), at_a
    if at_a is not None:
        if at_a[0] not in out and _is_weight(b) and not axis.trial:
            return gathered(a, axis, partly=False), b, None  # a weight that is not split: cutting it would cost more
        if at_a[0] not in out and axis.trial is not None:
            axis.trial.meets(b, at_a[1], right.index(at_a[0]))
        return a, _beside_cut(b, right, at_a, axis), at_a
    assert at_b is not None
    return _beside_cut(a, left, at_b, axis), b, at_b


def _beside_cut(tensor: Any, letters: str, cut_letter: tuple[str, Cut], axis: Axis) -> Any:
    letter, cut = cut_letter
    if letter not in letters:
        return gathered(tensor, axis, partly=True)
    return brought(tensor, axis, letters.index(letter) - len(letters), cut)


def _cut_letter(tensor: Any, letters: str, axis: Axis) -> tuple[str, Cut] | None:
    place = tensor.on(axis) if is_sliced(tensor) else None
    return None if place is None else (letters[place.dim], place.cut)


def _is_weight(tensor: Any) -> bool:
    return parameter_of(local_of(tensor)) is not None


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


RULES.update(linear=linear, addmm=addmm, baddbmm=baddbmm, einsum=einsum)
for _name in ("matmul", "rmatmul", "mm", "bmm"):
    RULES[_name] = matmul
