"""A worker of parameter servers: asks, pulls, computes, pushes, until all is done; and its connections to servers."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar, final

import torch

from phalanx.comm.frames import Connection, Frame, LostError, views
from phalanx.config import Job, Plan
from phalanx.data.loader import BatchPieces
from phalanx.hardware import peak_memory
from phalanx.parallel import activation_checkpointing, torch_compile, without_gradient
from phalanx.parallel.compression import Codec, Feedback, message
from phalanx.parallel.layout import Layout, SingleLayout
from phalanx.parallel.parameter_server import Flat, FrameKind, RowSlice, cut_out
from phalanx.parallel.rng_streams import reseed, stream
from phalanx.train.build_model import build_model
from phalanx.train.evaluate import Sums, add_up, evaluation_mode, measure
from phalanx.train.inputs import Inputs
from phalanx.train.loss import read_loss
from phalanx.train.loss_scaling import compute_context
from phalanx.train.observer import Observer
from phalanx.train.parameter_server.server_group import Directory, Patience, gone
from phalanx.train.parameter_server.shard_store import ServerStatistics

T = TypeVar("T")


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
        seconds = time.perf_counter() - begun
        done = {"version": version, "sums": sums, "samples": samples, "seconds": seconds}
        done |= {"what": what, "step": step, "part": part, "term": term}
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
        return found, samples

    @property
    def memory(self) -> dict[str, Any]:
        """Bytes of what is held, as events tell it."""
        size = sum(tensor.nbytes for tensor in self._layout.parameters.values())
        buffers = sum(tensor.nbytes for tensor in self._layout.module.buffers())
        return {"parameters": size, "gradients": size, "optimizer": 0, "buffers": buffers, "activations": 0}


class LinkLostError(Exception):
    """The connection to server ``index`` has ended."""

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.index = index


@dataclass(slots=True)
class ServerLink:
    """One server: the ``slices`` it holds, the ``version`` last pulled, what was left out of gradients pushed to it."""

    index: int
    connection: Connection | None = None
    slices: tuple[RowSlice, ...] = ()
    version: int = -1
    term: int = -1
    feedback: Feedback | None = None

    def receive(self) -> Frame:
        """The next frame that is not a sign of life."""
        assert self.connection is not None
        while (frame := self.connection.receive()).kind == FrameKind.BEAT:
            pass
        return frame

    def expect(self, kind: FrameKind) -> Frame:
        """The next frame, which must be of this kind."""
        frame = self.receive()
        if frame.kind != kind:
            raise LostError(f"{FrameKind(frame.kind).name} came where {kind.name} was expected")
        return frame


@final
class ServerLinks:
    """All servers, seen from a worker."""

    def __init__(
        self, rank: int, length: int, servers: int, directory: Directory, patience: Patience, codec: Codec | None
    ) -> None:
        self._rank, self._length, self._directory, self._patience = rank, length, directory, patience
        self._links = [ServerLink(index) for index in range(servers)]
        self._codec = codec
        self._pool = ThreadPoolExecutor(servers) if servers > 1 else None
        self._gone = threading.Event()
        self._beats = threading.Thread(target=self._beat, daemon=True)

    def start(self) -> None:
        """Begin to send signs of life."""
        self._beats.start()

    def close(self) -> None:
        """End every connection."""
        self._gone.set()
        for link in self._links:
            if link.connection:
                link.connection.close()
        if self._pool:
            self._pool.shutdown()
        if self._beats.is_alive():
            self._beats.join()

    def connect(self) -> bool:
        """Connect to every server that there is no connection to. Returns whether the run still goes on.

        Raises:
            RunError: if a server cannot be found in time.
        """
        until = time.monotonic() + self._patience.back
        for link in self._links:
            while link.connection is None:
                if self._directory.over:
                    return False
                address = self._directory.find(link.index)
                if address is not None:
                    with suppress(OSError):
                        self._introduce(link, Connection.to(address.host, address.port, patience=self._patience.answer))
                        break
                if time.monotonic() > until:
                    where = f" at {address.host}:{address.port}" if address else ""
                    raise gone(f"server {link.index}{where} could not be reached for {self._patience.back:g} s")
                time.sleep(0.05)
        return True

    def lose(self, index: int) -> None:
        """Let go of the connection to a server."""
        link = self._links[index]
        connection, link.connection = link.connection, None
        if connection:
            connection.close()
        link.version = link.term = -1

    def ask(self, done: dict[str, Any] | None, brought: list[memoryview]) -> Frame:
        """Tell the coordinator what was computed, and wait for what to do.

        Raises:
            LinkLostError: if its connection has ended.
        """

        def asked(link: ServerLink) -> Frame:
            assert link.connection is not None
            link.connection.send(FrameKind.ASK, {"done": done} if done else {}, brought)
            return link.receive()

        return self._guarded(self._links[0], asked)

    def say_goodbye(self, memory: dict[str, Any]) -> None:
        """Tell the coordinator what was held in memory."""
        with suppress(LostError):
            if connection := self._links[0].connection:
                connection.send(FrameKind.END, {"memory": memory})

    def pull(self, into: Mapping[str, torch.Tensor], statistics: list[memoryview]) -> tuple[int, int]:
        """Bring ``into`` (name → whole parameter, on the host) up to date. Returns the oldest version and the term.

        Raises:
            LinkLostError: if a connection has ended.
        """

        def pulled(link: ServerLink) -> tuple[int, int]:
            assert link.connection is not None
            link.connection.send(FrameKind.PULL, {"version": link.version, "term": link.term})
            frame = link.expect(FrameKind.VALUES)
            if frame.size:
                targets = views(cut_out(into[part.name], part) for part in link.slices)
                link.version = link.term = -1  # until all of it is here
                link.connection.fill(frame, [*targets, *(statistics if link.index == 0 else [])])
            link.version, link.term = frame.meta["version"], frame.meta["term"]
            return link.version, link.term

        found = self._each(pulled)
        return min(version for version, _ in found), max(term for _, term in found)

    def push(
        self, gradients: Mapping[str, torch.Tensor | None], like: Mapping[str, torch.Tensor], meta: dict[str, Any]
    ) -> None:
        """Give every server its part of ``gradients`` (name → whole, on the host; ``None`` is zeros as of ``like``).

        Raises:
            LinkLostError: if a connection has ended.
        """
        none = [name for name, gradient in gradients.items() if gradient is None]
        whole = {name: torch.zeros_like(like[name]) if one is None else one for name, one in gradients.items()}

        def pushed(link: ServerLink) -> None:
            assert link.connection is not None
            parts = [cut_out(whole[part.name], part) for part in link.slices]
            without = [place for place, part in enumerate(link.slices) if part.name in none]
            payload = views(parts) if self._codec is None else views([_encoded(self._codec, link, parts)])
            link.connection.send(FrameKind.PUSH, {**meta, "version": link.version, "without": without}, payload)
            link.expect(FrameKind.TAKEN)

        self._each(pushed)

    def _each(self, call: Callable[[ServerLink], T]) -> list[T]:
        if self._pool is None:
            return [self._guarded(self._links[0], call)]
        waiting = [self._pool.submit(self._guarded, link, call) for link in self._links]
        errors = [one.exception() for one in waiting]
        for error in errors:
            if error is not None:
                raise error
        return [one.result() for one in waiting]

    def _guarded(self, link: ServerLink, call: Callable[[ServerLink], T]) -> T:
        if link.connection is None:
            raise LinkLostError(link.index)
        try:
            return call(link)
        except LostError:
            raise LinkLostError(link.index) from None

    def _introduce(self, link: ServerLink, connection: Connection) -> None:
        connection.send(FrameKind.HELLO, {"rank": self._rank, "length": self._length})
        meta = connection.receive().meta
        link.slices = tuple(RowSlice(name=one[0], start=one[1], stop=one[2], whole=one[3]) for one in meta["held"])
        link.version = link.term = -1
        link.connection = connection

    def _beat(self) -> None:
        while not self._gone.wait(self._patience.beat):
            with suppress(LostError):
                if connection := self._links[0].connection:
                    connection.send(FrameKind.BEAT)


def _encoded(codec: Codec, link: ServerLink, parts: list[torch.Tensor]) -> torch.Tensor:
    """One message of all ``parts``, with what was left out of those before."""
    flat = torch.cat([part.reshape(-1) for part in parts])
    if not codec.facts.feeds_back:
        return message(codec, flat)
    link.feedback = link.feedback or Feedback(codec)
    return link.feedback.message(flat)
