"""Keras layers as torch modules: their variables are parameters and buffers that others may cut, gather or swap.

Keras 3 on torch has its own modules, which hinder a plan in three ways: a variable holds its own tensor, so that a
replacement is ignored; layers in lists are not children; and seeds and moving averages are parameters without a
gradient. Here a variable reads its value from its layer, under Keras' name with an underscore behind it (``kernel_``),
layers in lists are children, and values without gradients are buffers. Random numbers come from torch's own streams,
which plans keep: a mask then does not depend on the number of earlier calls.

This file relies on details that Keras does not promise, and must be checked for each new version.
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportArgumentType=false, reportOptionalMemberAccess=false, reportIncompatibleMethodOverride=false
# Keras has no types that hold for the backend that it runs on.

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial, partialmethod
from types import MethodType
from typing import Any

import torch
from keras.src.backend.common import global_state
from keras.src.backend.common.masking import get_keras_mask, set_keras_mask
from keras.src.backend.common.variables import AutocastScope, get_autocast_scope
from keras.src.backend.torch import random as keras_random
from keras.src.backend.torch.core import Variable
from keras.src.backend.torch.layer import TorchLayer
from keras.src.layers import BatchNormalization, Dense, Dropout, EinsumDense, Embedding
from keras.src.layers.layer import CallContext
from keras.src.layers.regularization.spatial_dropout import BaseSpatialDropout
from keras.src.models.functional import Functional
from keras.src.random.seed_generator import SeedGenerator
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from phalanx.errors import RefusedError
from phalanx.parallel.global_batch_norm import joined_moments
from phalanx.train.keras.keras_own import CALL, DEVICE, is_keras_code
from phalanx.train.keras.keras_penalties import PENALTIES, penalise_within
from phalanx.train.keras.layer_children import children_of, free_name, functional_of


class ModuleVariable(Variable):
    """A variable whose value is the parameter or buffer with its name in its layer's module."""

    @property
    def _value(self) -> Any:
        home, key = self.__dict__["_home"]
        return getattr(home, key)

    @_value.setter
    def _value(self, value: Any) -> None:
        home, key = self.__dict__["_home"]
        setattr(home, key, value)

    def _direct_assign(self, value: Any) -> None:
        home, key = self.__dict__["_home"]
        if key in home._parameters and global_state.get_global_attribute(CALL) is not None:
            given = f"a layer that assigns to its weight {self.path!r} when it is called"
            allowed = "weights that the optimizer alone changes: what a plan has gathered for a call is not kept"
            raise RefusedError.of("job.model", given, allowed, "self.add_weight(..., trainable=False) for that value")
        super()._direct_assign(value)


def home_of(variable: Any) -> tuple[nn.Module, str]:
    """Return the module that holds the value of ``variable``, and its name there."""
    return variable.__dict__["_home"]


def is_regularised(layer: Any) -> bool:
    """Return True if a layer that is a torch module has weights with a regulariser."""
    return bool(vars(layer).get("_regularised"))


_ALONE = (None, None, False, None, None)  # what is around a layer that is called by itself


