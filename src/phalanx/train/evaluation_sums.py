"""The sums and rows of an evaluation on one rank, and the result over all ranks."""

from __future__ import annotations

import base64
import math
from collections.abc import Callable, Mapping
from numbers import Real
from typing import Any, final

import numpy as np
import torch
from torch import Tensor

from phalanx.config import Metric
from phalanx.device_kinds import widened
from phalanx.errors import LossError
from phalanx.train.row_gather import with_whole_tensors

Sums = dict[str, tuple[float, float]]
"""Name → sum and count: of ``loss``, and of each metric that is a ratio."""
Found = Mapping[str, "tuple[Any, Any] | Metric"]
"""Name → what some samples gave: of ``loss``, and of each metric."""


def add_up(sums: Sums, found: Found) -> None:
    """Add the ratios in ``found``, from further samples, to ``sums``."""
    for name, given in found.items():
        if not isinstance(given, Metric):
            before = sums.get(name, (0.0, 0.0))
            sums[name] = before[0] + float(given[0]), before[1] + float(given[1])


@final
class EvaluationSums:
    """The sums of one evaluation on one rank."""

    def __init__(self) -> None:
        self.ratios: Sums = {}
        self._computes: dict[str, Callable[..., Any]] = {}
        self._sums: dict[str, dict[str, Tensor]] = {}
        self._rows: dict[str, dict[str, list[tuple[int, Tensor]]]] = {}

    def add(self, found: Found, first: int, *, counts: bool = True) -> None:
        """Add ``found``, the values of samples from number ``first`` of the data on.

        Without ``counts`` they are not samples of this rank, and only the names are taken.

        Raises:
            LossError: if a metric returns no tensors, or others than before.
        """
        ratios = found if counts else {name: (0.0, 0.0) for name, one in found.items() if not isinstance(one, Metric)}
        add_up(self.ratios, ratios)
        for name, metric in found.items():
            if not isinstance(metric, Metric):
                continue
            self._computes.setdefault(name, metric.compute)
            if counts:
                self._take(name, metric, first)

    def _take(self, name: str, metric: Metric, first: int) -> None:
        sums, rows = self._sums.setdefault(name, {}), self._rows.setdefault(name, {})
        for key, given in metric.sums.items():
            value = _on_host(name, key, given)
            value = widened(value) if value.is_floating_point() else value.long()
            if key in sums and sums[key].shape != value.shape:
                shapes = f"{list(value.shape)}, and before {list(sums[key].shape)}"
                raise LossError(f"metric {name!r}: {key!r} of sums has the shape {shapes}: they cannot be added")
            sums[key] = sums[key] + value if key in sums else value
        for key, given in metric.rows.items():
            value = _on_host(name, key, given)
            if not value.dim():
                raise LossError(f"metric {name!r}: {key!r} of rows has no dimension; what is one number goes into sums")
            rows.setdefault(key, []).append((first, value))

    def to_send(self) -> dict[str, Any]:
        """Return the metrics' sums and rows as JSON."""
        sums = {name: {key: _packed(value) for key, value in entry.items()} for name, entry in self._sums.items()}
        rows = {
            name: {key: [[first, _packed(value)] for first, value in pieces] for key, pieces in entry.items()}
            for name, entry in self._rows.items()
        }
        return {"sums": sums, "rows": rows}

    def computed(self, everywhere: list[dict[str, Any]], *, trial: bool) -> dict[str, float]:
        """Return the metrics computed from every rank's values; in a ``trial``, NaN for failures.

        Raises:
            LossError: if one is no number.
        """
        found: dict[str, float] = {}
        for name, compute in sorted(self._computes.items()):
            whole = _whole([sent for sent in everywhere if name in sent["sums"]], name)
            try:
                found |= _numbers(name, compute(**whole))
            except LossError:
                raise
            except Exception:
                if not trial:  # of one class there is no AUC
                    raise
                found[name] = math.nan
        return found


def _on_host(name: str, key: str, given: Any) -> Tensor:
    if not isinstance(given, Tensor | bool | int | float):
        raise LossError(f"metric {name!r}: {key!r} is a {type(given).__name__}; px.Metric takes tensors")
    value = torch.as_tensor(with_whole_tensors(given)).detach()  # here, where all ranks of tp and cp come by
    if hasattr(value, "full_tensor"):
        raise LossError(f"metric {name!r}: {key!r} is spread over ranks; give it whole: value.full_tensor()")
    return value.to("cpu", copy=True)


def _packed(value: Tensor) -> list[Any]:
    wide = value.float() if value.dtype in (torch.bfloat16, torch.float16) else value
    return [
        str(wide.dtype).removeprefix("torch."),
        list(wide.shape),
        base64.b64encode(wide.contiguous().numpy().tobytes()).decode("ascii"),
    ]


def _unpacked(packed: list[Any]) -> Tensor:
    name, shape, data = packed
    dtype, content = getattr(torch, name), bytearray(base64.b64decode(data))
    return torch.frombuffer(content, dtype=dtype).reshape(shape) if content else torch.empty(shape, dtype=dtype)


def _whole(sent: list[dict[str, Any]], name: str) -> dict[str, Tensor]:
    sums, rows = dict[str, Tensor](), dict[str, list[tuple[int, Tensor]]]()
    for one in sent:
        for key, packed in one["sums"][name].items():
            value = _unpacked(packed)
            sums[key] = sums[key] + value if key in sums else value
        for key, pieces in one["rows"][name].items():
            rows.setdefault(key, []).extend((first, _unpacked(packed)) for first, packed in pieces)
    joined = {key: torch.cat([value for _, value in sorted(of, key=lambda one: one[0])]) for key, of in rows.items()}
    return {**sums, **joined}


_MOST_CELLS = 10_000


def _numbers(name: str, given: Any) -> dict[str, float]:
    many = given if isinstance(given, Mapping) else {"": given}
    found: dict[str, float] = {}
    for key, value in many.items():  # pyrefly: ignore
        one = value.item() if isinstance(value, Tensor) and value.numel() == 1 else value  # pyrefly: ignore
        base = f"{name}.{key}" if key else name
        if isinstance(one, Tensor) and 1 < one.numel() <= _MOST_CELLS:  # a number of each class, or of each cell
            found |= {".".join([base, *map(str, place)]): float(one[place]) for place in np.ndindex(*one.shape)}
            continue
        if not isinstance(one, Real):
            shape = f" of shape {list(value.shape)}" if isinstance(value, Tensor) else ""
            raise LossError(
                f"metric {name!r}: compute gives a {type(value).__name__}{shape}; a metric is a number, or a dict of "
                'name → number.\n    try: compute=lambda right, all: {"accuracy": right / all}'
            )
        found[base] = float(one)
    return found
