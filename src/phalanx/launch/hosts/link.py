"""What a host's link can do, in the words it is written in, and what this machine must have for hosts."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from phalanx.errors import Problem, RefusedError, SpecError
from phalanx.units import parse_bit_rate, parse_seconds, parse_share

_SERIAL = 0.0008, 0.1  # seconds, or of the delay, that a packet may take on the link: the larger, the less work
_SMALLEST, _LARGEST = 1500, 65000  # bytes of a packet
_BURST = 0.001  # seconds of the rate that may leave at once
_ROOM = 0.1  # seconds of the rate that may wait for a link before packets are dropped


@dataclass(frozen=True, kw_only=True, slots=True)
class HostLink:
    """A host's link to the switch that joins all hosts; the same in both directions but for delay and loss.

    Attributes:
        rate: bit/s out of the host, and as much into it; 0: as fast as the machine can.
        delay: seconds that a packet out of the host takes, so that a round trip between two hosts takes twice as long.
        loss: share of the packets out of the host that are lost.
    """

    rate: float = 0.0
    delay: float = 0.0
    loss: float = 0.0

    @classmethod
    def parse(cls, rate: str = "", delay: str = "", loss: str = "") -> Self:
        """A link in words; an empty word leaves that as it is without a limit.

        Raises:
            SpecError: with every word that is wrong.
        """
        problems: list[Problem] = []
        asked: tuple[tuple[str, str, Callable[[str], float], str], ...] = (
            ("rate", rate, parse_bit_rate, "100mbit"),
            ("delay", delay, parse_seconds, "20ms"),
            ("loss", loss, parse_share, "0.1%"),
        )
        values: dict[str, float] = {}
        for name, text, parse, example in asked:
            try:
                values[name] = parse(text) if text else 0.0
                if not _LIMITS[name][0](values[name]) and text:
                    raise ValueError(_LIMITS[name][1])
            except ValueError as error:
                problems.append(Problem(where=name, given=repr(text), allowed=str(error), fix=f"--{name} {example}"))
        if problems:
            raise SpecError(problems)
        return cls(**values)

    @property
    def packet(self) -> int:
        """Bytes of the largest packet."""
        seconds = max(_SERIAL[0], _SERIAL[1] * self.delay)
        return max(_SMALLEST, min(_LARGEST, int(self.rate / 8 * seconds))) if self.rate else _LARGEST

    @property
    def room(self) -> float:
        """Seconds of packets that may wait for the link."""
        return _ROOM

    def limit(self, device: str) -> list[str]:
        """Arguments of ``tc`` that hold a device to the rate; none where there is none."""
        if not self.rate:
            return []
        burst = max(2 * (self.packet + 14), int(self.rate / 8 * _BURST))
        waiting = max(int(self.rate / 8 * _ROOM), 16 * self.packet)
        return [f"qdisc add dev {device} root handle 1: tbf rate {self.rate:.0f}bit burst {burst} limit {waiting}"]

    def hold(self, device: str) -> list[str]:
        """Arguments of ``tc`` that also delay and lose packets, where the kernel has netem."""
        limited = self.limit(device)
        if not self.delay and not self.loss:
            return limited
        where = "parent 1:1 handle 10:" if limited else "root handle 10:"
        under_way = int(max(self.rate, 1e10) / 8 * (self.delay + _ROOM) / _SMALLEST) + 1000
        how = f"delay {self.delay * 1e6:.0f}us loss {self.loss:.6%} limit {under_way}"
        return [*limited, f"qdisc add dev {device} {where} netem {how}"]


_LIMITS: dict[str, tuple[Callable[[float], bool], str]] = {
    "rate": (lambda rate: rate >= 1e5, "a rate of 100kbit or more, such as 100mbit"),
    "delay": (lambda delay: 0 <= delay <= 10, "a time of at most 10s, such as 20ms"),
    "loss": (lambda loss: 0 <= loss < 1, "a share below 100%, such as 0.1%"),
}


_PROGRAMS = {"ip": "iproute2", "tc": "iproute2", "nsenter": "util-linux", "unshare": "util-linux"}
_NET_ADMIN, _SYS_ADMIN = 12, 21  # bits of capabilities


def lacking(link: HostLink) -> Problem | None:
    """Why hosts with such links cannot be made here; ``None`` where they can."""
    if sys.platform != "linux":
        return _problem(f"a machine with {sys.platform}", "Linux, whose network namespaces stand in for machines")
    for program, package in _PROGRAMS.items():
        if not tool(program):
            given, fix = f"a machine without the program {program}", f"apt-get install {package}"
            return _problem(given, "iproute2 and util-linux", fix)
    status = Path("/proc/self/status").read_text()
    held = int(status.partition("CapEff:")[2].split()[0], 16)
    if not (held >> _NET_ADMIN & 1 and held >> _SYS_ADMIN & 1):
        given = "a process that may not make network namespaces"
        return _problem(given, "root, or a user namespace", "unshare --map-root-user --net phalanx bench ...")
    if error := _trial("ip", "link add one type bridge\nlink add two type veth peer name three"):
        return _problem(f"a kernel that makes none: {error}", "network namespaces, veth and bridge")
    if link.rate and (error := _qdisc("tbf rate 1mbit burst 10k limit 10k")):
        return _problem(f"a kernel without tbf: {error}", "the kernel module sch_tbf", "modprobe sch_tbf")
    if (link.delay or link.loss) and not has_netem() and not os.access("/dev/net/tun", os.R_OK | os.W_OK):
        allowed = "netem in the kernel (sch_netem), or /dev/net/tun to read and write"
        return _problem("a kernel without netem, and no /dev/net/tun", allowed, "modprobe sch_netem, or modprobe tun")
    return None


def refuse(link: HostLink) -> None:
    """Raise what is missing here for hosts with such links.

    Raises:
        RefusedError: one problem, the first that was found.
    """
    if problem := lacking(link):
        raise RefusedError([problem])


def tool(program: str) -> str | None:
    """Where a program is; the paths of many users leave out those of the administrator."""
    return shutil.which(program) or shutil.which(program, path="/usr/sbin:/sbin")


@functools.cache
def has_netem() -> bool:
    """Whether the kernel can delay packets by itself."""
    return not _qdisc("netem delay 1ms")


def _qdisc(words: str) -> str:
    return _trial("tc", f"qdisc add dev lo root {words}")


@functools.cache
def _trial(program: str, commands: str) -> str:
    """What goes wrong when these are tried in a namespace that is thrown away; empty where nothing does."""
    argv = ["unshare", "--net", str(tool(program)), "-batch", "-"]
    done = subprocess.run(argv, input=commands, capture_output=True, text=True, check=False)
    return (done.stderr.strip().splitlines() or [f"exit {done.returncode}"])[0] if done.returncode else ""


def _problem(given: str, allowed: str, fix: str = "another machine, or leave out --hosts") -> Problem:
    return Problem(where="hosts", given=given, allowed=allowed, fix=fix)
