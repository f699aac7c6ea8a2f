"""Tensors of which each rank holds a slice, and which model code sees as wholes."""

from phalanx.parallel.sliced import attention, elementwise, products, reductions, shapes  # noqa: F401  # fill RULES
from phalanx.parallel.sliced.axis import Axis, Placed
from phalanx.parallel.sliced.cut import Cut
from phalanx.parallel.sliced.tensor import Sliced, is_sliced, sliced

__all__ = ["Axis", "Cut", "Placed", "Sliced", "is_sliced", "sliced"]
