"""The models that forecasts are held against here, as jobs, and every kind of plan that each is run under."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

import phalanx as px
from phalanx.launch.jobfile import load_job
from workloads import GPT, loss

_EXAMPLES = Path(__file__).parent.parent / "examples"
_SAMPLES = 4096  # so that no epoch begins in a short run


@dataclass(frozen=True, kw_only=True, slots=True)
class Kind:
    """Plans of one technique.

    Attributes:
        name: of the technique.
        counts: of processes that it is run with.
        plans: with ``{n}`` processes, ``{half}`` of these, ``{part}`` half of a replica's samples, ``{fourth}`` and
            ``{eighth}`` of the batch.
        jobs: that it can serve; all where empty.
    """

    name: str
    counts: tuple[int, ...]
    plans: tuple[str, ...]
    jobs: tuple[str, ...] = ()


_BLOCKS = ("gpt", "mlp")
KINDS = (
    Kind(name="single", counts=(1,), plans=("single", "micro={part}")),
    Kind(name="threads", counts=(2,), plans=("threads={n}",)),
    Kind(name="recompute", counts=(1, 2, 4), plans=("dp={n} recompute=full",)),
    Kind(name="bf16", counts=(1, 2, 4), plans=("dp={n} precision=bf16",)),
    Kind(name="compile", counts=(1,), plans=("compile=true",), jobs=("mlp",)),
    Kind(name="dp", counts=(2, 4), plans=("dp={n}", "dp={n} micro={part}")),
    Kind(name="shares", counts=(2,), plans=("dp=2 shares=3,1",)),
    Kind(name="zero=1", counts=(2, 4), plans=("fsdp={n} zero=1",)),
    Kind(name="zero=2", counts=(2, 4), plans=("fsdp={n} zero=2",)),
    Kind(name="zero=3", counts=(2, 4), plans=("fsdp={n}", "fsdp={n} recompute=full")),
    Kind(name="offload", counts=(2,), plans=("fsdp={n} offload=optimizer",)),
    Kind(name="hybrid", counts=(4,), plans=("dp=2 fsdp=2", "dp=2 fsdp=2 zero=1")),
    Kind(name="tp", counts=(2, 4), plans=("tp={n}",), jobs=_BLOCKS),
    Kind(name="tp sequence", counts=(2, 4), plans=("tp={n} sequence=true",), jobs=("gpt",)),
    Kind(name="pp", counts=(2, 4), plans=("pp={n} micro={fourth}", "pp={n} schedule=gpipe micro={fourth}")),
    Kind(
        name="pp, two stages a rank",
        counts=(2,),
        plans=(
            "pp={n} schedule=interleaved micro={fourth}",
            "pp={n} schedule=zero-bubble micro={fourth}",
            "pp={n} schedule=zbv micro={fourth}",
            "pp={n} schedule=dualpipev micro={eighth}",
        ),
        jobs=_BLOCKS,
    ),
    Kind(name="cp", counts=(2, 4), plans=("cp={n}",), jobs=("gpt",)),
    Kind(name="cp", counts=(2,), plans=("cp={n} attention=alltoall", "cp={n} attention=gather"), jobs=("gpt",)),
    Kind(name="ep", counts=(2, 4), plans=("ep={n}",), jobs=("moe",)),
    Kind(name="single", counts=(1,), plans=("single",), jobs=("moe",)),
    Kind(name="products", counts=(4,), plans=("dp=2 tp=2", "fsdp=2 tp=2", "pp=2 tp=2 micro={fourth}"), jobs=_BLOCKS),
    Kind(name="products", counts=(4,), plans=("dp=2 pp=2 micro={eighth}", "fsdp=2 pp=2 micro={eighth}")),
    Kind(name="products", counts=(4,), plans=("dp=2 cp=2",), jobs=("gpt",)),
    Kind(name="server", counts=(2,), plans=("dp={n} server=1", "dp={n} server=1 staleness=2")),
    Kind(name="local", counts=(2, 4), plans=("dp={n} sync=local every=3",)),
    Kind(name="diloco", counts=(2, 4), plans=("dp={n} sync=diloco every=3",)),
    Kind(
        name="compress",
        counts=(2,),
        plans=tuple(f"dp={{n}} compress={one}" for one in ("bf16", "int8", "topk:0.01", "powersgd:4")),
    ),
)
"""Every kind of plan that this machine can run."""


def plans(job: str, batch: int) -> list[tuple[str, px.Plan]]:
    """What ``job`` is run under: the kind, and the plan."""
    found: dict[px.Plan, str] = {}
    for kind in KINDS:
        if (kind.jobs and job not in kind.jobs) or (job == "moe" and "moe" not in kind.jobs):
            continue
        for count in kind.counts:
            for text in kind.plans:
                sizes = {"n": count, "part": batch // count // 2, "fourth": batch // 4, "eighth": batch // 8}
                found.setdefault(px.Plan.parse(text.format(**sizes)), kind.name)
    return [(kind, plan) for plan, kind in found.items()]


def gpt() -> px.Job:
    """4 blocks of width 256 over 64 bytes, 3.3 M parameters: attention, and products over tokens."""
    return _job("gpt", lambda: GPT(layers=4, width=256, heads=4, context=64), _text, batch=16)


def mlp() -> px.Job:
    """8 blocks of width 512, 4.2 M parameters for 256 samples: products, and an update that counts."""

    def model() -> nn.Module:
        blocks = [nn.Sequential(nn.Linear(512, 512), nn.GELU(), nn.Linear(512, 512)) for _ in range(8)]
        return nn.Sequential(nn.Linear(64, 512), *blocks, nn.Linear(512, 10))

    return _job("mlp", model, lambda: _labelled(64), batch=256)


def convnet() -> px.Job:
    """Four convolutions of images of 28 x 28, 0.4 M parameters: traffic, pooling."""

    def model() -> nn.Module:
        return nn.Sequential(
            *[nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)],
            *[nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.Conv2d(64, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)],
            *[nn.Flatten(), nn.Linear(64 * 49, 64), nn.ReLU(), nn.Linear(64, 10)],
        )

    return _job("convnet", model, lambda: _labelled(1, 28, 28), batch=32)


def moe() -> px.Job:
    """The blocks of a small mixture of experts, for what needs experts."""
    return load_job(str(_EXAMPLES / "moe.py"))


def _text() -> torch.utils.data.Dataset[tuple[torch.Tensor, ...]]:
    text = torch.randint(256, (_SAMPLES, 65), generator=torch.Generator().manual_seed(0))
    return torch.utils.data.TensorDataset(text[:, :-1], text[:, 1:])


def _labelled(*shape: int) -> torch.utils.data.TensorDataset:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(_SAMPLES, *shape, generator=generator)
    return torch.utils.data.TensorDataset(inputs, torch.randint(10, (_SAMPLES,), generator=generator))


def _job(name: str, model: object, data: object, *, batch: int) -> px.Job:
    return px.Job(
        model=model,
        data=data,
        loss=lambda output, batch: loss(output, batch[1]),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-4),
        batch=batch,
        epochs=100,
        name=name,
    )


JOBS: Mapping[str, Callable[[], px.Job]] = {"gpt": gpt, "mlp": mlp, "convnet": convnet, "moe": moe}
