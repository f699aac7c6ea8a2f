"""A worker of parameter servers: it asks, pulls, computes and pushes until all is done."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any, final

import torch

from phalanx.comm.frames import Frame, LostError
from phalanx.config import Job, Plan
from phalanx.config.losses import names_of
from phalanx.data import MicroBatch
from phalanx.data.loader import BatchPieces
from phalanx.device_kinds import kind_of
from phalanx.hardware import peak_memory
from phalanx.parallel import activation_checkpointing, torch_compile, without_gradient
from phalanx.parallel.layout import Layout, SingleLayout, drop_gradients
from phalanx.parallel.parameter_server import Flat, FrameKind
from phalanx.parallel.rng_streams import reseed, stream
from phalanx.train.build_model import build_model
from phalanx.train.evaluate import evaluation_mode, measure, refuse_metrics
from phalanx.train.evaluation_sums import Sums, add_up
from phalanx.train.inputs import Inputs
from phalanx.train.loss import read_loss
from phalanx.train.loss_scaling import compute_context
from phalanx.train.observer import Observer
from phalanx.train.parameter_server.server_links import ServerLinks
from phalanx.train.parameter_server.shard_store import ServerStatistics


@final
class Worker:
    """One worker with a whole model and no optimizer.

    Attributes:
        observer: looks on.
    """

    def __init__(
        self, job: Job, plan: Plan, device: torch.device, divisor: float, data: tuple[BatchPieces, BatchPieces | None]
    ) -> None:
        """Build the model; ``data`` are pieces to train on and to evaluate on."""
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
        self._computer.moved = links.moved
        if not links.connect():
            return
        try:
            order = links.ask(None, [])
            while order.kind != FrameKind.END:
                if order.meta["what"] == "train":
                    report(order.meta["step"])
                done, brought = self._work(links, order)
                order = links.ask(done, brought.wire if brought else [])
            links.say_goodbye({"peak_bytes": peak_memory(), **self._computer.memory})
        except LostError:
            if not links.over:  # a piece that was not needed
                raise

    def _work(self, links: ServerLinks, order: Frame) -> tuple[dict[str, Any], Flat | None]:
        begun = time.perf_counter()
        what, step, part, ticket = (order.meta[name] for name in ("what", "step", "part", "ticket"))
        piece = {"step": step, "part": part, "ticket": ticket}
        version = links.pull(self._host, self._arriving.wire)
        links.moved()
        self._land()
        if what == "train":
            buffers = self._statistics.tensors if version else dict(self._layout.module.named_buffers())
            self.observer.received(version, dict(self._layout.module.named_parameters()), buffers)
        if what == "evaluate":
            assert self._evaluation is not None
            sums, samples = self._computer.measures(self._evaluation, step, part)
        else:
            sums, samples = self._computer.gradients(self._pieces, step, part)
            links.push(self._gradients(), self._host, piece)
        seconds = time.perf_counter() - begun
        done = {**piece, "what": what, "version": version, "sums": sums, "samples": samples, "seconds": seconds}
        brings = what == "train" and part == 0 and self._statistics.tensors
        return done, self._statistics.take() if brings else None

    def _land(self) -> None:
        with torch.no_grad():
            for name, host in self._landing.items():
                self._layout.parameters[name].copy_(host)
        self._statistics.put(self._arriving)

    def _gradients(self) -> Mapping[str, torch.Tensor | None]:
        grads = {name: tensor.grad for name, tensor in self._layout.parameters.items()}
        return {name: None if grad is None else grad.to("cpu").contiguous() for name, grad in grads.items()}


def _on_host(parameters: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    def host(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.device.type == "cpu" and tensor.is_contiguous():
            return tensor
        return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=kind_of(tensor.device).pinned)

    return {name: host(tensor) for name, tensor in parameters.items()}


@final
class Computer:
    """Forward and backward over pieces."""

    def __init__(self, job: Job, plan: Plan, layout: Layout, device: torch.device, divisor: float) -> None:
        """Take the job; ``divisor`` is the constant divisor of sums in backward."""
        self._job, self._plan, self._layout, self._device, self._divisor = job, plan, layout, device, divisor
        self._inputs = Inputs(job, layout.module)
        self._checked = False
        self.moved: Callable[[], None] = lambda: None  # called between micro-batches

    def gradients(self, pieces: BatchPieces, step: int, part: int) -> tuple[Sums, int]:
        """Compute in each parameter's ``grad`` the sum over a piece, over the divisor.

        Returns the sum and the count of its loss, and of each by name, and its samples.

        Raises:
            GradientError: if parameters get no gradient and the job does not allow it.
        """
        sums: Sums = dict.fromkeys(("loss", *names_of(self._job.loss)), (0.0, 0.0))
        samples = 0
        drop_gradients(self._layout.parameters.values())
        for index, micro in enumerate(pieces.micros(step, part)):
            add_up(sums, self._compute(micro, index, step, part))
            samples += micro.samples
        if not self._checked and self._job.unused == "error":
            without = [name for name, tensor in self._layout.parameters.items() if tensor.grad is None]
            if without:
                raise without_gradient(without, f"in step {step}")
        self._checked = True
        return sums, samples

    def _compute(self, micro: MicroBatch, index: int, step: int, part: int) -> dict[str, tuple[Any, Any]]:
        device = self._device
        reseed(device, stream(self._job.seed, step, index, part))
        with compute_context(self._plan, device):
            args, kwargs, batch = self._inputs(micro.batch, device)
            output = self._layout.module(*args, **kwargs)
            read = read_loss(self._job.loss(output, batch), micro.samples, step)
        value = read.value * (read.weight / self._divisor)
        value.backward()
        self.moved()
        named = zip(names_of(self._job.loss), read.named, strict=True)
        return {"loss": (float(read.value.detach()) * read.weight, read.count), **dict(named)}

    def measures(self, pieces: BatchPieces, step: int, part: int) -> tuple[Sums, int]:
        """Return sum and count of the loss and of each metric over a piece of evaluation data, and its samples."""
        module, device = self._layout.module, self._device
        found: Sums = {}
        samples = 0
        with torch.no_grad(), evaluation_mode(module):
            for micro in pieces.micros(step, part):
                with compute_context(self._plan, device):
                    args, kwargs, batch = self._inputs(micro.batch, device)
                    measured = measure(self._job, module(*args, **kwargs), batch, micro.samples)
                refuse_metrics(measured, self._plan)
                samples += micro.samples
                add_up(found, measured)
                self.moved()
        return found, samples

    @property
    def memory(self) -> dict[str, Any]:
        """Return the bytes held, in the form of events."""
        size = sum(tensor.nbytes for tensor in self._layout.parameters.values())
        buffers = sum(tensor.nbytes for tensor in self._layout.module.buffers())
        return {"parameters": size, "gradients": size, "optimizer": 0, "buffers": buffers, "activations": 0}
