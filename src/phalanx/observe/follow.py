"""Follows the event log of a run that is going on, and hands each new event to whoever shows it."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self, final

from phalanx.events import EventReader

Event = dict[str, Any]


class Viewer(ABC):
    """Shows events somewhere."""

    @abstractmethod
    def event(self, event: Event) -> None:
        """Take one event, in the order of the log."""

    @abstractmethod
    def tick(self) -> None:
        """Called about ten times a second, after the events that came in between."""

    @abstractmethod
    def close(self) -> None:
        """No more events will come."""


@final
class Follower:
    """Calls viewers with what is new in a log. Calling it looks once; leaving its block reads on to the end.

    A viewer that raises is told of on stderr once and then left out: watching never ends a run.
    """

    def __init__(self, log: Path, viewers: Sequence[Viewer]) -> None:
        self._reader = EventReader(log)
        self._reader.new()  # what an earlier part of a resumed run wrote is no news
        self._viewers = list(viewers)

    def __call__(self) -> None:
        self._hand_on()
        for viewer in tuple(self._viewers):
            self._call(viewer, viewer.tick)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._hand_on()
        for viewer in tuple(self._viewers):
            self._call(viewer, viewer.close)

    def _hand_on(self) -> None:
        for event in self._reader.new():
            for viewer in tuple(self._viewers):
                self._call(viewer, lambda viewer=viewer, event=event: viewer.event(event))

    def _call(self, viewer: Viewer, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as error:
            self._viewers.remove(viewer)
            name = type(viewer).__name__
            print(
                f"{name} stopped showing this run, which goes on: {type(error).__name__}: {error}",
                file=sys.__stderr__,
            )
