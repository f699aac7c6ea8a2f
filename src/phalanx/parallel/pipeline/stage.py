"""One stage: the model's own forward, restricted to this stage's part."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensor
from torch.overrides import _get_current_function_mode, _pop_mode_temporarily
from torch.utils._pytree import tree_leaves, tree_map

from phalanx.errors import RefusedError
from phalanx.parallel.buffer_sync import buffers_kept
from phalanx.parallel.pipeline.program import Program, UnitCall, by_values, intercepted
from phalanx.parallel.pipeline.replay import GuardError
from phalanx.parallel.pipeline.stage_recording import StageRecorder, Tapes
from phalanx.parallel.pipeline.stand_in import Outline, drawn, like_arguments, outline, signature
from phalanx.parallel.pipeline.value_flow import Flow, Key, TensorMark, autocast_types, tensors, told_to
from phalanx.parallel.rng_streams import branch
from phalanx.parallel.tensor.trial import fixed
from phalanx.trace.fake_tensors import fake, quiet

Receive = Callable[[list[Tensor]], Sequence[Tensor]]
"""Gives the tensors that these fakes stand for."""


class Stage:
    """A callable that runs a stage.

    It returns the next stage's input, a list of tensors, or the model's output for the last stage.
    """

    def __init__(self, program: Program, index: int, regions: range, forms: UnitOutlines) -> None:
        self.program, self.index, self.regions, self._forms = program, index, regions, forms
        self.arriving = program.crossing(regions.start)  # values that it needs from the stage before
        self.leaving = program.crossing(regions.stop) if regions.stop < len(program.calls) else []
        self.receive: Receive = list  # gives the values that arrive; to be set before each call
        self.result: Any = None  # what the last call gave
        self._units = dict.fromkeys(call.unit for call in program.calls)
        self._shapes: dict[Any, list[Tensor]] = {}
        self._tapes = Tapes(program.module, self._units)

    @property
    def is_last(self) -> bool:
        return self.regions.stop == len(self.program.calls)

    def learns(self, keys: Sequence[Key]) -> list[bool]:
        """Return for each value True if a gradient comes back for it."""
        return [self.program.values[key].learns for key in keys]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module = self.program.module
        with fixed({module: partial(self._run, module.forward)}):  # its hooks are around that
            self.result = module(*args, **kwargs)
        return self.result

    def shapes(self, *args: Any, **kwargs: Any) -> list[Tensor]:
        """Return fakes of the values that will arrive for these arguments, without running hooks or units."""
        key = (signature(args, kwargs), autocast_types())
        if key not in self._shapes:
            if len(self._shapes) > _MOST_SHAPES:
                self._shapes.clear()
            found: list[Tensor] = []

            def receive(fakes: list[Tensor]) -> Sequence[Tensor]:
                found.extend(fakes)
                raise _Leave([])

            before, self.receive = self.receive, receive
            try:
                with buffers_kept(self.program.module):
                    self._follow(_StageRun(self, self._forms), self.program.module.forward, args, kwargs)
            finally:
                self.receive = before
            self._shapes[key] = found
        return self._shapes[key]

    def _run(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        key = self._tapes.key(forward, args, kwargs)
        for tape in self._tapes.ready(key):
            with suppress(GuardError):
                return tape.play(list(tensors((args, kwargs))), self._received)
        run = _StageRun(self, self._forms)
        run.recorder = self._tapes.recorder(key, args, kwargs, real=run.real)
        if run.recorder is None:
            return self._follow(run, forward, args, kwargs)
        with run.recorder.watching():
            result = self._follow(run, forward, args, kwargs)
        self._tapes.recorded(key, run.recorder, result)
        return result

    def _received(self, fakes: list[Tensor]) -> Sequence[Tensor]:
        values = self.receive(fakes)
        if self.program.module.training and values:
            # Every stage begins with the same random stream; layers that drop out are to differ all the same.
            branch(values[0].device, self.index)
        return values

    def _follow(self, run: _StageRun, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        try:
            with intercepted(self._units, run.called), told_to(run), quiet(), run:
                output = tree_map(run.as_real, forward(*args, **kwargs))
        except _Leave as leave:
            return leave.values
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            raise by_values(error) from None
        finally:
            run.forget()
        if run.call + 1 < len(self.program.calls):
            raise differs(f"ended after {run.call + 1} of {len(self.program.calls)} calls")
        if any(isinstance(leaf, FakeTensor) for leaf in tensors(output)):
            raise differs("gave something in its output that it had not given before")
        return output


class UnitOutlines:
    """The output forms of units that do not run here, by their arguments."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self._forwards = {call.unit: call.unit.forward for call in program.calls}
        self._known: dict[Any, Outline] = {}

    def copied(self, units: Mapping[nn.Module, Any], fakes: Mapping[int, Tensor]) -> None:
        """Run copies of these units with fake parameters, because the units run in other stages."""
        for unit in units:
            memo: dict[int, Any] = {id(tensor): fakes[id(tensor)] for tensor in unit.parameters()}
            memo.update({id(tensor): tensor for tensor in unit.buffers()})
            self._forwards[unit] = copy.deepcopy(unit, memo).forward

    def of(self, index: int, args: Any, kwargs: Any) -> Outline:
        """Return the output form of call ``index``; arguments that depend on parameters are fakes.

        Raises:
            RefusedError: if it depends on more than shapes.
        """
        call = self._program.calls[index]
        key = (call.kin, signature(args, kwargs), autocast_types(), call.unit.training)
        if key not in self._known:
            if len(self._known) > _MOST_SHAPES:
                self._known.clear()
            try:
                with torch.no_grad():
                    output = self._forwards[call.unit](*args, **kwargs)
                self._known[key], _ = outline(output, args, kwargs, self._program.fakes)
            except Exception as error:  # what fakes cannot follow
                like = like_arguments(call.outline, args, kwargs)
                if like is None:
                    raise by_values(error, call.name) from None
                self._known[key] = like
        return self._known[key]


