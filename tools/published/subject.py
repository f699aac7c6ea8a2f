"""What a published run is to Phalanx: a model of standard modules, a plan, a cluster, and its framework's preset.

Presets of frameworks stand in ``presets.toml``.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from phalanx.config import Cluster, Plan
from phalanx.forecast import PHALANX, Preset
from phalanx.hardware import cluster
from phalanx.trace import Family, Shape
from published.rows import Row


def _presets() -> dict[str, Preset]:
    found = {PHALANX.name: PHALANX}
    for name, stated in tomllib.loads(Path(__file__).with_name("presets.toml").read_text(encoding="utf-8")).items():
        like = found[stated.pop("like")] if "like" in stated else Preset(name=name)
        found[name] = replace(like, name=name, **stated)
    return found


NAMED: Mapping[str, Preset] = _presets()
"""Presets by name, those of Phalanx among them."""

_BINNED = {512: 340}
"""Mean tokens in a sample of BERT's second phase: its loader sorts samples into bins of like length, and pads to those.

Both phases then reach the same share of the peak, in both precisions, as the same kernels must.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Subject:
    """A row as it is forecast.

    Attributes:
        shape: of the model.
        plan: how it was split.
        cluster: on what.
        preset: of the framework.
        batch: samples in a step.
        length: tokens in a sample; 1 for images.
    """

    shape: Shape
    plan: Plan
    cluster: Cluster
    preset: Preset
    batch: int
    length: int


def subject(row: Row, *, network: bool = True) -> Subject:
    """``row`` as a model, a plan, a cluster and preset.

    ``network``: where the row states none, take the one that the framework's runs are thought to have had; else the
    catalog's.
    """
    preset = NAMED[_habits(row)]
    return Subject(
        shape=_shape(row),
        plan=_plan(row),
        cluster=_cluster(row, preset.network if network else 0.0),
        preset=preset,
        batch=row.whole("batch"),
        length=_length(row),
    )


def _length(row: Row) -> int:
    stated = row.whole("seq")
    return _BINNED.get(stated, stated) if row.text("kind") == "bert" else stated


def _shape(row: Row) -> Shape:
    family = _family(row)
    if family == "resnet50":
        return Shape(family=family, image=row.whole("image", 224), vocabulary=1000)
    positions = row.text("positions")
    return Shape(
        family=family,
        layers=row.whole("layers"),
        hidden=row.whole("hidden"),
        heads=row.whole("heads"),
        kv_heads=row.whole("kv_heads", row.whole("heads")),
        ffn=row.whole("ffn", 4 * row.whole("hidden")),
        vocabulary=row.whole("vocab", 50304),
        length=_length(row),
        tied=row.truth("tied"),
        positions=positions if family == "mpt" and positions in ("learned", "alibi") else "",
        dropout=0.1 if family in ("gpt", "bert") else 0.0,
    )


def _family(row: Row) -> Family:
    if row.text("kind") in ("bert", "resnet50"):
        return row.text("kind")  # pyrefly: ignore
    if row.text("model").startswith("MPT") or "foundry" in row.text("framework"):
        return "mpt"
    return "llama" if row.truth("gated") else "gpt"


def _plan(row: Row) -> Plan:
    given: dict[str, Any] = {name: row.whole(name) for name in ("tp", "pp", "cp", "dp", "fsdp")}
    zero = row.whole("zero", 0)
    if row.text("framework") == "InternEvo":
        given["fsdp"] = min(_sharded_over(row), given["dp"])
        given["dp"] //= given["fsdp"]
    elif zero in (1, 2) and given["fsdp"] == 1:  # its optimizer state is sharded over the replicas
        given["dp"], given["fsdp"] = 1, given["dp"]
    given["zero"] = (zero or 3) if given["fsdp"] > 1 else 0
    schedule, stages = _schedule(row)
    recompute = row.text("recompute")
    return Plan(
        **given,
        schedule=schedule,
        stages=stages,
        sequence=row.truth("sp") and given["tp"] > 1 and given["cp"] == 1,
        micro=row.whole("micro", 0) or (1 if row.text("kind") == "transformer" else None),
        recompute="full" if recompute == "full" else "selective" if recompute.startswith("selective") else "none",
        precision=row.text("precision") or "bf16",  # pyrefly: ignore
    )


