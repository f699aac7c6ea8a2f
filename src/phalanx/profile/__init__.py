"""A model's costs: operations, parameters and saved activations, found without a device."""

from phalanx.profile.config import from_config
from phalanx.profile.costs import Operation, Part, Profile, Saved, Share, Size, Weights, flops
from phalanx.profile.standard import Family, Shape, standard
from phalanx.profile.tracing import Described, length_of, trace

__all__ = [
    "Described",
    "Family",
    "Operation",
    "Part",
    "Profile",
    "Saved",
    "Shape",
    "Share",
    "Size",
    "Weights",
    "flops",
    "from_config",
    "length_of",
    "standard",
    "trace",
]
