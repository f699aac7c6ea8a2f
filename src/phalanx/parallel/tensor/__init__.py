"""Tensor parallelism: each layer's weights shared out over ranks, for unmodified models."""

from phalanx.parallel.tensor.find_pairs import Split, dry, find
from phalanx.parallel.tensor.trial import Places, show_added_later, show_slices, split_weights

__all__ = ["Places", "Split", "dry", "find", "show_added_later", "show_slices", "split_weights"]
