"""What a work allows each dimension of a plan to be."""

from __future__ import annotations

from phalanx.forecast import Work
from phalanx.placement.limits import Limits


def limits_of(work: Work) -> Limits:
    """The limits of ``work``."""
    profile = work.profile
    shares = [weights.share for part in profile.parts if part.role == "block" for weights in part.weights]
    return Limits(
        batch=work.batch,
        tokens=work.tokens,
        blocks=profile.blocks,
        ends=sum(part.count for part in profile.parts if part.role != "block"),
        heads=profile.heads,
        experts=profile.experts,
        products="inner" in shares,
    )
