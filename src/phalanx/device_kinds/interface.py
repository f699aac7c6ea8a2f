"""The interface of a kind of device. It is read without torch: functions that need torch import it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceMemory:
    """The memory of this process's device, in bytes.

    Attributes:
        peak: most taken by tensors at one time; ``allocated``: taken by tensors now.
        reserved: held by the allocator, for tensors and to use again.
        free: held by no process; ``total``: of the device.
    """

    peak: int
    allocated: int
    reserved: int
    free: int
    total: int


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionKernels:
    """The fused kernels of attention that torch has on a device, and may use: its switches rule all devices.

    Attributes:
        flash: for half precision, and on the host for all floating point types; ``efficient``: for fp32, too.
        features: of a head must be a multiple of this, and at most ``most_features``.
    """

    flash: bool = False
    efficient: bool = False
    features: int = 1
    most_features: int = 2**30


class DeviceKind(ABC):
    """One kind of device.

    Attributes:
        name: in plans (``device=NAME``) and run folders.
        label: before "device", in messages.
        hardware: kinds of the catalog and of cluster files with such devices; a maker's name beside the kind's own, if
            torch uses another one.
        torch_type: of the ``torch.device``, used by torch's functions.
        automatic: ``device=auto`` takes it if each replica can have its own device.
        on_host: it computes with the host's cores, in the host's memory.
        most: devices of it that one run may have; ``None``: any number.
        streams: work is queued on streams, and events report its end. Else it is done once a call returns, or torch
            waits when a value is read.
        pinned: copies from pinned memory of the host run by themselves.
        in_order: a process group tells messages between two ranks apart by their order alone.
        shared: one process may compute on several.
        forks: workers may be forked from a process that has loaded torch and not begun to use one; else each is a
            process of its own from the start.
        precisions: that plans may compute in.
        fitted: the constants of forecasts were fitted to measurements of devices of this name.
        compiles: ``torch.compile`` makes its kernels without the C++ compiler of the host.
        backend: for collectives of its tensors.
        interfaces: environment variables that select the backend's network interfaces.
        lost_peer: a pattern of the backend's message about a lost peer; may be empty.
        light_way, heavy_ways: user code that asks for the devices without, and with, beginning to use one.
        visible: the environment variable that leaves devices out; may be empty.
        listing: a program that prints, as JSON, a list with the name and the bytes of memory of each device here.
        versions: the kind's name (its version in ``torch.version``) and its backend → words for their versions, which
            hosts of one run should have alike; empty if hosts are not asked.
        pod_resource: Kubernetes' name of such a device, by its maker's plugin; may be empty.
        driver_tool: the program by which the driver lists its devices, and ``driver_reset`` the command that resets the
            device ``{index}``, for messages; may be empty.
    """

    name: ClassVar[str]
    label: ClassVar[str]
    hardware: ClassVar[tuple[str, ...]]
    torch_type: ClassVar[str]
    backend: ClassVar[str]
    automatic: ClassVar[bool] = False
    on_host: ClassVar[bool] = False
    most: ClassVar[int | None] = None
    streams: ClassVar[bool] = False
    pinned: ClassVar[bool] = False
    in_order: ClassVar[bool] = False
    shared: ClassVar[bool] = False
    forks: ClassVar[bool] = True
    precisions: ClassVar[tuple[str, ...]] = ("fp32", "bf16", "fp16")
    fitted: ClassVar[bool] = False
    compiles: ClassVar[bool] = False
    interfaces: ClassVar[tuple[str, ...]] = ()
    lost_peer: ClassVar[str] = ""
    light_way: ClassVar[str] = "torch.accelerator.device_count()"
    heavy_ways: ClassVar[str] = "torch.accelerator.synchronize()"
    visible: ClassVar[str] = ""
    listing: ClassVar[str] = "print([])"
    versions: ClassVar[Mapping[str, str]] = {}
    pod_resource: ClassVar[str] = ""
    driver_tool: ClassVar[str] = ""
    driver_reset: ClassVar[str] = ""

    @property
    def backends(self) -> str:
        """Return the backends for ``init_process_group``: host tensors go by gloo, which offload needs."""
        of_host = self.on_host or self.torch_type == "cpu"
        return self.backend if of_host else f"cpu:gloo,{self.torch_type}:{self.backend}"

    @abstractmethod
    def count(self) -> int:
        """Return the devices of this machine, without keeping workers from being forked from this process."""

    def driver(self) -> tuple[int, str, str]:
        """Return how many devices the driver lists, its version, and its error."""
        return 0, "", ""

    def topology(self) -> str:
        """Return the driver's text on the links between the devices of this machine, or ""."""
        return ""

    def missing(self) -> str:
        """Return the reason why there can be none here, and the package to install, or ""."""
        return ""

    @abstractmethod
    def device(self, index: int) -> torch.device:
        """Return the device of the ``index``-th worker of its machine."""

    @abstractmethod
    def current(self) -> torch.device:
        """Return the device that this process uses now."""

    def use(self, device: torch.device) -> None:
        """Make this process and its collectives use ``device``; a kind with one device ignores it."""
        return

    @abstractmethod
    def generator(self, device: torch.device) -> torch.Generator:
        """Return the default stream of random numbers of ``device``."""

    def before_workers(self, machines: int, workers: int) -> None:
        """Prepare the process that starts ``workers`` on each of so many machines, before it does."""
        return

    def in_use(self) -> bool:
        """Return True if this process has begun to use one, so that workers forked from it could not."""
        return False

    def spoilt(self) -> bool:
        """Return True if this process was forked from one that had begun to use one, so that it cannot."""
        return False

    def asks_lightly(self) -> Mapping[str, str]:
        """Return environment variables under which user code may ask for devices without using one."""
        return {}

    def synchronize(self) -> None:
        """Wait for all that is queued on the device in use."""
        return

    def event(self, *, timed: bool = False) -> torch.Event:
        """Return a new event that reports the end of queued work, for kinds with ``streams``."""
        raise NotImplementedError(f"{self.label} has no events")

    def stream(self, device: torch.device) -> torch.Stream:
        """Return a new stream of ``device``, for kinds with ``streams``."""
        raise NotImplementedError(f"{self.label} has no streams")

    def queued_on(self, stream: torch.Stream) -> AbstractContextManager[Any]:
        """Queue work in the block on ``stream``."""
        raise NotImplementedError(f"{self.label} has no streams")

    def current_stream(self, device: torch.device) -> torch.Stream:
        """Return the stream of ``device`` on which work is queued, for kinds with ``streams``."""
        raise NotImplementedError(f"{self.label} has no streams")

    def memory(self) -> DeviceMemory | None:
        """Return the memory of the device in use; ``None`` for the host's, or if unknown."""
        return None

    def attention(self) -> AttentionKernels:
        """Return the fused kernels of attention that ring attention may call."""
        return AttentionKernels()

    def attention_switches(self) -> tuple[bool, ...]:
        """Return torch's switches between kernels of attention, from the host's kind: they rule all."""
        return ()

    def widest(self) -> torch.dtype:
        """Return the widest floating point type for its sums."""
        import torch

        return torch.float64
