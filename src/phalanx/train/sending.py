"""What the sender of compressed gradients hands on: to a checkpoint, and to the event log."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from phalanx.comm import from_every_rank
from phalanx.parallel import Held

SENDER_SECTION = "sender"
"""The key of a checkpoint's state that says how gradients were sent, and the beginning of its tensors' names."""


def sender_tensors(held: Held) -> dict[str, torch.Tensor]:
    """What was left out of gradients so far, to be saved or filled in place; nothing where they go whole. Collective.

    Ranks need not save theirs each: what counts is the sum, and each goes on with the mean.
    """
    if held.sender is None:
        return {}
    return {f"{SENDER_SECTION}.{name}": tensor for name, tensor in held.sender.tensors().items()}


def restore_sender(path: Path, held: Held, state: Mapping[str, Any]) -> str:
    """Fill what the sender keeps from the checkpoint in ``path``; says so where there is nothing to go on with.

    Collective.
    """
    from phalanx import checkpoint

    targets = sender_tensors(held)
    if held.sender is None or not targets:
        return ""
    if state.get(SENDER_SECTION) != held.sender.kind:
        return f"the checkpoint is not of {held.sender.kind}: what was left out of gradients before it is lost."
    checkpoint.load(path, targets)
    return ""


def traffic(held: Held) -> list[dict[str, Any]]:
    """Fields of each rank's ``traffic`` event; none where gradients go whole. Collective."""
    if held.sender is None:
        return []
    return [{"rank": rank, **sent} for rank, sent in enumerate(from_every_rank(asdict(held.sender.traffic)))]
