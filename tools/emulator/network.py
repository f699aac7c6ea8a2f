"""A network of hosts inside this machine: namespaces, links between them, and how a process moves there.

Every host is a network namespace with one interface, ``net0``. Where the kernel itself can do what is asked, that is
one end of a veth pair whose other end is on a bridge, in a namespace of its own so that no firewall of the machine's
meets the packets; ``tc`` holds both ends to the rate, and ``netem`` delays what leaves the host. Where there is no
``netem`` and packets are to be delayed, ``net0`` is a TUN device held to the rate by ``tc``, and the host
process carries its packets.
"""

from __future__ import annotations

import ctypes
import functools
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, final

from emulator.process import FIRST_HOST
from phalanx.errors import RunError

_SERIAL = 0.0008, 0.1  # seconds, or of the delay, that a packet may take on the link: the larger, the less work
_SMALLEST, _LARGEST = 1500, 65000  # bytes of a packet
_BURST = 0.001  # seconds of the rate that may leave at once
_ROOM = 0.1  # seconds of the rate that may wait for a link before packets are dropped


@dataclass(frozen=True, kw_only=True, slots=True)
class HostLink:
    """A host's link to the switch that joins all hosts; the same in both directions but for the delay.

    Attributes:
        rate: bit/s out of the host, and as much into it; 0: as fast as the machine can.
        delay: seconds that a packet out of the host takes, so that a round trip between two hosts takes twice as long.
    """

    rate: float = 0.0
    delay: float = 0.0

    @property
    def packet(self) -> int:
        """Bytes of the largest packet."""
        seconds = max(_SERIAL[0], _SERIAL[1] * self.delay)
        return max(_SMALLEST, min(_LARGEST, int(self.rate / 8 * seconds))) if self.rate else _LARGEST

    def limit(self, device: str) -> list[str]:
        """Arguments of ``tc`` that hold a device to the rate; none where there is none."""
        if not self.rate:
            return []
        burst = max(2 * (self.packet + 14), int(self.rate / 8 * _BURST))
        waiting = max(int(self.rate / 8 * _ROOM), 16 * self.packet)
        return [f"qdisc add dev {device} root handle 1: tbf rate {self.rate:.0f}bit burst {burst} limit {waiting}"]

    def hold(self, device: str) -> list[str]:
        """Arguments of ``tc`` that also delay packets, where the kernel has netem."""
        limited = self.limit(device)
        if not self.delay:
            return limited
        where = "parent 1:1 handle 10:" if limited else "root handle 10:"
        under_way = int(max(self.rate, 1e10) / 8 * (self.delay + _ROOM) / _SMALLEST) + 1000
        how = f"delay {self.delay * 1e6:.0f}us limit {under_way}"
        return [*limited, f"qdisc add dev {device} {where} netem {how}"]


_PROGRAMS = {"ip": "iproute2", "tc": "iproute2", "nsenter": "util-linux", "unshare": "util-linux"}
_NET_ADMIN, _SYS_ADMIN = 12, 21  # bits of capabilities


def lacking(link: HostLink) -> str:
    """Why hosts with such links cannot be made here; empty where they can."""
    if sys.platform != "linux":
        return f"hosts are network namespaces of Linux, and this is {sys.platform}"
    for program, package in _PROGRAMS.items():
        if not tool(program):
            return f"{program} is not installed ({package})"
    status = Path("/proc/self/status").read_text()
    held = int(status.partition("CapEff:")[2].split()[0], 16)
    if not (held >> _NET_ADMIN & 1 and held >> _SYS_ADMIN & 1):
        return "network namespaces need root, or: unshare --map-root-user --net"
    if error := _trial("ip", "link add one type bridge\nlink add two type veth peer name three"):
        return f"the kernel makes no namespaces, veth or bridge: {error}"
    if link.rate and (error := _qdisc("tbf rate 1mbit burst 10k limit 10k")):
        return f"the kernel has no tbf (modprobe sch_tbf): {error}"
    if link.delay and not has_netem() and not os.access("/dev/net/tun", os.R_OK | os.W_OK):
        return "the kernel has no netem (modprobe sch_netem), and there is no /dev/net/tun to read and write"
    return ""


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


_PROGRAM = Path(__file__).with_name("process.py")
_numbers = count()


