"""A model's program, seen in one run on fake parameters: the units it calls, and the values that pass between them."""
# A run of its own: a cut needs each value that passes between units, of the model as it is. What records costs runs
# each distinct block by itself, at several sizes, and knows no value between blocks.

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.utils._pytree import tree_leaves, tree_map

from phalanx.errors import RefusedError
from phalanx.parallel.pipeline.stand_in import Flops, Outline, outline, signature
from phalanx.parallel.pipeline.value_flow import Flow, Key, tensors, told_to
from phalanx.parallel.survey import Example
from phalanx.trace.blocks import leave_cache_out
from phalanx.trace.fake_tensors import fake, quiet


@dataclass(frozen=True, kw_only=True, slots=True)
class UnitCall:
    """One call of a unit."""

    name: str
    unit: nn.Module
    keys: tuple[Key | None, ...]  # of each leaf of its output; None for what does not depend on parameters
    outline: Outline  # of its output
    written: tuple[tuple[int, Key], ...]  # which tensors it is called with it writes into, and what those are then
    reads: bool  # whether it reads values that it was not called with
    kin: int  # an earlier call that did the same to the same, or this one


@dataclass(slots=True)
class Value:
    """A value that depends on parameters."""

    born: int  # the region that computes it; region c runs from call c to the next
    last: int  # the last region that reads it
    learns: bool  # whether a gradient flows through it
    trouble: str = ""  # why it cannot be sent


@dataclass(frozen=True, kw_only=True, slots=True)
class Program:
    """A model as a row of regions: each a call of a unit and the model's own work after it."""

    module: nn.Module
    fakes: FakeTensorMode  # the mode of all fakes of the model
    calls: tuple[UnitCall, ...]  # in order; one a region
    values: dict[Key, Value]
    parameters: dict[str, frozenset[int]]  # by name the regions that use it, none for one that nothing uses
    costs: tuple[float, ...]  # of each region, in floating-point operations of a forward, or what takes as long
    recomputes: bool  # whether the model recomputes activations by itself
    reentrant: tuple[bool, ...]  # of each reentrant checkpoint around units whether what it is called with learns

    def uncalled(self, units: Iterable[nn.Module]) -> list[nn.Module]:
        """Return those of ``units`` that were never called although their parameters are read."""
        called = {call.unit for call in self.calls}
        read = {id(tensor) for name, tensor in self.module.named_parameters() if self.parameters[name]}
        return [unit for unit in units if unit not in called and any(id(one) in read for one in unit.parameters())]

    def crossing(self, cut: int) -> list[Key]:
        """Return the values that pass a cut before region ``cut``, in order."""
        return [key for key, value in self.values.items() if value.born < cut <= value.last]

    def trouble(self, cut: int) -> str:
        """Return the reason why there can be no cut before region ``cut``, or ""."""
        return next((self.values[key].trouble for key in self.crossing(cut) if self.values[key].trouble), "")


def program(module: nn.Module, units: Mapping[nn.Module, str], example: Example) -> Program:
    """Run ``module`` once on the example with fake parameters.

    Raises:
        RefusedError: if it decides by values that a stage would not have.
    """
    leave_cache_out(module)
    dry = _Dry(module, units)
    with (
        quiet(),
        torch.random.fork_rng(devices=[]),
        dry.fake_parameters(),
        intercepted(units, dry.called),
        told_to(dry),
        Flops(lambda: max(dry.call, 0)) as flops,
    ):
        try:
            with dry:
                output = module(*example.args, **example.kwargs)
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            raise by_values(error) from None
        for leaf in tensors(output):
            dry.read(leaf, len(dry.calls) - 1)
    for key in [key for key, value in dry.values.items() if value.last <= value.born]:
        del dry.values[key]  # never leaves its region
    regions = range(len(dry.calls))
    parameters = {name: frozenset(dry.regions.get(id(tensor), ())) for name, tensor in module.named_parameters()}
    return Program(
        module=module,
        fakes=dry.fakes,
        calls=tuple(dry.calls),
        values=dry.values,
        parameters=parameters,
        costs=tuple(flops.found.get(region, 0.0) for region in regions),
        recomputes=dry.recomputes,
        reentrant=tuple(dry.reentrant),
    )


