"""Random streams of a device."""

from __future__ import annotations

import torch


def reseed(device: torch.device, seed: int) -> None:
    """Start the device's default stream at ``seed``.

    Cheaper than ``torch.manual_seed``, which visits every kind of device and, where CUDA has not begun, keeps each call
    with its traceback for the moment when it does.
    """
    generator(device).manual_seed(seed)


def branch(device: torch.device, index: int) -> None:
    """Start the device's default stream anew as the one of that ``index`` among those that begin where it began.

    The index changes the lower bits, too: of a seed, torch's generator of the CPU reads the lower 32.
    """
    reseed(device, (seed_of(device) ^ (index * 0x9E3779B97F4A7C15)) % 2**63)


def seed_of(device: torch.device) -> int:
    """What the device's default stream was last started at."""
    return generator(device).initial_seed()


def generator(device: torch.device) -> torch.Generator:
    """The default stream of the device."""
    return torch.cuda.default_generators[device.index or 0] if device.type == "cuda" else torch.default_generator
