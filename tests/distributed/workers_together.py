"""Workers that go no further than each other, in tests of what comes only once all of them are there."""

from __future__ import annotations

import os
import time
from pathlib import Path

LIMIT = 60.0  # seconds to wait for the others


class Together:
    """Processes that this one starts and that meet: each has come as often as the others before it goes on."""

    def __init__(self, folder: Path, many: int) -> None:
        folder.mkdir()
        self._folder, self._many, self._maker = folder, many, os.getpid()

    def meet(self) -> None:
        """Wait for the others; raises ``TimeoutError`` where they do not come."""
        own, until = self._folder / str(os.getpid()), time.monotonic() + LIMIT
        with own.open("ab") as file:
            file.write(b".")
        times = own.stat().st_size
        while sum(each.stat().st_size >= times for each in self._folder.iterdir()) < self._many:
            if time.monotonic() > until:
                raise TimeoutError(
                    f"{self._many} were to come {times} times: {len(list(self._folder.iterdir()))} have begun"
                )
            time.sleep(0.002)

    def meet_first(self) -> None:
        """As ``meet``, the first time only; this process, and whom its children start to look at a job, go on."""
        if os.getppid() == self._maker and not (self._folder / str(os.getpid())).exists():
            self.meet()