@contextmanager
def intercepted(units: Mapping[nn.Module, Any], called: Callable[..., Any]) -> Iterator[None]:
    """Replace calls of units by ``called(unit, call, args, kwargs)``; hooks are part of ``call``."""
    before = {unit: unit.__dict__.get("_compiled_call_impl") for unit in units}

    def instead(unit: nn.Module, call: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **kwargs: called(unit, call, args, kwargs)

    for unit, compiled in before.items():
        # Where Module.compile keeps what it calls in place of the module.
        unit.__dict__["_compiled_call_impl"] = instead(unit, compiled or unit._call_impl)
    try:
        yield
    finally:
        for unit, compiled in before.items():
            if compiled is None:
                del unit.__dict__["_compiled_call_impl"]
            else:
                unit.__dict__["_compiled_call_impl"] = compiled


def by_values(error: BaseException, where: str = "") -> RefusedError:
    """Return the error for a model that reads a tensor missing on this stage."""
    if not where:
        frames = traceback.extract_tb(error.__traceback__)
        others = {Path(torch.__file__).parent, Path(__file__).parent}
        lines = [frame for frame in frames if others.isdisjoint(Path(frame.filename).parents)]
        where = f"{Path(lines[-1].filename).name}:{lines[-1].lineno} ({lines[-1].line})" if lines else "the model"
    given = "control flow that depends on data across a split:"
    return RefusedError.of(
        where="plan.pp",
        given=f"{given} {where} decides by the values of a tensor that another stage computes",
        allowed="models whose own code, outside their blocks, decides by shapes and inputs only",
        fix="torch.where in place of the decision, or the same code inside a block; or fsdp in place of pp",
    )


@contextmanager
def _exchanged(tables: Sequence[dict[str, Any]], other: Callable[[Any], Any]) -> Iterator[None]:
    before = [dict(table) for table in tables]
    for table in tables:
        table.update({name: other(tensor) for name, tensor in table.items()})
    try:
        yield
    finally:
        for table, tensors_before in zip(tables, before, strict=True):
            table.update(tensors_before)


_KEPT = 2**31  # stands for whatever a unit keeps to itself


@dataclass(slots=True)
class _UnitForm:
    signature: Any
    outline: Outline
    parts: Any


class _Dry(Flow):
    def __init__(self, module: nn.Module, units: Mapping[nn.Module, str]) -> None:
        super().__init__(FakeTensorMode(allow_non_fake_inputs=True))
        self.calls: list[UnitCall] = []
        self.values: dict[Key, Value] = {}
        self.regions: dict[int, set[int]] = {}
        self._module, self._units = module, units
        self._meant: dict[int, nn.Parameter] = {}
        self._given: set[int] = set()
        self._reads = False
        self._seen: list[_UnitForm] = []

    @contextmanager
    def fake_parameters(self) -> Iterator[None]:
        made: dict[int, Any] = {}

        def stand_in(tensor: Any) -> Any:
            if tensor is None or not (isinstance(tensor, nn.Parameter) or tensor.is_meta):
                return tensor
            if id(tensor) not in made:
                made[id(tensor)] = fake(self.fakes, tensor)
                if isinstance(tensor, nn.Parameter):
                    self._meant[id(made[id(tensor)])] = tensor
            return made[id(tensor)]

        tables = [table for child in self._module.modules() for table in (child._parameters, child._buffers)]
        with _exchanged(tables, stand_in):
            yield

    def used(self, leaves: list[Tensor]) -> None:
        for leaf in leaves:
            self.read(leaf, max(self.call, 0))

    def read(self, leaf: Tensor, region: int) -> None:
        if id(leaf) in self._meant:
            self.regions.setdefault(id(self._meant[id(leaf)]), set()).add(region)
            return
        mark = self.mark_of(leaf)
        if mark is None:
            return
        if mark.key is not None:
            self.values[mark.key].last = max(region, self.values[mark.key].last)
        elif mark.region < region:
            name = self.calls[mark.region].name
            kept = f"a tensor that {name} computes and keeps to itself, and that is read after {self.calls[-1].name}"
            self.values[Key(mark.region, True, _KEPT)] = Value(mark.region, region, False, kept)

    def came(self, mark: Any, tensor: Tensor) -> None:
        trouble = ""
        if tensor.layout != torch.strided or type(tensor) not in (Tensor, FakeTensor, nn.Parameter):
            trouble = f"a {type(tensor).__name__} of layout {tensor.layout}"
        region = mark.key.region
        self.values[mark.key] = Value(region, region, tensor.requires_grad, trouble)

    def within(self, func: Any, args: Any, kwargs: Any) -> Any:
        for leaf in tensors((args, kwargs)):
            mark = self.mark_of(leaf)
            if id(leaf) in self._meant:
                self.read(leaf, self.call)
            elif mark is not None and mark.region < self.call and id(leaf) not in self._given:
                self.read(leaf, self.call)
                self._reads = True
        result = func(*args, **kwargs)
        for leaf in tensors(result):
            if isinstance(leaf, FakeTensor) and id(leaf) not in self._given:
                self.put(leaf, None)
        return result

    def called(self, unit: nn.Module, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if self.inside:
            return call(*args, **kwargs)
        self.entered()
        given = list(tensors((args, kwargs)))
        self.used([leaf for leaf in given if self.depends(leaf)])
        args, kwargs = tree_map(self.as_fake, args), tree_map(self.as_fake, kwargs)
        self._given, self._reads = {id(leaf) for leaf in tensors((args, kwargs))}, False
        for tensor in unit.parameters():
            self.read(tensor, self.call)
        before = [(leaf, leaf._version, self.mark_of(leaf)) for leaf in tensors((args, kwargs))]
        self.inside = True
        try:
            output = self._run(unit, call, args, kwargs)
        finally:
            self.inside = False
        written: list[tuple[int, Key]] = []
        for index, (leaf, version, mark) in enumerate(before):
            if leaf._version != version:
                key = Key(self.call, True, -1 - index)
                self.written(given[index], leaf, key)
                written.append((index, key))
            elif mark is not None:
                self.again(leaf, mark)
        form, output = outline(output, args, kwargs, self.fakes)
        keys: list[Key | None] = []
        for index, (leaf, way) in enumerate(zip(tree_leaves(output), form.ways, strict=True)):
            if way.made:
                keys.append(self.put(leaf, Key(self.call, True, index)).key)
            else:
                mark = self.mark_of(leaf) if isinstance(leaf, Tensor) else None
                keys.append(mark.key if mark is not None else None)
        self.calls.append(
            UnitCall(
                name=self._units[unit],
                unit=unit,
                keys=tuple(keys),
                outline=form,
                written=tuple(written),
                reads=self._reads,
                kin=self._kin(unit, signature(args, kwargs), form),
            )
        )
        return output

    def _run(self, unit: nn.Module, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        try:
            return call(*args, **kwargs)
        except RefusedError:
            raise
        except Exception as error:  # a choice of experts, say: what fakes cannot follow, values of the same form can
            if any(tensor.is_meta for tensor in self._meant.values()):
                raise by_values(error, self._units[unit]) from None
            back: dict[int, Tensor] = {}

            def real(leaf: Any) -> Any:
                if not isinstance(leaf, FakeTensor):
                    return leaf
                made = torch.zeros(leaf.shape, dtype=leaf.dtype)
                back[id(made)] = leaf
                return made

            given, named = tree_map(real, args), tree_map(real, kwargs)
            tables = [child._parameters for child in unit.modules()]
            with _exchanged(tables, lambda tensor: self._meant.get(id(tensor), tensor)), torch.no_grad():
                output = call(*given, **named)
            learns = any(tensor.requires_grad for tensor in (*unit.parameters(), *back.values()))
            return tree_map(lambda leaf: self._as_if(leaf, back, learns=learns), output)

    def _as_if(self, leaf: Any, back: dict[int, Tensor], *, learns: bool) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        if id(leaf) in back:
            return back[id(leaf)]
        made = fake(self.fakes, leaf.detach())
        return made.requires_grad_(learns and leaf.is_floating_point()) * 1

    def _kin(self, unit: nn.Module, given: Any, form: Outline) -> int:
        parts = (
            tuple((name, type(child)) for name, child in unit.named_modules()),
            tuple((name, tuple(tensor.shape)) for name, tensor in unit.named_parameters()),
        )
        self._seen.append(_UnitForm(given, form, parts))
        for index, seen in enumerate(self._seen[:-1]):
            if seen.signature == given and seen.outline == form and seen.parts == parts:
                return index
        return len(self._seen) - 1
