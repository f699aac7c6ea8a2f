"""Adapters of peft in a checkpoint, exported alone or merged into their base.

peft writes both, from the model with the checkpoint's values. The job builds that model; without a job it is built from
the checkpoint's description, without running the user's code.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Any

import torch
from torch import nn

from phalanx.checkpoint import Exported, ExportForm, export, model_tensors
from phalanx.checkpoint.export import refuse_target, written
from phalanx.checkpoint.reading import read_state
from phalanx.config import Job
from phalanx.errors import MissingExtraError, Problem, SpecError
from phalanx.train.frozen_values import completed, left_out
from phalanx.train.trained_model import trained_model, with_values
from phalanx.units import show_names

SECTION = "adapters"
"""What of a checkpoint's state says how its model is built: its base, and the adapters that peft has put into it."""


def adapters_of(module: nn.Module) -> dict[str, Any] | None:
    """Return the JSON from which a model of ``peft.get_peft_model`` is built again; ``None`` for other models."""
    if not _is_adapted(module):
        return None
    model: Any = module
    base = model.get_base_model()
    try:
        config = json.loads(base.config.to_json_string())
        adapters = {name: _plain(one.to_dict()) for name, one in model.peft_config.items()}
        json.dumps(adapters)
    except (AttributeError, TypeError, ValueError):  # no model of transformers, or a config with code in it
        return None
    kind = next((one for one in type(base).__mro__ if one.__module__.startswith("transformers.models.")), type(base))
    own = kind.forward is not type(base).forward  # a class of the user's own is not to be had from its name
    return {
        "base": config,
        "class": "" if own else kind.__name__,
        "adapters": adapters,
        "active": _plain(model.active_adapter),
    }


def export_model(path: Path, target: Path, form: ExportForm, *, job: Job | None = None) -> Exported:
    """Write the content ``form`` of the checkpoint ``path`` to ``target``; a model as ``phalanx.checkpoint.export``.

    Frozen values missing in the checkpoint are the job's, if they equal those at the begin of the run.

    For adapters, or the base with merged adapters, ``target`` is a folder, and the whole model is in memory once, on
    the CPU. Adapters have peft's names and ``adapter_config.json``; a merged model is the result of peft's
    ``merge_and_unload``, with ``config.json``. Among several adapters the active ones are merged, before the conversion
    to ``form.dtype``.

    Args:
        job: builds a model with adapters, and has values missing in a checkpoint; by default the model is built from
            the checkpoint's description.

    Raises:
        SpecError: the model is not peft's, training changed more than its adapters, the target exists, or the
            checkpoint holds trained values only, and there is no job.
        CheckpointError: the checkpoint is damaged, the target cannot be written, or the job has other frozen values.
        MissingExtraError: peft is not installed.
    """
    path, target = Path(path), Path(target)
    if form.content == "model":
        return export(path, target, form, left_out=left_out(job, path))
    if target.suffix == ".safetensors":
        raise SpecError.of("target", str(target), "a folder: tensors and a configuration", str(target.with_suffix("")))
    refuse_target(target)
    try:
        import peft  # noqa: F401
    except ImportError:
        raise MissingExtraError("peft", "peft") from None
    model: Any = _model(path, job, averaged=form.averaged)
    if form.content == "adapter":
        _refuse_more_than_adapters(model, path)
    else:
        model = _merged(model)
    model = model if form.dtype is None else model.to(form.dtype)
    with written(target) as partial:
        model.save_pretrained(str(partial))
    files = sorted(file for file in target.rglob("*") if file.is_file())
    tensors, nbytes = _tensors_in([file for file in files if file.suffix == ".safetensors"])
    return Exported(files=tuple(files), tensors=tensors, nbytes=nbytes, configured=True)


def _is_adapted(module: Any) -> bool:
    return hasattr(module, "peft_config") and hasattr(module, "get_base_model")


