"""How long a rank computes in a step by itself, without its waits for other replicas.

Where nothing but the last gradients' sums is exchanged between replicas (``zero`` 0), that is from the begin of the
first forward to the moment at which backward has the last gradient of this rank. Where backward itself waits for other
replicas (``zero`` 1 to 3), it is the time of forward alone: it stands for the rest, being about the same part of it on
every device. On CUDA moments are events on the stream that computes.
"""

from __future__ import annotations

import time
from typing import Any, final

import torch

from phalanx.parallel import Held

Moment = float | torch.cuda.Event


@final
class Stopwatch:
    """Times the steps of one rank; it hangs on the model and the optimizer as long as they live."""

    def __init__(self, held: Held, optimizer: torch.optim.Optimizer, *, backward: bool, cuda: bool) -> None:
        """``backward``: time it too, as nothing in it waits for other replicas."""
        self._cuda, self._backward = cuda, backward
        self._passes: list[tuple[Moment, Moment]] = []
        self._update: tuple[Moment, Moment] | None = None
        self._began: Moment | None = None
        self._ended: Moment | None = None
        held.module.register_forward_pre_hook(self._enter)
        held.module.register_forward_hook(self._leave)
        optimizer.register_step_pre_hook(self._update_begins)
        optimizer.register_step_post_hook(self._update_ends)
        for tensor in held.module.parameters() if backward else ():
            if tensor.requires_grad:
                tensor.register_post_accumulate_grad_hook(self._gradient)

    def lap(self) -> Lap:
        """The step that ends here; the next begins."""
        passes = self._passes
        if self._backward and self._began is not None and self._ended is not None:
            passes = [(self._began, self._ended)]
        found = Lap(passes, self._update)
        self._passes, self._update, self._began, self._ended = [], None, None, None
        return found

    def _now(self, again: Moment | None = None) -> Moment:
        if not self._cuda:
            return time.perf_counter()
        event = again if isinstance(again, torch.cuda.Event) else torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _enter(self, *_: Any) -> None:
        if torch.is_grad_enabled() and (self._began is None or not self._backward):
            self._began = self._now()

    def _leave(self, *_: Any) -> None:
        if torch.is_grad_enabled() and not self._backward and self._began is not None:
            self._passes.append((self._began, self._now()))

    def _gradient(self, _: torch.Tensor) -> None:
        self._ended = self._now(self._ended)

    def _update_begins(self, *_: Any) -> None:
        self._update = self._now(), 0.0

    def _update_ends(self, *_: Any) -> None:
        if self._update is not None:
            self._update = self._update[0], self._now()


@final
class Lap:
    """One step as it was timed."""

    def __init__(self, passes: list[tuple[Moment, Moment]], update: tuple[Moment, Moment] | None) -> None:
        self._passes, self._update = passes, update

    @property
    def passes(self) -> float:
        """Seconds that depend on the samples; 0 where nothing was timed. Waits for the device."""
        return sum(_between(*one) for one in self._passes)

    @property
    def update(self) -> float:
        """Seconds of the optimizer. Waits for the device."""
        return _between(*self._update) if self._update else 0.0


def _between(begin: Moment, end: Moment) -> float:
    if isinstance(begin, torch.cuda.Event) and isinstance(end, torch.cuda.Event):
        end.synchronize()
        return begin.elapsed_time(end) / 1e3
    return end - begin if isinstance(begin, float) and isinstance(end, float) else 0.0