class _LayerModule(TorchLayer):
    """The class between ``Layer`` and torch's module in layers made by ``as_modules``."""

    named_parameters = nn.Module.named_parameters

    def _track_variables(self) -> None:
        """Keep Keras from rebuilding its own table of parameters."""

    def _post_track_variable(self, variable: Any) -> None: ...

    def _post_untrack_variable(self, variable: Any) -> None: ...

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # Keras' own call ends here; what it knows of the calls around goes along, for a forward that comes again later.
        context = global_state.get_global_attribute(CALL)
        scope = get_autocast_scope()
        penalised, counted = False, PENALTIES.counted() if self._layers else None
        if self.__dict__["_regularised"] and PENALTIES.terms is not None and id(self) not in PENALTIES.layers:
            PENALTIES.layers.add(id(self))
            penalised = True
        masks = masks_of((args, kwargs)) if self._layers else None
        within = (getattr(context, "training", None), scope.dtype if scope else None, penalised, counted, masks)
        return nn.Module.__call__(self, *args, keras_within=within, **kwargs)

    def forward(self, *args: Any, keras_within: tuple[Any, ...] = _ALONE, **kwargs: Any) -> Any:
        training, dtype, penalised, counted, masks = keras_within
        if masks is not None:
            put_masks((args, kwargs), masks)
        if not (penalised or self.__dict__["_shared"]) and global_state.get_global_attribute(CALL) is not None:
            return self.call(*args, **kwargs)  # pyrefly: ignore[not-callable]
        with _as_it_was(self, training, dtype, (args, kwargs)), PENALTIES.again(counted), _read_here(self):
            if penalised:
                penalty = sum(one.regularizer(one) for one in self.__dict__["_regularised"])
                if PENALTIES.terms is not None:
                    PENALTIES.terms.append(penalty)  # pyrefly: ignore[bad-argument-type]
            return self.call(*args, **kwargs)  # pyrefly: ignore[not-callable]

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        # Keras copies by writing a file; nodes of its graph lead from layer to layer, and are those of all copies.
        made = object.__new__(type(self))
        memo[id(self)] = made
        for name, value in vars(self).items():
            own = name not in _GRAPH and _holds(value)
            made.__dict__[name] = copy.deepcopy(value, memo) if own else value
        return made


