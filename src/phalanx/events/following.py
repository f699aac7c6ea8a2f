"""Viewers that follow the event log of a run while it is trained."""

from __future__ import annotations

import sys
import threading
import traceback
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Self, final

from phalanx.errors import SpecError
from phalanx.events.log import EventReader
from phalanx.events.schema import SCHEMA

Event = dict[str, Any]
Callback = Callable[[Event], object]

_EVERY = 0.1  # seconds between looks of a thread


class Viewer:
    """Base of viewers; each method does nothing by default."""

    @property
    def name(self) -> str:
        """The name in messages."""
        return type(self).__name__

    def event(self, event: Event) -> None:
        """Handle one event, in the order of the log."""

    def tick(self) -> None:
        """Update the view; called about ten times a second, after new events."""

    def close(self) -> None:
        """End the view; no more events come."""


@final
class Follower:
    """Calls viewers with new events of a log: once a call, and at the end of its block.

    A viewer that raises is reported on stderr and then left out: it never ends a run.
    """

    def __init__(self, log: Path, viewers: Sequence[Viewer]) -> None:
        self._reader = EventReader(log)
        self._reader.new()  # events of an earlier part of a resumed run
        self._viewers = list(viewers)

    def __call__(self) -> None:
        self._hand_on()
        for viewer in tuple(self._viewers):
            self._call(viewer, viewer.tick)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._hand_on()
        for viewer in tuple(self._viewers):
            self._call(viewer, viewer.close)

    def _hand_on(self) -> None:
        for event in self._new():
            for viewer in tuple(self._viewers):
                self._call(viewer, lambda viewer=viewer, event=event: viewer.event(event))

    def _new(self) -> list[Event]:
        try:
            return self._reader.new()
        except SpecError:  # something else stands in the log's place
            return []

    def _call(self, viewer: Viewer, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as error:
            self._viewers.remove(viewer)
            text = f"{viewer.name} is left out from now on, and the run goes on: {type(error).__name__}: {error}"
            with suppress(OSError):
                print(text, file=sys.__stderr__)


@final
class CallbackViewer(Viewer):
    """Caller of a job's own function with each event of one name."""

    def __init__(self, event: str, function: Callback) -> None:
        self._event, self._function = event, function
        self._where = ""

    @property
    def name(self) -> str:
        return f"the callback of {self._event}{self._where}"

    def event(self, event: Event) -> None:
        if event["event"] != self._event:
            return
        try:
            self._function(event)
        except Exception as error:
            last = traceback.extract_tb(error.__traceback__)[-1]
            self._where = f" ({last.filename}:{last.lineno} {last.name})"
            raise


def callback_viewers(callbacks: Mapping[str, Callback]) -> list[Viewer]:
    """Return the viewers that call a job's ``callbacks``, by the name of the event.

    Raises:
        SpecError: there is no event of that name.
    """
    for name in callbacks:
        if name not in SCHEMA:
            near = get_close_matches(name, SCHEMA, n=1) or ["evaluate"]
            raise SpecError.of("job.callbacks", repr(name), ", ".join(SCHEMA), f"callbacks={{{near[0]!r}: print}}")
    return [CallbackViewer(name, function) for name, function in callbacks.items()]


@contextmanager
def followed(viewers: Sequence[Viewer], log: Path) -> Generator[None]:
    """Pass new events of ``log`` to ``viewers`` in a thread, within the block; all of them when it ends."""
    if not viewers:
        yield
        return
    ends = threading.Event()

    def follow() -> None:
        while not ends.wait(_EVERY):
            follower()

    with Follower(log, viewers) as follower:
        thread = threading.Thread(target=follow, name="phalanx-callbacks", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ends.set()
            thread.join()
