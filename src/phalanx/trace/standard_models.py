"""Models to trace, with their arguments: well-known ones by their sizes, and those of a ``config.json``.

Those of a ``config.json`` that are not well known are built by transformers.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from phalanx.config.fields import is_whole
from phalanx.config.model_costs import Profile
from phalanx.errors import MissingExtraError, Problem, SpecError
from phalanx.files import read_json

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelCall:
    """A model, its arguments, and its loss. Only the forms of tensors are read; they may be on the meta device."""

    module: nn.Module  # the model; may be on the meta device
    args: tuple[Any, ...] = ()  # positional arguments of its forward, of one or more samples (dimension 0)
    kwargs: Mapping[str, Any] = field(default_factory=dict[str, Any])  # named arguments
    batch: Any = None  # the second argument of the loss
    # from the output and the batch to a scalar tensor, or to something whose ``sum`` is one
    loss: Callable[[Any, Any], Any]
    length: int = 0  # tokens in one sample; 0 to find it from the inputs
    # whether the model makes its tensors on torch's default device and never asks where one is: tensors of the meta
    # device then do in place of fakes, and torch's compiler, which takes a second to load, is not needed
    meta: bool = False
    values: bool = False  # whether to compute with the values that there are, for a model whose shapes depend on them

    def profile(self) -> Profile:
        return trace(self)


def trace(described: ModelCall) -> Profile:
    """Return the costs of a model, found by running it on fake tensors at three sizes, without computing.

    Floating parameters and inputs of fp32 are taken as bf16 if the model allows it, so that tensors the model itself
    makes fp32 are recognised: they have ``itemsize`` 4, while 0 means the computing precision.

    Raises:
        ProfileError: if the model does not run on fake tensors; it names the line of the model.
    """
    from phalanx.trace.laws import measured_at_sizes

    return measured_at_sizes(described)


def length_of(tensors: list[Any]) -> int:
    """Return the tokens of a sample in a model's inputs: dimension 1 of integers, or of vectors in a row; else 1."""
    found = [one.shape[1] for one in tensors if one.dim() == 2 and not one.is_floating_point()]
    found += [one.shape[1] for one in tensors if one.dim() == 3 and one.is_floating_point()]
    return found[0] if found else 1


