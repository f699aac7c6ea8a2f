"""Training with parameter servers: the processes of servers and workers, and their work beside the steps."""

from phalanx.train.parameter_server.role import take_part

__all__ = ["take_part"]
