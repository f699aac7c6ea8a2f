"""The keys of a plan that take one of a few words, and the dimensions of its mesh."""

from __future__ import annotations

from typing import Literal, get_args

Precision = Literal["fp32", "tf32", "bf16", "fp16", "fp8"]
Recompute = Literal["none", "selective", "full"]
Offload = Literal["none", "optimizer", "parameters"]
Device = Literal["auto", "cpu", "cuda"]
Schedule = Literal["gpipe", "1f1b", "interleaved", "zero-bubble", "zbv", "dualpipev"]
Attention = Literal["ring", "alltoall", "gather"]
Sync = Literal["each", "local", "diloco"]
Outer = Literal["none", "nesterov", "sgd"]
Compensate = Literal["none", "rate", "delay"]

AXES = ("pp", "dp", "fsdp", "ep", "cp", "tp")
"""The dimensions of the mesh, from the one whose ranks are farthest apart to the one whose ranks are neighbours."""

DATA_AXES = ("dp", "fsdp", "ep")
"""Those whose ranks hold different samples."""

CHOICES: dict[str, tuple[str, ...]] = {
    "precision": get_args(Precision),
    "recompute": get_args(Recompute),
    "offload": get_args(Offload),
    "device": get_args(Device),
    "schedule": get_args(Schedule),
    "attention": get_args(Attention),
    "sync": get_args(Sync),
    "outer": get_args(Outer),
    "compensate": get_args(Compensate),
}
"""Keys that take one of a few words."""

STAGES = {"gpipe": 1, "1f1b": 1, "interleaved": 2, "zero-bubble": 2, "zbv": 2, "dualpipev": 2}
"""Stages on each rank that a schedule needs, and has where a plan does not say."""

TRUTHS = ("compile", "sequence")
"""Keys that are true or false."""

TEXTS = ("split", "shares", "compress")
"""Keys that take a text of their own."""

NUMBERS = ("outer_lr", "outer_momentum")
"""Keys that take a number which need not be whole."""

UNBOUNDED = "unbounded"
"""How a plan's text says a staleness without end, ``math.inf``."""

APART = (
    *("sync", "every", "after", "fragments", "outer", "outer_lr", "outer_momentum"),
    *("server", "staleness", "compensate", "backup", "compress", "shares"),
)
"""Keys of other ways to keep replicas together than summing whole gradients over even shares in every step."""
