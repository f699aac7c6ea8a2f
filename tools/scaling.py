"""Writes the page on scaling and its chart, from published claims and fresh forecasts: ``python tools/scaling.py``."""

from __future__ import annotations

import sys
from pathlib import Path

from published.claims_chart import claims_chart
from published.claims_page import claims_page, forecast_claims

EXPLANATION = Path(__file__).resolve().parents[1] / "docs" / "explanation"


def pages() -> dict[Path, str]:
    """What belongs into each file."""
    curves = forecast_claims()
    return {EXPLANATION / "scaling.md": claims_page(curves), EXPLANATION / "scaling.svg": claims_chart(curves)}


def main() -> int:
    """Forecast every claim and write both files."""
    for path, text in pages().items():
        path.write_text(text, encoding="utf-8")
        print(f"wrote {path.relative_to(EXPLANATION.parents[1])}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
