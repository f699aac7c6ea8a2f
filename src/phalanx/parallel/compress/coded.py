"""Averages buckets through a codec."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from phalanx.parallel.compress.averaged import averaged
from phalanx.parallel.compress.bucket import Average, Bucket
from phalanx.parallel.compress.codec import Codec
from phalanx.parallel.compress.feedback import Feedback
from phalanx.parallel.compress.left_out import LeftOut
from phalanx.parallel.compress.wire import Wire


class Coded(Average):
    """The mean of what ranks sent through ``codec``, with error feedback where the codec asks for it."""

    def __init__(self, codec: Codec, wire: Wire, parameters: Mapping[str, Tensor]) -> None:
        self._codec, self._wire = codec, wire
        self._left_out = LeftOut(parameters) if codec.feeds_back else None

    def __call__(self, bucket: Bucket) -> None:
        feedback = Feedback(self._codec, self._left_out.of(bucket)) if self._left_out else None
        averaged(bucket.flat, self._wire, self._codec, feedback)

    def scale(self, factor: float) -> None:
        if self._left_out:
            self._left_out.scale(factor)

    def stored(self) -> list[Tensor]:
        return self._left_out.stored() if self._left_out else []

    def tensors(self) -> dict[str, Tensor]:
        if not self._left_out:
            return {}
        return {f"left_out.{name}": tensor for name, tensor in self._left_out.shared(self._wire).items()}
