"""A run of a model on fake tensors, each distinct block alone and the rest around them."""
# Not the run that cuts are made from: costs are laws of samples and length, so blocks run alone, at several sizes.

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from phalanx.trace.blocks import Entered, MadeTensor, Spec, Stub, among, leave_cache_out, likeness, parts, spec
from phalanx.trace.fake_tensors import MetaMode, Values, fake, faked, quiet, resized
from phalanx.trace.operation_recorder import (
    OperationRecorder,
    RecordedRun,
    TensorUse,
    hides_later,
    recomputation_seen,
    recomputed,
)
from phalanx.trace.operations import as_on_accelerators
from phalanx.trace.standard_models import ModelCall


@dataclass(frozen=True, kw_only=True, slots=True)
class Trace:
    """The record of a run of a block, or of the parts around the blocks."""

    tape: RecordedRun  # its operations and memory
    parameters: dict[int, str]  # memory → name of the parameters that it met
    gradients: dict[int, str]  # memory → name of the parameter whose gradient it is
    # what entered, the stream first; then gradients of what leaves, or around blocks what each block left
    entries: tuple[TensorUse, ...]
    others: frozenset[int]  # memories of other arguments, kept by the caller
    leaving: frozenset[int]  # memories that others read
    # memories, with their segment, that blocks keep beside what enters them
    saved: dict[int, int] = field(default_factory=dict[int, int])
    modules: dict[int, int] = field(default_factory=dict[int, int])  # calls of modules without children, by segment


@dataclass(frozen=True, slots=True)
class BlockCall:
    """A block's turn: its name, its key of likeness, and whether its parameters were met before."""

    name: str
    like: Any
    again: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Traced:
    """A whole model at one size."""

    visits: list[BlockCall]  # blocks in the order of their turns
    blocks: dict[Any, Trace]  # trace of each distinct block
    around: Trace  # trace of the parts around them

    @property
    def recomputes(self) -> bool:
        return any(trace.tape.recomputes for trace in (*self.blocks.values(), self.around))


