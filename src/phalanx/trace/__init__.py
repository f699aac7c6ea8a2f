"""A model's costs: operations, parameters and saved activations, found without a device."""

from phalanx.config.model_costs import ModelPart, Operation, Profile, Saved, Share, SizeLaw, Weights, flops
from phalanx.trace.hf_config import from_config
from phalanx.trace.standard_models import Family, Shape, standard
from phalanx.trace.tracing import ModelCall, length_of, trace

__all__ = [
    "Family",
    "ModelCall",
    "ModelPart",
    "Operation",
    "Profile",
    "Saved",
    "Shape",
    "Share",
    "SizeLaw",
    "Weights",
    "flops",
    "from_config",
    "length_of",
    "standard",
    "trace",
]