def _model(path: Path, job: Job | None, *, averaged: bool) -> nn.Module:
    values = completed(job, path, model_tensors(path, averaged=averaged))
    if job is not None:
        model = trained_model(job, values, str(path))
        if not _is_adapted(model):
            raise SpecError([_no_adapters(f"a {type(model).__name__}")])
        return model
    section = read_state(path).get(SECTION)
    kind = section and _class_of(section)
    if section and kind:
        return with_values(_built(section, kind, values), values, str(path)).eval()
    if not section and not any(".lora_" in name or ".base_layer." in name for name in values):
        raise SpecError([_no_adapters(f"the model of {path}")])
    given = f"none for {path}, which does not say how its model is built: it is no class of transformers, or older"
    allowed = "the job, which builds it"
    raise SpecError.of("job", given, allowed, "px.load(folder, job()).save_pretrained(target, adapter=True)")


def _no_adapters(given: str) -> Problem:
    allowed = "a model that peft.get_peft_model has put adapters into"
    return Problem(where="run", given=f"{given}, without adapters", allowed=allowed, fix="run.save_pretrained(target)")


def _class_of(section: Mapping[str, Any]) -> Any:
    import transformers

    return getattr(transformers, section["class"], None) if section["class"] else None


def _built(section: Mapping[str, Any], kind: Any, values: Mapping[str, torch.Tensor]) -> nn.Module:
    import peft

    configs = {name: peft.PeftConfig.from_peft_type(**dict(one)) for name, one in section["adapters"].items()}
    names = list(configs)
    with torch.random.fork_rng(devices=[]):
        base = kind(kind.config_class.from_dict(dict(section["base"])))
        first: Any = configs[names[0]]
        model: Any = peft.MODEL_TYPE_TO_PEFT_MODEL_MAPPING.get(first.task_type, peft.PeftModel)(base, first, names[0])
        for name in names[1:]:
            model.add_adapter(name, configs[name])
    model.base_model.set_adapter(section["active"])
    for name, tensor in model.state_dict(keep_vars=True).items():
        if name in values:
            tensor.data = tensor.data.to(values[name].dtype)
    return model


def _refuse_more_than_adapters(model: Any, path: Path) -> None:
    from peft import get_peft_model_state_dict

    states = [get_peft_model_state_dict(model, adapter_name=name) for name in model.peft_config]
    kept = {tensor.data_ptr() for state in states for tensor in state.values()}
    groups = (read_state(path).get("optimizer") or {}).get("groups", [])
    stepped = {name for group in groups for name in group["parameters"]}
    others = [
        name
        for name, one in model.state_dict(keep_vars=True).items()
        if one.data_ptr() not in kept and (one.requires_grad or name in stepped or name.endswith("running_mean"))
    ]
    if others:
        given = f"a model that has trained more than its adapters: {show_names(others)}"
        allowed = "one whose other values are as they were; or merged=True, which holds everything"
        module = others[0].rpartition(".")[0].rpartition(".")[2]
        raise SpecError.of("adapter", given, allowed, f"peft.LoraConfig(..., modules_to_save=[{module!r}])")


def _merged(model: Any) -> nn.Module:
    base, tuner = model.get_base_model(), model.base_model
    if not hasattr(tuner, "merge_and_unload"):
        kinds = ", ".join(sorted({str(_plain(one.peft_type)) for one in model.peft_config.values()}))
        allowed = "adapters that are added to weights, such as LoRA"
        raise SpecError.of("merged", f"adapters of {kinds}, which peft cannot merge", allowed, "adapter=True")
    if not hasattr(base, "save_pretrained"):
        given, fix = f"a base that is a {type(base).__name__}", "model = run.model().merge_and_unload()"
        raise SpecError.of("merged", given, "a model of transformers, which writes itself", fix)
    return model.merge_and_unload()


def _plain(value: Any) -> Any:
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, set | frozenset):
        return sorted(map(_plain, value))
    if isinstance(value, tuple | list):
        return [_plain(one) for one in value]
    if isinstance(value, Mapping):
        return {str(key): _plain(one) for key, one in value.items()}
    return value


def _tensors_in(files: list[Path]) -> tuple[int, int]:
    from safetensors import safe_open

    tensors = nbytes = 0
    for file in files:
        with safe_open(str(file), "pt") as opened:
            for name in opened.keys():  # noqa: SIM118
                one = opened.get_tensor(name)
                tensors, nbytes = tensors + 1, nbytes + one.numel() * one.element_size()
    return tensors, nbytes
