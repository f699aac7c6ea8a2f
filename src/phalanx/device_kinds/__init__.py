"""Kinds of devices: what Phalanx asks of one, the registry, and a file for each kind in ``kinds``."""

from phalanx.device_kinds.interface import AttentionKernels, DeviceKind, DeviceMemory
from phalanx.device_kinds.registry import (
    accelerator,
    accelerator_count,
    all_kinds,
    automatic_kind,
    hardware_names,
    host,
    interface_variables,
    is_kind,
    kind_named,
    kind_names,
    kind_of,
    kind_of_hardware,
    probed_kinds,
    register,
    registered,
)

__all__ = [
    "AttentionKernels",
    "DeviceKind",
    "DeviceMemory",
    "accelerator",
    "accelerator_count",
    "all_kinds",
    "automatic_kind",
    "hardware_names",
    "host",
    "interface_variables",
    "is_kind",
    "kind_named",
    "kind_names",
    "kind_of",
    "kind_of_hardware",
    "probed_kinds",
    "register",
    "registered",
]
