"""A machine's cluster with constants measured on it, from the sweeps of its workers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from phalanx.hardware import fitted
from phalanx.hardware.exchanges import Exchange
from phalanx.hardware.sweeps import Point
from phalanx.spec import Cluster, Link

_LONG = 1e-4  # seconds from which a call says how busy cores slow each other down


@dataclass(frozen=True, kw_only=True, slots=True)
class Sweeps:
    """All that was measured.

    Attributes:
        kept: a sweep alone on the machine, freed memory staying with the process.
        returned: likewise, freed memory going back to the kernel.
        beside: sweeps as ``kept`` of as many processes at once as there are cores.
        exchanges: collectives, of each count of ranks.
        rest: seconds of a step that computes next to nothing, by processes.
        relay: seconds in which a stage of a pipeline that computes next to nothing hands a result on, by processes.
    """

    kept: tuple[Point, ...]
    returned: tuple[Point, ...]
    beside: tuple[tuple[Point, ...], ...]
    exchanges: tuple[Exchange, ...]
    rest: Mapping[int, float]
    relay: Mapping[int, float]


def calibrated(machine: Cluster, sweeps: Sweeps) -> Cluster:
    """``machine``, its CPU cores with what ``sweeps`` say of them."""
    found = fitted.core(sweeps.kept, sweeps.returned)
    peak = {name.partition(".")[2]: found.pop(name) for name in list(found) if name.startswith("peak.")}
    found["busy"] = fitted.slowdown(sweeps.kept, sweeps.beside, ("product", "convolution"), _LONG)
    found["busy_stream"] = fitted.slowdown(sweeps.kept, sweeps.beside, ("stream", "named"), _LONG)
    lines = fitted.lines(sweeps.exchanges)
    found |= lines | {f"rest.{count}": seconds for count, seconds in sweeps.rest.items()}
    for count, seconds in sweeps.relay.items():
        found[f"relay.{count}"] = max(0.0, seconds - lines.get(f"send.{count}.start", 0.0))
    group = machine.groups[0]
    peak["fp64"], peak["fp16"] = peak["fp32"] / 2, peak["fp32"]
    device = replace(
        group.device,
        name=f"{group.device.name}-measured",
        peak=dict(sorted(peak.items())),
        bandwidth=found["far"],
        measured=dict(sorted(found.items())),
    )
    return replace(machine, groups=(replace(group, device=device, link=_link(group.link, lines)),))


def _link(known: Link, lines: Mapping[str, float]) -> Link:
    """What a send between two processes says of the link."""
    if not lines.get("send.2.byte"):
        return known
    return replace(known, bandwidth=1 / lines["send.2.byte"], latency=lines["send.2.start"])


def default_path() -> Path:
    """Where ``phalanx calibrate`` writes unless told otherwise: here, beside the job."""
    return Path("machine.toml")
