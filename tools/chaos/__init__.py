"""A job run under faults, and whether anything was lost: what tests and bench/chaos_kills.py call."""

from chaos.faults import Fault, draw
from chaos.verdict import Chaos, Verdict

__all__ = ["Chaos", "Fault", "Verdict", "draw"]
