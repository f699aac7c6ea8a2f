"""Charts in a terminal."""

from __future__ import annotations

from typing import Any

from phalanx.planner.scaling import Curve

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
