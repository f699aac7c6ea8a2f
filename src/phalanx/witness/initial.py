"""A job's model with its initial values, made as a script would make it: ``load_state_dict`` of whole files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor, nn

from phalanx.config import Job, Pretrained


def initial_model(job: Job) -> nn.Module:
    """Return the job's model, with the values of ``job.initial`` if it has one."""
    model: nn.Module = job.model()
    for part in model.modules():
        config: Any = getattr(part, "config", None)
        if getattr(config, "use_cache", False):
            config.use_cache = False
    if job.initial is None:
        return model
    path = Path(Pretrained.of(job.initial).path)
    index = path / "model.safetensors.index.json"
    files = [path if path.is_file() else path / "model.safetensors"]
    if index.is_file():
        files = [path / name for name in sorted(set(json.loads(index.read_text())["weight_map"].values()))]
    values: dict[str, Tensor] = {}
    for file in files:
        values |= load_file(file)
    base = getattr(model, "base_model_prefix", "") or "-"
    for name in [name for name in model.state_dict() if name not in values]:
        other = name.removeprefix(f"{base}.") if name.startswith(f"{base}.") else f"{base}.{name}"
        if other in values:
            values[name] = values[other]
    model.load_state_dict(values, strict=False, assign=any(tensor.is_meta for tensor in model.parameters()))
    return model
