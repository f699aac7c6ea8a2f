"""The plans that the law holds for: *every plan equals one device*. A new technique adds its rows here."""

from __future__ import annotations

EACH = (
    "dp={n}",
    "dp={n} micro=2",
    "threads={n}",
    "threads={n} micro=2",
    "fsdp={n} zero=1",
    "fsdp={n} zero=2",
    "fsdp={n} zero=2 micro=2",
    "fsdp={n}",
    "fsdp={n} micro=2",
    "dp={n} recompute=full",
    "fsdp={n} recompute=selective",
    "dp={n} offload=optimizer",
    "fsdp={n} zero=1 offload=optimizer",
    "fsdp={n} offload=parameters",
)

LONG: dict[int, tuple[str, ...]] = {
    1: ("micro=3", "micro=5 recompute=full", "offload=optimizer"),
    **{ranks: tuple(plan.format(n=ranks) for plan in EACH) for ranks in (2, 3)},
    4: (
        *(plan.format(n=4) for plan in EACH),
        "dp=2 fsdp=2 zero=1",
        "dp=2 fsdp=2 zero=2 micro=2",
        "dp=2 fsdp=2",
        "dp=2 fsdp=2 micro=3 recompute=full",
    ),
}

# What every run of the tests holds the law for: each technique with each kind of model, the rank counts in turn.
SHORT: dict[str, tuple[str, ...]] = {
    "ConvNet": ("dp=3", "fsdp=2", "fsdp=3 zero=2", "threads=2", "dp=2 recompute=full"),
    "MLP": (
        *LONG[1],
        "dp=2",
        "dp=4",
        "fsdp=3 zero=1",
        "fsdp=4",
        "dp=2 fsdp=2 zero=2 micro=2",
        "dp=2 fsdp=2",
        "threads=3 micro=2",
    ),
    "own GPT": (
        "dp=3 micro=2",
        "threads=2 micro=3",
        "fsdp=2 zero=1",
        "fsdp=2 zero=2 micro=2",
        "fsdp=3 micro=2",
        "fsdp=2 offload=parameters",
        "dp=2 offload=optimizer",
        "fsdp=2 recompute=selective",
        "dp=2 fsdp=2 zero=1",
    ),
    "HF GPT-2": ("dp=2", "fsdp=2", "fsdp=2 zero=2 micro=3", "dp=2 recompute=full"),
    "HF BERT, padded": ("dp=4", "fsdp=3", "fsdp=2 zero=1 micro=2"),
}

BAR = 1e-5  # relative: every step's loss, and each first gradient against its norm
STEPS = 20
