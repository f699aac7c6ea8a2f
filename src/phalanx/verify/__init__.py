"""The proof that a plan computes the same as one device, and the likely cause of a difference."""

from phalanx.verify.parity import OneDevice, Proof, prove
from phalanx.verify.references import ReferenceRun, small_copy

__all__ = ["OneDevice", "Proof", "ReferenceRun", "prove", "small_copy"]