def _called(self: Any, own: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return nn.Module.__call__(self, *args, **kwargs) if "keras_within" in kwargs else own(self, *args, **kwargs)


def _drops(self: Any, own: Callable[..., Any], inputs: Any, training: bool = False) -> Any:
    """Keep dropout an operation in evaluation, too, so that pipeline stages do the same in both modes."""
    if training or not 0 < self.rate < 1:
        return own(self, inputs, training=training)
    return masked(inputs, self.rate, getattr(self, "_get_noise_shape", lambda _: self.noise_shape)(inputs), False)


def _moments(self: Any, own: Callable[..., Any], inputs: Any, mask: Any) -> Any:
    """Return mean and variance of the batch, or of the global batch if the plan joins replicas."""
    joined = None if mask is not None or not isinstance(self.axis, int) else joined_moments(self, inputs, self.axis)
    return own(self, inputs, mask) if joined is None else joined


def masks_of(given: Any) -> tuple[Any, ...] | None:
    """Return the masks that Keras has tied to the tensors of ``given``, in order; ``None`` without masks."""
    masks = tuple(get_keras_mask(leaf) if isinstance(leaf, Tensor) else None for leaf in tree_leaves(given))
    return masks if any(mask is not None for mask in masks) else None


def put_masks(given: Any, masks: Iterable[Any]) -> None:
    """Tie masks again to tensors that have lost theirs, because gathering and casting make new tensors."""
    for leaf, mask in zip(tree_leaves(given), masks, strict=True):
        if mask is not None and get_keras_mask(leaf) is None:
            set_keras_mask(leaf, mask)


def _operation_of(self: Any, node: Any) -> Any:
    return self.__dict__["_own_layers"].get(id(node.operation), node.operation)


_GRAPH = frozenset({"_inbound_nodes", "_outbound_nodes", "_nodes", "_nodes_by_depth", "_tracker"})
_GRAPH |= {"_operations", "_operations_by_depth", "_layers"}
_KINDS: dict[type, type] = {}


def as_modules(model: Any, top: nn.Module) -> None:
    """Turn the layers of ``model`` into torch modules, in place, and make ``top`` the module of the model.

    ``model`` is built. Its layers become children of ``top``, its own variables parameters and buffers of it.
    """
    layers = [model, *functional_of(model), *model._flatten_layers(include_self=False)]
    layers += [inner for layer in layers[1:] for inner in functional_of(layer)]
    layers = list({id(layer): layer for layer in layers}.values())
    keep_streams()
    for layer in layers:
        for generator in layer._seed_generators:
            drawn_by_torch(generator)
        layer.__dict__["draws_in_training"] = _draws(layer)
    homes: dict[int, tuple[Any, nn.Module, str]] = {}
    for layer in layers:
        layer.__dict__["_shared"] = []
        _place_children(layer, top if layer is model else layer)
    for layer in layers:
        _place_variables(layer, top if layer is model else layer, homes)
    for layer in layers:
        penalise_within(layer)
    for layer in layers:
        _become(layer, layers)


def _place_children(layer: Any, home: nn.Module) -> None:
    children = children_of(layer)
    for name, value in list(vars(layer).items()):
        if type(value).__name__ in ("TrackedList", "TrackedDict"):  # which ask to be told of changes
            layer.__dict__[name] = dict(value) if isinstance(value, Mapping) else list(value)
    if functional := layer._modules.pop("_functional", None):
        layer.__dict__["_functional"] = functional
    layer._modules.pop("_torch_params", None)
    home._modules.update(children)


def _place_variables(layer: Any, home: nn.Module, homes: dict[int, tuple[Any, nn.Module, str]]) -> None:
    """Register the layer's own variables in ``home``; a variable shared by several layers is one tensor."""
    own = [
        *((one, True) for one in layer._trainable_variables),
        *((one, False) for one in layer._non_trainable_variables),
    ]
    for variable, learns in own:
        if id(variable) in homes and homes[id(variable)][0] is layer:
            continue
        key = free_name(variable.name + "_", {**home._parameters, **home._buffers, **home._modules})
        if id(variable) in homes:
            first, there, as_there = homes[id(variable)]
            value = getattr(there, as_there)
            layer.__dict__["_shared"].append((variable, home, key))
            first.__dict__["_shared"].append((variable, there, as_there))
        else:
            homes[id(variable)] = layer, home, key
            value = variable.__dict__.pop("_value")
            variable.__class__ = ModuleVariable
            variable.__dict__["_home"] = (home, key)
        if learns:
            home._parameters[key] = value.requires_grad_(bool(variable.trainable))
        else:
            home._buffers[key] = value.detach() if isinstance(value, nn.Parameter) else value
    layer.__dict__["_regularised"] = [
        one for one, _ in own if one.trainable and one.regularizer is not None and homes[id(one)][0] is layer
    ]  # once where several layers have it, and not where it does not learn, as Keras counts them


def _draws(layer: Any) -> bool:
    given = (getattr(layer, name, None) for name in ("rate", "dropout", "recurrent_dropout", "stddev"))
    rates = [rate for rate in given if isinstance(rate, int | float)]
    return bool(layer._seed_generators) and (not rates or any(rates))


def _become(layer: Any, layers: list[Any]) -> None:
    kind = type(layer)
    if isinstance(layer, Functional):
        layer.__dict__["_own_layers"] = {id(one): one for one in layers}
    if kind not in _KINDS:
        names: dict[str, Any] = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
        names["__setattr__"] = nn.Module.__setattr__  # Keras' own tracks what is set, and refuses it once built
        names["__delattr__"] = nn.Module.__delattr__
        names["__call__"] = partialmethod(_called, kind.__call__)
        names["__deepcopy__"] = _LayerModule.__deepcopy__
        if issubclass(kind, Functional):
            names["_get_operation_for_node"] = _operation_of
        if issubclass(kind, BatchNormalization):
            names["running_statistics"] = ("moving_mean_", "moving_variance_")
            names["_moments"] = partialmethod(_moments, kind._moments)
        if issubclass(kind, Dropout | BaseSpatialDropout) and is_keras_code(kind.call):
            names["call"] = partialmethod(_drops, kind.call)
        if issubclass(kind, Dense | Embedding):
            names["column_dimension"] = 1
        if issubclass(kind, EinsumDense):
            names["weights_by_heads"] = ("kernel_",)
        _KINDS[kind] = type(kind.__name__, (kind, _LayerModule), names)
    object.__setattr__(layer, "__class__", _KINDS[kind])
    if issubclass(kind, BatchNormalization) and not layer.trainable:  # then it goes by what it has
        layer.__dict__["running_statistics"] = ()


def _holds(value: Any, depth: int = 0) -> bool:
    if isinstance(value, nn.Module | Variable | Tensor | MethodType | partial):
        return True
    if depth > 8:
        return False
    if isinstance(value, Mapping):
        return any(_holds(one, depth + 1) for one in value.values())
    return isinstance(value, list | tuple | set) and any(_holds(one, depth + 1) for one in value)


@contextmanager
def _as_it_was(layer: Any, training: Any, dtype: Any, given: Any) -> Iterator[None]:
    if global_state.get_global_attribute(CALL) is not None:
        yield
        return
    context: Any = CallContext(entry_layer=layer)
    context.training = training
    global_state.set_global_attribute(CALL, context)
    try:
        with on_device_of(given):
            if dtype is None:
                yield
            else:
                with AutocastScope(dtype):
                    yield
    finally:
        global_state.set_global_attribute(CALL, None)


@contextmanager
def _read_here(layer: Any) -> Iterator[None]:
    """Read shared variables from the running layer, because a plan has them ready there."""
    if not (shared := layer.__dict__["_shared"]):
        yield
        return
    before = [variable.__dict__["_home"] for variable, _, _ in shared]
    for variable, *home in shared:
        variable.__dict__["_home"] = tuple(home)
    try:
        yield
    finally:
        for (variable, *_), home in zip(shared, before, strict=True):
            variable.__dict__["_home"] = home


@contextmanager
def on_device_of(given: Any) -> Iterator[None]:
    """Make Keras create tensors on the device of the first tensor in ``given``; a device, not its name.

    Keras treats no tensor as being on a device given by name.
    """
    device = next((leaf.device for leaf in tree_leaves(given) if isinstance(leaf, Tensor)), None)
    before = global_state.get_global_attribute(DEVICE)
    if device is not None:
        global_state.set_global_attribute(DEVICE, device)
    try:
        yield
    finally:
        global_state.set_global_attribute(DEVICE, before)


def drawn_by_torch(generator: Any) -> None:
    """Make a layer's draws from its own ``generator`` come from torch's stream."""
    generator.__dict__["_drawn_by_torch"] = True
    generator._initial_seed = None


_PLAIN: Callable[[Any], Any] = keras_random.torch_seed_generator
_PLAIN_DROPOUT: Callable[..., Any] = keras_random.dropout


def keep_streams() -> None:
    """Make layers that are torch modules draw from torch's streams; others are unchanged."""
    keras_random.torch_seed_generator = _generator
    keras_random.dropout = _dropout


def _dropout(inputs: Any, rate: float, noise_shape: Any = None, seed: Any = None) -> Any:
    if noise_shape is None or _generator(seed) is not None or not 0 < rate < 1:
        return _PLAIN_DROPOUT(inputs, rate, noise_shape, seed)
    return masked(inputs, rate, noise_shape, True)


def masked(inputs: Tensor, rate: float, noise_shape: Any, training: bool) -> Tensor:
    """Apply dropout to ``inputs`` with a mask of ``noise_shape``; the same operations run without dropping."""
    if noise_shape is None:
        return torch.nn.functional.dropout(inputs, rate, training=training)
    shape = [size if wanted is None else wanted for size, wanted in zip(inputs.shape, noise_shape, strict=True)]
    return inputs * torch.nn.functional.dropout(inputs.new_ones(shape), rate, training=training)


def _generator(seed: Any) -> Any:
    if isinstance(seed, SeedGenerator) and "_drawn_by_torch" in vars(seed):
        return None
    if isinstance(global_state.get_global_attribute(DEVICE), torch.device):  # a model that runs under a plan
        if seed is None:
            return None
        raise RefusedError.of(
            "job.model",
            f"a layer that draws random numbers by the seed {seed!r:.40} of its own each time it is called",
            "random numbers by a keras.random.SeedGenerator that the layer has: the plan keeps its stream",
            "self.seed_generator = keras.random.SeedGenerator(), and seed=self.seed_generator in call",
        )
    return _PLAIN(seed)
