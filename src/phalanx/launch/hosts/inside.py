"""Moving a process onto a host: into its network namespace, with a list of names of its own."""

from __future__ import annotations

import ctypes
import os
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from phalanx.errors import RunError

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
