"""Expert parallelism: each rank holds some of a layer's experts, and tokens travel to those that they are meant for."""

from phalanx.parallel.expert.deal import Dealt, deal_out
from phalanx.parallel.expert.find import Experts, find

__all__ = ["Dealt", "Experts", "deal_out", "find"]
