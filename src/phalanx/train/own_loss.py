"""What the loss that a model of transformers computes itself is a mean over: known by the model's class."""

from __future__ import annotations

import inspect
import re
from typing import Any

from torch import nn

from phalanx.config import Job
from phalanx.config.model_loss import SHIFTED, UNSHIFTED, ModelLoss, unknown
from phalanx.errors import Problem

_HEADS = {
    "ForCausalLM": SHIFTED,
    "LMHeadModel": SHIFTED,
    "ForMaskedLM": UNSHIFTED,
    "ForTokenClassification": UNSHIFTED,
    "ForSequenceClassification": UNSHIFTED,
    "ForImageClassification": UNSHIFTED,
}
"""How names of classes of transformers end → the outputs by which their loss is counted."""


def own_loss_problems(job: Job, module: nn.Module) -> list[Problem]:
    """What keeps the loss that ``module`` computes itself from adding up, as far as its class shows."""
    if not isinstance(job.loss, ModelLoss):
        return []
    base = _without_adapters(module)
    config = getattr(base, "config", None)
    routers = [config, getattr(config, "text_config", None)]
    if any(getattr(one, "output_router_logits", False) is True for one in routers):
        given = f"px.model_loss() of a {type(base).__name__} that adds a loss of its router, no mean over tokens"
        allowed = "the model without it: px.load_balancing_loss adds up over any split"
        return [Problem(where="job.loss", given=given, allowed=allowed, fix="config.output_router_logits = False")]
    if job.loss.count is None and not _is_known(base):
        return [unknown(f"a {type(base).__name__}")]
    return []


def _is_known(base: nn.Module) -> bool:
    """Whether the loss of ``base`` is its library's mean over labels that are not -100."""
    forward = type(base).forward
    if not str(getattr(forward, "__module__", "")).startswith("transformers.models."):
        return False
    written = next(one for one in type(base).__mro__ if "forward" in vars(one))
    outputs = next((outputs for end, outputs in _HEADS.items() if written.__name__.endswith(end)), None)
    try:
        source = inspect.getsource(forward)
    except (OSError, TypeError):
        return False
    if outputs is None or "ignore_index" in source or getattr(base.config, "return_dict", True) is not True:
        return False
    library = "self.loss_function(" in source
    if library and not _is_library_loss(base, outputs):
        return False
    given = re.findall(r"return (\w+)\(", source)
    return (library or outputs is UNSHIFTED) and bool(given) and all(name in outputs for name in given)


def _is_library_loss(base: nn.Module, outputs: frozenset[str]) -> bool:
    """Whether ``loss_function`` of ``base`` is the one of its kind, which nobody has put another in place of."""
    from transformers.loss.loss_utils import LOSS_MAPPING

    kinds = ["ForCausalLM"] if outputs is SHIFTED else [end for end, has in _HEADS.items() if has is UNSHIFTED]
    return any(base.loss_function is LOSS_MAPPING[kind] for kind in kinds)


def _without_adapters(module: nn.Module) -> Any:
    """The model that peft has put adapters into; the module itself where that is none."""
    whole: Any = module
    return whole.get_base_model() if hasattr(module, "get_base_model") else module
