"""Expert parallelism: each rank holds some of a layer's experts, and tokens travel to their experts."""

from phalanx.parallel.expert.dispatch import DispatchedExperts, by_rows, deal_out, dealt_over, rows_of
from phalanx.parallel.expert.find_experts import find

__all__ = ["DispatchedExperts", "by_rows", "deal_out", "dealt_over", "find", "rows_of"]
