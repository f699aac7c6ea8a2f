"""Finds what belongs to experts: products with one matrix an expert, and what lies between them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from phalanx.profile.kinds import Work
from phalanx.profile.tracer import Trace


def experts_in(made: Sequence[Work], parameters: Mapping[int, str]) -> dict[str, int]:
    """Weights with one matrix an expert: name → experts."""
    operands = [one for work in made if work.kind == "matmul" for one in work.operands]
    return {
        parameters[one.memory]: one.shape[0] for one in operands if one.memory in parameters and len(one.shape) == 3
    }


def of_experts(made: Sequence[Work], trace: Trace, experts: Mapping[str, int]) -> list[bool]:
    """Whether each operation is of experts: from their first product to their last, forward and backward."""
    found = [False] * len(made)
    for backward in (False, True):
        here = [
            index for index, work in enumerate(made) if work.step.backward == backward and _meets(work, trace, experts)
        ]
        if here:
            found[here[0] : here[-1] + 1] = [True] * (here[-1] + 1 - here[0])
    return found


def _meets(work: Work, trace: Trace, experts: Mapping[str, int]) -> bool:
    names = {trace.parameters.get(one.memory) for one in work.operands}
    names |= {trace.gradients.get(one.memory) for one in work.outputs}
    return not names.isdisjoint(experts)
