"""A check, before any process starts, that a run may resume from a checkpoint: the same model, and the same data."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

from torch import nn

from phalanx.checkpoint import latest, read_state
from phalanx.checkpoint.format import Manifest
from phalanx.checkpoint.sections import FROZEN, MODEL, OPTIMIZER, name_in, take_out
from phalanx.config import Job, RunSpec
from phalanx.config.run_files import CHECKPOINTS
from phalanx.errors import CheckpointError, SpecError
from phalanx.train.few_samples import whole_loader
from phalanx.train.state import FILES, identity
from phalanx.units import show_names


def checkpoint_of(run: RunSpec) -> Path | None:
    """Return the checkpoint from which ``run`` resumes, as far as its folder says, or ``None``."""
    folder = run.folder / CHECKPOINTS
    if run.resume is not True or not folder.is_dir():
        return None
    if run.from_step is None:
        return latest(folder)
    steps = {path.name.removeprefix("step-"): path for path in folder.glob("step-*")}
    return next((path for step, path in steps.items() if step.isdigit() and int(step) == run.from_step), None)


def refuse_another_model(path: Path, module: nn.Module) -> None:
    """Refuse the checkpoint ``path`` for a model with other parameter names or shapes. It may be damaged.

    Workers compare everything else when they load it, buffers included.

    Raises:
        SpecError: with the parameters that differ.
    """
    with suppress(CheckpointError):  # the workers resume from the one before it, or report the error
        manifest, state = Manifest.read(path), read_state(path)
        _refuse_another_model(path, manifest, set(state.get(FROZEN) or ()), module)


def _refuse_another_model(path: Path, manifest: Manifest, left_out: set[str], module: nn.Module) -> None:
    stored = {name: list(one.shape) for name, one in take_out(MODEL, manifest.tensors).items()}
    if not stored:
        return
    here = {name: list(one.shape) for name, one in module.named_parameters()}
    known = module.state_dict(keep_vars=True).keys() | here.keys()
    stepped = {name.removeprefix(f"{OPTIMIZER}.").rpartition(".")[0] for name in manifest.tensors}
    missing = [name for name in here if name not in stored and name_in(MODEL, name) not in left_out]
    extra = [name for name in stored if name not in known and (missing or name in stepped)]
    other = [
        f"{name} {here[name]} now, {stored[name]} there" for name in here if here[name] != stored.get(name, here[name])
    ]
    said = {"only in the model": missing, "only in the checkpoint": extra, "other shapes": other}
    if differs := "; ".join(f"{what}: {show_names(names, 5)}" for what, names in said.items() if names):
        raise SpecError.of(
            where="run.resume",
            given=f"{path}, which is of another model ({differs})",
            allowed="the model as it was",
            fix=f'the model as it was; or folder="{path.parents[1]}-anew", a run of its own',
        )


def refuse_other_data(path: Path, job: Job) -> None:
    """Refuse the checkpoint ``path`` for data of another length, order or files. Invalid data are left to a worker.

    Raises:
        SpecError: a step would mean other samples.
    """
    try:
        saved: Any = read_state(path).get("identity")
        now = identity(job, whole_loader(job).told)
    except SpecError:
        raise
    except Exception:
        return
    if not isinstance(saved, dict):
        return
    names = {"samples": "samples of the data", "sampler": "their order", FILES: FILES}
    differs = [
        f"{said}: {saved[key]} there, {now[key]} now"
        for key, said in names.items()
        if key in saved and saved[key] != now[key]
    ]
    if differs:
        raise SpecError.of(
            where="run.resume",
            given=f"{path}, which belongs to another job ({'; '.join(differs)})",
            allowed="the data as they were: else a step would mean other samples",
            fix=f'the data as they were; or folder="{path.parents[1]}-anew", a run of its own',
        )
