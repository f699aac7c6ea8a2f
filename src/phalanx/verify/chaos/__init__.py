"""A job run under faults, and whether anything was lost: what ``phalanx chaos`` and users' own tests call."""

from phalanx.verify.chaos.faults import Fault, draw
from phalanx.verify.chaos.verdict import Chaos, Verdict

__all__ = ["Chaos", "Fault", "Verdict", "draw"]
