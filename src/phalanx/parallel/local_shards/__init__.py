"""Tensors held in slices that model code sees as wholes."""

from phalanx.parallel.context import attention  # noqa: F401  # each fills RULES
from phalanx.parallel.local_shards import elementwise_ops, matmul_ops, reduction_ops, view_ops  # noqa: F401
from phalanx.parallel.local_shards.axis import Axis, Placed
from phalanx.parallel.local_shards.cut import Cut
from phalanx.parallel.local_shards.tensor import Sliced, is_sliced, sliced

__all__ = ["Axis", "Cut", "Placed", "Sliced", "is_sliced", "sliced"]