def traced(call: ModelCall, form: Callable[[Tensor], tuple[int, ...]], dtype: torch.dtype | None) -> Traced:
    """Run the model with inputs of the shapes from ``form``, computing in ``dtype``.

    Raises:
        Exception: any error of the model on fake tensors.
    """
    module = call.module
    leave_cache_out(module)
    mode = Values() if call.values else MetaMode() if call.meta else FakeTensorMode(allow_non_fake_inputs=True)
    names = {id(tensor): name for name, tensor in module.named_parameters()}
    tensors = [leaf for leaf in tree_leaves((call.args, call.kwargs)) if isinstance(leaf, Tensor)]
    masks = {id(leaf) for leaf in tensors if hides_later(leaf)}
    causal_buffers = {name for name, one in module.named_buffers() if hides_later(one)}
    with quiet(), _training(module), faked(module, mode, dtype) as meant:
        parameters = [(names[id(meant[id(stand_in)])], stand_in) for stand_in in module.parameters()]
        run = _TracedRun(module, parameters, values=call.values)

        def given(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            sized = resized(leaf, form(leaf)) if call.values else leaf.new_empty(form(leaf), device="meta")
            made = fake(mode, sized, dtype=dtype)
            if id(leaf) in masks:
                run.recorder.mark_causal(made)
            return made

        for name, buffer in module.named_buffers():
            if name in causal_buffers:
                run.recorder.mark_causal(buffer)
        args, kwargs, batch = tree_map(given, (call.args, call.kwargs, call.batch))
        return run.whole(args, kwargs, lambda output: call.loss(output, batch), batch)


class _TracedRun:
    def __init__(self, module: nn.Module, parameters: list[tuple[str, nn.Parameter]], *, values: bool) -> None:
        self.module = module
        self.values = values
        self.parameters = parameters
        self.blocks = parts(module)
        names = {child: name for name, child in module.named_modules()}
        self.names = {block: names[block] for block in self.blocks}
        self.visits: list[BlockCall] = []
        self.met: set[nn.Module] = set()
        self.traces: dict[Any, Trace] = {}
        self.forms: dict[Any, Any] = {}
        self.likes = {block: likeness(block) for block in self.blocks}
        self.recorder = OperationRecorder()
        self.anchor = torch.empty(1, requires_grad=True)
        self.kept: dict[int, int] = {}
        self.entries: list[TensorUse] = []
        self.entered: set[int] = set()
        self.held: list[Tensor] = []
        self.leaving: set[int] = set()

    def whole(self, args: Any, kwargs: Any, loss: Callable[[Any], Any], batch: Any) -> Traced:
        recorder = self.recorder
        inside = {id(one) for block in self.blocks for one in block.parameters()}
        within = {child for block in self.blocks for child in block.modules()}
        around = [child for child in self.module.modules() if child not in within]
        outside = {id(one) for child in around for one in child._parameters.values()}
        held = {recorder.number(one): name for name, one in self.parameters}
        buffers = frozenset(recorder.number(one) for one in self.module.buffers())
        inputs = [leaf for leaf in tree_leaves((args, kwargs, batch)) if isinstance(leaf, Tensor)]
        others = frozenset(recorder.number(leaf) for leaf in inputs) | buffers
        entries = tuple(recorder.see(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor))
        counted = dict[int, int]()
        with ExitStack() as stack:
            stack.enter_context(_calls(self.module, within, counted, lambda: recorder.segment))
            stack.enter_context(_replaced({block: self._stub(block) for block in self.blocks}))
            stack.enter_context(recomputation_seen(recorder))
            stack.enter_context(as_on_accelerators(recorder))
            stack.enter_context(recorder)
            with recorder.keeping():
                value = scalar(loss(self.module(*args, **kwargs)))
            recorder.begin_backward()
            mine = [(name, one) for name, one in self.parameters if id(one) not in inside or id(one) in outside]
            rest = [(name, one) for name, one in mine if one.requires_grad]
            sought = [*(one for _, one in rest), self.anchor] if value.requires_grad else []
            grads = torch.autograd.grad(value, sought, allow_unused=True) if sought else ()
            gradients = {
                recorder.number(grad): name for (name, _), grad in zip(rest, grads, strict=False) if grad is not None
            }
        trace = Trace(
            tape=recorder.tape,
            parameters=held,
            gradients=gradients,
            entries=(*(one for one in entries if one.floating), *self.entries),
            others=others | self.entered | {one.memory for one in self.entries},
            leaving=frozenset(self.leaving),
            saved=self.kept,
            modules=counted,
        )
        return Traced(visits=self.visits, blocks=self.traces, around=trace)

    def _stub(self, block: nn.Module) -> Callable[..., Any]:
        forward, recorder = block.forward, self.recorder

        def instead(*args: Any, **kwargs: Any) -> Any:
            leaves, structure = tree_flatten((args, kwargs))
            tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
            form = tuple((tuple(one.shape), one.dtype, one.requires_grad) for one in tensors)
            plain = tuple(leaf for leaf in leaves if isinstance(leaf, bool | int | float | str | None))
            again = recorder.again or recorder.checkpoints > 0
            like = (self.likes[block], form, plain, str(structure), again)
            with recorder.paused():
                if like not in self.traces:
                    run = recomputed(forward) if again else forward
                    self.traces[like], self.forms[like] = _alone(block, run, leaves, structure, recorder)
                with torch.no_grad():
                    values = tree_leaves(forward(*args, **kwargs)) if self.values else []
                if recorder.again:
                    made = self._made(like, tensors, lambda _: None, values)
                    return tree_unflatten(made, self.forms[like][1])
                self.visits.append(BlockCall(self.names[block], like, block in self.met))
                self.met.add(block)
                return self._given(like, tensors, values)

        return instead

    def _given(self, like: Any, tensors: list[Tensor], values: list[Any]) -> Any:
        recorder = self.recorder
        recorder.segment += 1
        turn = recorder.segment
        entry = next((one for one in tensors if one.is_floating_point()), None)
        for one in tensors:
            if one is not entry:
                self.kept.setdefault(recorder.number(one), turn - 1)
            self.leaving.add(recorder.number(one))
        if entry is not None:
            self.entered.add(recorder.number(entry))

        def back(grads: tuple[Tensor, ...]) -> None:
            self.leaving |= {recorder.number(one) for one in grads}
            recorder.segment = turn - 1

        filled = self._made(like, tensors, back, values)
        outputs = [one for one in filled if isinstance(one, Tensor)]
        self.held += outputs  # so that their memory is not another's while the run lasts
        self.entries += [recorder.see(one) for one in outputs[:1]]
        return tree_unflatten(filled, self.forms[like][1])

    def _made(
        self, like: Any, tensors: list[Tensor], back: Callable[[tuple[Tensor, ...]], None], values: list[Any]
    ) -> list[Any]:
        specs: list[Spec] = self.forms[like][0]
        floats = [one for one in tensors if one.requires_grad]
        made = [one for one in specs if isinstance(one, MadeTensor)]
        stubs = Stub.apply(self.recorder, back, made, self.anchor, *floats) if made else ()
        results = iter(stubs)
        if values:
            known = [value for value, one in zip(values, specs, strict=True) if isinstance(one, MadeTensor)]
            with torch.no_grad():
                for stub, value in zip(stubs, known, strict=True):
                    stub.copy_(value)
        return [
            tensors[one] if isinstance(one, int) else next(results) if isinstance(one, MadeTensor) else one.value
            for one in specs
        ]


def _alone(
    block: nn.Module, forward: Callable[..., Any], leaves: list[Any], structure: Any, outside: OperationRecorder
) -> tuple[Trace, Any]:
    originals = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    outer = [one.detach().requires_grad_(one.requires_grad) for one in originals]
    tensors = [Entered.apply(one) if one.requires_grad else one for one in outer]
    given_in_turn = iter(tensors)
    inputs = [next(given_in_turn) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    recorder = OperationRecorder()
    named = dict(block.named_parameters())
    held = {recorder.number(one): name for name, one in named.items()}
    given = [recorder.see(one) for one in tensors]
    entry = [one for one in given if one.floating][:1]
    others = {one.memory for one in given} | {recorder.number(one) for one in block.buffers()}
    buffers = list(block.buffers())
    for one, original in zip([*tensors, *buffers], [*originals, *buffers], strict=True):
        if outside.is_causal(original):
            recorder.mark_causal(one)
    counted = dict[int, int]()
    args, kwargs = tree_unflatten(inputs, structure)
    seen = recomputation_seen(recorder)
    with _calls(block, set(), counted, lambda: 0), seen, as_on_accelerators(recorder), recorder:
        with recorder.keeping():
            output = forward(*args, **kwargs)
        results, form = tree_flatten(output)
        made = [one for one in results if isinstance(one, Tensor) and one.requires_grad and not among(one, tensors)]
        leaving = frozenset(recorder.number(one) for one in results if isinstance(one, Tensor))
        specs = [spec(one, tensors) for one in results]
        with recorder.paused():
            ones = [torch.ones_like(one) for one in made]
            for one in ones:
                recorder.number(one)
        learning = [(name, one) for name, one in named.items() if one.requires_grad]
        wanted = [one for one in outer if one.requires_grad]
        recorder.begin_backward()
        streams = recorder.tensors_in([ones, [one for one in tensors if one.requires_grad]])
        output = results = None
        sought = [*wanted, *(one for _, one in learning)]
        grads = torch.autograd.grad(made, sought, ones, allow_unused=True) if made and sought else ()
        of_weights = zip(learning, grads[len(wanted) :], strict=False)
        gradients = {recorder.number(grad): name for (name, _), grad in of_weights if grad is not None}
        leaving |= {recorder.number(one) for one in grads[: len(wanted)] if one is not None}
    trace = Trace(
        tape=recorder.tape,
        parameters=held,
        gradients=gradients,
        entries=(*entry, *streams),
        others=frozenset(others),
        leaving=leaving,
        modules=counted,
    )
    return trace, (specs, form)


def scalar(value: Any) -> Tensor:
    """Return the number to minimise: for a loss with a sum and a count, its sum."""
    total = getattr(value, "sum", None)
    return total if isinstance(total, Tensor) else value


@contextmanager
def _training(module: nn.Module) -> Iterator[None]:
    before = [(child, child.training) for child in module.modules()]
    if not module.training:  # in one that comes in training mode, parts kept out of it stay so
        module.train()
    try:
        yield
    finally:
        for child, training in before:
            child.training = training


@contextmanager
def _replaced(forwards: dict[nn.Module, Callable[..., Any]]) -> Iterator[None]:
    own = {module: module.__dict__["forward"] for module in forwards if "forward" in module.__dict__}
    for module, forward in forwards.items():
        module.__dict__["forward"] = forward
    try:
        yield
    finally:
        for module in forwards:
            module.__dict__.pop("forward", None)
        for module, forward in own.items():
            module.__dict__["forward"] = forward


@contextmanager
def _calls(
    module: nn.Module, without: set[nn.Module], counted: dict[int, int], where: Callable[[], int]
) -> Iterator[None]:
    def count(*_: Any) -> None:
        counted[where()] = counted.get(where(), 0) + 1

    leaves = [child for child in module.modules() if child not in without and not any(True for _ in child.children())]
    handles = [child.register_forward_pre_hook(count) for child in leaves]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
