"""A model's costs: operations, parameters and saved activations, found without a device."""

from phalanx.profile.costs import Operation, Part, Profile, Saved, Share, Size, Weights, flops

__all__ = ["Operation", "Part", "Profile", "Saved", "Share", "Size", "Weights", "flops"]
