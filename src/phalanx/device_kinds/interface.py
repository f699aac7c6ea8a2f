"""What Phalanx asks of a kind of device. Read without torch: who asks for a tensor, a stream or a number loads it."""

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
    """The memory of the device that this process uses, in bytes.

    Attributes:
        peak: most that tensors have taken at one time; ``allocated``: that they take now.
        reserved: that the allocator holds, for tensors and to use again.
        free: that nobody holds; ``total``: of the device.
    """

    peak: int
    allocated: int
    reserved: int
    free: int
    total: int


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionKernels:
    """Which fused kernels of attention torch has on a device, and may use: its switches rule all devices.

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
        name: as plans say it (``device=NAME``) and run folders keep it.
        label: before "device", in messages.
        hardware: kinds of the catalog and of cluster files whose devices these are; one that torch calls otherwise
            than their maker stands beside the kind's own name.
        torch_type: of the ``torch.device``, which torch's functions go by.
        automatic: ``device=auto`` takes it where each replica can have a device of its own.
        on_host: it computes with the host's cores, in the host's memory.
        most: devices of it that one run may have; ``None``: any number.
        streams: work is queued there, on streams, and its end is told by events. Else it is done once a call returns,
            or torch waits where a value is read.
        pinned: copies from pinned memory of the host go on by themselves.
        in_order: a process group tells messages between two ranks apart by their order alone.
        shared: one process may compute on several.
        forks: workers may be forked from a process that has loaded torch and not begun to use one; else each is a
            process of its own from the start.
        precisions: that plans may compute in.
        fitted: the constants of forecasts were fitted to measurements of devices of this name.
        compiles: ``torch.compile`` makes its kernels without the C++ compiler of the host.
        backend: for collectives of its tensors.
        interfaces: environment variables that say over which network interfaces that backend goes.
        lost_peer: a pattern of what that backend says when a peer is gone; empty where nobody knows.
        light_way, heavy_ways: how user code asks for the devices without, and with, beginning to use one.
        visible: the environment variable that leaves devices out; empty where there is none.
        listing: a program that prints, as JSON, a list with the name and the bytes of memory of each device here.
        versions: the kind's name (its version in ``torch.version``) and its backend → words for their versions, which
            hosts of one run should have alike; empty where hosts are not asked.
        pod_resource: what Kubernetes calls such a device, by its maker's plugin; empty where that is not known.
        driver_tool: the program by which the driver lists its devices, and ``driver_reset`` the command that resets the
            device ``{index}``, for messages; empty where there is none.
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
        """As ``init_process_group`` takes it: tensors of the host go by gloo, which offload needs."""
        of_host = self.on_host or self.torch_type == "cpu"
        return self.backend if of_host else f"cpu:gloo,{self.torch_type}:{self.backend}"

    @abstractmethod
    def count(self) -> int:
        """Devices of this machine, asked so that workers can still be forked from this process."""

    def driver(self) -> tuple[int, str, str]:
        """Return how many devices the driver lists, its version, and its error."""
        return 0, "", ""

    def topology(self) -> str:
        """How the devices of this machine are joined, as the driver prints it; empty where it does not."""
        return ""

    def missing(self) -> str:
        """Why there can be none here, and what to install; empty where nothing is missing."""
        return ""

    @abstractmethod
    def device(self, index: int) -> torch.device:
        """The device of a worker that is the ``index``-th of its machine."""

    @abstractmethod
    def current(self) -> torch.device:
        """The device that this process uses now."""

    def use(self, device: torch.device) -> None:
        """Have this process use ``device``, which its collectives then take; nothing to do where there is one."""
        return

    @abstractmethod
    def generator(self, device: torch.device) -> torch.Generator:
        """The default stream of random numbers of ``device``."""

    def before_workers(self, machines: int, workers: int) -> None:
        """Called in the process that starts ``workers`` on each of so many machines, before it does."""
        return

    def in_use(self) -> bool:
        """Return True if this process has begun to use one, so that workers forked from it could not."""
        return False

    def spoilt(self) -> bool:
        """Return True if this process was forked from one that had begun to use one, so that it cannot."""
        return False

    def asks_lightly(self) -> Mapping[str, str]:
        """Environment variables under which user code may ask whether there is one without beginning to use it."""
        return {}

    def synchronize(self) -> None:
        """Wait for all that is queued on the device in use."""
        return

    def event(self, *, timed: bool = False) -> torch.Event:
        """What tells when work that is queued has ended, for kinds with ``streams``; not recorded yet."""
        raise NotImplementedError(f"{self.label} has no events")

    def stream(self, device: torch.device) -> torch.Stream:
        """A new stream of ``device``, for kinds with ``streams``."""
        raise NotImplementedError(f"{self.label} has no streams")

    def queued_on(self, stream: torch.Stream) -> AbstractContextManager[Any]:
        """Work inside is queued on ``stream``."""
        raise NotImplementedError(f"{self.label} has no streams")

    def current_stream(self, device: torch.device) -> torch.Stream:
        """The stream of ``device`` that work is queued on, for kinds with ``streams``."""
        raise NotImplementedError(f"{self.label} has no streams")

    def memory(self) -> DeviceMemory | None:
        """Of the device in use; ``None`` where it is the host's, or the kind does not tell."""
        return None

    def attention(self) -> AttentionKernels:
        """The fused kernels of attention that ring attention may call."""
        return AttentionKernels()

    def attention_switches(self) -> tuple[bool, ...]:
        """torch's switches that choose between kernels of attention, asked of the host's kind: they rule all."""
        return ()

    def widest(self) -> torch.dtype:
        """The widest floating point type that it adds up in."""
        import torch

        return torch.float64
