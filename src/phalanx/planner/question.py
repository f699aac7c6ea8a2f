"""A question to the planner: a work, the devices it may use, and their price an hour; clusters of other sizes.

Prices come from the user only.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

from phalanx.config import Cluster, Plan
from phalanx.config.fields import is_number
from phalanx.config.plan import Precision
from phalanx.errors import Problem, SpecError
from phalanx.files import read_toml
from phalanx.forecast import PHALANX, Preset, Work
from phalanx.hardware import entry

_FIX = "--price 2.50"
_FILE = 'currency = "EUR" and a table [per_hour] of prices by device, such as H100 = 2.5'


@dataclass(frozen=True, kw_only=True, slots=True)
class Prices:
    """The price of a device for an hour."""

    each: float | None = None  # of any device; ``None`` if prices go by device, or unknown
    by_device: Mapping[str, float] = field(default_factory=dict[str, float])  # by its name
    currency: str = ""  # they are in; empty if unknown

    @property
    def stated(self) -> bool:
        return self.each is not None or bool(self.by_device)

    def hour(self, cluster: Cluster) -> float | None:
        """Return the price of all devices of ``cluster`` for an hour; ``None`` if unknown.

        Raises:
            SpecError: if prices go by device, and a device of ``cluster`` has none.
        """
        if not self.stated:
            return None
        if self.each is not None:
            return self.each * cluster.devices
        missing = [group.device.name for group in cluster.groups if group.device.name not in self.by_device]
        if missing:
            near = difflib.get_close_matches(missing[0], self.by_device, n=1, cutoff=0.0)
            given = f"no price of {missing[0]}; there are {', '.join(self.by_device)}"
            fix = f"{missing[0]} = {self.by_device[near[0]]:g}"
            raise SpecError([Problem(where="--price", given=given, allowed="a price of every device", fix=fix)])
        return sum(self.by_device[group.device.name] * group.devices for group in cluster.groups)


@dataclass(frozen=True, kw_only=True, slots=True)
class Bill:
    """The cost of a span of time on a cluster."""

    seconds: float
    device_hours: float
    # kWh that the devices draw at most; ``None`` if unknown. Hosts are not in it.
    energy: float | None
    money: float | None  # price; ``None`` if unknown
    currency: str  # of ``money``

    @property
    def amount(self) -> float:
        """Return the amount compared with budgets: money if prices are known, else device-hours."""
        return self.device_hours if self.money is None else self.money

    def to_dict(self) -> dict[str, Any]:
        return {
            "seconds": self.seconds,
            "device_hours": self.device_hours,
            "energy_kwh": self.energy,
            "money": self.money,
            "currency": self.currency or None,
        }


def bill(seconds: float, cluster: Cluster, prices: Prices) -> Bill:
    """Return the cost of ``seconds`` on all devices of ``cluster``."""
    hours = seconds / 3600
    powers = [group.device.power for group in cluster.groups]
    watts = sum((group.device.power or 0.0) * group.devices for group in cluster.groups)
    hour = prices.hour(cluster)
    return Bill(
        seconds=seconds,
        device_hours=hours * cluster.devices,
        energy=hours * watts / 1e3 if all(powers) else None,
        money=None if hour is None else hour * hours,
        currency=prices.currency,
    )


def prices(text: str | None) -> Prices:
    """Return prices from ``2.50`` (of any device, for an hour), or from the path of a TOML file; none from ``None``.

    Raises:
        SpecError: if it is neither.
    """
    if text is None:
        return Prices()
    if text.endswith(".toml"):
        return _from_file(Path(text))
    try:
        each = float(text)
    except ValueError:
        each = -1.0
    if not (is_number(each) and each >= 0):
        allowed = f"what one device costs for an hour, 0 or more, or a TOML file with {_FILE}"
        raise SpecError([Problem(where="--price", given=repr(text), allowed=allowed, fix=_FIX)])
    return Prices(each=each)


def _from_file(path: Path) -> Prices:
    table = read_toml(path, where="--price", allowed=f"a TOML file: {_FILE}", fix=_FIX)
    rates: object = table.get("per_hour")
    currency: object = table.get("currency", "")
    wrong = [name for name in table if name not in ("per_hour", "currency")]
    if not isinstance(rates, dict) or not rates or not isinstance(currency, str) or wrong:
        given = f"{path} with {', '.join(table) or 'nothing'}"
        raise SpecError([Problem(where="--price", given=given, allowed=_FILE, fix="[per_hour]\n    H100 = 2.5")])
    found = cast(dict[str, object], rates)
    problems = [
        Problem(where=f"per_hour.{name}", given=repr(rate), allowed="a price, 0 or more", fix=f"{name} = 2.5")
        for name, rate in found.items()
        if not (is_number(rate) and cast(float, rate) >= 0)
    ]
    if problems:
        raise SpecError(problems)
    return Prices(by_device={name: float(cast(float, rate)) for name, rate in found.items()}, currency=currency)


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    """A work and a cluster for it."""

    work: Work  # the work of each step
    cluster: Cluster  # the devices
    precision: Precision  # that plans compute in
    steps: int = 0  # optimizer steps of the whole training; 0 if unknown
    prices: Prices = field(default_factory=Prices)  # of devices; none if unknown
    preset: Preset = PHALANX
    # what keeps a plan from the job, by a look at its model; ``None`` where there is none to look at
    look: Callable[[Plan], list[Problem]] | None = field(default=None, compare=False)

    @property
    def mixed(self) -> bool:
        return mixed(self.cluster)

    def on(self, devices: int) -> Question | None:
        """Return the question for that many devices, in the fewest nodes; ``None`` if they fill no nodes."""
        cluster = resized(self.cluster, devices)
        return replace(self, cluster=cluster) if cluster else None


def mixed(cluster: Cluster) -> bool:
    """Return True if devices differ."""
    return len({group.device.name for group in cluster.groups}) > 1


def precision_for(cluster: Cluster) -> Precision:
    """Return the fastest precision of every device: ``bf16``, else ``fp16``; on CPUs ``fp32``."""
    kinds = [group.device for group in cluster.groups]
    if any(device.kind == "cpu" for device in kinds):
        return "fp32"
    for precision in ("bf16", "fp16"):
        if all(precision in device.peak for device in kinds):
            return precision
    return "fp32"


def full_node(cluster: Cluster) -> int:
    """Return the devices of a full node of the first kind of ``cluster``; 0 if any number fits.

    It is the number of its host's slots, or of devices in the nodes of ``cluster`` if these are several or slots are
    unknown.
    """
    group = cluster.groups[0]
    if group.nodes > 1:
        return group.per_node
    return group.host.slots or (group.per_node if group.per_node > 1 else 0)


def resized(cluster: Cluster, devices: int) -> Cluster | None:
    """Return a cluster with that many devices of the first kind of ``cluster``; ``None`` unless they fill whole
    nodes.
    """
    full = full_node(cluster) or devices
    if devices > full and devices % full:
        return None
    group = cluster.groups[0]
    nodes, per_node = (devices // full, full) if devices > full else (1, devices)
    network = cluster.network
    if network.name:
        try:
            network = entry(group.device.name).network(per_node)
        except SpecError:  # a device of the user's own file: its network is what the file says
            network = cluster.network
    return Cluster(groups=(replace(group, nodes=nodes, per_node=per_node),), network=network)


def doublings(cluster: Cluster, most: int) -> Iterator[int]:
    """Yield 1, 2, 4, ... devices of one node, 1, 2, 4, ... full nodes, and ``most``."""
    full = full_node(cluster) or most
    count = 1
    while count < most:
        yield count
        count = full if count < full < 2 * count else 2 * count
    yield most
