"""A trained model as the user wrote it: built by its job, with the values of a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from phalanx.config import Job
from phalanx.errors import SpecError
from phalanx.units import show_names


def trained_model(job: Job, values: Mapping[str, Tensor], where: str) -> nn.Module:
    """The job's model with ``values``, in evaluation mode; of tied tensors one name among them suffices.

    Args:
        values: by name; whole.
        where: they come from, for the error.

    Raises:
        SpecError: names or shapes are another model's.
    """
    with torch.random.fork_rng(devices=[]):
        module: Any = job.model()
    if not isinstance(module, nn.Module):
        raise SpecError.of("job.model", f"a {type(module).__name__}", "a torch.nn.Module", "model=lambda: Net()")
    return with_values(module, values, where).eval()


def with_values(module: nn.Module, values: Mapping[str, Tensor], where: str) -> nn.Module:
    """``module`` with ``values``, which come from ``where``; of tied tensors one name among them suffices.

    Raises:
        SpecError: names or shapes are another model's.
    """
    own = {name: tensor for name, tensor in module.state_dict(keep_vars=True).items() if isinstance(tensor, Tensor)}
    names = {id(tensor): name for name, tensor in own.items() if name in values}
    problems = {
        "missing there": [name for name, tensor in own.items() if id(tensor) not in names],
        "only there": [name for name in values if name not in own],
        "other shape": [
            f"{name} {list(own[name].shape)} here, {list(value.shape)} there"
            for name, value in values.items()
            if name in own and own[name].shape != value.shape
        ],
    }
    if said := [f"{what} ({len(found)}): {show_names(sorted(found), 10)}" for what, found in problems.items() if found]:
        given = f"a model that {where} does not fit: {'; '.join(said)}"
        raise SpecError.of("job.model", given, "the model that the run has trained", "the job as it was in the run")
    bare = any(tensor.is_meta for tensor in own.values())
    module.load_state_dict({name: values[names[id(tensor)]] for name, tensor in own.items()}, strict=False, assign=bare)
    return module
