"""The codec that a plan's ``compress`` names."""

from __future__ import annotations

from phalanx.config.sync import Compression
from phalanx.parallel.compress.blocks import Blocks
from phalanx.parallel.compress.codec import Codec
from phalanx.parallel.compress.halves import Brain, Half
from phalanx.parallel.compress.largest import Largest


def codec(text: str) -> Codec | None:
    """The codec of ``fp16``, ``bf16``, ``int8`` or ``topk:0.01``; none for ``none``.

    Raises:
        ValueError: for others. PowerSGD is none: what it sends depends on the shapes of gradients, and on what other
            ranks send.
    """
    asked = Compression.parse(text)
    match asked.codec:
        case "none":
            return None
        case "fp16":
            return Half()
        case "bf16":
            return Brain()
        case "int8":
            return Blocks()
        case "topk":
            return Largest(asked.amount)
        case _:
            raise ValueError(f"{text} is no codec of flat tensors")
