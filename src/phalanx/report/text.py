"""Charts in a terminal, and names as runs: ``blocks.{0..5}.up.weight``, ``0-3, 8``."""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterable, Mapping, Sequence
from math import prod
from typing import Any

from phalanx.planner.scale import Curve

_HEIGHT = 15
_MOST_TICKS = 8


def scaling_chart(curve: Curve, width: int) -> str:
    """Speed-up against devices, both logarithmic, beside the ideal; with the escape codes of a terminal."""
    import plotext  # loaded when a chart is drawn: it takes a tenth of a second

    plt: Any = plotext
    devices = [one.devices for one in curve.points]
    plt.clear_figure()
    plt.theme("clear")
    plt.plot_size(width, _HEIGHT)
    plt.plot(devices, [one / devices[0] for one in devices], marker="dot", label="ideal")
    plt.plot(devices, [one.speed_up for one in curve.points], marker="braille", label="forecast")
    for name, point in (("knee", curve.knee), ("stop", curve.stop)):
        if point is not None and (name == "stop" or point is not curve.stop):
            plt.scatter([point.devices], [point.speed_up], marker="x" if name == "knee" else "o", label=name)
    plt.xscale("log")
    plt.yscale("log")
    every = -(-len(devices) // _MOST_TICKS)
    shown = devices[::-every][::-1]
    plt.xticks(shown, [str(one) for one in shown])
    ideal = [one / devices[0] for one in shown]
    plt.yticks(ideal, [f"{one:g}" for one in ideal])
    plt.xlabel("devices")
    plt.title("speed-up")
    return str(plt.build())


_NUMBER = re.compile(r"(?:(?<=\.)|^)\d+(?=\.|$)")


def grouped(names: Mapping[str, Hashable]) -> list[tuple[str, list[str]]]:
    """Names that differ only by numbers and of which the same is told, each group as (one name for all, its names)."""
    families: dict[Hashable, list[str]] = {}
    for name, told in names.items():
        families.setdefault((_NUMBER.sub("{}", name), told), []).append(name)
    return [pair for members in families.values() for pair in _named(members)]


def runs(numbers: Iterable[int], most: int = 4) -> str:
    """``0-3, 8`` for 0, 1, 2, 3, 8; of more runs than ``most`` the first and the last."""
    found: list[list[int]] = []
    for number in sorted(numbers):
        if found and found[-1][-1] == number - 1:
            found[-1][1:] = [number]
        else:
            found.append([number])
    words = ["-".join(map(str, run)) for run in found]
    return ", ".join(words if len(words) <= most else [*words[: most - 1], "...", words[-1]])


def _named(names: Sequence[str]) -> list[tuple[str, list[str]]]:
    numbers = [tuple(int(digits) for digits in _NUMBER.findall(name)) for name in names]
    columns = [sorted(set(column)) for column in zip(*numbers, strict=True)]
    if prod(len(column) for column in columns) == len(names):
        holes = iter(columns)
        return [(_NUMBER.sub(lambda _: _braced(next(holes)), names[0]), list(names))]
    at = next(index for index, column in enumerate(columns) if len(column) > 1)
    apart: dict[int, list[str]] = {}
    for name, row in zip(names, numbers, strict=True):
        apart.setdefault(row[at], []).append(name)
    return [pair for members in apart.values() for pair in _named(members)]


def _braced(values: Sequence[int]) -> str:
    if len(values) == 1:
        return str(values[0])
    whole_run = list(values) == list(range(values[0], values[-1] + 1))
    return "{" + (f"{values[0]}..{values[-1]}" if whole_run else ",".join(map(str, values))) + "}"
