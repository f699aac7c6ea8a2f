"""A model's costs: operations, parameters and saved activations, found without a device."""

from phalanx.config.model_costs import ModelPart, Operation, Profile, Saved, SizeLaw, Weights, flops
from phalanx.trace.standard_models import Family, ModelCall, Shape, length_of, trace

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
    "length_of",
    "trace",
]
