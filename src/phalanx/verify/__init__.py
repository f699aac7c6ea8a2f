"""Proof that a plan computes what one device computes, and the likely cause where it does not."""

from phalanx.verify.parity import OneDevice, Proof, prove
from phalanx.verify.references import ReferenceRun, small_copy

__all__ = ["OneDevice", "Proof", "ReferenceRun", "prove", "small_copy"]
