"""What ``spread.toml`` is written from: by how much four of five forecasts were off."""

from __future__ import annotations

import math
from collections.abc import Sequence

HEAD = """# By how much forecasts were off: of logarithms of measured over forecast the size that 4 of 5 are within.
# Written by `PYTHONPATH=tools python bench/forecast_here.py --write` (own, catalog) and by
# `python tools/validate.py measured.csv --left-out --spread src/phalanx/forecast/spread.toml` (published, unknown).

"""

SHARE = 0.8
_LEAST = 10  # errors of a technique, from which on it has a quantile of its own


def quantiles(errors: Sequence[tuple[str, float]]) -> dict[str, float]:
    """Return for ``all`` and each technique that enough is known of: the size that four of five ``errors`` stay within.

    Errors are logarithms of measured over forecast. The quantile is the one that a further outcome of the same kind
    stays within with that chance: the k-th of n with k = ceil(0.8 (n + 1)).
    """
    groups: dict[str, list[float]] = {"all": [abs(error) for _, error in errors]}
    for name, error in errors:
        groups.setdefault(name, []).append(abs(error))
    return {
        name: sorted(sizes)[min(len(sizes), math.ceil(SHARE * (len(sizes) + 1))) - 1]
        for name, sizes in sorted(groups.items())
        if sizes and (name == "all" or len(sizes) >= _LEAST)
    }
