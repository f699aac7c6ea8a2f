"""Clipping as a script would write it, with torch's own functions where they take the gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from phalanx.config import Clip
from phalanx.witness.parts import Part, dense


def clip(how: float | Clip, part: Part, norm: Tensor) -> None:
    """Clip the gradients of ``part`` as ``job.clip`` says; ``norm`` is their global L2 norm in fp64."""
    limit: Any = how.norm if isinstance(how, Clip) else how
    if not isinstance(how, Clip) or (how.value is None and how.norm_type == 2 and how.per == "all"):
        torch.nn.utils.clip_grads_with_norm_(part.trained.values(), limit, norm)
    elif how.value is not None:
        for tensor in part.trained.values():  # as clip_grad_value_, which takes no sparse ones
            if (grad := tensor.grad) is not None:
                (grad.values() if grad.is_sparse else grad).clamp_(-how.value, how.value)
    else:
        each = part.optimizer.param_groups if how.per == "group" else [{"params": list(part.trained.values())}]
        for group in each:
            grads = [dense(one.grad) for one in group["params"] if one.grad is not None]
            norms = [torch.linalg.vector_norm(one, how.norm_type, dtype=torch.float64) for one in grads]
            if norms:
                whole = torch.linalg.vector_norm(torch.stack(norms), how.norm_type)
                torch.nn.utils.clip_grads_with_norm_(group["params"], limit, whole)
