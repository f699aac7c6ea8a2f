"""An independent witness: the plain PyTorch loop that a job is turned into, and a user's own loop.

Nothing in this folder imports what a proof judges: of Phalanx only what people write (``phalanx.config``) and errors.
"""

from phalanx.witness.own_loop import OwnLoop
from phalanx.witness.plain_loop import Witness, why_not

__all__ = ["OwnLoop", "Witness", "why_not"]
