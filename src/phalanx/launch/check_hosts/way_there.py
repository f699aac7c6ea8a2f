"""What to do about a host that does not answer."""

from __future__ import annotations

_WAYS = (
    ("host key verification", "ssh {name}, once by hand: look at its key, and accept it if it is the right one"),
    ("resolve hostname", 'an entry {name} in ~/.ssh/config; or ssh = ["-F", "ssh.config"] in the hosts file'),
    (
        "connection refused",
        "ssh {name} true: see that sshd listens there, at the port that ~/.ssh/config has",
    ),
    ("permission denied", "ssh-copy-id {name}: nobody is asked for a password here"),
    ("no such file", 'python = "/path/to/python" and folder = "/path" in the hosts file: those on the hosts'),
    ("not found", 'python = "/path/to/python" in the hosts file: without it, it is the path of the interpreter here'),
)


def way_there(name: str, said: str) -> str:
    """What to do where the host ``name`` cannot be used, by what ssh or its shell ``said``."""
    ways = (way for sign, way in _WAYS if sign in said.lower())
    return next(ways, "ssh {name} true: see that it is up, and that its name and address are right").format(name=name)
