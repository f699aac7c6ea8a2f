"""Means over replicas of flat host tensors, each replica weighted by what its losses counted since the last time."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from phalanx.comm import Across
from phalanx.errors import DataError, LossError
from phalanx.parallel.compress import Feedback, Wire, averaged, codec


@dataclass(kw_only=True, slots=True)
class Tally:
    """What goes with an averaging, by replica; afterwards over all of them.

    Attributes:
        weight: what losses counted, samples or tokens, since this was averaged last.
        loss: sum of the losses since the last averaging of anything.
        count: what they counted.
        steps: optimizer steps taken: the same on every replica.
        sent: bytes that this rank sent.
        whole: bytes that those would have been without a codec.
    """

    weight: float
    loss: float
    count: float
    steps: int
    sent: int = 0
    whole: int = 0


class Averaging:
    """Over the counterparts of this rank; what a codec leaves out comes with the same fragment's next averaging."""

    def __init__(self, across: Across, compress: str) -> None:
        self._across = across
        self._codec = codec(compress)
        self._wire = Wire(across.group)
        self._feedback: dict[int, Feedback] = {}

    def mean(self, fragment: int, values: Tensor, beside: Tensor, tally: Tally, *, whole: bool = False) -> Tensor:
        """The weighted mean of ``values`` through the codec, or ``whole``, followed by that of ``beside``. Collective.

        Both are used up. ``tally`` becomes that of all replicas. What is sent ``whole`` has with it what was left out.

        Raises:
            LossError: if no replica counted anything.
            DataError: if replicas have not taken equally many steps.
        """
        weight = self._weigh(tally)
        tally.whole = tally.sent + self._across.sent(values.nbytes + beside.nbytes)
        across, feedback = self._across, self._feedback.get(fragment)
        if whole and feedback is not None:
            values = feedback.whole(values.mul_(weight))
            del self._feedback[fragment]
        else:
            values.mul_(weight)
        beside.mul_(weight)
        if whole or self._codec is None:
            both = torch.cat((values, beside)) if beside.numel() else values
            across.sum(both)
            tally.sent += across.sent(both.nbytes)
            return both.div_(across.size)
        if feedback is None and self._codec.feeds_back:
            feedback = self._feedback[fragment] = Feedback(self._codec)
        before = self._wire.traffic.sent
        averaged(values, self._wire, self._codec, feedback)
        tally.sent += self._wire.traffic.sent - before
        if beside.numel():
            across.sum(beside)
            tally.sent += across.sent(beside.nbytes)
        return torch.cat((values, beside.div_(across.size)))

    def plain(self, values: Tensor, weight: float) -> Tensor:
        """The mean of ``values`` by these weights, as they are; ``values`` is used up. Collective.

        Where all weights are 0, all are the same.
        """
        if not values.numel():
            return values
        across, total = self._across, torch.tensor(weight, dtype=torch.float64)
        across.sum(total)
        values.mul_(weight * across.size / total.item() if total else 1.0)
        across.sum(values)
        return values.div_(across.size)

    def _weigh(self, tally: Tally) -> float:
        """This replica's weight: 1 is the mean one. Adds the tallies up."""
        across = self._across
        numbers = torch.tensor((tally.weight, tally.loss, tally.count, tally.steps), dtype=torch.float64)
        across.sum(numbers)
        tally.sent += across.sent(numbers.nbytes)
        weight, tally.loss, tally.count, steps = numbers.tolist()
        if steps != tally.steps * across.size:
            raise DataError(
                f"replicas came together after unlike numbers of steps: {tally.steps} on this one, "
                f"{steps / across.size:g} on the average.\n"
                "    Usual cause: a stream of another length on each rank.\n"
                "    try: remove rank-dependent sharding from job.data"
            )
        if not weight > 0:
            raise LossError(
                f"nothing was counted in the steps before step {tally.steps}, on any replica: "
                "the counts of their losses add up to 0.\n"
                "    try: leave samples whose labels are all ignored out of job.data, or a larger batch"
            )
        own, tally.weight = tally.weight * across.size / weight, weight
        return own