Family = Literal["gpt", "llama", "mpt", "bert", "resnet50"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """A well-known model by its sizes."""

    # ``gpt`` (learned positions, LayerNorm, GELU, biases), ``llama`` (rotary positions, RMSNorm, SwiGLU, no biases),
    # ``mpt`` (as gpt, without biases, positions by ``positions``), ``bert`` (norms after, two heads), ``resnet50``
    # (version 1.5; ``image`` and ``vocabulary`` count, the rest does not)
    family: Family
    layers: int = 0  # blocks
    hidden: int = 0  # width of the stream
    heads: int = 0
    kv_heads: int = 0  # heads of keys and values; 0 for as many as ``heads``
    ffn: int = 0  # width inside the feed-forward network; 0 for 4 times ``hidden``
    vocabulary: int = 0  # tokens, or classes
    length: int = 1  # tokens in a sample
    places: int = 0  # rows of a table of learned positions; 0 for ``length``
    head_width: int = 0  # of one head; 0 for ``hidden / heads``
    tied: bool = False  # whether the head shares the embedding's weight
    # ``learned``, ``alibi`` or ``rotary``; empty for the family's own
    positions: Literal["", "learned", "alibi", "rotary"] = ""
    dropout: float = 0.0  # rate after attention and feed-forward network
    biases: bool = False  # of llama's projections of queries, keys and values (as Qwen2 has)
    image: int = 224  # height and width of an image

    def profile(self) -> Profile:
        """Return the costs of the model; computed once for each shape."""
        return _profile(self)


def standard(shape: Shape) -> ModelCall:
    """Return the model on the meta device, with inputs of one sample and its loss: cross-entropy over all tokens.

    Raises:
        SpecError: if numbers of the shape are missing or do not go together.
    """
    from phalanx.trace.models import described

    return described(shape)


_ENOUGH = 2


@cache
def _profile(shape: Shape) -> Profile:
    if shape.layers <= _ENOUGH:
        return standard(shape).profile()
    found = _profile(replace(shape, layers=_ENOUGH))
    # all blocks of these models are alike: what is added to a few is a count
    parts = [replace(part, count=shape.layers) if part.role == "block" else part for part in found.parts]
    return replace(found, parts=tuple(parts))


_MOST_TOKENS = 4096
"""Length of samples where neither the caller nor the configuration says less."""


def from_config(path: str | Path, *, length: int = 0) -> Shape | ModelCall:
    """Return the model of a ``config.json``, or of a folder with one; both results offer ``profile()``.

    Well-known architectures become standard models, without the package transformers: their details, such as norms of
    queries and keys, or blocks that compute attention and feed-forward network side by side, are left out. Other
    architectures are built by transformers on the meta device.

    ``length``: tokens in a sample; 0 for the model's own length, at most 4096.

    Raises:
        SpecError: if the file is not a configuration, lacks keys, or its architecture is not known.
        MissingExtraError: if transformers is needed and not installed.
    """
    config = _read(Path(path))
    kind = config.get("model_type")
    if not isinstance(kind, str):
        raise SpecError([_wrong(path, "no model_type", "a config.json of transformers", "model_type")])
    if kind in _KNOWN:
        return _KNOWN[kind].shape(config, str(path), length)

    if model := built(config, length or _MOST_TOKENS):
        return model
    near = difflib.get_close_matches(kind, known_architectures(), n=3) or sorted(_KNOWN)[:3]
    allowed = "an architecture that is known here, or to the installed transformers"
    raise SpecError(
        [_wrong(path, f"model_type {kind!r}", allowed, f'"model_type": "{near[0]}"  (near: {", ".join(near)})')]
    )


def known_architectures() -> list[str]:
    """Return architectures that need no transformers, by ``model_type``."""
    return sorted(_KNOWN)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Architecture:
    """The standard model of an architecture, and the names of its sizes in a configuration."""

    family: Family  # the standard model
    # name in ``Shape`` → name in the configuration, where it is not the usual one
    keys: Mapping[str, str] = field(default_factory=dict[str, str])
    tied: bool = False  # whether the head is tied where the configuration does not say
    # fields of the shape that follow from the architecture
    fixed: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def shape(self, config: Mapping[str, Any], path: str, length: int) -> Shape:
        keys = {**_USUAL, **self.keys}
        if self.family != "llama":
            keys = {name: key for name, key in keys.items() if name not in _GROUPED or name in self.keys}
        missing = [keys[name] for name in _NEEDED if not isinstance(config.get(keys[name]), int)]
        if missing:
            wanted = "whole numbers under these names"
            raise SpecError([_wrong(path, f"no {', '.join(missing)}", wanted, f'"{missing[0]}": ...')])
        found = {name: value for name, key in keys.items() if isinstance(value := config.get(key), int)}
        for name, value in found.items():
            if not is_whole(value, 1 if name in _NEEDED else 0) or value > _LARGEST:
                wanted = f"a whole number up to {_LARGEST}"
                raise SpecError([_wrong(path, f"{keys[name]}: {str(value)[:40]}", wanted, f'"{keys[name]}": ...')])
        most = found.pop("places", 0) or _MOST_TOKENS
        found["length"] = length or min(most, _MOST_TOKENS)
        if "expansion" in found:
            found["ffn"] = found.pop("expansion") * found["hidden"]
        if self.fixed.get("positions", "learned") == "learned" and self.family in ("gpt", "bert", "mpt"):
            found["places"] = most
        tied = bool(config.get("tie_word_embeddings", self.tied))
        return Shape(family=self.family, **{**found, "tied": tied, **self.fixed})  # pyrefly: ignore


_USUAL = {
    "layers": "num_hidden_layers",
    "hidden": "hidden_size",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "ffn": "intermediate_size",
    "vocabulary": "vocab_size",
    "head_width": "head_dim",
    "places": "max_position_embeddings",
}
_GROUPED = ("kv_heads", "head_width")
_LARGEST = 2**31
_NEEDED = ("layers", "hidden", "heads", "vocabulary")
_SHORT = {"layers": "n_layer", "hidden": "n_embd", "heads": "n_head", "ffn": "n_inner", "places": "n_positions"}
_MPT = {
    "layers": "n_layers",
    "hidden": "d_model",
    "heads": "n_heads",
    "expansion": "expansion_ratio",
    "places": "max_seq_len",
}
_KNOWN: dict[str, _Architecture] = {
    "llama": _Architecture(family="llama"),
    "mistral": _Architecture(family="llama"),
    "phi3": _Architecture(family="llama"),
    "qwen2": _Architecture(family="llama", fixed={"biases": True}),
    "qwen3": _Architecture(family="llama"),
    "gemma": _Architecture(family="llama", tied=True),
    "gpt2": _Architecture(family="gpt", keys=_SHORT, tied=True),
    "gpt_neox": _Architecture(family="gpt", fixed={"positions": "rotary"}),
    "phi": _Architecture(family="gpt", keys={"kv_heads": "num_key_value_heads"}, fixed={"positions": "rotary"}),
    "opt": _Architecture(family="gpt", keys={"ffn": "ffn_dim"}, tied=True),
    "bloom": _Architecture(
        family="gpt",
        keys={"layers": "n_layer", "heads": "n_head", "ffn": ""},  # always 4 times the width
        tied=True,
        fixed={"positions": "alibi"},
    ),
    "mpt": _Architecture(family="mpt", keys=_MPT, tied=True, fixed={"positions": "alibi"}),
    "bert": _Architecture(family="bert", tied=True),
}


def _read(path: Path) -> dict[str, Any]:
    file = path / "config.json" if path.is_dir() else path
    config = read_json(file, where=str(file), allowed="a config.json", fix="path/to/config.json")
    if not isinstance(config, dict):
        raise SpecError([_wrong(file, "JSON that is no object", "a config.json", "path/to/config.json")])
    return config


def _wrong(path: str | Path, given: str, allowed: str, fix: str) -> Problem:
    return Problem(where=str(path), given=given, allowed=allowed, fix=fix)


def built(config: Mapping[str, Any], length: int) -> ModelCall | None:
    """Return the model of ``config`` with inputs of one sample; ``None`` if transformers does not know its kind.

    Raises:
        MissingExtraError: if transformers is not installed.
        SpecError: if the configuration is wrong, or the model's input is not known.
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
        if not (isinstance(of_class, type) and issubclass(of_class, transformers.PreTrainedModel)):
            of_class = None  # whatever else of that name there is would be called with the configuration
        with torch.device("meta"):
            module = of_class(made) if of_class else transformers.AutoModelForCausalLM.from_config(made)
    except Exception as error:  # whatever transformers says of a configuration it cannot build
        said = (str(error).splitlines() or [""])[0]
        allowed = "a configuration that transformers can build a model from"
        raise SpecError(
            [Problem(where="config", given=said, allowed=allowed, fix='"architectures": ["..."]')]
        ) from None
    most = getattr(made, "max_position_embeddings", None) or length
    return ModelCall(module=module, kwargs=_inputs(module, made, min(length, most)), loss=_loss)


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
