"""Random streams of a device."""

from __future__ import annotations

import torch


def reseed(device: torch.device, seed: int) -> None:
    """Start the device's default stream at ``seed``.

    Cheaper than ``torch.manual_seed``, which visits every kind of device and, where CUDA has not begun, keeps each call
    with its traceback for the moment when it does.
    """
    generator(device).manual_seed(seed)


def seed_of(device: torch.device) -> int:
    """What the device's default stream was last started at."""
    return generator(device).initial_seed()


def generator(device: torch.device) -> torch.Generator:
    """The default stream of the device."""
    return torch.cuda.default_generators[device.index or 0] if device.type == "cuda" else torch.default_generator
