"""Mixed precision (Micikevicius et al. 2018): parameters stay in fp32, products are computed in half as many bits.

torch's autocast casts the operands of products; with ``zero=3`` parameters are gathered in half precision instead, and
other operations use it, too. Gradients are added up in fp32.
"""

from __future__ import annotations

import torch

from phalanx.config import Plan

HALVES = {"bf16": torch.bfloat16, "fp16": torch.float16}
"""By how plans name them."""


def gathered_type(plan: Plan) -> torch.dtype | None:
    """Return the type in which sharded parameters are gathered and computed with; ``None`` for their own."""
    return HALVES.get(plan.precision) if plan.zero == 3 else None
