"""Models of the package transformers, from a configuration, on the meta device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from phalanx.errors import MissingExtraError, Problem, SpecError
from phalanx.profile.tracing import Described


def built(config: Mapping[str, Any], length: int) -> Described | None:
    """The model of ``config`` with inputs of one sample; ``None`` if transformers does not know its kind.

    Raises:
        MissingExtraError: if transformers is not installed.
        SpecError: if the configuration is wrong, or what the model takes as input is not known.
    """
    try:
        import transformers
    except ImportError:
        raise MissingExtraError("transformers", "transformers") from None
    import torch

    kind = config["model_type"]
    if kind not in transformers.CONFIG_MAPPING:
        return None
    try:
        made = transformers.AutoConfig.for_model(**config)
        names = config.get("architectures") or []
        of_class = getattr(transformers, names[0], None) if names else None
        with torch.device("meta"):
            module = of_class(made) if of_class else transformers.AutoModelForCausalLM.from_config(made)
    except Exception as error:  # whatever transformers says of a configuration it cannot build
        said = (str(error).splitlines() or [""])[0]
        allowed = "a configuration that transformers can build a model from"
        raise SpecError(
            [Problem(where="config", given=said, allowed=allowed, fix='"architectures": ["..."]')]
        ) from None
    most = getattr(made, "max_position_embeddings", None) or length
    return Described(module=module, kwargs=_inputs(module, made, min(length, most)), loss=_loss)


def _inputs(module: Any, config: Any, length: int) -> dict[str, Any]:
    import torch

    takes = getattr(module, "main_input_name", "input_ids")
    with torch.device("meta"):
        if takes == "input_ids":
            tokens = torch.empty(1, length, dtype=torch.int64)
            return {"input_ids": tokens, **({"decoder_input_ids": tokens} if config.is_encoder_decoder else {})}
        size = getattr(config, "image_size", 224)
        if takes == "pixel_values" and isinstance(size, int):
            return {"pixel_values": torch.empty(1, getattr(config, "num_channels", 3), size, size)}
    allowed = "models of tokens or images; others by a job of your own"
    raise SpecError([Problem(where="config", given=f"a model of {takes}", allowed=allowed, fix="phalanx plan JOB")])


def _loss(output: Any, batch: Any) -> Any:
    import torch
    import torch.nn.functional as F

    scores = output.logits if "logits" in output else output[0]
    if scores.dim() == 4:
        return scores.float().sum()
    flat = scores.flatten(0, -2)
    return F.cross_entropy(flat.float(), torch.zeros(len(flat), dtype=torch.int64))
