"""The layers inside a Keras layer, as children of a torch module: also those in lists and dicts, by name."""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportArgumentType=false, reportOptionalMemberAccess=false, reportIncompatibleMethodOverride=false
# Keras has no types that hold for the backend that it runs on.

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from keras.src.layers import InputLayer, Layer
from keras.src.models.functional import Functional
from torch import nn


def children_of(layer: Any) -> dict[str, Any]:
    """Return the layers inside ``layer``, by attribute or by name; lists and dicts become torch's containers."""
    own = [*functional_of(layer), layer]
    found: dict[str, Any] = {}
    for name, value in list(vars(layer).items()):
        if not name.startswith("_") and (container := _container(value)):
            found[name] = container
    found |= {name: one for name, one in layer._modules.items() if isinstance(one, Layer) and one not in own}
    held = {id(one) for value in found.values() for one in _layers_in(value)}
    for child in layer._layers:
        if id(child) not in held and not any(child is one for one in own) and not isinstance(child, InputLayer):
            found[free_name(child.name, found)] = child
    order = {id(child): at for at, child in enumerate(layer._layers)}

    def place(value: Any) -> int:
        return min((order[id(one)] for one in (value, *value.modules()) if id(one) in order), default=len(order))

    return dict(sorted(found.items(), key=lambda item: place(item[1])))


def functional_of(layer: Any) -> list[Any]:
    """Return the graph by which a Sequential model runs its layers, if it is one."""
    inner = vars(layer).get("_functional") or layer._modules.get("_functional")
    return [inner] if isinstance(inner, Functional) else []


def _container(value: Any) -> nn.Module | None:
    if isinstance(value, Mapping):
        parts = {str(key).replace(".", "_"): _member(one) for key, one in value.items()}
        return nn.ModuleDict(parts) if parts and all(one is not None for one in parts.values()) else None  # pyrefly: ignore[bad-argument-type]
    if isinstance(value, list | tuple):
        members = [_member(one) for one in value]
        return nn.ModuleList(members) if members and all(one is not None for one in members) else None  # pyrefly: ignore[bad-argument-type]
    return None


def _layers_in(value: nn.Module) -> Iterator[nn.Module]:
    if isinstance(value, Layer):
        yield value
    else:
        for child in value.children():
            yield from _layers_in(child)


def _member(value: Any) -> nn.Module | None:
    return value if isinstance(value, Layer) else _container(value)


def free_name(name: str, taken: Collection[str]) -> str:
    """Return ``name`` in a form torch allows, with a number if it is ``taken``."""
    name = name.replace(".", "_")
    return name if name not in taken else next(new for at in range(1, 10**6) if (new := f"{name}{at}") not in taken)
