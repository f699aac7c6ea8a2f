"""Phalanx: write the training step for one device; run it on any number, proven to compute the same."""

__version__ = "0.1.0"
