"""What this machine must have for hosts to be made on it."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
from pathlib import Path

from phalanx.errors import Problem, RefusedError
from phalanx.launch.hosts.link import Link

_PROGRAMS = {"ip": "iproute2", "tc": "iproute2", "nsenter": "util-linux", "unshare": "util-linux"}
_NET_ADMIN, _SYS_ADMIN = 12, 21  # bits of capabilities


def lacking(link: Link) -> Problem | None:
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


def refuse(link: Link) -> None:
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
