"""Hosts in words: what may be asked of links, the commands it becomes, and what is missing where it cannot be had."""

from __future__ import annotations

from pathlib import Path

import pytest

import phalanx as px
from phalanx.errors import SpecError
from phalanx.launch import host_network
from phalanx.launch.host_network import HostLink
from phalanx.launch.host_process import Quotas
from phalanx.units import parse_bit_rate, parse_seconds, parse_share


@pytest.mark.parametrize(
    ("text", "rate"), [("100mbit", 1e8), ("1 Gbit/s", 1e9), ("2.5gbit", 2.5e9), ("400Gb/s", 4e11), ("64kbit", 64e3)]
)
def test_rates(text: str, rate: float) -> None:
    assert parse_bit_rate(text) == pytest.approx(rate)


@pytest.mark.parametrize("text", ["", "fast", "100", "100MB/s", "mbit", "-1mbit", "1e3mbit"])
def test_no_rates(text: str) -> None:
    with pytest.raises(ValueError, match="100mbit"):
        parse_bit_rate(text)


def test_times_and_shares() -> None:
    assert [parse_seconds(text) for text in ("20ms", "1.5 s", "500us")] == pytest.approx([0.02, 1.5, 0.0005])
    assert [parse_share(text) for text in ("0.1%", "0.001", "50 %")] == pytest.approx([0.001, 0.001, 0.5])
    for parse, text in ((parse_seconds, "20"), (parse_share, "0.1 percent")):
        with pytest.raises(ValueError, match="such as"):
            parse(text)


def test_everything_wrong_is_told_at_once() -> None:
    with pytest.raises(SpecError) as raised:
        px.Hosts(2, rate="1bit", delay="20", loss="100%")
    assert [problem.where for problem in raised.value.problems] == ["rate", "delay", "loss"]
    for how in ({"count": 0}, {"count": 2, "per_host": 0}):
        with pytest.raises(SpecError):
            px.Hosts(**how)


def test_a_link_as_commands() -> None:
    link = HostLink.parse("100mbit", "20ms", "0.1%")
    assert link.limit("net0") == ["qdisc add dev net0 root handle 1: tbf rate 100000000bit burst 50028 limit 1250000"]
    assert link.hold("net0") == [
        *link.limit("net0"),
        "qdisc add dev net0 parent 1:1 handle 10: netem delay 20000us loss 0.100000% limit 101000",
    ]
    assert (
        HostLink.parse(delay="1ms").hold("net0")[0].startswith("qdisc add dev net0 root handle 10: netem delay 1000us")
    )
    assert HostLink().hold("net0") == []


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_network, "tool", lambda program: None if program == "tc" else program)
    problem = host_network.lacking(HostLink())
    assert problem is not None
    assert (problem.given, problem.fix) == ("a machine without the program tc", "apt-get install iproute2")


def test_quotas_of_control_groups_2(tmp_path: Path) -> None:
    quotas = Quotas(tmp_path, 2, version=2)
    quotas.allow(1, 0.25)
    quotas.join(1)
    assert sorted(path.read_text() for path in tmp_path.glob("*/cpu.max")) == ["5000 20000", "max 20000"]
    assert (tmp_path / "cgroup.subtree_control").read_text() == "+cpu"
    assert len(list(tmp_path.glob("*/cgroup.procs"))) == 1
