"""The content of a training's checkpoint, by name, and its restoring; also for independent replicas."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from phalanx import checkpoint
from phalanx.checkpoint.all_ranks import on_all_ranks
from phalanx.checkpoint.sections import AVERAGE, FROZEN, MODEL, OPTIMIZER, OUTER, SENDER, name_in, put_in
from phalanx.comm import from_every_rank, local
from phalanx.config import Job
from phalanx.errors import CheckpointError
from phalanx.parallel import Layout, LocalSgd, RankHoldings
from phalanx.parallel.diloco import flattened
from phalanx.parallel.grad_reduce import spread
from phalanx.train.adapters import SECTION as ADAPTERS
from phalanx.train.adapters import adapters_of
from phalanx.train.assembly import Assembly
from phalanx.train.frozen_values import fingerprints_of, frozen_of, refuse_other
from phalanx.train.loss_scaling import LossScale

if TYPE_CHECKING:
    from phalanx.checkpoint import PartTensor, TensorPart

FILES = "files of the data"


def training_state(path: Path) -> dict[str, Any]:
    """Return the checkpoint's state beside the tensors, from folder ``path``. Collective.

    Raises:
        DamagedError: it is damaged.
        CheckpointError: it was not saved by a run.
    """

    def read() -> dict[str, Any]:
        state = checkpoint.read_state(path)
        kinds = {"identity": dict, "step": int, "samples": int, "optimizer": dict}
        if wrong := [key for key, kind in kinds.items() if not isinstance(state.get(key), kind)]:
            raise CheckpointError(f"{path} was not saved by a run: its state has no {', '.join(wrong)}")
        return {"divisor": None, "loss_scale": None, **state}

    return on_all_ranks(read)


def to_save(
    folder: Path, job: Job, assembly: Assembly, *, keep: int, keep_every: int | None = None
) -> checkpoint.SaveRequest:
    """Return a checkpoint of this moment, to be written into ``folder``. Collective."""
    progress = assembly.step.progress
    held = assembly.layout.holdings
    tensors, groups = checkpoint.optimizer_tensors(assembly.optimizer, held.parameters, parts(held))
    outer, told = outer_tensors(assembly, parts(held))
    state = {
        "identity": identity(job, assembly.loader.told),
        "step": progress.step,
        "samples": progress.samples,
        "divisor": progress.divisor,
        "loss_scale": asdict(progress.loss_scale) if progress.loss_scale else None,
        OPTIMIZER: groups,
        "model_config": model_config(assembly.layout.module),
        ADAPTERS: adapters_of(assembly.layout.module),
        SENDER: held.sender.kind if held.sender else None,
        OUTER: told,
        FROZEN: assembly.frozen or None,
        SCHEDULER: assembly.step.scheduler.state() if assembly.step.scheduler else None,
        AVERAGE: assembly.step.average.state() if assembly.step.average else None,
    }
    tensors = {**model_tensors(assembly.layout, assembly.frozen), **tensors, **sender_tensors(held), **outer}
    infinite = buffer_names(assembly.layout)
    if average := assembly.step.average:
        tensors |= average.to_save(parts(held))
        infinite |= average.buffer_names()
    return checkpoint.SaveRequest(
        folder, progress.step, tensors, state, keep=keep, keep_every=keep_every or 0, infinite=infinite
    )


def model_config(module: torch.nn.Module) -> dict[str, Any] | None:
    """Return the configuration of a model of transformers, as in its ``config.json``, or ``None``.

    ``None`` with adapters of peft, too: ``from_pretrained`` would not find the model's names among theirs.
    """
    config: Any = getattr(module, "config", None)
    if not hasattr(config, "to_json_string") or hasattr(module, "peft_config"):
        return None
    try:
        return {**json.loads(config.to_json_string()), "architectures": [type(module).__name__]}
    except (TypeError, ValueError):  # a class of the user's own
        return None


def restore(path: Path, job: Job, assembly: Assembly) -> None:
    """Restore a training from ``path``: values, optimizer state and progress. Collective.

    Raises:
        CheckpointError: if the checkpoint belongs to another model or another job.
    """
    state, held = training_state(path), assembly.layout.holdings
    refuse_other_job(state["identity"], identity(job, assembly.loader.told), path)
    left_out = state.get(FROZEN) or {}
    if left_out:
        refuse_other(left_out, assembly.frozen or frozen_fingerprints(assembly), path)
    scheduler, scheduled = assembly.step.scheduler, state.get(SCHEDULER)
    kept = scheduler.keys() if scheduler and scheduled else ()
    restore_values(path, assembly.layout, assembly.optimizer, kept, left_out)
    if scheduler and scheduled:
        scheduler.restore(scheduled)
    elif scheduler:
        assembly.notes.append("the checkpoint has no state of a scheduler: the job's begins anew.")
    with torch.no_grad():
        lost = restore_sender(path, held, state)
    assembly.notes.extend([lost] if lost else [])
    assembly.layout.stepped()
    restore_outer(assembly, path, state, parts(held))
    if average := assembly.step.average:
        lost = average.restore(path, state.get(AVERAGE), parts(held))
        assembly.notes.extend([lost] if lost else [])
    progress = assembly.step.progress
    progress.step, progress.samples, progress.divisor = state["step"], state["samples"], state["divisor"]
    if progress.loss_scale and state["loss_scale"]:
        progress.loss_scale = LossScale(**state["loss_scale"])


def restore_values(
    path: Path,
    layout: Layout,
    optimizer: torch.optim.Optimizer,
    kept: Sequence[frozenset[str]] = (),
    left_out: Collection[str] = (),
) -> None:
    """Restore the model's values and the optimizer's state. Collective.

    Hyper-parameters (``lr``, ``weight_decay``, ``betas``, ...) are the job's present ones, so a user can edit them and
    resume. Only the ``kept`` ones of each group, which a scheduler sets, are restored. So values that an optimizer
    keeps in its parameter groups, not in its state, begin anew. Values ``left_out`` of the checkpoint are unchanged.
    """
    groups = optimizer.param_groups
    own = [
        _hyper_parameters(group, keys) for group, keys in zip(groups, kept or [frozenset()] * len(groups), strict=True)
    ]
    with torch.no_grad():
        checkpoint.load(path, model_tensors(layout, left_out))
        checkpoint.restore_optimizer(optimizer, layout.holdings.parameters, path, parts(layout.holdings))
        for group, values in zip(optimizer.param_groups, own, strict=True):
            _reset(group, values)


def frozen_fingerprints(assembly: Assembly) -> dict[str, str]:
    """Return the fingerprint of each untrained parameter. Collective."""
    layout = assembly.layout
    return fingerprints_of(frozen_of(layout, model_tensors(layout)), assembly.from_every_rank)


def model_tensors(layout: Layout, left_out: Collection[str] = ()) -> dict[str, torch.Tensor | PartTensor]:
    """Return every tensor of the model once, as ``model.<name>``: stepped and frozen parameters, and buffers.

    Names in ``left_out``, in this form, are omitted. Those in ``held.slices`` come with their part of the whole.
    """
    trainable = layout.parameters
    found = {name: tensor.detach() for name, tensor in trainable.items()}
    trained = {id(tensor) for name, tensor in layout.module.named_parameters() if name in trainable}
    seen: set[int] = set()
    for name, tensor in layout.module.state_dict(keep_vars=True).items():
        if isinstance(tensor, torch.Tensor) and id(tensor) not in trained and id(tensor) not in seen:
            seen.add(id(tensor))
            found[name] = tensor.detach()
    sliced = parts(layout.holdings)
    named = put_in(MODEL, {name: _with(tensor, sliced.get(name)) for name, tensor in found.items()})
    return {name: held for name, held in named.items() if name not in left_out}


def buffer_names(layout: Layout) -> set[str]:
    """Return the names of buffers in ``model_tensors``: a mask may be infinite, a parameter may not."""
    own = {name for name, _ in layout.module.named_buffers(remove_duplicate=False)}
    return {name_in(MODEL, name) for name in own if name not in layout.parameters}


def parts(held: RankHoldings) -> dict[str, TensorPart]:
    """Return the part of the whole for each tensor in ``held.slices``, in the terms of checkpoints."""
    if not held.slices:
        return {}
    return {
        name: checkpoint.TensorPart(
            shape=tuple(holding.shape),
            ranges={one.dim: one.cut.expanded()[one.axis.rank] for one in holding.placed},
            counts=holding.counts,
        )
        for name, holding in held.slices.items()
    }


def _with(tensor: torch.Tensor, part: TensorPart | None) -> torch.Tensor | PartTensor:
    return tensor if part is None else checkpoint.PartTensor(tensor, part)


def identity(job: Job, data: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the facts that must not change within one run, so that step k has the same samples.

    ``data`` are the facts ``told`` by a ``Loader``; by default the job's own.
    """
    own = {
        "batch": job.batch,
        "seed": job.seed,
        "drop_last": job.drop_last,
        "shuffle": job.shuffle,
        "batch_tokens": None if job.batch_tokens is None else job.batch_tokens.tokens,
        "batch_ramp": None if job.batch_ramp is None else str(dict(job.batch_ramp)),
    }
    if data is None:
        return own
    return own | {"samples": data["length"], "sampler": data["order"] or None, FILES: data["files"]}


