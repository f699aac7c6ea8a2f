"""The execution of a rank's stages in the order of a schedule."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn

from phalanx.comm import Mesh
from phalanx.device_kinds import kind_of
from phalanx.parallel.layout import MicroBatchWork
from phalanx.parallel.local_shards import Axis
from phalanx.parallel.pipeline.backward import WeightHalf, input_half
from phalanx.parallel.pipeline.cutting import CutPipeline
from phalanx.parallel.pipeline.messages import Message, Parcels, StageMessages
from phalanx.parallel.pipeline.stage import Stage
from phalanx.placement.schedules import Order, forwards, order

Event = Callable[[str, int, int, float, float], None]
"""``event(kind, stage, micro, begin, end)``, kind as in ``Action``, times of ``time.perf_counter``.

An action begins when what it needs has arrived, and ends when its result is there, before that is sent.
"""


@dataclass(slots=True)
class _Passing:
    """One micro-batch between its forward and its backward on one stage."""

    inputs: list[Tensor] = field(default_factory=list[Tensor])
    outputs: list[Tensor] = field(default_factory=list[Tensor])
    grads: list[Tensor | None] = field(default_factory=list[Tensor | None])
    weights: WeightHalf | None = None
    began: float = 0.0
    ended: float = 0.0


class PipelineRunner:
    """The stages of one rank, and their execution.

    ``on_event`` is called after each piece of work, which on CUDA is waited for first.
    """

    def __init__(
        self,
        pipeline: CutPipeline,
        mesh: Mesh,
        device: torch.device,
        *,
        halves: bool = True,
        on_event: Event | None = None,
    ) -> None:
        """Strip the model of other ranks' parameters.

        With ``halves=False`` a backward is never done in two halves: hooks on parameters and recomputed activations
        need it whole.
        """
        self.pipeline, self.on_event = pipeline, on_event
        self._mesh, self._device = mesh, device
        self._halves = halves and not pipeline.program.recomputes
        self._rank = mesh.at["pp"]
        self._stages = {stage.index: stage for stage in pipeline.keep(self._rank, device)}
        self.stages_here = list(self._stages)
        self.is_last = len(pipeline.regions) - 1 in self._stages  # which has the output and the loss
        self._parcels = Parcels()

    def share_out(self, axes: Mapping[str, Axis]) -> None:
        """Allow values sliced along these axes, by name, between stages. Call it on all stages alike."""
        self._parcels.axes = axes

    def run(self, micros: Sequence[Any], work: MicroBatchWork) -> None:
        """Run forward and backward of all micro-batches, equal on every rank of the pipeline."""
        if micros:
            plan = self.pipeline.plan
            each = PipelineRun(self, order(plan.schedule, plan.pp, plan.stages, len(micros)), micros, work)
            each.run()

    def evaluate(self, micros: Sequence[Any], work: MicroBatchWork) -> list[Any]:
        """Run forward of all micro-batches; return outputs on the rank of the last stage, else nothing."""
        if not micros:
            return []
        plan = self.pipeline.plan
        with torch.no_grad():
            each = PipelineRun(self, forwards(plan.schedule, plan.pp, plan.stages, len(micros)), micros, work)
            each.run()
        return each.results

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run forward of one batch without gradients; ``None`` except on the rank of the last stage."""
        found = self.evaluate([(args, kwargs)], _Arguments())
        return found[0] if found else None


class _Arguments(MicroBatchWork):
    def forward(self, module: nn.Module, device: torch.device, micro: Any) -> Any:
        args, kwargs = micro
        return module(*args, **kwargs)

    def loss(self, output: Any, device: torch.device, micro: Any, last: bool) -> Tensor:
        raise NotImplementedError


