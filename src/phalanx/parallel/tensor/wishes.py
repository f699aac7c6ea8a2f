"""Which dimension of a weight is to be cut, where somebody says so: the job, or the model's own plan."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from torch import Tensor, nn

from phalanx.config.job import Cutting
from phalanx.errors import Problem, RefusedError


@dataclass(frozen=True, kw_only=True, slots=True)
class Wishes:
    """What is said of weights, by the id of the parameter.

    Attributes:
        told: by the job: the dimension to cut, or ``None`` for a weight that is to stay whole.
        own: by the model's own plan: the dimension to cut. Followed where it goes well.
    """

    told: Mapping[int, int | None]
    own: Mapping[int, int]

    def dims(self, weight: Tensor, *, own: bool = True) -> Sequence[int]:
        """The dimensions of ``weight`` to try; ``own=False`` leaves the model's own plan aside."""
        if id(weight) in self.told:
            dim = self.told[id(weight)]
            return () if dim is None else (dim,)
        if own and id(weight) in self.own:
            return (self.own[id(weight)],)
        return range(2) if weight.dim() == 2 else ()


def wishes(module: nn.Module, told: Mapping[str, Cutting]) -> Wishes:
    """What the job says, by patterns of names, and what the model says of itself.

    Of the job's patterns the last that fits counts.

    Raises:
        RefusedError: if a pattern fits no weight, or one that cannot be cut so.
    """
    found: dict[int, int | None] = {}
    problems: list[Problem] = []
    for pattern, how in told.items():
        fitting = _fitting(module, pattern)
        matrices = [one for one in fitting if one[2].dim() == 2]
        unclear = [one for one in matrices if _dim(one[0], how) == _UNKNOWN]
        if not fitting:
            problems.append(_unknown(module, pattern, how))
        elif unclear or not matrices:
            problems.append(_unfit(*(unclear or fitting)[0][1:], pattern, how))
        else:
            found |= {id(weight): _dim(owner, how) for owner, _, weight in matrices}
    if problems:
        raise RefusedError(problems)
    return Wishes(told=found, own=_own(module))


_UNKNOWN = -1


def _fitting(module: nn.Module, pattern: str) -> list[tuple[nn.Module, str, nn.Parameter]]:
    """Owner, name and value of the parameters whose own or whose module's name fits."""
    found: list[tuple[nn.Module, str, nn.Parameter]] = []
    for prefix, owner in module.named_modules():
        for own, weight in owner.named_parameters(recurse=False):
            name = f"{prefix}.{own}" if prefix else own
            if fnmatchcase(name, pattern) or (prefix and fnmatchcase(prefix, pattern)):
                found.append((owner, name, weight))
    return found


def _dim(owner: nn.Module, how: Cutting) -> int | None:
    """The dimension that is cut: columns of y = xA are output features (Shoeybi et al. 2019, section 3)."""
    if how == "whole":
        return None
    if isinstance(how, int):
        return how
    if isinstance(owner, nn.Linear):
        return 0 if how == "colwise" else 1
    if isinstance(owner, nn.Embedding):
        return 0 if how == "rowwise" else 1
    return _UNKNOWN


def _own(module: nn.Module) -> dict[int, int]:
    """What a model of ``transformers`` says of itself (``base_model_tp_plan``), as far as it is said of matrices."""
    plan: Any = getattr(module, "tp_plan", None) or {}
    found: dict[int, int] = {}
    for pattern, style in plan.items() if isinstance(plan, dict) else ():
        if "colwise" not in str(style) and "rowwise" not in str(style):
            continue
        for owner, _, weight in _fitting(module, pattern):
            dim = _dim(owner, "colwise" if "colwise" in str(style) else "rowwise")
            if weight.dim() == 2 and dim is not None and dim != _UNKNOWN:
                found[id(weight)] = dim
    return found


def _unknown(module: nn.Module, pattern: str, how: Cutting) -> Problem:
    names = [name for name, tensor in module.named_parameters() if tensor.dim() == 2]
    near = difflib.get_close_matches(pattern, names, n=1, cutoff=0.0) or ["blocks.*.up"]
    return Problem(
        where="job.tensor_parallel",
        given=f"{pattern!r}, which no weight of the model is called",
        allowed="names of layers or of their weights; * stands for any text",
        fix=f"tensor_parallel={{{near[0]!r}: {how!r}}}",
    )


def _unfit(name: str, weight: Tensor, pattern: str, how: Cutting) -> Problem:
    given = f"{how!r} for {name} of shape {tuple(weight.shape)}"
    if weight.dim() != 2:
        allowed = "weights of two dimensions; biases go with theirs, experts are dealt out by ep"
        fix = "no entry for it: what is not named is cut as found"
        return Problem(where="job.tensor_parallel", given=given, allowed=allowed, fix=fix)
    return Problem(
        where="job.tensor_parallel",
        given=f"{given}, of which nobody knows which are its columns",
        allowed="colwise and rowwise for nn.Linear and nn.Embedding; for others the dimension, 0 or 1",
        fix=f"tensor_parallel={{{pattern!r}: 0}}",
    )
