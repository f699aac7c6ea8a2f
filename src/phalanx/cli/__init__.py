"""The command line: ``phalanx VERB``."""

from phalanx.cli.app import main

__all__ = ["main"]
