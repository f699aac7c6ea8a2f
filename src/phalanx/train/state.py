"""What a checkpoint holds of a training, by name, and how it comes back under any plan."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from phalanx.config import Job
from phalanx.errors import CheckpointError
from phalanx.parallel import Held, Layout
from phalanx.train.assembly import Assembly
from phalanx.train.precision import LossScale
from phalanx.train.sending import SENDER_SECTION, restore_sender, sender_tensors
from phalanx.train.together import OUTER_SECTION, outer_tensors, restore_outer

if TYPE_CHECKING:
    from phalanx.checkpoint import Part, Pieces


def save(folder: Path, job: Job, assembly: Assembly, *, keep: int) -> Path:
    """Write a checkpoint of this moment into ``folder``. Collective."""
    from phalanx import checkpoint  # not before the first step: it takes half as long to load as torch

    progress = assembly.step.progress
    held = assembly.layout.held
    tensors, groups = checkpoint.optimizer_tensors(assembly.optimizer, held.parameters, parts(held))
    outer, told = outer_tensors(assembly, parts(held))
    state = {
        "identity": identity(job, assembly.loader.length),
        "step": progress.step,
        "samples": progress.samples,
        "divisor": progress.divisor,
        "loss_scale": asdict(progress.loss_scale) if progress.loss_scale else None,
        "optimizer": groups,
        SENDER_SECTION: held.sender.kind if held.sender else None,
        OUTER_SECTION: told,
    }
    tensors |= sender_tensors(held) | outer
    return checkpoint.save(
        folder, step=progress.step, tensors={**model_tensors(assembly.layout), **tensors}, state=state, keep=keep
    )


def restore(path: Path, job: Job, assembly: Assembly) -> None:
    """Bring a training back to where ``path`` was written. Collective.

    Values, optimizer state and progress come from the checkpoint. Hyper-parameters (``lr``, ``weight_decay``,
    ``betas``, ...) are the job's as it is now: who edits them and resumes trains on with the new ones. So what an
    optimizer keeps in its parameter groups rather than in its state begins anew.

    Raises:
        CheckpointError: if the checkpoint is of another model or another job.
    """
    from phalanx import checkpoint

    state = checkpoint.read_state(path)
    _same_job(state["identity"], identity(job, assembly.loader.length), path)
    with torch.no_grad():
        checkpoint.load(path, model_tensors(assembly.layout))
        own = [_hyper_parameters(group) for group in assembly.optimizer.param_groups]
        held = assembly.layout.held
        checkpoint.restore_optimizer(assembly.optimizer, held.parameters, path, parts(held))
        for group, values in zip(assembly.optimizer.param_groups, own, strict=True):
            _reset(group, values)
        if lost := restore_sender(path, held, state):
            assembly.notes.append(lost)
    assembly.layout.stepped()
    restore_outer(assembly, path, state, parts(held))
    progress = assembly.step.progress
    progress.step, progress.samples, progress.divisor = state["step"], state["samples"], state["divisor"]
    if progress.loss_scale and state["loss_scale"]:
        progress.loss_scale = LossScale(**state["loss_scale"])


def model_tensors(layout: Layout) -> dict[str, torch.Tensor | Pieces]:
    """Every tensor of the model once, as ``model.<name>``: what the optimizer steps, frozen parameters, buffers.

    Those named in ``held.slices`` come with the part of the whole that they are.
    """
    trainable = layout.parameters
    found = {name: tensor.detach() for name, tensor in trainable.items()}
    trained = {id(tensor) for name, tensor in layout.module.named_parameters() if name in trainable}
    seen: set[int] = set()
    for name, tensor in layout.module.state_dict(keep_vars=True).items():
        if isinstance(tensor, torch.Tensor) and id(tensor) not in trained and id(tensor) not in seen:
            seen.add(id(tensor))
            found[name] = tensor.detach()
    sliced = parts(layout.held)
    return {f"model.{name}": _with(tensor, sliced.get(name)) for name, tensor in found.items()}


def parts(held: Held) -> dict[str, Part]:
    """What each tensor in ``held.slices`` is of the whole, in the words of checkpoints, which know no meshes."""
    if not held.slices:
        return {}
    from phalanx.checkpoint import Part

    return {
        name: Part(
            shape=tuple(holding.shape),
            ranges={one.dim: one.cut.expanded()[one.axis.rank] for one in holding.placed},
            counts=holding.counts,
        )
        for name, holding in held.slices.items()
    }


def _with(tensor: torch.Tensor, part: Part | None) -> torch.Tensor | Pieces:
    if part is None:
        return tensor
    from phalanx.checkpoint import Pieces

    return Pieces(tensor, part)


def identity(job: Job, length: int | None) -> dict[str, Any]:
    """What must not change between the parts of one run, for step k to mean the same samples."""
    return {
        "batch": job.batch,
        "seed": job.seed,
        "samples": length,
        "drop_last": job.drop_last,
        "shuffle": job.shuffle,
    }


def _hyper_parameters(group: dict[str, Any]) -> dict[str, Any]:
    """All of a parameter group but its parameters; tensors as copies, for restoring fills them in place."""
    return {
        key: value.detach().clone() if isinstance(value, torch.Tensor) else value
        for key, value in group.items()
        if key != "params"
    }


def _reset(group: dict[str, Any], values: dict[str, Any]) -> None:
    for key, value in values.items():
        if isinstance(value, torch.Tensor) and isinstance(group[key], torch.Tensor):
            group[key].copy_(value)
        else:
            group[key] = value


def _same_job(saved: dict[str, Any], now: dict[str, Any], path: Path) -> None:
    other = [f"{key}: {saved.get(key)} there, {now[key]} now" for key in now if saved.get(key) != now[key]]
    if other:
        raise CheckpointError(
            f"{path} belongs to another job ({'; '.join(other)}): a step would mean other samples.\n"
            "    try: the job as it was, or a new run folder"
        )
