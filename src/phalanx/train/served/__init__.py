"""Training with parameter servers: the processes of servers and workers, and what they do beside the steps."""

from phalanx.train.served.part import take_part
from phalanx.train.served.watch import Watcher

__all__ = ["Watcher", "take_part"]
