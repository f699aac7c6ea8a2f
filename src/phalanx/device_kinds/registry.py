"""The known kinds: files of ``kinds``, those registered by a program, and those of installed packages."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from pkgutil import iter_modules
from typing import TYPE_CHECKING

from phalanx.device_kinds.interface import DeviceKind

if TYPE_CHECKING:
    import torch

ENTRY_POINTS = "phalanx.device_kinds"
"""The group of entry points by which an installed package brings kinds: its name, and where the ``DeviceKind`` is."""

_FILES = f"{__package__}.kinds"
_added: dict[str, DeviceKind] = {}


def register(kind: DeviceKind) -> None:
    """Make plans accept ``device=NAME`` of this kind from now on; workers forked from this process know it, too.

    Raises:
        ValueError: there is another kind of that name.
    """
    if kind.name in ("auto", *_built_in()) or _added.get(kind.name, kind) is not kind:
        raise ValueError(f"there is a kind of device called {kind.name!r} already")
    _added[kind.name] = kind


@contextmanager
def registered(kind: DeviceKind) -> Iterator[DeviceKind]:
    """Register a kind for the length of the block."""
    register(kind)
    try:
        yield kind
    finally:
        del _added[kind.name]


def kind_names() -> tuple[str, ...]:
    """Return the values of ``device=`` in a plan beside ``auto``."""
    return (*_built_in(), *_added)


def is_kind(name: object) -> bool:
    """Return True if there is a kind of that name, here or in an installed package."""
    return isinstance(name, str) and (name in _built_in() or name in _added or _from_package(name))


def kind_named(name: str) -> DeviceKind:
    """Return the kind with this name in plans.

    Raises:
        KeyError: there is none; no plan says so.
    """
    if not is_kind(name):
        raise KeyError(name)
    return _added[name] if name in _added else _loaded(name)


def all_kinds() -> tuple[DeviceKind, ...]:
    """Return every kind known in this process."""
    return tuple(map(kind_named, kind_names()))


def host() -> DeviceKind:
    """Return the kind whose devices are the host's own cores."""
    return _loaded("cpu")


def kind_of(device: torch.device | str, named: str = "auto") -> DeviceKind:
    """Return the kind for tensors on ``device``, by torch's type; the host's for tensors without values.

    ``device`` may be its text, such as ``cpu``. ``named``: the plan's kind, among kinds with the same torch type.
    """
    if named != "auto" and kind_named(named).torch_type == str(device).partition(":")[0]:
        return kind_named(named)
    return _kind_of_type(device.partition(":")[0] if isinstance(device, str) else device.type)


def automatic_kinds() -> tuple[DeviceKind, ...]:
    """Return the kinds for ``device=auto``, if there are enough devices, best first; the host's comes last."""
    return tuple(sorted((one for one in all_kinds() if one.automatic), key=lambda one: one.on_host))


def accelerator() -> DeviceKind | None:
    """Return the kind of accelerator on this machine that ``device=auto`` may take, or ``None``."""
    return next((one for one in automatic_kinds() if not one.on_host and one.count()), None)


def accelerator_count() -> int:
    """Return the number of devices of that kind here."""
    kind = accelerator()
    return kind.count() if kind else 0


def automatic_kind(devices: int) -> DeviceKind:
    """Return the kind of ``device=auto`` for so many devices of this machine; the host's if others are fewer."""
    return next((one for one in automatic_kinds() if not one.on_host and one.count() >= devices), host())


def kind_for(named: str, devices: int) -> DeviceKind:
    """Return the computing kind of a plan with ``device=named``, which needs so many devices of this machine."""
    return automatic_kind(devices) if named == "auto" else kind_named(named)


def on_host(named: str) -> bool:
    """Return True if a plan with ``device=named`` computes with the host's cores on any machine."""
    return named != "auto" and is_kind(named) and kind_named(named).on_host


def widened(tensor: torch.Tensor) -> torch.Tensor:
    """Return ``tensor`` in the widest floating point type for sums on its device: fp64 if there is one."""
    return tensor.to(kind_of(tensor.device).widest())


def probed_kinds() -> tuple[DeviceKind, ...]:
    """Return the kinds whose devices hosts are asked for."""
    return tuple(kind for kind in all_kinds() if kind.versions)


def interface_variables() -> tuple[str, ...]:
    """Return the environment variables that select network interfaces of collectives, of every kind."""
    return tuple(dict.fromkeys(name for kind in all_kinds() for name in kind.interfaces))


def pod_resource(named: str) -> str:
    """Return Kubernetes' name of the devices of a plan with ``device=named``, or ""."""
    kinds = automatic_kinds() if named == "auto" else (kind_named(named),)
    return next((one.pod_resource for one in kinds if one.pod_resource), "")


def kind_of_hardware(word: str) -> DeviceKind:
    """Return the kind of devices that the catalog and cluster files call ``word``.

    Raises:
        KeyError: there is none.
    """
    found = next((one for one in all_kinds() if word in one.hardware), None)
    return found or kind_named(word)


def hardware_names() -> tuple[str, ...]:
    """Return the names for kinds of devices in the catalog and cluster files."""
    return tuple(dict.fromkeys(word for one in all_kinds() for word in (*one.hardware, one.name)))


@cache
def _built_in() -> tuple[str, ...]:
    return tuple(sorted(found.name for found in iter_modules(import_module(_FILES).__path__)))


@cache
def _loaded(name: str) -> DeviceKind:
    return import_module(f"{_FILES}.{name}").KIND


def _kind_of_type(torch_type: str) -> DeviceKind:
    if torch_type in _built_in():
        return _loaded(torch_type)
    found = next((one for one in _added.values() if one.torch_type == torch_type), None)
    return found or host()


def _from_package(name: str) -> bool:
    from importlib import metadata  # takes longer than all else here, and is asked for unknown kinds alone

    found = next(iter(metadata.entry_points(group=ENTRY_POINTS, name=name)), None)
    if found is None:
        return False
    _added[name] = found.load()
    return True
