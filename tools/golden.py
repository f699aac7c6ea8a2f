"""Writes how far off forecasts of ``tests/golden/published.csv`` are, by source: ``python tools/golden.py``."""

from __future__ import annotations

import json
from pathlib import Path

from published import Outcome, accuracy, forecast_rows, read

GOLDEN = Path(__file__).resolve().parents[1] / "tests" / "golden"
ROWS, NUMBERS = GOLDEN / "published.csv", GOLDEN / "published.json"


def numbers(outcome: Outcome) -> dict[str, float]:
    """Mean error of step times by source, and the share of runs whose running out of memory was called wrong."""
    found = accuracy(outcome.found)
    sources = {name: round(errors.mean, 4) for name, errors in found.sources.items()}
    wrong = [one.forecast.fits == one.row.ran_out for one in outcome.found]
    return {**sources, "fits or not": round(sum(wrong) / len(wrong), 4)}


if __name__ == "__main__":
    NUMBERS.write_text(json.dumps(numbers(forecast_rows(read(ROWS))), indent=2) + "\n", encoding="utf-8")
