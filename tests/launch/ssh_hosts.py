"""Hosts with an SSH server each, in network namespaces of this machine: a real key, a real file of known hosts."""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import final

import pytest

from emulator import Hosts
from emulator.network import HostLink, lacking
from phalanx.launch.reaper import die_with, fork

_SSHD = shutil.which("sshd") or "/usr/sbin/sshd"
_UP = 60.0  # seconds for a server to listen


def lacking_for_ssh(rate: float = 0.0) -> str:
    """Why there can be no such hosts with links of such a rate here; empty where there can."""
    if why := lacking(HostLink(rate=rate)):
        return why
    if os.geteuid():
        return "an SSH server of one's own needs root"
    missing = [name for name in (_SSHD, "ssh", "ssh-keygen") if not shutil.which(name)]
    return f"{', '.join(missing)} is not installed (openssh-server, openssh-client)" if missing else ""


@final
class SshServers:
    """The servers of ``hosts``, and the files with which ``phalanx launch`` finds them.

    ``own``: folders in whose place each host has an empty one of its own, as a machine without a shared disk has.
    """

    def __init__(self, hosts: Hosts, folder: Path, own: Sequence[Path] = ()) -> None:
        self.hosts, self.folder, self.own = hosts, folder, own
        self.pids: list[int] = []
        for name in ("key", "host_key", "other_key"):
            subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)], check=True)
        Path("/run/sshd").mkdir(exist_ok=True)  # where the server leaves its rights
        known = (folder / "host_key.pub").read_text().split()[:2]
        lines = [f"{hosts.address(number)} {' '.join(known)}\n" for number in range(hosts.count)]
        (folder / "known_hosts").write_text("".join(lines))
        self.write_config()
        for number in range(hosts.count):
            self.pids.append(self._server(number))
        self._await_servers()

    def write_config(self, **changed: str) -> None:
        """What ``ssh`` reads: ``n0``, ``n1`` are the hosts; ``changed``: an option's name → another value."""
        options = {
            "User": "root",
            "IdentityFile": str(self.folder / "key"),
            "IdentitiesOnly": "yes",
            "UserKnownHostsFile": str(self.folder / "known_hosts"),
            "GlobalKnownHostsFile": "/dev/null",
            **changed,
        }
        named = [f"Host n{one}\n  HostName {self.hosts.address(one)}\n" for one in range(self.hosts.count)]
        rest = "Host *\n" + "".join(f"  {name} {value}\n" for name, value in options.items())
        (self.folder / "config").write_text("".join(named) + rest)

    def write_hosts(self, devices: Sequence[int], *, name: str = "hosts.toml", **top: str) -> Path:
        """A hosts file with so many devices on each; ``top``: keys beside, as TOML."""
        given = {
            "ssh": f'["-F", "{self.folder / "config"}"]',
            "environment": f'{{PYTHONPATH = "{os.environ.get("PYTHONPATH", "")}", OMP_NUM_THREADS = "1"}}',
            "python": f'"{sys.executable}"',
            **top,
        }
        text = "".join(f"{key} = {value}\n" for key, value in given.items())
        for number, count in enumerate(devices):
            address = self.hosts.address(number)
            text += f'[[host]]\nname = "n{number}"\naddress = "{address}"\ndevices = {count}\n'
        path = self.folder / name
        path.write_text(text)
        return path

    def close(self) -> None:
        """End the servers, and with them their connections."""
        for pid in self.pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            with suppress(ChildProcessError):
                os.waitpid(pid, 0)

    def _server(self, number: int) -> int:
        config = self.folder / f"sshd-{number}"
        config.write_text(
            f"Port 22\nListenAddress {self.hosts.address(number)}\nHostKey {self.folder / 'host_key'}\n"
            f"AuthorizedKeysFile {self.folder / 'key.pub'}\nStrictModes no\nUsePAM no\nPasswordAuthentication no\n"
            f"PermitRootLogin yes\nPidFile none\n"
        )
        launcher = os.getpid()
        pid = fork()
        if pid == 0:
            try:
                die_with(launcher)
                self.hosts.enter(number * self.hosts.per_host)
                _have_own(self.own)
                os.setsid()
                os.execv(_SSHD, [_SSHD, "-D", "-f", str(config), "-E", str(self.folder / f"sshd-{number}.log")])
            finally:
                os._exit(1)
        return pid

    def _await_servers(self) -> None:
        until = time.monotonic() + _UP
        for number in range(self.hosts.count):
            words = ["ssh", "-F", str(self.folder / "config"), f"n{number}", "true"]
            while subprocess.run(words, capture_output=True).returncode:
                log = self.folder / f"sshd-{number}.log"
                assert time.monotonic() < until, log.read_text() if log.exists() else "no server"
                time.sleep(0.1)


def _have_own(folders: Sequence[Path]) -> None:
    """Put an empty folder that no other process sees in the place of each."""
    libc = ctypes.CDLL(None, use_errno=True)
    new_mounts, private, recursive = 0x20000, 1 << 18, 1 << 14
    if folders and (libc.unshare(new_mounts) or libc.mount(b"none", b"/", None, private | recursive, None)):
        raise OSError(ctypes.get_errno(), "no mounts of its own")
    for folder in folders:
        if libc.mount(b"tmpfs", str(folder).encode(), b"tmpfs", 0, None):
            raise OSError(ctypes.get_errno(), f"nothing can be mounted at {folder}")


@contextmanager
def ssh_servers(count: int, folder: Path, rate: float = 0.0, own: Sequence[Path] = ()) -> Iterator[SshServers]:
    """So many hosts with a server each, links of that rate, and folders of their ``own``; skips where none can be."""
    if why := lacking_for_ssh(rate):
        pytest.skip(why)
    with Hosts(count, rate=rate) as hosts:
        servers = SshServers(hosts, folder, own)
        try:
            yield servers
        finally:
            servers.close()
