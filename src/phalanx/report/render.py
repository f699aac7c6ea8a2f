"""Tables, text and pictures of answers, and the console that shows them: rich, with names kept as text."""

from __future__ import annotations

import io
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, final

from rich import box
from rich.console import Console, RenderableType
from rich.segment import Segment
from rich.table import Table
from rich.terminal_theme import DIMMED_MONOKAI
from rich.text import Text

from phalanx.units import visible

Row = Mapping[str, Any]
"""Heading → cell: text, a rich ``Text``, or ``None`` for an empty cell."""


@final
class PlainConsole(Console):
    """A rich console on stdout, or with ``stderr=True`` on stderr.

    It shows control characters in names and messages from elsewhere as text; colours are the console's own.
    """

    def render(self, renderable: Any, options: Any = None) -> Iterable[Segment]:
        """Return the segments of rich, with control characters shown as escapes."""
        for segment in super().render(renderable, options):
            if segment.control or (text := visible(segment.text)) is segment.text:
                yield segment
            else:
                yield Segment(text, segment.style)


def table(
    rows: Sequence[Row], *, numbers: Sequence[str] = (), styles: Sequence[str | None] = (), narrow: bool = False
) -> Table:
    """Return a table with a column a heading, in the order of the first row.

    Args:
        numbers: headings of columns that are aligned to the right and never wrapped.
        styles: of the rows; all plain if not given.
        narrow: leave less space between columns.
    """
    made = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0) if narrow else (0, 1))
    for heading in rows[0] if rows else ():
        right = heading in numbers
        made.add_column(heading, justify="right" if right else "left", no_wrap=right, overflow="fold")
    for row, style in zip(rows, styles or [None] * len(rows), strict=True):
        made.add_row(*map(_cell, row.values()), style=style)
    return made


def facts(rows: Mapping[str, Any]) -> Table:
    """Return a table of names and values without a head; empty values are left out."""
    made = Table.grid(padding=(0, 2))
    made.add_column(style="bold")
    made.add_column(overflow="fold")
    for name, value in rows.items():
        if value not in (None, ""):
            made.add_row(name, _cell(value))
    return made


def _cell(value: Any) -> Text:
    return value if isinstance(value, Text) else Text("" if value is None else str(value))


def as_text(*renderables: RenderableType, width: int) -> str:
    """Return the plain text of ``renderables``, in lines of at most ``width`` characters."""
    console = PlainConsole(width=width, color_system=None)
    with console.capture() as shown:
        for one in renderables:
            console.print(one, highlight=False)
    return "\n".join(line.rstrip() for line in shown.get().splitlines())


def as_svg(title: str, *renderables: RenderableType, width: int) -> str:
    """Return a picture of ``renderables`` in a terminal of ``width`` columns: one SVG document that loads nothing."""
    console = PlainConsole(record=True, width=width, file=io.StringIO(), force_terminal=True, color_system="truecolor")
    for one in renderables:
        console.print(one, highlight=False)
    svg = console.export_svg(title=visible(title), theme=DIMMED_MONOKAI, unique_id="shown")
    return re.sub(r"\s*@font-face \{.*?\}", "", svg, flags=re.DOTALL).replace("Fira Code", "Menlo, Consolas")
