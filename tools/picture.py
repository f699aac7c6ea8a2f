"""Draws the picture of the README: the table that ``phalanx demo`` ends with, as measured by one run of it.

``phalanx demo --json > demo.json``, then ``python tools/picture.py demo.json`` writes ``docs/demo.svg``.
"""

from __future__ import annotations

import io
import json
import re
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.terminal_theme import DIMMED_MONOKAI

from phalanx.demo.tour import Result, Stop, tour_table
from phalanx.hardware import cluster
from phalanx.report.tables import Scaled

PICTURE = Path(__file__).resolve().parents[1] / "docs" / "demo.svg"


def result_of(answer: dict[str, Any]) -> Result:
    """The result that ``phalanx demo --json`` printed."""
    stops = tuple(Stop(**{**run, "scaled": Scaled(**run["scaled"])}) for run in answer["runs"])  # pyrefly: ignore[bad-argument-type]
    return Result(machine=cluster(answer["machine"]), stops=stops)


def drawn(result: Result) -> str:
    """The table in a terminal window, as SVG."""
    console = Console(record=True, width=80, file=io.StringIO(), force_terminal=True, color_system="truecolor")
    console.print("[bold green]$[/] phalanx demo", highlight=False)
    console.print(tour_table(result), highlight=False)
    svg = console.export_svg(title="phalanx demo", theme=DIMMED_MONOKAI, unique_id="demo")
    # Pages that show it load nothing from elsewhere.
    return re.sub(r"\s*@font-face \{.*?\}", "", svg, flags=re.DOTALL).replace("Fira Code", "Menlo, Consolas")


def main() -> int:
    """Draw what the file named on the command line says."""
    answer = json.loads(Path(sys.argv[1]).read_text())
    PICTURE.write_text(drawn(result_of(answer)))
    print(f"wrote {PICTURE}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
