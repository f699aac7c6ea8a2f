"""A machine's cluster with constants measured on it: least squares on its workers' sweeps."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import geometric_mean, median

import numpy as np
import numpy.typing as npt

from phalanx.config import Cluster
from phalanx.hardware.sweeps import CACHED, MeasuredExchange, Measurement

_LONG = 1e-4  # seconds from which a call says how busy cores slow each other down


@dataclass(frozen=True, kw_only=True, slots=True)
class Sweeps:
    """All measurements.

    Attributes:
        kept: a sweep alone on the machine, freed memory staying with the process.
        returned: likewise, freed memory going back to the kernel.
        beside: sweeps as ``kept`` of as many processes at once as there are cores.
        exchanges: collectives, of each count of ranks.
        rest: seconds of a step that computes next to nothing, by processes.
        relay: seconds in which a pipeline stage with almost no work hands on a result, by processes.
    """

    kept: tuple[Measurement, ...]
    returned: tuple[Measurement, ...]
    beside: tuple[tuple[Measurement, ...], ...]
    exchanges: tuple[MeasuredExchange, ...]
    rest: Mapping[int, float]
    relay: Mapping[int, float]


def calibrated(machine: Cluster, sweeps: Sweeps) -> Cluster:
    """Return ``machine``, its CPU cores with the constants from ``sweeps``."""
    found = core(sweeps.kept, sweeps.returned)
    peak = {name.partition(".")[2]: found.pop(name) for name in list(found) if name.startswith("peak.")}
    found["busy"] = slowdown(sweeps, ("product", "convolution"))
    found["busy_stream"] = slowdown(sweeps, ("stream", "named"))
    wires = lines(sweeps.exchanges)
    found |= wires | {f"rest.{count}": seconds for count, seconds in sweeps.rest.items()}
    for count, seconds in sweeps.relay.items():
        found[f"relay.{count}"] = max(0.0, seconds - wires.get(f"send.{count}.start", 0.0))
    group = machine.groups[0]
    peak["fp64"], peak["fp16"] = peak["fp32"] / 2, peak["fp32"]
    device = replace(
        group.device,
        name=f"{group.device.name}-measured",
        peak=dict(sorted(peak.items())),
        bandwidth=found["far"],
        measured=dict(sorted(found.items())),
    )
    link = group.link
    if byte := wires.get("send.2.byte"):
        link = replace(link, bandwidth=1 / byte, latency=wires["send.2.start"])
    return replace(machine, groups=(replace(group, device=device, link=link),))


def default_path() -> Path:
    """Return the default output of ``phalanx calibrate``: here, beside the job."""
    return Path("machine.toml")


Array = npt.NDArray[np.float64]
_PIECE = 2**20


def core(kept: Sequence[Measurement], returned: Sequence[Measurement]) -> dict[str, float]:
    """Return constants of a CPU core by the names in ``Device.measured``, and ``peak.fp32``, ``peak.bf16``.

    They come from a sweep with freed memory kept by the process, and one with freed memory returned to the kernel.
    """
    call, step = (_of(kept, "floor", name)[0] for name in ("call", "linear"))
    found: dict[str, float] = {"floor": step.seconds / step.sizes[0]}
    floor = call.seconds
    for name in ("fp32", "bf16"):
        found[f"peak.{name}"], found[f"operand.{name}"] = products(_of(kept, "product", name), floor)
    for suffix, backward in (("", False), ("_backward", True)):
        mine = [one for one in _of(kept, "convolution") if one.backward == backward]
        share, half = convolutions(mine, found["peak.fp32"], floor)
        found |= {f"convolution{suffix}": share, f"convolution{suffix}_half": half}
    found |= _attention(kept, found, floor)
    found["near"], found["far"], found["cache"] = streams(_of(kept, "stream"), floor)
    found |= _named(kept, found, floor)
    found["fresh"] = fresh(_of(kept, "stream"), _of(returned, "stream"))
    found |= optimizers(_of(kept, "optimizer"), _of(returned, "optimizer"))
    return found


def products(points: Sequence[Measurement], floor: float) -> tuple[float, float]:
    """Return FLOP/s, and seconds for each element read or written beside computing, from products of m, n, k."""
    m, n, k = np.array([one.sizes for one in points]).T
    seconds = np.array([one.seconds for one in points])
    each, operand = _above_zero(np.stack([2 * m * n * k, m * n + m * k + n * k], axis=1), seconds, floor)
    return 1 / each if each else float((2 * m * n * k / seconds).max()), operand


def streams(points: Sequence[Measurement], floor: float) -> tuple[float, float, float]:
    """Return bytes/s near and far, and the bytes of traffic between the two, from sums of two tensors."""
    moved = np.array([4 * one.sizes[0] for one in points])
    seconds = np.array([one.seconds for one in points])
    best: tuple[float, float, float, float] = (np.inf, 0.0, 0.0, 0.0)
    for cache in np.geomspace(moved.min(), moved.max(), 40):
        away = moved**2 / (moved**2 + cache**2)
        far, near = _above_zero(np.stack([moved * away, moved * (1 - away)], axis=1), seconds, floor)
        error = float(((floor + moved * (away * far + (1 - away) * near) - seconds) ** 2 / seconds**2).sum())
        if far and near and error < best[0]:
            best = (error, 1 / near, 1 / far, float(cache))
    rate = float((moved / seconds).max())
    return best[1:] if best[1] else (rate, rate, float(moved.max()))


def fresh(kept: Sequence[Measurement], returned: Sequence[Measurement]) -> float:
    """Return seconds for each byte of a result of 1 MiB or more whose pages come from the kernel."""
    pairs = [(slow, quick) for slow, quick in zip(returned, kept, strict=True) if slow.sizes[1] >= _PIECE]
    return max(0.0, median((slow.seconds - quick.seconds) / slow.sizes[1] for slow, quick in pairs)) if pairs else 0.0


def optimizers(kept: Sequence[Measurement], returned: Sequence[Measurement]) -> dict[str, float]:
    """Return seconds to step a parameter and a tensor, from one step of few parameters and one of many."""
    found: dict[str, float] = {}
    for name in dict.fromkeys(one.name for one in kept):
        small, large = sorted((one for one in kept if one.name == name), key=lambda one: one.sizes[0])
        again = max((one for one in returned if one.name == name), key=lambda one: one.sizes[0])
        solved = np.linalg.solve([small.sizes, large.sizes], [small.seconds, large.seconds])
        found[f"update.{name}"], found[f"tensor.{name}"] = (max(0.0, float(one)) for one in solved)
        found[f"update_fresh.{name}"] = max(0.0, (again.seconds - large.seconds) / large.sizes[0])
    return found


def lines(points: Sequence[MeasuredExchange]) -> dict[str, float]:
    """Return seconds to start a collective and for each byte, by ``kind.ranks.start`` and ``kind.ranks.byte``.

    ``kind.ranks.far`` is for each byte beyond ``CACHED``, if measured.
    """
    found: dict[str, float] = {}
    for kind, ranks in dict.fromkeys((one.kind, one.ranks) for one in points):
        each = [one for one in points if (one.kind, one.ranks) == (kind, ranks)]
        mine = [one for one in each if one.size <= CACHED]
        seconds, sizes = np.array([one.seconds for one in mine]), np.array([one.size for one in mine])
        start, byte = _above_zero(np.stack([np.ones_like(sizes), sizes], axis=1), seconds, 0.0)
        found[f"{kind}.{ranks}.start"], found[f"{kind}.{ranks}.byte"] = start, byte
        if beyond := [(one.seconds - start - byte * CACHED) / (one.size - CACHED) for one in each if one.size > CACHED]:
            found[f"{kind}.{ranks}.far"] = max(0.0, median(beyond))
    return found


def slowdown(sweeps: Sweeps, kinds: Sequence[str]) -> float:
    """Return the factor by which work of ``kinds`` takes longer beside others."""
    ratios = [
        slow.seconds / quick.seconds
        for one in sweeps.beside
        for slow, quick in zip(one, sweeps.kept, strict=True)
        if quick.kind in kinds and quick.seconds >= _LONG
    ]
    return max(1.0, median(ratios)) if ratios else 1.0


def convolutions(points: Sequence[Measurement], peak: float, floor: float) -> tuple[float, float]:
    """Return the share of ``peak``, and the least size that reaches half of it; the backward is two products."""
    sizes = np.array([one.sizes for one in points])
    flops = 2 * sizes.prod(axis=1) * np.array([2.0 if one.backward else 1.0 for one in points])
    seconds = np.array([one.seconds for one in points])
    each, half = _above_zero(np.stack([flops, flops / sizes.min(axis=1)], axis=1), seconds, floor)
    if not each:
        return float((flops / seconds).max() / peak), 0.0
    return 1 / each / peak, half / each


def _attention(points: Sequence[Measurement], found: dict[str, float], floor: float) -> dict[str, float]:
    def share(one: Measurement) -> float:
        samples, heads, tokens, width = one.sizes
        flops = (10 if one.backward else 4) / 2 * samples * heads * tokens**2 * width
        return flops / max(one.seconds - floor, 1e-9) / found["peak.fp32"]

    each = [(one.backward, share(one)) for one in _of(points, "attention")]
    return {
        "attention": geometric_mean([one for backward, one in each if not backward]),
        "attention_backward": geometric_mean([one for backward, one in each if backward]),
    }


def _named(points: Sequence[Measurement], found: dict[str, float], floor: float) -> dict[str, float]:
    result: dict[str, float] = {}
    for one in _of(points, "named"):
        moved, written = one.sizes
        size = 4 * moved
        away = size**2 / (size**2 + found["cache"] ** 2)
        plain = floor + size * (away / found["far"] + (1 - away) / found["near"])
        result[f"pace.{one.name}"] = max(0.0, (one.seconds - plain) / moved)
        result[f"made.{one.name}"] = written / moved
    return result


def _of(points: Sequence[Measurement], kind: str, name: str = "") -> list[Measurement]:
    return [one for one in points if one.kind == kind and (not name or one.name == name)]


def _above_zero(columns: Array, seconds: Array, floor: float) -> tuple[float, float]:
    scaled, wanted = columns / seconds[:, None], (seconds - floor) / seconds
    both = np.linalg.lstsq(scaled, wanted, rcond=None)[0]
    if (both >= 0).all():
        return float(both[0]), float(both[1])
    one, other = (max(0.0, float(column @ wanted / (column**2).sum())) for column in scaled.T)
    options = [(one, 0.0), (0.0, other)]
    return min(options, key=lambda pair: float(((scaled @ np.array(pair) - wanted) ** 2).sum()))


_STAT = Path("/proc/stat")
_LOOK = 0.4  # seconds
_QUIET = 0.15  # of the cores


def busy_share(path: Path = _STAT, seconds: float = _LOOK) -> float:
    """Return the share of the machine's cores at work while this process waits ``seconds``; 0 if unknown."""
    idle, whole = _ticks(path)
    time.sleep(seconds)
    idle_then, whole_then = _ticks(path)
    return 1 - (idle_then - idle) / (whole_then - whole) if whole_then > whole else 0.0


def wait_until_quiet(patience: float) -> float:
    """Wait until few of the cores are busy, at most ``patience`` seconds; return the busy share."""
    end = time.monotonic() + patience
    while (share := busy_share()) > _QUIET and time.monotonic() < end:
        pass
    return share


def _ticks(path: Path) -> tuple[int, int]:
    try:
        fields = [int(word) for word in path.read_text().split("\n", 1)[0].split()[1:9]]
    except (OSError, ValueError):
        return 0, 0
    return sum(fields[3:5]), sum(fields)
