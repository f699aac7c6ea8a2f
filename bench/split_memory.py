"""Memory of what a rank of four has to hold of a GPT of 100 M parameters, against one device.

Counted: the bytes of parameters, gradients and AdamW's state that are really there when the optimizer is about to take
its second step, on the rank that has most. The ideal is a quarter; norms, and what does not divide, are on top.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch

import jobs
from phalanx.comm import Place, default_process_group, local
from phalanx.config import Plan
from phalanx.launch.local import launch
from phalanx.train.assembly import build

BAR = 0.30
PLANS = ("pp=4 micro=2", "tp=4", "fsdp=4")


def held(plan: Plan) -> Callable[..., list[int]]:
    """A worker's work: bytes of parameters, gradients and optimizer state here."""

    def work(place: Place, report: Any) -> list[int]:
        torch.set_num_threads(1)
        with default_process_group(place, torch.device("cpu")):
            assembly = build(replace(jobs.gpt_100m(), epochs=None, steps=2), plan, place, torch.device("cpu"))
            batches = iter(assembly.loader)
            assembly.step(next(batches))
            batch = next(batches)
            assembly.step.backward(batch)
            parameters = list(assembly.layout.module.parameters())
            stepped = assembly.layout.parameters.values()
            gradients = [tensor.grad for tensor in (*parameters, *stepped) if tensor.grad is not None]
            states = [one for state in assembly.optimizer.state.values() for one in state.values()]
            return [_bytes([*parameters, *stepped]), _bytes(gradients), _bytes(states)]

    return work


def _bytes(tensors: Iterable[Any]) -> int:
    """Of all their storages, each once."""
    storages = [local(tensor).untyped_storage() for tensor in tensors if isinstance(tensor, torch.Tensor)]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def main() -> int:
    print("MiB on the rank that holds most, before its second optimizer step: a GPT of 100 M parameters, AdamW")
    print(f"{'plan':14} parameters  gradients  optimizer  together  of one device")
    met, one_device = True, 0
    for text in ("single", *PLANS):
        plan = Plan.parse(text)
        most = max(launch(held(plan), plan.world_size), key=sum)
        one_device = one_device or sum(most)
        share = sum(most) / one_device
        good = text == "single" or share <= BAR
        met = met and good
        sizes = [size / 2**20 for size in (*most, sum(most))]
        verdict = "" if text == "single" else f"bar <= {BAR:.2f}  {'met' if good else 'MISSED'}"
        print("{:14} {:10.1f} {:10.1f} {:10.1f} {:9.1f}".format(text, *sizes), f" {share:.3f}  {verdict}", flush=True)
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
