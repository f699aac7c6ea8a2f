"""What is said of parameters that got no gradient, wherever that is found."""

from __future__ import annotations

from collections.abc import Sequence

from phalanx.errors import GradientError
from phalanx.units import show_names


def without_gradient(names: Sequence[str], where: str) -> GradientError:
    """The error that names the parameters without a gradient; ``where`` such as ``in the first step``."""
    return GradientError(
        f"parameters that got no gradient {where}: {show_names(names, 8)}.\n"
        "    The loss does not depend on them; usually a forgotten branch, or a detach().\n"
        '    try: remove them, set requires_grad=False, or allow it: job(unused="allow")'
    )
