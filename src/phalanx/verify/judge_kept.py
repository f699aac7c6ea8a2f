"""Compares what a run leaves behind: its evaluations, and the last checkpoint, read back."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from phalanx.verify import compare
from phalanx.verify.check import Check
from phalanx.verify.compare import Difference, Tolerance
from phalanx.verify.record import END, Record, Tensors


def evaluations(one: Record, other: Record, tolerance: Tolerance) -> Iterator[Check]:
    """Every evaluation says the same: the loss within what a step's may differ, metrics within what parameters may."""
    for step, here in one.evaluations.items():
        there = other.evaluations.get(step, {})
        pairs = {"loss": (here["loss"], there.get("loss", math.nan))}
        pairs |= {
            name: (value, there.get("metrics", {}).get(name, math.nan)) for name, value in here["metrics"].items()
        }
        off = {name: compare.apart(float(a), float(b)) for name, (a, b) in pairs.items()}
        # A loss is a mean over samples, here over fewer or more of them than in a step; a metric may be of any form.
        fewer = math.sqrt(max(1.0, (one.steps[0].samples or 0) / max(1, here["samples"])))
        within = {name: tolerance.loss * fewer if name == "loss" else tolerance.parameter for name in off}
        wrong = [
            f"{name} of the evaluation after step {step} is {pairs[name][1]}, not {pairs[name][0]}"
            for name, by in off.items()
            if not by <= within[name]
        ]
        if here["samples"] != there.get("samples"):
            wrong.append(f"samples of the evaluation are {there.get('samples')}, not {here['samples']}")
        worst = max(off, key=lambda name: off[name] / within[name])
        yield Check(
            kind="evaluation",
            when=f"after step {step}",
            many=len(pairs) + 1,
            largest=off[worst],
            allowed=within[worst],
            first=wrong[0] if wrong else "",
        )


def checkpoint(other: Record) -> Iterator[Check]:
    """What is saved, and what one device makes of it, is all that was held, bit for bit."""
    kept = {f"model.{name}": tensor for name, tensor in other.values[END].items()}
    kept |= {f"optimizer.{name}": tensor for name, tensor in other.state.get(END, {}).items()}
    numbers = {f"optimizer.{name}": value for name, value in other.numbers.get(END, {}).items()}
    numbers["progress.step"] = float(len(other.steps))
    buffers = {f"model.{name}": tensor for name, tensor in other.buffers.get(END, {}).items()}
    for words, found, counted in (
        ("in the checkpoint", other.saved, False),
        ("once one device has loaded the checkpoint", other.loaded, True),
    ):
        if not found:
            continue
        # Some buffers are no part of a model's state; numbers may be held by a file of their own.
        held = kept | {name: tensor for name, tensor in buffers.items() if name in found}
        there = {name: torch.tensor(value) for name, value in numbers.items() if counted or name in found}
        unlike = [one for name, tensor in held.items() for one in _unlike(name, tensor, found)]
        unlike += [one for name, value in there.items() for one in _unlike(name, value, found)]
        first = f"{unlike[0].name} {words}, by {unlike[0].relative:.2g} (allowed 0)" if unlike else ""
        if unlike and unlike[0].name not in found:
            first = f"{unlike[0].name} is not there {words}"
        largest = max((one.relative for one in unlike), default=0.0)
        yield Check(kind="checkpoint", when=words, many=len(held) + len(there), largest=largest, first=first)


def _unlike(name: str, tensor: Tensor, found: Tensors) -> list[Difference]:
    if name not in found:
        return [compare.missing(name)]
    there = found[name] if tensor.dim() else found[name].reshape(()).to(tensor.dtype)
    return [one for one in compare.values({name: tensor}, {name: there}) if one.beyond]
