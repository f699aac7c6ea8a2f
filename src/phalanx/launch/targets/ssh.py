"""``--to ssh:hosts.toml``: workers on hosts that SSH reaches, followed from here as those of this machine are.

One connection a host. On each an agent (``host_agent.py``) starts ``phalanx worker``, passes on what workers print and
report, and ends them when the connection does. Host keys are checked, and no password is asked for: ``ssh n1 true`` has
to work by itself. A host that has not the job's folder of this machine is sent it; where not all share the run folder,
each gets a copy, and what workers write there is brought here.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, final

from phalanx.errors import SpecError
from phalanx.launch.check_hosts import TargetHost, run_here
from phalanx.launch.runfile import settled
from phalanx.launch.targets.hosts_file import HostEntry, HostsFile, refuse_size
from phalanx.launch.targets.launch_folder import CODE_LIST
from phalanx.launch.targets.ssh_host import SshHosts, ssh_command, ssh_words
from phalanx.launch.targets.ssh_storage import HostStorage, code_to_send
from phalanx.launch.targets.target import AttachedTarget, Option, Prepared, Submission

if TYPE_CHECKING:
    from phalanx.launch.launcher import Launcher

_A_PORT = "a free one of the first host"
# The variables come first on stdin, since every user of a host sees its command lines; what runs has the rest of it.
_BOOT = """
import json, os, sys
with open(0, "rb", 0, closefd=False) as stdin:
    os.environ.update(json.loads(stdin.readline()))
os.execvp(sys.argv[1], sys.argv[1:])
"""


@final
class SshTarget(AttachedTarget):
    """Hosts of a file."""

    name: ClassVar[str] = "ssh"
    options: ClassVar[Mapping[str, Option]] = {}

    def __init__(self, address: str) -> None:
        if not address:
            given, allowed = "ssh without a file", "a file that names the hosts"
            raise SpecError.of(where="--to", given=given, allowed=allowed, fix="--to ssh:hosts.toml")
        self.file = HostsFile.read(Path(address))
        self._hosts: SshHosts | None = None

    def prepare(self, submission: Submission) -> Prepared:
        """What each host gets where it has the job and shares the run folder: paths are others where it does not."""
        refuse_size(submission.run, self.file)
        # as whoever follows a run has workers begin it
        run = replace(settled(submission.run), from_step=None, forecast="none")
        storage, files = HostStorage.alike(self.file, run), dict[Path, str]()
        for number, host in enumerate(self.file.hosts):
            start = storage.start(number, run, _A_PORT)
            told = {"folder": start.folder, "variables": start.ranks, "environment": [*self.file.environment]}
            files[Path(f"{host.name}:run.toml")] = start.run.to_toml()
            files[Path(f"{host.name}:workers.json")] = json.dumps(told, indent=2)
        if code := code_to_send(submission.run, self.file):
            files[submission.folder / CODE_LIST] = f"for a host that has it not: {code}"
        commands = tuple(ssh_words(self.file, host) for host in self.file.hosts)
        return Prepared(submission=submission, files=files, commands=commands)

    def reach(self) -> None:
        self._hosts = SshHosts(self.file)

    def hosts(self) -> list[SshAskedHost]:
        return [SshAskedHost(self.file, entry) for entry in self.file.hosts]

    def launcher(self) -> Launcher:
        from phalanx.launch.targets.ssh_workers import SshLauncher

        hosts, self._hosts = self._hosts, None
        return SshLauncher(self.file, hosts)

    def leave(self) -> None:
        if self._hosts:
            self._hosts.close()
            self._hosts = None


@final
class SshAskedHost(TargetHost):
    """One host of a hosts file; what it runs has the folder and the variables of workers."""

    def __init__(self, file: HostsFile, entry: HostEntry) -> None:
        self.name, self.address, self.processes = entry.name, entry.address, entry.devices
        self.folder, self.scratch = file.folder, file.scratch
        self._file, self._entry = file, entry

    def run(self, arguments: Sequence[str], text: str, patience: float) -> str:
        words = shlex.join([self._file.python, "-c", _BOOT, self._file.python, *arguments])
        variables = json.dumps({**self._file.environment})
        return run_here([*ssh_command(self._file, self._entry), words], f"{variables}\n{text}", patience)
