"""A worker of parameter servers: asks, pulls, computes, pushes, until all is done."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any, final

import torch

from phalanx.comm.frames import Frame
from phalanx.config import Job, Plan
from phalanx.data.loader import BatchPieces
from phalanx.hardware import peak_memory
from phalanx.parallel import activation_checkpointing, torch_compile, without_gradient
from phalanx.parallel.layout import Layout, SingleLayout
from phalanx.parallel.parameter_server import Flat, FrameKind
from phalanx.parallel.rng_streams import reseed, stream
from phalanx.train.build_model import build_model
from phalanx.train.evaluate import Sums, add_up, evaluation_mode, measure
from phalanx.train.inputs import Inputs
from phalanx.train.loss import read_loss
from phalanx.train.loss_scaling import compute_context
from phalanx.train.observer import Observer
from phalanx.train.parameter_server.server_links import LinkLostError, ServerLinks
from phalanx.train.parameter_server.shard_store import ServerStatistics


@final
class Worker:
    """One worker with a whole model and no optimizer; its ``observer`` looks on."""

    def __init__(
        self, job: Job, plan: Plan, device: torch.device, divisor: float, data: tuple[BatchPieces, BatchPieces | None]
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

    def run(self, links: ServerLinks, report: Callable[[int], None]) -> None:
        """Work until the coordinator says that all is done."""
        done: dict[str, Any] | None = None
        brought: Flat | None = None
        self._computer.moved = links.moved
        while links.connect():
            try:
                order = links.ask(done, brought.wire if brought and done else [])
                done = brought = None
                if order.kind == FrameKind.END:
                    links.say_goodbye({"peak_bytes": peak_memory(), **self._computer.memory})
                    return
                if order.meta["what"] == "train":
                    report(order.meta["step"])
                done, brought = self._work(links, order)
            except LinkLostError as cut:
                links.lose(cut.index)
                done = brought = None

    def _work(self, links: ServerLinks, order: Frame) -> tuple[dict[str, Any] | None, Flat | None]:
        """Do what the coordinator ordered; returns what it is told, with the statistics if it wants them."""
        begun = time.perf_counter()
        what, step, part, term, ticket = (order.meta[name] for name in ("what", "step", "part", "term", "ticket"))
        piece = {"step": step, "part": part, "term": term, "ticket": ticket}
        version, found_term = links.pull(self._host, self._arriving.wire)
        links.moved()
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
            links.push(self._gradients(), self._host, {**piece, "count": count})
        seconds = time.perf_counter() - begun
        done = {**piece, "what": what, "version": version, "sums": sums, "samples": samples, "seconds": seconds}
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


@final
class Computer:
    """Forward and backward over pieces."""

    def __init__(self, job: Job, plan: Plan, layout: Layout, device: torch.device, divisor: float) -> None:
        """``divisor`` is the constant that backward divides sums by."""
        self._job, self._plan, self._layout, self._device, self._divisor = job, plan, layout, device, divisor
        self._inputs = Inputs(job, layout.module)
        self._checked = False
        self.moved: Callable[[], None] = lambda: None  # called between micro-batches

    def gradients(self, pieces: BatchPieces, step: int, part: int) -> tuple[Sums, int]:
        """Leave in each parameter's ``grad`` the sum over a piece, over the divisor.

        Returns the sum and the count of its loss, and its samples.

        Raises:
            GradientError: if parameters get no gradient and the job does not allow it.
        """
        module, device = self._layout.module, self._device
        for tensor in self._layout.parameters.values():
            tensor.grad = None
        total, count, samples = 0.0, 0.0, 0
        for index, micro in enumerate(pieces.micros(step, part)):
            reseed(device, stream(self._job.seed, step, index, part))
            with compute_context(self._plan, device):
                args, kwargs, batch = self._inputs(micro.batch, device)
                output = module(*args, **kwargs)
                read = read_loss(self._job.loss(output, batch), micro.samples, step)
            (read.value * (read.weight / self._divisor)).backward()
            total += float(read.value.detach()) * read.weight
            count += float(read.count)
            samples += micro.samples
            self.moved()
        if not self._checked and self._job.unused == "error":
            without = [name for name, tensor in self._layout.parameters.items() if tensor.grad is None]
            if without:
                raise without_gradient(without, f"in step {step}")
        self._checked = True
        return {"loss": (total, count)}, samples

    def measures(self, pieces: BatchPieces, step: int, part: int) -> tuple[Sums, int]:
        """Sum and count of the loss and of each metric over a piece of the evaluation data, and its samples."""
        module, device = self._layout.module, self._device
        found: Sums = {}
        samples = 0
        with torch.no_grad(), evaluation_mode(module):
            for micro in pieces.micros(step, part):
                with compute_context(self._plan, device):
                    args, kwargs, batch = self._inputs(micro.batch, device)
                    measured = measure(self._job, module(*args, **kwargs), batch, micro.samples)
                samples += micro.samples
                add_up(found, measured)
                self.moved()
        return found, samples

    @property
    def memory(self) -> dict[str, Any]:
        """Bytes of what is held, as events tell it."""
        size = sum(tensor.nbytes for tensor in self._layout.parameters.values())
        buffers = sum(tensor.nbytes for tensor in self._layout.module.buffers())
        return {"parameters": size, "gradients": size, "optimizer": 0, "buffers": buffers, "activations": 0}