class PipelineRun:
    """One run over some micro-batches."""

    def __init__(self, runner: PipelineRunner, order: Order, micros: Sequence[Any], work: MicroBatchWork) -> None:
        self.results: list[Any] = []
        self._order, self._micros, self._work = order, micros, work
        self._stages, self._device, self._rank = runner._stages, runner._device, runner._rank
        self._halves, self._event, self._parcels = runner._halves, runner.on_event, runner._parcels
        self._backward = any(action.kind != "F" for action in order.ranks[self._rank])
        self._passing: dict[tuple[int, int], _Passing] = {}
        self._sizes: dict[Message, list[Tensor]] = {}
        self._inside = False
        peers, group = runner._mesh.peers("pp"), runner._mesh.group("pp")
        self._traffic = StageMessages(order, self._rank, peers=peers, group=group, device=self._device, contents=self)

    def run(self) -> None:
        does: dict[str, Callable[[Stage, int], None]] = {
            "F": self._forward,
            "B": self._whole_backward,
            "I": self._input_backward,
            "W": self._weight_backward,
        }
        for action in self._order.ranks[self._rank]:
            does[action.kind](self._stages[action.stage], action.micro)
        self._traffic.finish()

    def _forward(self, stage: Stage, micro: int) -> None:
        passing = self._passing[stage.index, micro] = _Passing(began=self._now())
        message = Message(True, stage.index, micro)
        if stage.index and self._traffic.in_order:
            self._traffic.expect(message)

        def receive(fakes: list[Tensor]) -> list[Tensor]:
            self._sizes.setdefault(message, fakes)
            values = self._traffic.receive(message)
            self._sizes.pop(message, None)
            passing.began = self._now()
            return self._parcels.unpacked(stage.index, fakes, self._arrived(stage, passing, values))

        stage.receive = receive
        self._inside = True
        # Work only ever calls what it is given.
        output = self._work.forward(cast(nn.Module, stage), self._device, self._micros[micro])
        self._inside = False
        left, stage.result, stage.receive = stage.result, None, list
        if not stage.is_last:
            self._leave(stage, micro, passing, left)
        elif self._backward:
            last = micro == len(self._micros) - 1
            passing.outputs = [self._work.loss(output, self._device, self._micros[micro], last)]
        else:
            self.results.append(output)
        if not self._backward:
            del self._passing[stage.index, micro]
        self._happened("F", stage, micro, passing)

    def _arrived(self, stage: Stage, passing: _Passing, values: list[Tensor]) -> list[Tensor]:
        found: list[Tensor] = []
        for value, learns in zip(values, stage.learns(stage.arriving), strict=True):
            if learns and self._backward:
                leaf = value.detach().requires_grad_()
                passing.inputs.append(leaf)
                found.append(_Arrive.apply(leaf))
            else:
                found.append(value)
        return found

    def _leave(self, stage: Stage, micro: int, passing: _Passing, values: list[Tensor]) -> None:
        values, line = self._parcels.packed(stage.index + 1, values)
        passing.ended = self._now()
        self._traffic.send(Message(True, stage.index + 1, micro), [value.detach() for value in values], line)
        if self._backward:
            learning = stage.learns(stage.leaving)
            passing.outputs = [value for value, learns in zip(values, learning, strict=True) if learns]
            self._sizes[Message(False, stage.index + 1, micro)] = [value.detach() for value in passing.outputs]

    def _whole_backward(self, stage: Stage, micro: int) -> None:
        passing = self._with_grads(stage, micro)
        self._run_backward(passing)
        self._give_back(stage, micro, [leaf.grad for leaf in passing.inputs], passing)
        del self._passing[stage.index, micro]
        self._happened("B", stage, micro, passing)

    def _input_backward(self, stage: Stage, micro: int) -> None:
        passing = self._with_grads(stage, micro)
        if self._halves and passing.inputs:
            found, passing.weights = input_half(passing.outputs, passing.grads, passing.inputs)
            passing.outputs, passing.grads = [], []
            self._give_back(stage, micro, found, passing)
        elif stage.index:
            self._run_backward(passing)
            self._give_back(stage, micro, [leaf.grad for leaf in passing.inputs], passing)
            passing.outputs = []
        self._happened("I", stage, micro, passing)

    def _weight_backward(self, stage: Stage, micro: int) -> None:
        passing = self._passing.pop((stage.index, micro))
        passing.began = self._now()
        if passing.weights is not None:
            passing.weights.run()
        elif passing.outputs:
            self._run_backward(passing)
        self._happened("W", stage, micro, passing)

    def _with_grads(self, stage: Stage, micro: int) -> _Passing:
        passing = self._passing[stage.index, micro]
        passing.grads = [None]
        if not stage.is_last:
            message = Message(False, stage.index + 1, micro)
            passing.grads = list(self._traffic.receive(message))
            self._sizes.pop(message, None)
        passing.began = self._now()
        return passing

    def _run_backward(self, passing: _Passing) -> None:
        pairs = [pair for pair in zip(passing.outputs, passing.grads, strict=True) if pair[0].requires_grad]
        if pairs:
            torch.autograd.backward([output for output, _ in pairs], [grad for _, grad in pairs])

    def _give_back(self, stage: Stage, micro: int, grads: Sequence[Tensor | None], passing: _Passing) -> None:
        if stage.index:
            found = [
                torch.zeros_like(leaf) if grad is None else grad
                for leaf, grad in zip(passing.inputs, grads, strict=True)
            ]
            passing.ended = self._now()
            self._traffic.send(Message(False, stage.index, micro), found)
        passing.inputs = []

    def sizes(self, message: Message) -> Sequence[Tensor] | None:
        """Return tensors, perhaps fakes, with the shapes and types of a message; ``None`` if unknown yet."""
        known = self._whole(message)
        if known is None or not message.forward:
            return known
        return self._parcels.sizes(message.cut, known)

    def untold(self, message: Message) -> bool:
        """Return True if a line precedes the message, without which its sizes are unknown."""
        known = self._whole(message) if message.forward else None
        return known is not None and self._parcels.unknown(message.cut, known)

    def tell(self, message: Message, line: Tensor) -> None:
        """Take the line of a message."""
        known = self._whole(message)
        assert known is not None
        self._parcels.learn(message.cut, known, line)

    def _whole(self, message: Message) -> Sequence[Tensor] | None:
        if message not in self._sizes and message.forward and self._traffic.in_order and not self._inside:
            look = cast(nn.Module, self._stages[message.cut].shapes)
            self._sizes[message] = self._work.forward(look, self._device, self._micros[message.micro])
        return self._sizes.get(message)

    def _happened(self, kind: str, stage: Stage, micro: int, passing: _Passing) -> None:
        if self._event is not None:
            self._event(kind, stage.index, micro, passing.began, passing.ended or self._now())
        passing.ended = 0.0

    def _now(self) -> float:
        if self._event is not None and (kind := kind_of(self._device)).streams:
            # Not the whole device: what is being sent waits for other ranks.
            kind.current_stream(self._device).synchronize()
        return time.perf_counter()


class _Arrive(torch.autograd.Function):
    """Autograd node that makes a received tensor writable: a leaf is not, and a unit may begin with a write."""

    @staticmethod
    def forward(ctx: Any, leaf: Tensor) -> Tensor:
        same = torch.empty(0, dtype=leaf.dtype, device=leaf.device)
        return same.set_(leaf.untyped_storage(), leaf.storage_offset(), leaf.size(), leaf.stride())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad
