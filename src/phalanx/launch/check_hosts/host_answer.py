"""The answers of hosts to a check, and their reading: a host may be hostile, so each field is checked."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, is_dataclass
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from phalanx.device_kinds import all_kinds
from phalanx.files import json_value
from phalanx.units import visible

T = TypeVar("T")

MARK = "phalanx-check:"
"""Beginning of the line with the answer: a login script may print, too."""
LONGEST = 2**20
"""Bytes of an answer; of longer output the end is read."""
_MOST, _LONGEST_TEXT = 4096, 2**16  # entries of a list; characters of a text


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceFacts:
    """A device as torch knows it; memory in bytes. ``error`` is empty if the device computes."""

    index: int
    name: str = ""
    error: str = ""
    free: int = 0
    total: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class HostFacts:
    """Facts that a host reports; sizes in bytes, times in seconds.

    Attributes:
        open_files, locked_memory, processes: soft limits; -1: none.
        shared: the host sees the asker's file in the run folder.
        driver_devices: devices that their driver lists.
        speed: bytes per second of the host's fastest network; 0 if unknown.
        meets: reason why workers cannot meet at the host's address.
        versions: Python package, or name in ``DeviceKind.versions`` → version.
        files: file of the job, relative to its folder → SHA-256.
        missing: the job was not loaded, as its file is not there.
        samples: of the job's data; -1: a stream, or not read.
        loaders: processes that load the data of each worker.
        step: step that the probing process was in as it ended.
        ending: reason why it did not finish.
    """

    python: str
    executable: str
    cores: int
    memory: int
    memory_free: int
    open_files: int
    locked_memory: int
    processes: int
    shm: int
    shm_free: int
    shared: bool
    folder_error: str
    folder_free: int
    driver: str
    driver_error: str
    driver_devices: int
    topology: str
    address: str
    speed: float
    infiniband: bool
    meets: str
    free_port: int
    began: float
    ended: float
    versions: Mapping[str, str] = field(default_factory=dict[str, str])
    kind: str = ""
    devices: tuple[DeviceFacts, ...] = ()
    files: Mapping[str, str] = field(default_factory=dict[str, str])
    missing: bool = False
    job_error: str = ""
    job_fix: str = ""
    data_error: str = ""
    data_read: bool = False
    samples: int = -1
    loaders: int = 0
    step: str = ""
    ending: str = ""

    def __post_init__(self) -> None:
        if self.kind not in ("", *(one.name for one in all_kinds())) or min(self.cores, self.memory) < 1:
            raise ValueError(f"{self.kind or 'no device'}, {self.cores} cores, {self.memory} bytes")


@dataclass(frozen=True, kw_only=True, slots=True)
class LinkFacts:
    """Answer of a host about its links.

    Attributes:
        links: number of another host → seconds of a round trip, and bytes per second from there.
        unmeasured: links for which no time was left.
    """

    error: str = ""
    links: Mapping[str, tuple[float, ...]] = field(default_factory=dict[str, tuple[float, ...]])
    unmeasured: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class LinkAnswer:
    """A link from one host to another: its error, or the seconds of a round trip and bytes per second."""

    source: str
    target: str
    error: str = ""
    latency: float = 0.0
    bandwidth: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class HostAnswer:
    """Answer of one host.

    Attributes:
        processes: that the target starts there; 0: as many as it has devices.
        facts: ``None`` if no answer came, for the reason ``error``.
        ahead: least and most seconds by which its clock may be ahead of this machine's.
    """

    name: str
    processes: int = 0
    facts: HostFacts | None = None
    error: str = ""
    ahead: tuple[float, float] = (0.0, 0.0)

    @property
    def working(self) -> list[DeviceFacts]:
        """Devices that compute."""
        return [one for one in self.facts.devices if not one.error] if self.facts else []


def read_answer(text: str, form: type[T]) -> T | None:
    """Return the answer in the last marked line of ``text``; ``None`` if there is none of this ``form``."""
    lines = [line for line in text.splitlines() if line.startswith(MARK)]
    try:
        return _read(json_value(lines[-1].removeprefix(MARK)), form) if lines else None
    except (TypeError, ValueError):  # TypeError: a field is missing or unknown
        return None


def _read(value: Any, form: Any) -> Any:
    kind, inner = get_origin(form), get_args(form)
    if is_dataclass(form) and isinstance(value, dict):
        kinds = get_type_hints(form, vars(sys.modules[__name__]))
        return form(**{name: _read(one, kinds.get(name)) for name, one in value.items()})  # pyrefly: ignore
    if kind is tuple and isinstance(value, list) and len(value) <= _MOST:
        return tuple(_read(one, inner[0]) for one in value)
    if kind is Mapping and isinstance(value, dict) and len(value) <= _MOST:
        return {_read(name, str): _read(one, inner[1]) for name, one in value.items()}
    if form is float and type(value) is float:
        return value
    if form is int and type(value) is int and -1 <= value < 2**63:
        return value
    if form is bool and type(value) is bool:
        return value
    if form is str and isinstance(value, str) and len(value) <= _LONGEST_TEXT:
        return visible(value)
    raise ValueError(f"not {form}")
