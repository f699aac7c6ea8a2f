"""How a global batch is cut: into contiguous shares, one a part, and each share into micro-batches."""

from __future__ import annotations

from dataclasses import dataclass


def share(total: int, part: int, parts: int) -> tuple[int, int]:
    """The range [start, stop) of ``total`` samples that belongs to ``part`` (0-based) of ``parts``.

    Shares are contiguous and differ by at most one sample; the first ones are the larger: 256 over 3 is 86, 85, 85.

    Raises:
        ValueError: if ``part`` is not one of ``parts``, or ``total`` is negative.
    """
    if not 0 <= part < parts or total < 0:
        raise ValueError(f"no part {part} of {parts} in {total} samples")
    size, larger = divmod(total, parts)
    start = part * size + min(part, larger)
    return start, start + size + (part < larger)


@dataclass(frozen=True, kw_only=True, slots=True)
class Lane:
    """Which parts of every global batch this process holds.

    Rank r of 4 has ``Lane(first=r, count=1, parts=4)``; one process with 4 threads ``Lane(first=0, count=4, parts=4)``.

    Attributes:
        first: the first part held here, 0-based.
        count: parts held here.
        parts: parts over all processes.
    """

    first: int = 0
    count: int = 1
    parts: int = 1

    def __post_init__(self) -> None:
        if self.first < 0 or self.count < 1 or self.first + self.count > self.parts:
            raise ValueError(f"parts {self.first}..{self.first + self.count - 1} are not all among {self.parts} parts")


Cuts = tuple[tuple[tuple[int, int], ...], ...]
"""For each part held, for each micro-batch, its range [start, stop) in the global batch. (0, 0) is a filler."""


def cuts(total: int, lane: Lane, micro: int | None) -> Cuts:
    """The micro-batches of a global batch of ``total`` samples, for the parts of ``lane``.

    Every part of every process gets as many micro-batches as the largest share needs, so that all take part in the
    same collectives; a part with fewer samples is filled up with empty ranges.

    Args:
        total: samples in the global batch, 1 or more.
        lane: the parts held by this process.
        micro: most samples in a micro-batch; ``None``: the whole share.
    """
    largest = share(total, 0, lane.parts)[1]
    size = micro or largest
    count = -(-largest // size)
    return tuple(
        tuple(_piece(*share(total, part, lane.parts), index, size) for index in range(count))
        for part in range(lane.first, lane.first + lane.count)
    )


def _piece(start: int, stop: int, index: int, size: int) -> tuple[int, int]:
    first = start + index * size
    return (first, min(first + size, stop)) if first < stop else (0, 0)