def _hyper_parameters(group: dict[str, Any], kept: frozenset[str]) -> dict[str, Any]:
    """Return a parameter group without parameters and ``kept`` keys; tensors are copied, as restoring fills them."""
    return {
        key: value.detach().clone() if isinstance(value, torch.Tensor) else value
        for key, value in group.items()
        if key != "params" and key not in kept
    }


def _reset(group: dict[str, Any], values: dict[str, Any]) -> None:
    for key, value in values.items():
        if isinstance(value, torch.Tensor) and isinstance(group[key], torch.Tensor):
            group[key].copy_(value)
        else:
            group[key] = value


def refuse_other_job(saved: dict[str, Any], now: dict[str, Any], path: Path) -> None:
    """Refuse the checkpoint ``path``, of the job with identity ``saved``, if it differs from ``now``.

    Raises:
        CheckpointError: with the differences.
    """
    saved = {FILES: now[FILES], **saved}  # of an earlier version it is not known
    if other := [f"{key}: {saved.get(key)} there, {now[key]} now" for key in now if saved.get(key) != now[key]]:
        raise CheckpointError(
            f"{path} belongs to another job ({'; '.join(other)}): a step would mean other samples.\n"
            "    try: the job as it was, or a new run folder"
        )


def come_together(assembly: Assembly) -> None:
    """Make independent replicas equal: average parameters, optimizer state and loss scale. Collective."""
    if (apart := assembly.local_sgd) is None:
        return
    apart.together()
    with torch.no_grad():
        _average_state(assembly, apart)
    progress = assembly.step.progress
    if progress.loss_scale:
        progress.loss_scale = LossScale(**apart.across.from_counterparts(asdict(progress.loss_scale))[0])


