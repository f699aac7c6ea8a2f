"""How gradients are made smaller before they are sent: the text of a plan's ``compress``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

Codec = Literal["none", "fp16", "bf16", "int8", "powersgd", "topk"]

_DEFAULTS = {"powersgd": 4.0, "topk": 0.01}


@dataclass(frozen=True, kw_only=True, slots=True)
class Compression:
    """One way to send less.

    Attributes:
        codec: ``fp16`` and ``bf16`` round; ``int8`` rounds blocks to 255 levels, ``topk`` sends the largest elements,
            and ``powersgd`` a product of two thin matrices, each adding what it left out to the next step's gradient.
        amount: rank of ``powersgd``; share of the elements that ``topk`` sends; 0 for others.
    """

    codec: Codec
    amount: float = 0.0

    @classmethod
    def parse(cls, text: str) -> Compression:
        """What ``int8``, ``powersgd:4`` or ``topk:0.01`` says; rank 4 and a share of 0.01 where not given.

        Raises:
            ValueError: if it is none of these.
        """
        name, colon, amount = text.partition(":")
        codec = next((one for one in get_args(Codec) if one == name), None)
        if codec is None or (colon and name not in _DEFAULTS):
            raise ValueError(text)
        value = float(amount) if colon else _DEFAULTS.get(name, 0.0)
        allowed = {"powersgd": value >= 1 and value == int(value), "topk": 0 < value <= 1}
        if not allowed.get(name, True):
            raise ValueError(text)
        return cls(codec=codec, amount=value)
