"""Draws the picture of the README: the table that ``phalanx demo`` ends with, as measured by one run of it.

``phalanx demo --json > demo.json``, then ``python tools/picture.py demo.json`` writes ``docs/demo.svg``.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from phalanx.demo.tour import Result, Stop, tour_table
from phalanx.hardware import cluster
from phalanx.report.render import as_svg
from phalanx.report.tables import Scaled

PICTURE = Path(__file__).resolve().parents[1] / "docs" / "demo.svg"


def result_of(answer: dict[str, Any]) -> Result:
    """The result that ``phalanx demo --json`` printed."""
    stops = tuple(Stop(**{**run, "scaled": Scaled(**run["scaled"])}) for run in answer["runs"])  # pyrefly: ignore[bad-argument-type]
    return Result(machine=cluster(answer["machine"]), stops=stops)


def drawn(result: Result) -> str:
    """The table in a terminal window, as SVG."""
    return as_svg("phalanx demo", "[bold green]$[/] phalanx demo", tour_table(result), width=80)


def main() -> int:
    """Draw what the file named on the command line says."""
    answer = json.loads(Path(sys.argv[1]).read_text())
    PICTURE.write_text(drawn(result_of(answer)))
    print(f"wrote {PICTURE}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
