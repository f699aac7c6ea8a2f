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
    1: ("single", "micro=3", "micro=5 recompute=full", "offload=optimizer"),
    2: (*(plan.format(n=2) for plan in EACH), "dp=2 server=1", "dp=2 server=2 micro=2"),
    3: tuple(plan.format(n=3) for plan in EACH),
    4: (
        *(plan.format(n=4) for plan in EACH),
        "dp=4 server=2",
        "dp=2 fsdp=2 zero=1",
        "dp=2 fsdp=2 zero=2 micro=2",
        "dp=2 fsdp=2",
        "dp=2 fsdp=2 micro=3 recompute=full",
    ),
}

# What every run of the tests holds the law for: each technique once, on a model that it can change most.
SHORT: dict[str, tuple[str, ...]] = {
    "MLP": ("micro=3", "dp=2 fsdp=2 zero=2 micro=2", "threads=3 micro=2", "dp=4 server=2"),
    "irregular": ("pp=2 micro=2 schedule=dualpipev",),
    "own GPT": (
        "fsdp=2 offload=parameters",
        "cp=3 attention=alltoall recompute=full",
        "fsdp=2 tp=2 zero=1 sequence=true",
        "pp=2 micro=7 schedule=interleaved",
    ),
    "HF GPT-2": ("pp=2 micro=3 schedule=zbv",),
    "HF Llama": ("tp=2 sequence=true recompute=selective",),
    "HF Mixtral": ("pp=2 ep=2 micro=7",),
}

# Plans whose replicas are several ranks each. What a model has nothing to split for is refused, with the reason.
SPLIT = (
    "tp=2",
    "tp=3 micro=5",
    "tp=4",
    "tp=2 sequence=true",
    "tp=2 recompute=full",
    "tp=2 recompute=selective",
    "tp=3 micro=5 sequence=true recompute=selective",
    "pp=2",
    "pp=2 micro=2 schedule=gpipe",
    "pp=2 micro=2",
    "pp=2 micro=2 schedule=interleaved",
    "pp=2 micro=2 schedule=zero-bubble",
    "pp=2 micro=2 schedule=zbv",
    "pp=2 micro=2 schedule=dualpipev",
    "pp=4 micro=2",
    "pp=2 micro=2 recompute=full",
    "pp=2 micro=2 recompute=selective schedule=zero-bubble",
    "cp=2",
    "cp=2 attention=alltoall",
    "cp=3 attention=gather",
    "cp=2 recompute=selective",
    "cp=2 recompute=full",
    "cp=3 attention=alltoall recompute=full",
    "cp=3 attention=gather recompute=selective",
    "cp=4",
    "tp=2 sequence=true recompute=full",
    "tp=2 sequence=true recompute=selective",
    "tp=2 cp=2 recompute=full",
    "tp=2 cp=2 recompute=selective",
    "fsdp=2 cp=2 recompute=full",
    "fsdp=2 cp=2 zero=1 recompute=selective",
    "fsdp=2 tp=2 sequence=true recompute=full",
    "dp=2 tp=2 sequence=true recompute=selective",
    "pp=2 cp=2 micro=4 recompute=full",
    "pp=2 tp=2 micro=4 sequence=true recompute=full",
    "ep=2",
    "ep=4",
    "dp=2 tp=2",
    "fsdp=2 tp=2",
    "fsdp=2 tp=2 zero=1 sequence=true",
    "fsdp=2 tp=2 zero=2",
    "dp=2 pp=2 micro=2",
    "pp=2 fsdp=2 micro=2",
    "pp=2 tp=2 micro=4",
    "tp=2 cp=2",
    "dp=2 cp=2",
    "fsdp=2 cp=2",
    "pp=2 cp=2 micro=4",
    "ep=2 tp=2",
    "fsdp=2 ep=2",
    "pp=2 ep=2 dp=2 micro=2",
    "dp=2 cp=2 tp=2",
    "pp=2 fsdp=2 tp=2 micro=2",
    "pp=2 fsdp=2 tp=2 micro=2 sequence=true recompute=selective",
)

# Replicas that take unequal shares, of batches of 13, and of a last one with a single sample.
SHARES: dict[str, tuple[str, ...]] = {
    "MLP": (
        "dp=2 shares=3,1",
        "dp=2 shares=12,1",
        "dp=3 shares=9,1,3 micro=2",
        "dp=2 fsdp=2 shares=3,1",
        "dp=2 fsdp=2 zero=1 shares=3,1 micro=2",
        "dp=2 fsdp=2 zero=2 shares=3,1 micro=2",
        "dp=2 shares=auto",
    ),
    "own GPT": ("dp=2 shares=3,1 micro=2", "dp=2 fsdp=2 shares=1,3 micro=2", "dp=2 tp=2 shares=3,1 micro=2"),
    "HF Mixtral": ("dp=2 ep=2 shares=3,1 micro=2",),
    "HF BERT, padded": ("dp=2 shares=1,3",),
}

# Replicas that step by themselves are one device if each step ends with averaging what plain SGD did, and as long as
# gradients are summed.
APART: dict[str, tuple[str, ...]] = {
    "MLP": (
        "dp=2 sync=local",
        "dp=4 sync=local",
        "dp=2 shares=3,1 sync=local",
        "dp=2 sync=diloco outer=sgd",
        "dp=2 fsdp=2 sync=diloco outer=sgd",
        "dp=2 fsdp=2 zero=1 sync=local micro=2",
    ),
    "own GPT": (
        "dp=2 sync=local micro=2",
        "dp=2 fsdp=2 sync=diloco outer=sgd",
        "dp=2 tp=2 sync=diloco outer=sgd",
        "dp=2 pp=2 sync=local micro=4",
    ),
    "ConvNet": ("dp=3 sync=diloco outer=sgd",),
}


# Of the tables of shares and of replicas apart: what every run of the tests holds the law for.
OFTEN: tuple[tuple[str, str], ...] = (
    ("MLP", "dp=2 shares=auto"),
    ("own GPT", "dp=2 shares=3,1 micro=2"),
    ("MLP", "dp=2 shares=3,1 sync=local"),
    ("own GPT", "dp=2 pp=2 sync=local micro=4"),
    ("ConvNet", "pp=2 micro=7 recompute=full"),
    ("own GPT", "cp=2 attention=alltoall"),
    ("own GPT", "tp=2 sequence=true recompute=selective"),
)

REFUSED: tuple[tuple[str, str, str], ...] = (
    ("ConvNet", "tp=2", "no two layers can share out their weights"),
    ("irregular", "tp=2 sequence=true", "without attention over tokens"),
    ("MLP", "ep=2", "experts"),
    ("HF Mixtral", "ep=5", "experts"),
    ("own GPT", "pp=2 schedule=interleaved stages=40", "stages"),
)

PLAIN_BAR = 1e-6  # of a loss of one device of Phalanx, against the plain loop
BAR = 1e-5  # relative: every step's loss, and each first gradient against its norm
STEPS = 20  # of `make parity`
SHORT_STEPS = 5  # of every run of the tests: into the second epoch, after a last batch of its own size