def strip(program: Program, keep: set[str], device: torch.device, dtype: torch.dtype | None) -> dict[int, Tensor]:
    """Keep only the parameters named in ``keep`` in the model; fakes replace the others.

    ``dtype``: the computing type of fp32 parameters on their own rank. Returns id of a parameter → its fake, for all.
    """
    module = program.module
    kept = {id(tensor) for name, tensor in module.named_parameters() if name in keep}
    fakes = {id(tensor): fake(program.fakes, tensor, device, dtype) for tensor in module.parameters()}
    for child in module.modules():
        gone = {name: tensor for name, tensor in child._parameters.items() if tensor is not None}
        gone = {name: tensor for name, tensor in gone.items() if id(tensor) not in kept}
        for name, tensor in gone.items():
            del child._parameters[name]
            child.__dict__[name] = fakes[id(tensor)]
        ids = {id(tensor) for tensor in gone.values()}
        for name, value in vars(child).items():  # such as the list of weights that a recurrent layer keeps
            if isinstance(value, list) and any(id(one) in ids for one in value):
                child.__dict__[name] = [fakes[id(one)] if id(one) in ids else one for one in value]
    return fakes


def differs(what: str) -> RefusedError:
    """Return the error for a model that acts differently than in its traced run."""
    return RefusedError.of(
        where="plan.pp",
        given=f"a model that does not run its parts in the same order for every batch: it {what}",
        allowed="models whose own code, outside their blocks, does the same for every batch",
        fix="no skipping of layers by chance (layerdrop=0); or fsdp in place of pp",
    )


_MOST_SHAPES = 4096


class _Leave(BaseException):
    """Signal that a stage is done; not an Exception, so that a model's ``except Exception`` does not catch it."""

    def __init__(self, values: list[Tensor]) -> None:
        super().__init__()
        self.values = values


