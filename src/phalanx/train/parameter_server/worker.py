"""A worker of parameter servers: asks, pulls, computes, pushes, until all is done."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any, final

import torch

from phalanx.comm.frames import Frame
from phalanx.config import Job, Plan
from phalanx.data.loader import Pieces
from phalanx.hardware import peak_memory
from phalanx.parallel import activation_checkpointing, torch_compile
from phalanx.parallel.parameter_server import Flat, Kind
from phalanx.parallel.single import SingleLayout
from phalanx.train.assembly import build_model
from phalanx.train.observer import Observer
from phalanx.train.parameter_server.compute import Computer
from phalanx.train.parameter_server.connections import LinkLostError, Links
from phalanx.train.parameter_server.shard_store import ServerStatistics


@final
class Worker:
    """One worker with a whole model and no optimizer.

    Attributes:
        observer: who looks on.
    """

    def __init__(
        self, job: Job, plan: Plan, device: torch.device, divisor: float, data: tuple[Pieces, Pieces | None]
    ) -> None:
        """``data`` are pieces to train on and to evaluate on."""
        self.observer = Observer()
        self._pieces, self._evaluation = data
        module = torch_compile.apply(activation_checkpointing.apply(build_model(job), plan), plan)
        self._layout = SingleLayout(module, device)
        self._host = _on_host(self._layout.parameters)
        self._landing = {
            name: self._host[name] for name, one in self._layout.parameters.items() if one is not self._host[name]
        }
        self._computer = Computer(job, plan, self._layout, device, divisor)
        self._statistics = ServerStatistics(module)
        self._arriving = self._statistics.take()
        self._divisor = divisor

    def run(self, links: Links, report: Callable[[int], None]) -> None:
        """Work until the coordinator says that all is done."""
        done: dict[str, Any] | None = None
        brought: Flat | None = None
        while links.connect():
            try:
                order = links.ask(done, brought.wire if brought and done else [])
                done = brought = None
                if order.kind == Kind.END:
                    links.say_goodbye({"peak_bytes": peak_memory(), **self._computer.memory})
                    return
                if order.meta["what"] == "train":
                    report(order.meta["step"])
                done, brought = self._work(links, order)
            except LinkLostError as cut:
                links.lose(cut.index)
                done = brought = None

    def _work(self, links: Links, order: Frame) -> tuple[dict[str, Any] | None, Flat | None]:
        """Do what the coordinator ordered; returns what it is told, with the statistics if it wants them."""
        begun = time.perf_counter()
        what, step, part, term = (order.meta[name] for name in ("what", "step", "part", "term"))
        version, found_term = links.pull(self._host, self._arriving.wire)
        if found_term != term:
            return None, None  # servers have gone back meanwhile
        self._land()
        if what == "train":
            buffers = self._statistics.tensors if version else dict(self._layout.module.named_buffers())
            self.observer.received(version, dict(self._layout.module.named_parameters()), buffers)
        if what == "evaluate":
            assert self._evaluation is not None
            sums, samples = self._computer.measures(self._evaluation, step, part)
        else:
            sums, samples = self._computer.gradients(self._pieces, step, part)
            count = sums["loss"][1] / self._divisor
            links.push(self._gradients(), self._host, {"step": step, "part": part, "count": count, "term": term})
        done = {
            "what": what,
            "step": step,
            "part": part,
            "term": term,
            "version": version,
            "sums": sums,
            "samples": samples,
            "seconds": time.perf_counter() - begun,
        }
        brings = what == "train" and part == 0 and self._statistics.tensors
        return done, self._statistics.take() if brings else None

    def _land(self) -> None:
        """Bring pulled values to where forward reads them."""
        with torch.no_grad():
            for name, host in self._landing.items():
                self._layout.parameters[name].copy_(host)
        self._statistics.put(self._arriving)

    def _gradients(self) -> Mapping[str, torch.Tensor | None]:
        grads = {name: tensor.grad for name, tensor in self._layout.parameters.items()}
        return {name: None if grad is None else grad.to("cpu").contiguous() for name, grad in grads.items()}


def _on_host(parameters: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The parameters themselves where they are runs of host memory, else memory for what comes for them."""

    def host(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.device.type == "cpu" and tensor.is_contiguous():
            return tensor
        return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.device.type == "cuda")

    return {name: host(tensor) for name, tensor in parameters.items()}
