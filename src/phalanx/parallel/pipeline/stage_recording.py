"""Recording of a stage's operations while the model's own code runs; two equal runs are replayed from then on."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from torch.utils._pytree import tree_flatten

from phalanx.device_kinds import host
from phalanx.parallel.local_shards import is_sliced
from phalanx.parallel.pipeline.python_state import PythonState, calls_not_watched, calls_watched, chance
from phalanx.parallel.pipeline.replay import CONSTANTS, NO_GUARD, ArgumentTree, Attribute, ReplayedCall, Slot, StageTape
from phalanx.parallel.pipeline.value_flow import RANDOM, autocast_types, writes


class StageRecorder:
    """A recorder of one run."""

    def __init__(self, model: nn.Module, inside: Iterable[nn.Module], args: Any, kwargs: Any, *, real: bool) -> None:
        self.trouble = ""  # why there can be none
        self._inside = {id(module._buffers) for module in inside}
        self.state = PythonState()
        self._model, self._real = model, real
        self._operations: list[ReplayedCall] = []
        self._slots: dict[int, Slot] = {}
        self._early: set[Slot] = set()
        self._read_late: set[int] = set()
        self._changed_late: set[int] = set()
        self._count = 0
        self._alive: list[Any] = [args, kwargs]
        self._arrives = -1
        self._expected: list[Tensor] = []
        self._arrivals: tuple[Slot, ...] = ()
        given = [leaf for leaf in tree_flatten((args, kwargs))[0] if not isinstance(leaf, CONSTANTS)]
        if any(not isinstance(leaf, Tensor) for leaf in given):
            self.refuse("it is called with more than tensors and numbers")
        self._given = len(given)
        self._early |= {self._new(leaf) for leaf in given if isinstance(leaf, Tensor)}
        self._chance = chance()
        self._context, self._around = _context(), _surroundings()

    def watching(self) -> AbstractContextManager[None]:
        return calls_watched(self.state.add_frame)

    def operation(self, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call one of torch's functions between units, and record it."""
        leaves = tree_flatten((args, kwargs))[0]
        given = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        if any(isinstance(tensor, FakeTensor) for tensor in given) and self._real:
            self.refuse("it computes with what another stage keeps to itself")
        if self.trouble or any(isinstance(tensor, FakeTensor) for tensor in given):
            return call(*args, **kwargs)
        form, random = self._form((args, kwargs)), _name(call) in RANDOM
        early = not random and all(map(self._is_early, form.leaves))
        early = early and self._changed_late.isdisjoint(map(_storage, given))
        before = torch.default_generator.get_state()
        with self._late(given, early=early), _ValuesRead() as read:
            result = call(*args, **kwargs)
        if not random and not torch.equal(before, torch.default_generator.get_state()):
            self.refuse("an operation that is not known to do so draws random numbers")
        made = tree_flatten(result)[0]
        tensors = any(isinstance(leaf, Tensor) for leaf in made)
        if not tensors and not given:
            return result
        looked = not tensors and result is not None
        if looked and not early:
            self.refuse("it decides by values that the stage has computed")
        if read.found and not looked:
            self.refuse("shapes depend on values")
        changes = writes(_name(call))
        if early and changes and _storage(given[0]) in self._read_late:
            self.refuse("it changes a tensor in place after the stage has computed with it")
        guard = result if looked else NO_GUARD
        self._keep(call, form, made, guard, early=early, keeps=looked or changes or not tensors)
        return result

    def unit(self, unit: nn.Module, args: Any, kwargs: Any, run: Callable[[], Any]) -> Any:
        """Run a unit of this stage, and record it."""
        if self.trouble:
            with calls_not_watched():
                return run()
        leaves = tree_flatten((args, kwargs))[0]
        form = self._form((args, kwargs))
        with calls_not_watched(), self._late([leaf for leaf in leaves if isinstance(leaf, Tensor)], early=False):
            result = run()
        made = tree_flatten(result)[0]
        if any(leaf is not None and not isinstance(leaf, Tensor) for leaf in made):
            self.refuse("a unit gives more than tensors")
        self._keep(unit, form, made, NO_GUARD, early=False, keeps=True)
        return result

    def arrived(self, expected: list[Tensor], values: Sequence[Tensor]) -> None:
        """Begin the stage's own work with these arrived values."""
        self._real, self._arrives, self._expected = True, len(self._operations), expected
        self._arrivals = tuple(self._new(value) for value in values)

    def refuse(self, why: str) -> None:
        """Give up the tape of this run."""
        self.trouble = self.trouble or why

    def tape(self, result: Any) -> StageTape | None:
        form = self._form(result)
        if any(not isinstance(leaf, (Slot, Attribute, *CONSTANTS)) for leaf in form.leaves):
            self.refuse("its output holds objects that are no tensors")
        if chance() != self._chance:
            self.refuse("it draws from Python's random streams")
        if not self.state.unchanged():
            self.refuse("its code changes Python state")
        self._alive = []
        if self.trouble or self.state.trouble:
            return None
        early = sum(one.early for one in self._operations[max(self._arrives, 0) :])
        tape = StageTape(
            operations=sorted(self._operations, key=lambda one: not one.early),
            arrives=self._arrives + early if self._arrives >= 0 else -1,
            expected=self._expected,
            arrivals=self._arrivals,
            result=form,
            given=self._given,
            slots=self._count,
            context=self._context,
            state=self.state,
        )
        tape.prune()
        return tape

    def _keep(self, call: Any, given: ArgumentTree, made: list[Any], guard: Any, *, early: bool, keeps: bool) -> None:
        if _surroundings() != self._around:
            self.refuse("it puts units or operations into a context of its own")
        makes = tuple(self._new(leaf) if isinstance(leaf, Tensor) else None for leaf in made)
        if early:
            self._early |= {slot for slot in makes if slot is not None}
        self._operations.append(ReplayedCall(call, given, makes, guard, _context(), early, keeps))

    def _is_early(self, leaf: Any) -> bool:
        if isinstance(leaf, Attribute):  # units may change their buffers
            return not isinstance(leaf.table[leaf.name], nn.Parameter) and id(leaf.table) not in self._inside
        return leaf in self._early if isinstance(leaf, Slot) else not isinstance(leaf, Tensor)

    @contextmanager
    def _late(self, given: list[Tensor], *, early: bool) -> Iterator[None]:
        if early:
            yield
            return
        known = [tensor for tensor in given if self._slots.get(id(tensor)) in self._early]
        versions = [tensor._version for tensor in known]
        yield
        self._read_late |= {_storage(tensor) for tensor in known}
        now = [tensor._version for tensor in known]
        self._changed_late |= {_storage(one) for one, a, b in zip(known, versions, now, strict=True) if a != b}

    def _new(self, tensor: Tensor) -> Slot:
        slot = Slot(self._count)
        self._count += 1
        self._slots[id(tensor)] = slot
        self._alive.append(tensor)
        return slot

    def _form(self, tree: Any) -> ArgumentTree:
        leaves, spec = tree_flatten(tree)
        return ArgumentTree(tuple(self._leaf(leaf) for leaf in leaves), spec)

    def _leaf(self, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        slot = self._slots.get(id(leaf))
        if slot is not None:
            return slot
        for module in self._model.modules():
            for table in (module._parameters, module._buffers):
                for name, tensor in table.items():
                    if tensor is leaf:
                        return Attribute(table, name)
        if leaf.requires_grad and not leaf.is_leaf:  # which a tape would keep, with its graph
            self.refuse("it computes with a tensor of unknown origin")
        return leaf


class Tapes:
    """The tapes of one stage, by the form of the arguments."""

    def __init__(self, model: nn.Module, units: Iterable[nn.Module]) -> None:
        self._model = model
        self._inside = {child for unit in units for child in unit.modules()}
        self._outside = [module for module in model.modules() if module not in self._inside]
        self._once: dict[Any, list[StageTape]] = {}
        self._ready: dict[Any, list[StageTape]] = {}
        self._tries: dict[Any, int] = {}
        self.trouble = ""

    def key(self, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Return the key of tapes for these arguments."""
        leaves, spec = tree_flatten((args, kwargs))
        forms = tuple(
            (tuple(leaf.shape), leaf.stride(), leaf.dtype, leaf.device, leaf.requires_grad)
            if isinstance(leaf, Tensor)
            else (leaf if isinstance(leaf, CONSTANTS) else type(leaf))
            for leaf in leaves
        )
        training = bytes(module.training for module in self._outside)
        return forms, spec, _context(), torch.get_default_dtype(), forward, training

    def ready(self, key: Any) -> Iterator[StageTape]:
        """Yield the tapes that may be valid now."""
        if key in self._ready and not _followed():
            yield from (tape for tape in self._ready[key] if tape.state.unchanged())

    def recorder(self, key: Any, args: Any, kwargs: Any, *, real: bool) -> StageRecorder | None:
        """Return a recorder for these arguments; ``None`` once recording has been given up."""
        others = (module for module in self._outside if module is not self._model)
        hooks = _followed() or any(getattr(module, name, None) for module in others for name in _HOOKS)
        if hooks or self._tries.get(key, 0) >= _MOST_TRIES or len(self._tries) > _MOST_FORMS:
            return None
        self._tries[key] = self._tries.get(key, 0) + 1
        recorder = StageRecorder(self._model, self._inside, args, kwargs, real=real)
        recorder.state.add_modules(self._outside, self._inside)
        return recorder

    def recorded(self, key: Any, recorder: StageRecorder, result: Any) -> None:
        """Take the recording of a finished run with ``result``."""
        tape = recorder.tape(result)
        self.trouble = recorder.trouble or recorder.state.trouble
        if tape is None:
            return
        once = self._once.setdefault(key, [])
        if any(tape.same(other) for other in once):
            self._ready.setdefault(key, []).append(tape)
            self._once.pop(key)
        else:
            self._once[key] = [*once[1 - _MOST_AT_ONCE :], tape]


_MOST_TRIES, _MOST_FORMS, _MOST_AT_ONCE = 12, 4096, 4


def _context() -> tuple[Any, ...]:
    return torch.is_grad_enabled(), autocast_types()


def _surroundings() -> tuple[Any, ...]:
    autograd: Any = torch._C._autograd  # pyrefly: ignore
    saving = autograd._top_saved_tensors_default_hooks(True)
    return (
        saving if saving is None else tuple(map(id, saving)),
        tuple(map(id, _get_current_function_mode_stack())),
        tuple(map(id, _get_current_dispatch_mode_stack())),
        torch.is_inference_mode_enabled(),
        torch.get_default_dtype(),
        host().attention_switches(),
        torch.are_deterministic_algorithms_enabled(),
    )


_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def _followed() -> bool:
    return bool(torch.nn.modules.module._has_any_global_hook())


class _ValuesRead(TorchDispatchMode):
    """Detector of operations whose output shape depends on values."""

    found = False

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        by_values = torch.Tag.dynamic_output_shape in func.tags
        if func is torch.ops.aten.index.Tensor:  # only where an index is a mask
            by_values = any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])
        if by_values or torch.Tag.data_dependent_output in func.tags:
            self.found = True
        return func(*args, **(kwargs or {}))


def _name(call: Any) -> str:
    return getattr(call, "__name__", "")


def _storage(tensor: Tensor) -> int:
    return id(tensor) if is_sliced(tensor) else tensor.untyped_storage()._cdata
