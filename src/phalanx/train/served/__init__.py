"""Training with parameter servers: the processes of servers and workers, and what they do beside the steps."""

from phalanx.train.served.part import take_part

__all__ = ["take_part"]
