"""A host reached by SSH, as ``phalanx check`` asks it: a program at a time, each over a connection of its own."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import final

from phalanx.launch.check_hosts import TargetHost, run_here
from phalanx.launch.targets.hosts_file import HostEntry, HostsFile
from phalanx.launch.targets.ssh_host import ssh_command


@final
class SshAskedHost(TargetHost):
    """One host of a hosts file; what it runs has the folder and the variables of workers."""

    def __init__(self, file: HostsFile, entry: HostEntry) -> None:
        self.name, self.address, self.processes = entry.name, entry.address, entry.devices
        self.folder = file.folder
        self._file, self._entry = file, entry

    def run(self, arguments: Sequence[str], text: str, patience: float) -> str:
        variables = [f"{name}={value}" for name, value in self._file.environment.items()]
        words = ["env", *variables, self._file.python, *arguments]
        return run_here([*ssh_command(self._file, self._entry), shlex.join(words)], text, patience)
