"""``python -m phalanx`` is ``phalanx``."""

from phalanx.cli import main

main()