def _sharded_over(row: Row) -> int:
    found = re.search(r"sharded over (\d+)", row.text("note"))
    return int(found.group(1)) if found else row.whole("per_node", 8)


_CHUNKS = 4
"""Stages of a rank in Megatron's runs on H100, which interleave and do not state how many."""

_SCHEDULES = (("zbv", "zbv"), ("zb-", "zero-bubble"), ("interleaved", "interleaved"), ("1f1b-i", "interleaved"))


def _schedule(row: Row) -> tuple[Any, int]:
    """The schedule that the note names, or else the framework's own, and stages on each rank."""
    note, virtual = row.text("note").lower(), row.whole("vpp")
    if row.whole("pp") == 1:
        return "1f1b", 1
    if row.text("framework") == "Megatron-LM" and _is_hopper(row) and not row.text("vpp"):
        return "interleaved", _CHUNKS
    for word, schedule in _SCHEDULES:
        if word in note:
            return schedule, max(virtual, 2) if schedule == "interleaved" else 2
    if "1f1b" in note or row.text("framework") != "ZeroBubble-Megatron":
        return ("interleaved", virtual) if virtual > 1 else ("1f1b", 1)
    return "zero-bubble", 2


def _cluster(row: Row, network: float) -> Cluster:
    devices, per_node = row.whole("devices"), row.whole("per_node", 8)
    name, rate = row.text("device"), row.text("network")
    here = f"{max(devices // per_node, 1)}x{min(devices, per_node)}x{name}"
    made = cluster(f"{here}@{rate}" if rate else here)
    if not rate and network:
        made = replace(made, network=replace(made.network, bandwidth=network))
    return made


_BY_FRAMEWORK = {
    "Megatron-LM": "megatron-2021",
    "Megatron-DeepSpeed": "megatron-deepspeed",
    "DeepSpeed": "deepspeed-zero3",
    "llm-foundry": "llm-foundry",
    "llm-foundry-memory": "llm-foundry",
    "torchtitan": "torchtitan",
    "InternEvo": "internevo",
    "ZeroBubble-Megatron": "zero-bubble",
    "PyTorch (NVIDIA examples)": "nvidia-examples",
    "AA-Megatron": "aa-megatron-flash",
    "NeMo-MLPerf": "nemo",
}


def _habits(row: Row) -> str:
    """The name of the preset that a row's framework had, with the kernels and options that its note names."""
    name, note = _BY_FRAMEWORK.get(row.text("framework"), "phalanx"), row.text("note")
    hopper = _is_hopper(row)
    if name == "megatron-2021" and hopper:
        return "megatron-core"
    if name == "llm-foundry" and hopper:
        return "llm-foundry-hopper"
    if name == "torchtitan":
        joined = "torchtitan-compiled" if row.truth("compile") else "torchtitan"
        return "torchtitan-async" if row.truth("compile") and "async_tp=True" in note else joined
    if name == "aa-megatron-flash":
        kernel = note.split(";")[0].lower()
        for word, kind in _KERNELS:
            if word in kernel:
                return f"aa-megatron-{kind}"
    if name == "zero-bubble" and "zb-2p" in note.lower():
        return "zero-bubble-2p"
    return name


def _is_hopper(row: Row) -> bool:
    return row.text("device").startswith(("H100", "H200"))


_KERNELS = (("rms", "flash-rms"), ("attention2", "flash"), ("flash", "flash1"), ("fused", "scores"), ("torch", "eager"))
