"""A model's costs: operations, parameters and saved activations, found without a device."""

from phalanx.config.model_costs import ModelPart, Operation, Profile, Saved, SizeLaw, Weights, flops
from phalanx.trace.standard_models import Family, ModelCall, Shape, from_config, length_of, standard, trace

__all__ = [
    "Family",
    "ModelCall",
    "ModelPart",
    "Operation",
    "Profile",
    "Saved",
    "Shape",
    "SizeLaw",
    "Weights",
    "flops",
    "from_config",
    "length_of",
    "standard",
    "trace",
]
