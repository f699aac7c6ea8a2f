"""Where this process is reached, and where it listens: loopback on one machine, else the address others reach it by."""

from __future__ import annotations

import ipaddress
import os
import socket
import struct
import sys
from contextlib import suppress

from phalanx.device_kinds import interface_variables

LOOPBACK = "127.0.0.1"

_MOST_CONNECTED = 256  # ranks of which each is connected with every other as a group is made
ANYWHERE = "198.51.100.1"
"""An address kept for documentation: nothing is sent there, only a route looked up."""


def own_address(master: str, *, one_host: bool) -> str:
    """The address of this machine that a machine at ``master`` reaches; loopback where all is on ``one_host``.

    The user's ``GLOO_SOCKET_IFNAME`` goes first: its interface's address.
    """
    if chosen := _address_of(os.environ.get("GLOO_SOCKET_IFNAME", "").partition(",")[0]):
        return chosen
    if one_host:
        return LOOPBACK
    # the machine that master is on may know itself by a loopback address, as Debian's /etc/hosts has it
    addresses = (_source(towards) for towards in (master, ANYWHERE))
    return next((one for one in addresses if one and not ipaddress.ip_address(one).is_loopback), LOOPBACK)


def listen_at(address: str) -> None:
    """Have gloo listen at ``address`` of this machine from now on; on loopback the backends of accelerators, too.

    gloo listens at the address that the machine's name resolves to, unless its variable says otherwise: torch hands no
    other device to the groups that it makes itself, sub-groups and those of a DeviceMesh. What the user has set stays.
    """
    interface = next((name for _, name in socket.if_nameindex() if _address_of(name) == address), None)
    if interface is None:
        return
    os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    if ipaddress.ip_address(address).is_loopback:  # between machines they know better which of their links are fast
        for name in interface_variables():
            os.environ.setdefault(name, interface)


def connect_late(ranks: int) -> None:
    """Of many ranks have gloo connect two when they first send to each other, not each with every other at once.

    A ring needs two connections a rank, and a process may have no more than 1,024 files open on most machines. What the
    user has set stays.
    """
    if ranks > _MOST_CONNECTED:
        os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")


def _source(towards: str) -> str:
    """The address from which this machine sends to ``towards``; empty where it cannot."""
    with suppress(OSError):
        family, kind, *_, where = socket.getaddrinfo(towards, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(where)  # of datagrams: looks the route up, sends nothing
            return probe.getsockname()[0]
    return ""


def _address_of(interface: str) -> str:
    """The IPv4 address of a network interface; empty where it has none."""
    if not interface or sys.platform != "linux":
        return LOOPBACK if interface == "lo0" else ""
    import fcntl

    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        request = struct.pack("256s", interface.encode()[:15])
        return socket.inet_ntoa(fcntl.ioctl(probe.fileno(), 0x8915, request)[20:24])  # SIOCGIFADDR
    return ""
