"""Where and how candidates are computed: what every price depends on beside the model and its layout."""

from __future__ import annotations

from dataclasses import dataclass

from phalanx.forecast.habits import Habits
from phalanx.forecast.links import Fabric
from phalanx.forecast.rates import Rates


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """One kind of device, joined in one way, used by one framework.

    Attributes:
        rates: of the device.
        fabric: between devices.
        habits: of the framework.
        precision: computed in.
        host: bytes/s between a device and the memory of its host.
        bus: seconds until a copy between the two begins.
        processor: bytes/s at which a host steps the parameters of a server on it.
    """

    rates: Rates
    fabric: Fabric
    habits: Habits
    precision: str
    host: float = 25e9
    bus: float = 0.0
    processor: float = 100e9
