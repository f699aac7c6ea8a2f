"""The sending of what hosts of a launch by SSH have not: the job's code, and what a copy of the run folder holds."""

from __future__ import annotations

import base64
import os
import shutil
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, final

from phalanx.config import RunSpec
from phalanx.config.run_files import CHECKPOINTS, EVENTS, RUN_FILES
from phalanx.errors import RunError
from phalanx.files import replace_text
from phalanx.launch.targets.host_folder import PIECE
from phalanx.launch.targets.launch_folder import CODE_LIST, FOLDER
from phalanx.launch.targets.ssh_host import SshHost
from phalanx.launch.targets.ssh_storage import HostStorage

_MANIFEST = "manifest.json"
_END = 1.0  # seconds that a thread has to end once its connection is over


@final
class HostSending:
    """Sends to all hosts at a time what each has not, from threads of its own.

    Attributes:
        snapshot: what copies of the run folder begin with; ``None`` where all share it.
    """

    def __init__(self, hosts: Sequence[SshHost], storage: HostStorage, run: RunSpec) -> None:
        """
        Raises:
            RunError: the code changes while it is packed.
        """
        self.snapshot = None if storage.shared else FolderSnapshot(run)
        self._storage, self._run, self._error = storage, run, ""
        self._folder = Path(tempfile.mkdtemp(prefix="phalanx-code-"))
        self._threads: list[threading.Thread] = []
        code = storage.code
        self._awaited = {host.number: call for host in hosts if (call := self._last_call(host.number))}
        if code and code.missing and code.pack.write(self._folder / "pack") != code.digest:
            self.close()
            raise RunError(
                f"{code.pack.root} changed while it was packed\n    try: once more, when nothing writes there"
            )
        if code and code.there:
            path = run.folder / FOLDER / CODE_LIST
            path.parent.mkdir(exist_ok=True)
            replace_text(path, code.pack.to_text())
        for host in hosts:
            if host.number in self._awaited:
                thread = threading.Thread(target=self._send, args=(host,), daemon=True)
                self._threads.append(thread)
                thread.start()

    @property
    def goes_on(self) -> bool:
        """Whether a host has not got all."""
        return bool(self._awaited)

    def take(self, host: int, message: Mapping[str, Any]) -> None:
        """Take in what the agent of ``host`` tells.

        Raises:
            RunError: a file that is to be sent cannot be read.
        """
        if self._error:
            raise RunError(f"{self._error}\n    try: once more, when nothing writes there")
        if host in self._awaited and message.get("files") == self._awaited[host]:
            del self._awaited[host]

    def close(self) -> None:
        """End, once the connections are over."""
        for thread in self._threads:
            thread.join(_END)
        shutil.rmtree(self._folder, ignore_errors=True)

    def _last_call(self, number: int) -> str:
        """The last thing that is asked of a host; empty where it lacks nothing."""
        code = self._storage.code
        return "follow" if self.snapshot else "unpack" if code and number in code.missing else ""

    def _send(self, host: SshHost) -> None:
        storage = self._storage
        try:
            if storage.code and host.number in storage.code.missing:
                host.call("receive", scratch=storage.scratch[host.number], tells=False)
                send_file(host, self._folder / "pack", "pack")
                host.call("unpack", scratch=storage.scratch[host.number], digest=storage.code.digest)
            if self.snapshot:
                name = storage.copy_name(host.number, self._run)
                host.call("begin", scratch=storage.scratch[host.number], name=name, tells=False)
                self.snapshot.send(host)
                stays = [name for name, file in RUN_FILES.items() if not file.brought]
                host.call("follow", manifest=_MANIFEST, stays=stays)
        except OSError as error:
            self._error = f"what {host.entry.name} is to have cannot be read: {error}"


class FolderSnapshot:
    """Files of the run folder as they are now, path → bytes, that a copy begins with.

    Attributes:
        log: bytes of the event log among them.
    """

    def __init__(self, run: RunSpec) -> None:
        self._folder = run.folder
        chosen = _checkpoints_for(run)
        self.files: dict[str, int] = {}
        for folder, folders, files in os.walk(run.folder):
            below = Path(folder).relative_to(run.folder)
            if below == Path():
                folders[:] = [name for name in folders if _is_sent(name)]
            elif below == Path(CHECKPOINTS):
                folders[:] = [name for name in folders if name in chosen]
            for name in files:
                path = Path(folder) / name
                sent = below != Path() or _is_sent(name)
                if sent and not name.startswith(".") and not path.is_symlink():
                    self.files[str(below / name)] = path.stat().st_size
        self.log = self.files.get(EVENTS, 0)

    def send(self, host: SshHost) -> None:
        """Send all of it to the copy on ``host``."""
        for path, size in self.files.items():
            send_file(host, self._folder / path, path, size)


def _is_sent(name: str) -> bool:
    """Whether what has this name in the run folder is sent; what the user has put there is."""
    return name not in RUN_FILES or RUN_FILES[name].sent


def send_file(host: SshHost, path: Path, name: str, size: int | None = None) -> None:
    """Send the first ``size`` bytes of a file, all where that is not given; ends early where the connection is over."""
    left = path.stat().st_size if size is None else size
    host.call("put", path=name, data="", tells=False)  # an empty file is one, too
    with path.open("rb") as file:
        while left > 0 and not host.is_over and (data := file.read(min(PIECE, left))):
            left -= len(data)
            host.call("put", path=name, data=base64.b64encode(data).decode(), tells=False)


def _checkpoints_for(run: RunSpec) -> set[str]:
    """The names of those that workers go on from: the newest whole one, all where it is damaged."""
    if not run.resume:
        return set()
    from phalanx.checkpoint import verify
    from phalanx.checkpoint.folder import is_complete, newest_first

    whole = [path for path in newest_first(run.folder / CHECKPOINTS) if is_complete(path)]
    return {path.name for path in (whole[:1] if whole and not verify(whole[0]) else whole)}