class _StageRun(Flow):
    """One run of a stage."""

    def __init__(self, stage: Stage, forms: UnitOutlines) -> None:
        super().__init__(stage.program.fakes)
        self.real = stage.regions.start == 0
        self.recorder: StageRecorder | None = None
        self._stage, self._forms = stage, forms
        self._waits = dict.fromkeys(stage.arriving) if not self.real else {}
        self._leaves = dict.fromkeys(stage.leaving)
        self._awaited: dict[Key, list[tuple[TensorMark, Tensor]]] = {}
        self._values: dict[Key, Tensor] = {}

    def forget(self) -> None:
        """Release the references that would keep tensors alive in a cycle."""
        self._awaited, self._values = {}, {}

    def came(self, mark: TensorMark, tensor: Tensor) -> None:
        key = mark.key
        assert key is not None
        if self.real:
            if key in self._leaves:
                self._values[key] = tensor
        elif key in self._waits:
            self._awaited.setdefault(key, []).append((mark, tensor))

    def learns(self, args: tuple[Any, ...]) -> bool:
        super().learns(args)
        known = self._stage.program.reentrant  # what stands in for a value does not say whether that learns
        at = len(self.reentrant) - 1
        if at >= len(known):
            raise differs("recomputed activations where it did not before")
        return known[at]

    def within(self, func: Any, args: Any, kwargs: Any) -> Any:
        if self.real:
            args, kwargs = tree_map(self.as_real, args), tree_map(self.as_real, kwargs)
        return func(*args, **kwargs)

    def called(self, unit: nn.Module, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if self.inside:
            return call(*args, **kwargs)
        index, program, own = self.call + 1, self._stage.program, self._stage.regions
        if index >= len(program.calls) or program.calls[index].unit is not unit:
            raise differs(f"called {type(unit).__name__} where {self._expected(index)}")
        if index == own.stop:
            raise _Leave([self._left(key) for key in self._stage.leaving])
        self.entered()
        if index == own.start and index > 0:
            self._arrive()
        known = program.calls[index]
        given = list(tensors((args, kwargs)))
        swap = self.as_real if self.real else self.as_fake
        args, kwargs = tree_map(swap, args), tree_map(swap, kwargs)
        self.inside = True
        try:
            on_top = _get_current_function_mode() is self
            with _pop_mode_temporarily() if on_top and not (known.reads and self.real) else nullcontext():
                if self.real:
                    output = self._computed(known, call, args, kwargs)
                else:
                    output = drawn(self._forms.of(index, args, kwargs), args, kwargs, self.fakes)
        finally:
            self.inside = False
        swapped = list(tensors((args, kwargs)))
        for place, key in known.written:
            self.written(given[place], swapped[place], key)
        self._mark(known.keys, output, known.name)
        return output

    def _computed(self, known: UnitCall, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        # What reads more than it is called with is not there any more in backward.
        wrapped = call if known.reads else self.recomputed(call)
        if self.recorder is None:
            return wrapped(*args, **kwargs)
        if known.reads or wrapped is not call:
            self.recorder.refuse("a unit reads more than it is called with, or the model computes it again in backward")
        return self.recorder.unit(known.unit, args, kwargs, lambda: wrapped(*args, **kwargs))

    def between(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if self.recorder is None:
            return func(*args, **kwargs)
        return self.recorder.operation(func, args, kwargs)

    def _mark(self, keys: Sequence[Key | None], output: Any, name: str) -> None:
        leaves = tree_leaves(output)
        if len(leaves) != len(keys):
            raise differs(f"got {len(leaves)} things from {name} where it got {len(keys)} before")
        for key, leaf in zip(keys, leaves, strict=True):
            if key is not None and isinstance(leaf, Tensor):
                if self.real and isinstance(leaf, FakeTensor):
                    raise differs(f"let {name} read a tensor inside an object that Phalanx cannot look into")
                mark = self.mark_of(leaf)
                if mark is None or mark.key != key:
                    self.put(leaf, key)

    def _arrive(self) -> None:
        missing = [key for key in self._waits if key not in self._awaited]
        if missing:
            raise differs(f"has not made what it made before, after call {missing[0].call}")
        fakes = [self.as_fake(self._awaited[key][-1][1]) for key in self._waits]
        self.inside = True  # what the receiver does with tensors is none of the model's work
        values = self._stage._received(fakes)
        self.inside = False
        if self.recorder is not None:
            self.recorder.arrived(fakes, values)
        for key, value in zip(self._waits, values, strict=True):
            self._values[key] = value
            for mark, _ in self._awaited[key]:
                mark.value = value
        self.real = True

    def _left(self, key: Key) -> Tensor:
        if key not in self._values:
            raise differs(f"has not made what it made before, after call {key.call}")
        return self._values[key]

    def _expected(self, index: int) -> str:
        calls = self._stage.program.calls
        return f"it called {calls[index].name} before" if index < len(calls) else "it had ended before"