@final
class HostNetwork:
    """Hosts joined by a switch. Nothing of it outlives this process.

    Attributes:
        carried: their process carries the packets; else the kernel does.
    """

    def __init__(self, hosts: int, link: HostLink) -> None:
        self._hosts, self._link = hosts, link
        self.carried = bool(link.delay) and not has_netem()
        self._name = f"phx{os.getpid()}.{next(_numbers)}"
        self._claim, self._subnet = _claim_subnet()
        self.launcher = f"{self._subnet}.1"
        self._process = self._start_process()
        try:
            _batch("ip", ["link set lo up"])  # in a namespace of the user's own it may not be yet
            self._namespaces = self._read_namespaces()
            self._join_up() if self.carried else self._wire_up()
        except BaseException:
            self.close()
            raise

    def address(self, host: int) -> str:
        return f"{self._subnet}.{FIRST_HOST + host}"

    def namespace(self, host: int) -> str:
        """A path that opens a host's namespace."""
        return self._namespaces[host]

    def sent(self, host: int) -> int:
        """Bytes that a host has sent so far."""
        shown = _run(["ip", "-json", "-statistics", "link", "show", "dev", "net0"], within=self.namespace(host))
        return int(json.loads(shown)[0]["stats64"]["tx"]["bytes"])

    def cut(self, host: int) -> None:
        """Drop whatever is sent to or by a host, without a word to either side."""
        if self.carried:
            self.ask(f"cut {host}")
        else:
            _run(["ip", "link", "set", f"host{host}", "nomaster"], within=self._switch)

    def restore(self, host: int) -> None:
        if self.carried:
            self.ask(f"restore {host}")
        else:
            _run(["ip", "link", "set", f"host{host}", "master", "switch"], within=self._switch)

    def tell(self, line: str) -> None:
        """Tell their process something it does not answer; also from a worker, until it lets go."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            os.write(self._process.stdin.fileno(), f"{line}\n".encode())

    def ask(self, line: str) -> None:
        """Have their process do something, and wait until it is done."""
        assert self._process.stdout is not None
        self.tell(line)
        if self._process.stdout.readline() != b"ok\n":
            raise RunError("the process that keeps the hosts has ended")

    def let_go(self) -> None:
        """In a forked worker: close what is the launcher's."""
        for stream in (self._process.stdin, self._process.stdout, self._claim):
            if stream is not None:
                stream.close()

    def close(self) -> None:
        self.tell("end")
        try:
            self._process.wait(2)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if not self.carried:
            with suppress(RunError):  # gone already with its other end, or never made
                _run(["ip", "link", "delete", self._name])
        self.let_go()

    @property
    def _switch(self) -> str:
        return self._namespaces[-1]

    def _start_process(self) -> subprocess.Popen[bytes]:
        link = self._link
        carrying = {"delay": link.delay, "rate": link.rate, "room": _ROOM}
        given: dict[str, Any] = {"launcher": os.getpid(), "hosts": self._hosts, "tun": self._name}
        words = json.dumps({**given, "carrying": carrying if self.carried else None})
        return subprocess.Popen(
            [sys.executable, "-I", "-S", str(_PROGRAM), words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,  # Ctrl-C in the terminal is not meant for this one
        )

    def _read_namespaces(self) -> list[str]:
        assert self._process.stdout is not None
        answer = json.loads(self._process.stdout.readline() or "{}")
        if not isinstance(answer, list):
            raise RunError(f"hosts could not be made: {answer.get('error', 'their process ended')}")
        return [f"/proc/{self._process.pid}/fd/{number}" for number in answer]

    def _join_up(self) -> None:
        mtu = f"mtu {self._link.packet}"
        quiet = "addrgenmode none up"
        _batch("ip", [f"address add {self.launcher}/24 dev {self._name}", f"link set {self._name} {mtu} {quiet}"])
        for host in range(self._hosts):
            where = self.namespace(host)
            commands = [f"address add {self.address(host)}/24 dev net0", f"link set net0 {mtu} {quiet}"]
            _batch("ip", [*commands, "link set lo up"], within=where)
            _batch("tc", self._link.limit("net0"), within=where)

    def _wire_up(self) -> None:
        mtu = f"mtu {self._link.packet}"
        ends = [self._name, *(f"host{host}" for host in range(self._hosts))]
        _batch("ip", [f"link add {self._name} {mtu} type veth peer name {self._name} {mtu} netns {self._switch}"])
        switch = [f"link add switch {mtu} type bridge", "link set switch addrgenmode none up"]
        for host in range(self._hosts):
            to = f"netns {self.namespace(host)}"
            switch.append(f"link add host{host} {mtu} type veth peer name net0 {mtu} {to}")
        switch += [f"link set {end} master switch addrgenmode none up" for end in ends]
        _batch("ip", switch, within=self._switch)
        limits = [line for host in range(self._hosts) for line in self._link.limit(f"host{host}")]
        _batch("tc", limits, within=self._switch)
        _batch("ip", self._interface(self._name, self.launcher, -1))
        for host in range(self._hosts):
            where = self.namespace(host)
            _batch("ip", [*self._interface("net0", self.address(host), host), "link set lo up"], within=where)
            _batch("tc", self._link.hold("net0"), within=where)

    def _interface(self, device: str, address: str, host: int) -> list[str]:
        """With everybody's address known beforehand: a cut link must be silent, not "no such host"."""
        others = [(self.launcher, -1), *((self.address(other), other) for other in range(self._hosts))]
        link = f"link set {device} address {_hardware(host)} addrgenmode none up"
        neighbours = [(ip, _hardware(at)) for ip, at in others if at != host]
        known = [f"neigh replace {ip} lladdr {mac} dev {device} nud permanent" for ip, mac in neighbours]
        return [link, f"address add {address}/24 dev {device}", *known]


def _hardware(host: int) -> str:
    return f"02:50:48:58:00:{FIRST_HOST + host:02x}"


def _claim_subnet() -> tuple[socket.socket, str]:
    """Three numbers of addresses that nobody here uses, and what keeps others from them while it is open."""
    used = {int(line.split()[1], 16) for line in Path("/proc/net/route").read_text().splitlines()[1:]}
    for number in range(256):
        claim = socket.socket(socket.AF_UNIX)
        if int.from_bytes(bytes([10, 213, number, 0]), sys.byteorder) not in used:
            with suppress(OSError):
                claim.bind(f"\0phalanx-hosts-{number}")
                return claim, f"10.213.{number}"
        claim.close()
    raise RunError("no addresses are left for hosts: 10.213.0.0/16 is in use\n    try: end other runs with hosts")


def _batch(program: str, commands: list[str], within: str = "") -> None:
    if commands:
        _run([program, "-batch", "-"], within=within, text="\n".join(commands))


def _run(argv: list[str], *, within: str = "", text: str = "") -> str:
    program = [str(tool(argv[0])), *argv[1:]]
    entered = [str(tool("nsenter")), f"--net={within}", "--", *program] if within else program
    done = subprocess.run(entered, input=text, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RunError(f"{' '.join(argv)} failed: {done.stderr.strip()}\n{text}".rstrip())
    return done.stdout


_CLONE_NEWNET, _CLONE_NEWNS = 0x40000000, 0x00020000
_MS_BIND, _MS_REC, _MS_SLAVE = 4096, 16384, 1 << 19
_NAMES = Path("/etc/hosts")


def move_into(namespace: str, names: Mapping[str, str]) -> None:
    """Move this process, of one thread as yet, into a network namespace where ``names`` (name → address) hold.

    Raises:
        RunError: if the kernel does not let it in.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    descriptor = os.open(namespace, os.O_RDONLY)
    entered = libc.setns(descriptor, _CLONE_NEWNET) == 0
    os.close(descriptor)
    if not entered:
        raise RunError(f"this process could not enter a host: {os.strerror(ctypes.get_errno())}")
    with suppress(OSError):  # without it torch only warns that it knows no names for the addresses
        _name(libc, names)


def _name(libc: ctypes.CDLL, names: Mapping[str, str]) -> None:
    """No server of names can be reached from a host; a private view of the file of names takes its place."""
    # torch's sockets are of IPv6, and their addresses of IPv4 are looked up in that form
    lines = [f"{written}{address} {name}\n" for name, address in names.items() for written in ("", "::ffff:")]
    text = "".join([_NAMES.read_text(), *lines])
    with tempfile.NamedTemporaryFile("w") as file:
        file.write(text)
        file.flush()
        if libc.unshare(_CLONE_NEWNS) == 0 and libc.mount(b"none", b"/", None, _MS_REC | _MS_SLAVE, None) == 0:
            libc.mount(file.name.encode(), str(_NAMES).encode(), None, _MS_BIND, None)
