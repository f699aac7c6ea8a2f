"""A host reached by SSH, as ``phalanx check`` asks it: a program at a time, each over a connection of its own."""

from __future__ import annotations

import json
import shlex
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import final

from phalanx.errors import Problem, RunError, SpecError
from phalanx.launch.check_hosts import CODE_OF_CHECK, CodeForHost, TargetHost, run_here
from phalanx.launch.targets.code_pack import CodePack, folder_to_pack
from phalanx.launch.targets.hosts_file import HostEntry, HostsFile
from phalanx.launch.targets.ssh_host import ssh_command

# The variables come first on stdin, since every user of a host sees its command lines; what runs has the rest of it.
_BOOT = """
import json, os, sys
with open(0, "rb", 0, closefd=False) as stdin:
    os.environ.update(json.loads(stdin.readline()))
os.execvp(sys.argv[1], sys.argv[1:])
"""


@final
class SshAskedHost(TargetHost):
    """One host of a hosts file; what it runs has the folder and the variables of workers."""

    def __init__(self, file: HostsFile, entry: HostEntry) -> None:
        self.name, self.address, self.processes = entry.name, entry.address, entry.devices
        self.folder, self.scratch = file.folder, file.scratch
        self._file, self._entry = file, entry

    def sent_code(self, reference: str, run_folder: Path) -> CodeForHost | None:
        try:
            return _packed(folder_to_pack(reference, self._file.code), run_folder.absolute())
        except SpecError as error:
            return CodeForHost(refused=error.problems[0])
        except (RunError, OSError) as error:
            given = f"{error}".partition("\n")[0]
            fix = "once more, when nothing writes there"
            return CodeForHost(refused=Problem(where="--code", given=given, allowed="what stays as it is", fix=fix))

    def run(self, arguments: Sequence[str], text: str, patience: float) -> str:
        words = shlex.join([self._file.python, "-c", _BOOT, self._file.python, *arguments])
        variables = json.dumps({**self._file.environment})
        return run_here([*ssh_command(self._file, self._entry), words], f"{variables}\n{text}", patience)


@lru_cache(maxsize=1)
def _packed(root: Path, run_folder: Path) -> CodeForHost:
    """The same for all hosts of a check."""
    pack = CodePack.of(root, without=run_folder)
    found = CodeForHost(root=root, nbytes=pack.nbytes, digests=pack.digests)
    if pack.nbytes > CODE_OF_CHECK:
        return found
    with tempfile.TemporaryDirectory(prefix="phalanx-code-") as folder:
        pack.write(Path(folder) / "pack")
        return replace(found, pack=(Path(folder) / "pack").read_bytes())
