"""Agreement on a common point: ranks asked at different moments to act all act at the same point.

Every rank passes the same points in the same order, such as the ends of steps. A rank writes its request to the ranks'
store, where a thread of each rank looks twice a second. A rank that sees it stops before the next point and publishes
the number of points it has passed; the agreed point is the one after the furthest. Slower ranks continue up to it
without waiting, however long a step takes. Without a request it costs nothing.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, final

from torch.distributed import Store  # pyrefly: ignore

_PERIOD = 0.5  # seconds between looks at the store
_LOOKS = 20_000  # a second, at most, of all ranks together: beyond 10,000 ranks each looks less often
_PATIENCE = (
    10.0  # seconds that a rank is held for others to tell how far they are; then all go on, and it is asked anew
)
_PAUSE = 0.002, 0.05  # seconds between looks while ranks are held, at first and at most
_CALLED_OFF = "null"


@final
class PointAgreement:
    """One rank's part in the agreement. As a context manager it ends with the block.

    Args:
        store: the ranks' store, under a prefix never used before.
        wanted: returns this rank's request, numbers; all 0 for none. Called by a thread.
    """

    def __init__(self, store: Store, rank: int, world_size: int, wanted: Callable[[], Sequence[int]]) -> None:
        self._rank, self._world_size, self._wanted = rank, world_size, wanted
        own: Any = store
        with suppress(NotImplementedError, RuntimeError, AttributeError):
            own = own.clone()  # a client of its own: no call waits for one of the main thread
        self._store: Store = own
        self._changed = threading.Condition()
        self._held, self._passed, self._round = False, 0, 0
        self._agreed: dict[int, list[int]] = {}  # by point
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="phalanx-agreement", daemon=True)
        self._thread.start()

    def pass_point(self) -> list[int] | None:
        """Pass a point, on every rank; at the agreed point return the largest request for each number."""
        with self._changed:
            while self._held:
                self._changed.wait()
            self._passed += 1
            return self._agreed.pop(self._passed, None)

    def close(self, *, finished: bool = False) -> None:
        """Leave the agreement; ``finished`` tells the others that all points were passed. Safe to call twice."""
        if self._ends.is_set():
            return
        if finished:
            with suppress(RuntimeError):
                self._store.set(f"finished/{self._rank}", json.dumps([self._passed, []]))
        self._ends.set()
        self._thread.join()

    def __enter__(self) -> PointAgreement:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _watch(self) -> None:
        with suppress(RuntimeError):  # the store is gone with its server: so is the run
            while not self._ends.wait(max(_PERIOD, self._world_size / _LOOKS)):
                wanted = [] if self._agreed else list(self._wanted())
                if any(wanted):
                    self._store.set(f"{self._round}/asked", "1")
                if any(wanted) or self._store.check([f"{self._round}/asked"]):
                    self._agree(wanted)

    def _agree(self, wanted: list[int]) -> None:
        with self._changed:
            self._held = True
        try:
            self._store.set(f"{self._round}/passed/{self._rank}", json.dumps([self._passed, wanted]))
            found = self._decide() if self._rank == 0 else self._hear()
            if found:
                self._agreed[found["point"]] = found["numbers"]
            self._round += 1
        finally:
            with self._changed:
                self._held = False
                self._changed.notify_all()

    def _decide(self) -> Any:
        told, missing, until, pause = (
            list[Any](),
            list(range(self._world_size)),
            time.monotonic() + _PATIENCE,
            _PAUSE[0],
        )
        while missing:
            for rank in list(missing):
                for key in (f"{self._round}/passed/{rank}", f"finished/{rank}"):
                    if rank in missing and self._store.check([key]):
                        told.append(json.loads(self._store.get(key)))
                        missing.remove(rank)
            if missing and self._gives_up(until, pause):
                return self._settle(_CALLED_OFF)
            pause = min(2 * pause, _PAUSE[1])
        asked = [numbers for _, numbers in told if numbers]
        numbers = [max(each) for each in zip(*asked, strict=True)]
        return self._settle(json.dumps({"point": 1 + max(passed for passed, _ in told), "numbers": numbers}))

    def _hear(self) -> Any:
        until, pause = time.monotonic() + _PATIENCE, _PAUSE[0]
        while not self._store.check([f"{self._round}/outcome"]):
            if self._store.check(["finished/0"]) or self._gives_up(until, pause):
                return self._settle(_CALLED_OFF)
            pause = min(2 * pause, _PAUSE[1])
        return json.loads(self._store.get(f"{self._round}/outcome"))

    def _gives_up(self, until: float, pause: float) -> bool:
        return self._ends.wait(pause) or time.monotonic() > until

    def _settle(self, outcome: str) -> Any:
        return json.loads(self._store.compare_set(f"{self._round}/outcome", "", outcome))
