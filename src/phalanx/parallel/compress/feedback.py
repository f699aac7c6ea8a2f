"""Error feedback: what a codec left out of one tensor is added to the next, so that late is not lost."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from phalanx.parallel.compress.codec import Codec
from phalanx.parallel.compress.pieces import pieces


def lack(whole: Tensor, sent: Tensor, left_out: Tensor) -> None:
    """Put ``whole`` less ``sent`` into ``left_out``, but for what is not finite; all (count,). ``whole`` is used up."""
    for piece in pieces(whole):
        lacking = whole[piece].sub_(sent[piece])
        if lacking.device.type == "cpu" and math.isfinite(float(lacking.sum())):
            left_out[piece] = lacking  # to look at each element takes a CPU ten times as long
        else:
            torch.where(lacking.isfinite(), lacking, left_out[piece], out=left_out[piece])


class Feedback:
    """Encodes one tensor after another, each with what was left out of those before.

    The sum of all that was sent is the sum of all that was given, but for what is left out at the end. Elements that
    come out as no finite number (the gradient of a step that is skipped) change nothing of what is left out of them.

    Source: Seide et al., "1-bit stochastic gradient descent", 2014, section 3.2; Karimireddy et al., "Error feedback
    fixes SignSGD and other gradient compression schemes", 2019, algorithm 2.
    """

    def __init__(self, codec: Codec, left_out: Tensor | None = None) -> None:
        self.codec = codec
        self._left_out = left_out

    @property
    def left_out(self) -> Tensor | None:
        """What was left out so far: the shape of what is encoded; ``None`` before the first."""
        return self._left_out

    def encode(self, flat: Tensor) -> list[Tensor]:
        """What ``flat`` (count,) and what was left out before become. ``flat`` stays as it is."""
        whole = self.whole(flat)
        parts = self.codec.encode(whole)
        sent = torch.empty_like(whole)
        self.codec.decode(parts, sent)
        self.keep(whole, sent)
        return parts

    def whole(self, flat: Tensor, out: Tensor | None = None) -> Tensor:
        """``flat`` with what was left out before: a tensor of its own, or ``out``."""
        if self._left_out is None:
            self._left_out = torch.zeros_like(flat, dtype=torch.float32)
        return torch.add(flat, self._left_out, out=out)

    def keep(self, whole: Tensor, sent: Tensor) -> None:
        """``sent`` has gone for ``whole``, which is used up: what it lacks is left out until the next."""
        assert self._left_out is not None
        lack(whole, sent, self._left_out)

    def scale(self, factor: float) -> None:
        """What is encoded from now on is ``factor`` times as large (a loss scale that changes)."""
        if self._left_out is not None:
            self._left_out.mul_(factor)

    def state(self) -> dict[str, Tensor]:
        """For a checkpoint."""
        return {} if self._left_out is None else {"left_out": self._left_out}

    def load(self, state: dict[str, Tensor]) -> None:
        """Go on from a ``state``."""
        found = state.get("left_out")
        self._left_out = None if found is None else found.clone()