def outer_tensors(assembly: Assembly, parts: Mapping[str, TensorPart]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the outer momentum by name, to save beside the model, and the value of ``state["outer"]``."""
    momentum = assembly.local_sgd.momentum() if assembly.local_sgd else {}
    return _named(momentum, parts), {"momentum": bool(momentum)}


def restore_outer(assembly: Assembly, path: Path, state: Mapping[str, Any], parts: Mapping[str, TensorPart]) -> None:
    """Restart independent replicas from the restored values, with a saved outer momentum. Collective."""
    if assembly.local_sgd is None:
        return
    found: dict[str, torch.Tensor] = {}
    if (state.get(OUTER) or {}).get("momentum"):
        found = assembly.local_sgd.room_for_momentum()
        checkpoint.load(path, _named(found, parts))
    assembly.local_sgd.restored(state["step"], found)


def _named(
    momentum: Mapping[str, torch.Tensor], parts: Mapping[str, TensorPart]
) -> dict[str, torch.Tensor | PartTensor]:
    return put_in(OUTER, {name: _with(tensor, parts.get(name)) for name, tensor in momentum.items()})


def _average_state(assembly: Assembly, apart: LocalSgd) -> None:
    """Return the mean of the replicas' optimizer states; step counts become the largest."""
    states = _same_states(assembly, apart)
    numbers = [
        (key, value)
        for state in states
        for key, value in state.items()
        if isinstance(value, torch.Tensor) and value.is_floating_point()
    ]
    steps = [value for key, value in numbers if key == "step"]
    most = [max(each) for each in zip(*apart.across.from_counterparts([float(one) for one in steps]), strict=True)]
    for one, largest in zip(steps, most, strict=True):
        one.fill_(largest)
    values = [local(value) for key, value in numbers if key != "step"]
    spread(values, apart.mean(flattened(values)))


def _same_states(assembly: Assembly, apart: LocalSgd) -> list[dict[str, Any]]:
    """Return the state keys of each parameter that any replica has, in order.

    A parameter unused so far by a replica has no state there, and gets zeros.
    """
    parameters, known = assembly.layout.parameters, assembly.optimizer.state
    here = {name: _forms(known[tensor]) for name, tensor in parameters.items() if known.get(tensor)}
    anywhere: dict[str, dict[str, Any]] = {}
    for there in apart.across.from_counterparts(here):
        anywhere = there | anywhere
    for name in anywhere.keys() - here.keys():
        tensor = parameters[name]
        for key, form in anywhere[name].items():
            alike = form == list(local(tensor).shape)
            known[tensor][key] = torch.zeros_like(tensor, requires_grad=False) if alike else torch.zeros(form)
    return [known[parameters[name]] for name in parameters if name in anywhere]


def _forms(state: Mapping[str, Any]) -> dict[str, list[int]]:
    return {key: list(local(value).shape) for key, value in state.items() if isinstance(value, torch.Tensor)}


SCHEDULER = "scheduler"
"""The key of a checkpoint's state that has what ``TorchScheduler.state`` gave; null where the job gives none."""


def sender_tensors(held: RankHoldings) -> dict[str, torch.Tensor]:
    """Return the compression losses of gradients, to save or fill in place; empty without any. Collective.

    Ranks need not save their own: only the sum matters, and each continues with the mean.
    """
    if held.sender is None:
        return {}
    return put_in(SENDER, held.sender.tensors())


def restore_sender(path: Path, held: RankHoldings, state: Mapping[str, Any]) -> str:
    """Restore the sender's losses from the checkpoint ``path``; return a sentence if there are none. Collective."""
    targets = sender_tensors(held)
    if held.sender is None or not targets:
        return ""
    if state.get(SENDER) != held.sender.kind:
        return f"the checkpoint is not of {held.sender.kind}: what was left out of gradients before it is lost."
    checkpoint.load(path, targets)
    return ""


def traffic(held: RankHoldings) -> list[dict[str, Any]]:
    """Return fields of each rank's ``traffic`` event; empty without compression. Collective."""
    if held.sender is None:
        return []
    return [{"rank": rank, **sent} for rank, sent in enumerate(from_every_rank(asdict(held.sender.traffic)))]
