"""Where text goes to a terminal: what would steer it, in a name or a message of whoever wrote it, is shown as text."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, final

from rich.console import Console
from rich.segment import Segment

from phalanx.units import visible


@final
class PlainConsole(Console):
    """A rich console on stdout, or with ``stderr=True`` on stderr; colours are its own alone."""

    def render(self, renderable: Any, options: Any = None) -> Iterable[Segment]:
        """As rich does, without control characters in what is shown."""
        for segment in super().render(renderable, options):
            if segment.control or (text := visible(segment.text)) is segment.text:
                yield segment
            else:
                yield Segment(text, segment.style)
