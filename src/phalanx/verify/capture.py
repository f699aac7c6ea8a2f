"""What a proof looks at: a few steps of a job under a plan, with losses, first gradients and final parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from phalanx.comm import Place, device_for, is_dtensor, joined, local, place_within
from phalanx.parallel import Apart, Held, device_kind
from phalanx.parallel.fragments import flattened, spread
from phalanx.spec import Job, Plan
from phalanx.train.assembly import build, build_model
from phalanx.verify.auxiliary import auxiliary_gradients
from phalanx.verify.prints import prints_of
from phalanx.verify.trace import trace_to_json, traceable, traced


def capture(job: Job, plan: Plan, steps: int, folder: Path) -> Callable[[Place, Callable[[int], None]], dict[str, Any]]:
    """A worker's work: ``steps`` steps of ``job`` under ``plan``, tensors written whole into ``folder``.

    The first rank of each pipeline stage writes those that are there, into a folder called after it.

    It returns, as JSON: ``losses`` and ``skipped`` updates by step, ``ids`` of the first step's samples on this rank,
    prints of what this rank holds of each parameter at the ``start`` and the ``end`` and of the first ``gradients``,
    the ``trace`` of the first step, and ``notes``.
    """
    given = replace(job, model=without_dropout(job))
    short = replace(given, steps=steps, epochs=None, evaluate=None, metrics=None, evaluate_every=0)

    def work(place: Place, report: Callable[[int], None]) -> dict[str, Any]:
        switch_off_dropout()
        device = device_for(place, device_kind(plan, place.workers_here * plan.threads))
        with joined(place_within(plan, place), device):
            assembly = build(short, plan, place)
            step, held = assembly.step, assembly.layout.held
            parameters, whole = held.parameters, dict(held.module.named_parameters())
            gradients: dict[str, Any] = {}
            trace: dict[str, Any] = {}
            start = prints_of(whole, held.slices)
            _write(folder, "initial", parameters, held, plan, place)
            if scaling := step.progress.loss_scale:
                # What one backward adds up decides whether a borderline step overflows: stay away from the border.
                scaling.scale /= 2**6
            metrics: list[Any] = []
            losses: list[float] = []
            ids: list[int] = []
            for batch in assembly.loader:
                report(batch.step)
                if batch.step == 0 and plan.kind == "single" and (alone := auxiliary_gradients(step, batch)):
                    save_file(alone, folder / "auxiliary-0.safetensors")
                with traced(held.module) if batch.step == 0 and traceable(plan) else nullcontext({}) as passed:
                    totals = step.backward(batch)
                if batch.step == 0:
                    ids = [one for part in batch.parts for micro in part for one in micro.ids]
                    grads = {name: tensor.grad for name, tensor in parameters.items() if tensor.grad is not None}
                    grads = _mean(grads, float(totals[1]), assembly.apart) if assembly.apart else grads
                    _write(folder, "gradients", grads, held, plan, place)
                    gradients, trace = prints_of(grads, held.slices), trace_to_json(passed)
                metrics.append(step.update(batch, totals))
                losses.append(_loss(totals, assembly.apart) if assembly.apart else metrics[-1].loss)
            _write(folder, "parameters", parameters, held, plan, place)
            return {
                "losses": losses,
                "skipped": [one.skipped for one in metrics],
                "lr": max((one.lr for one in metrics), default=0.0),
                "ids": ids,
                "start": start,
                "gradients": gradients,
                "trace": trace,
                "end": prints_of(whole, held.slices),
                "notes": assembly.notes,
            }

    return work


def _loss(totals: Any, apart: Apart) -> float:
    """The loss of the global batch, from those of replicas that step by themselves. Collective."""
    numbers = torch.tensor([float(one) for one in totals], dtype=torch.float64)
    apart.across.sum(numbers)
    return float(numbers[0] / numbers[1])


def _mean(grads: Mapping[str, torch.Tensor], count: float, apart: Apart) -> dict[str, torch.Tensor]:
    """The gradients of the global batch, from those of replicas that step by themselves. Collective."""
    found = {name: torch.empty_like(grad) for name, grad in grads.items()}
    with torch.no_grad():
        flat = apart.mean(flattened([local(grad) for grad in grads.values()]), count)
        spread([local(grad) for grad in found.values()], flat)
    return found


def model_of(job: Job) -> nn.Module:
    """The model with its initial values, built without changing the stream of torch's random numbers."""
    with torch.random.fork_rng(devices=[]):
        return build_model(job)


def recurrent_dropouts(module: nn.Module) -> list[str]:
    """Names of LSTM, GRU and RNN modules that drop between their layers."""
    return [name for name, child in module.named_modules() if isinstance(child, nn.RNNBase) and child.dropout > 0]


def without_dropout(job: Job) -> Callable[[], Any]:
    """The job's model function, with the rates of recurrent layers at zero: compiled code drops there."""

    def model() -> Any:
        built = job.model()
        if isinstance(built, nn.Module):
            for child in built.modules():
                if isinstance(child, nn.RNNBase):
                    child.dropout = 0.0
        return built

    return model


def switch_off_dropout() -> None:
    """Make every dropout of torch's functional interface the identity, in this process, from now on.

    Modules call these functions, so that theirs is off as well; training mode otherwise stays on.
    """
    functional = torch.nn.functional

    def identity(input: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        return input

    names = ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout")
    for name in names:
        setattr(functional, name, identity)
    attention = functional.scaled_dot_product_attention

    def without_dropout(
        query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0, *rest: Any, **named: Any
    ) -> Any:
        return attention(query, key, value, attn_mask, 0.0, *rest, **named)

    functional.scaled_dot_product_attention = without_dropout


def _write(folder: Path, what: str, tensors: Mapping[str, torch.Tensor], held: Held, plan: Plan, place: Place) -> None:
    at = plan.coordinate(place.rank)
    stage = at.pop("pp")
    writes = not any(at.values())
    whole: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        full = tensor.detach()
        full = full.full_tensor() if is_dtensor(full) else full
        if (holding := held.slices.get(name)) is not None:
            for one in holding.placed:
                full = one.axis.gather(full, one.dim, one.cut)
        if writes:
            whole[name] = full.to("cpu", copy=True).contiguous()
    if writes:
        save_file(whole, folder / f"{what}-{stage}.safetensors")
