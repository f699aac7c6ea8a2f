"""One connection to one host, over which an agent there is told what to do: ``SshHost``."""

from __future__ import annotations

import json
import queue
import shlex
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, final

from phalanx.errors import RunError
from phalanx.launch import code_files
from phalanx.launch.check_hosts.host_findings import way_there
from phalanx.launch.host_messages import LONGEST, checked
from phalanx.launch.targets import host_agent, host_folder
from phalanx.launch.targets.hosts_file import HostEntry, HostsFile

_CONNECT = 10  # seconds
_ANSWER = 60.0  # seconds for a host to look at files
_STILL = 5.0  # seconds between signs of life
_END = 1.0  # seconds that an agent has to end once its launcher has hung up
_LAST_WORDS = 4096  # bytes of what ssh says
# The agent's text comes first, so that it need not be there, nor be of the same version.
_BOOT = "import sys; exec(compile(sys.stdin.buffer.read(int(sys.stdin.buffer.readline())), 'phalanx-host', 'exec'))"
# Nobody is asked for a password, no unknown host is believed, and a host that falls silent is given up.
_OPTIONS = {
    "BatchMode": "yes",
    "StrictHostKeyChecking": "yes",
    "ConnectTimeout": str(_CONNECT),
    "ServerAliveInterval": "5",
    "ServerAliveCountMax": "3",
}


@dataclass(frozen=True, slots=True)
class Told:
    """What an agent has told; nothing where the connection is over."""

    host: int
    message: dict[str, Any]


def ssh_words(file: HostsFile, host: HostEntry) -> tuple[str, ...]:
    """The command that reaches ``host`` and starts the agent there."""
    return (*ssh_command(file, host), shlex.join([file.python, "-u", "-c", _BOOT, file.folder]))


def ssh_command(file: HostsFile, host: HostEntry) -> tuple[str, ...]:
    """What reaches ``host``, before the command to run there."""
    options = [word for name, value in _OPTIONS.items() for word in ("-o", f"{name}={value}")]
    return ("ssh", "-T", *file.ssh, *options, "--", host.name)


@final
class SshHost:
    """The agent on one host. Everything it tells goes into ``told``; closing the connection ends its workers."""

    def __init__(self, file: HostsFile, number: int, told: queue.Queue[Told]) -> None:
        """
        Raises:
            RunError: there is no ``ssh``.
        """
        self.entry, self.number = file.hosts[number], number
        self._told, self._said = told, b""
        first = sum(host.devices for host in file.hosts[:number])
        self._ranks = range(first, first + self.entry.devices)
        try:
            self._ssh = subprocess.Popen(
                ssh_words(file, self.entry),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,  # Ctrl-C in the terminal is the launcher's, who has workers save
            )
        except FileNotFoundError:
            raise RunError("ssh is not installed here\n    try: apt-get install openssh-client") from None
        self._sending = threading.Lock()
        self._over = threading.Event()
        text = _agent_text()
        self._write(f"{len(text)}\n".encode() + text)
        self._words = threading.Thread(target=self._read_words, daemon=True)
        others = [threading.Thread(target=each, daemon=True) for each in (self._hear, self._live)]
        self._threads = [self._words, *others]
        for thread in self._threads:
            thread.start()

    def ask(self, do: str, **what: Any) -> None:
        """Have the agent do something; nothing happens where the connection is over, which ``told`` says."""
        self._write(json.dumps({"do": do, **what}).encode() + b"\n")

    def call(self, name: str, /, *, tells: bool = True, **given: Any) -> None:
        """Have the agent call ``HostFiles.name``; what that gives comes as ``files``, where it ``tells``."""
        self.ask("files", call=name, tells=tells, **{"with": given})

    @property
    def is_over(self) -> bool:
        """Whether this side has hung up."""
        return self._over.is_set()

    @property
    def last_words(self) -> str:
        """What ssh, or the host's shell, has said."""
        return self._said.decode(errors="replace").strip()

    def close(self) -> None:
        """Hang up, upon which the agent ends its workers; ends ssh by force where that takes long."""
        self._over.set()
        if self._sending.acquire(timeout=_END):
            with suppress(OSError, ValueError):
                assert self._ssh.stdin
                self._ssh.stdin.close()
            self._sending.release()
        else:  # what is being sent does not get through
            self._ssh.kill()
        try:
            self._ssh.wait(_END)
        except subprocess.TimeoutExpired:
            self._ssh.kill()
            self._ssh.wait()
        for thread in self._threads:
            thread.join(_END)
        for pipe in (self._ssh.stdout, self._ssh.stderr):
            with suppress(OSError):
                assert pipe
                pipe.close()

    def _write(self, data: bytes) -> None:
        with self._sending, suppress(OSError, ValueError):
            assert self._ssh.stdin
            self._ssh.stdin.write(data)
            self._ssh.stdin.flush()

    def _hear(self) -> None:
        assert self._ssh.stdout
        while line := self._ssh.stdout.readline(LONGEST):
            if message := checked(line, self._ranks):
                self._told.put(Told(self.number, message))
            if message and "refused" in message:
                self._ssh.kill()  # nothing more of it is heard
                break
        self._ssh.wait()
        self._words.join(_END)  # why it is over
        self._told.put(Told(self.number, {}))

    def _read_words(self) -> None:
        assert self._ssh.stderr
        while data := self._ssh.stderr.read1(_LAST_WORDS):  # pyrefly: ignore
            self._said = (self._said + data)[-_LAST_WORDS:]

    def _live(self) -> None:
        while not self._over.wait(_STILL):
            self.ask("still")


@final
class SshHosts:
    """All hosts of a file, connected to at the same time."""

    def __init__(self, file: HostsFile, threads: int | None = None) -> None:
        """Begin to reach them; ``await_all`` waits for that.

        Args:
            threads: that each worker computes with; its share of its host's cores where not given.

        Raises:
            RunError: there is no ``ssh``.
        """
        self.told = queue.Queue[Told]()
        self._reached = False
        self._each: list[SshHost] = []
        argv = [file.python, "-m", "phalanx", "worker", "{reports}/run.toml", "--reports", "{reports}", "--wait"]
        environment = {**({"OMP_NUM_THREADS": str(threads)} if threads else {}), **file.environment}
        try:
            for number in range(len(file.hosts)):
                self._each.append(host := SshHost(file, number, self.told))
                loads = {"folder": file.folder, "named": file.folder_named, "environment": environment, "argv": argv}
                host.ask("load", **loads, count=host.entry.devices)
        except BaseException:
            self.close()
            raise

    def __getitem__(self, number: int) -> SshHost:
        return self._each[number]

    def __iter__(self):
        return iter(self._each)

    def close(self) -> None:
        """Hang up on all at once."""
        closing = [threading.Thread(target=host.close) for host in self._each]
        for thread in closing:
            thread.start()
        for thread in closing:
            thread.join()
        self._each.clear()

    def call(self, name: str, given: Mapping[int, Mapping[str, Any]]) -> dict[int, Any]:
        """Have agents call ``HostFiles.name``, each with what is ``given`` for its host, and wait for what it gives.

        Raises:
            RunError: some do not answer; each is named.
        """
        self.await_all()
        for number, one in given.items():
            self._each[number].call(name, **one)
        return self._await(
            set(given), lambda message: message.get("files") == name, lambda message: message["result"], _ANSWER
        )

    def await_all(self) -> None:
        """Wait until each has been reached; nothing where that is so.

        Raises:
            RunError: some cannot be reached; each is named, with what ssh says.
        """
        if self._reached:
            return
        self._await(set(range(len(self._each))), lambda message: "hello" in message, lambda message: None, _CONNECT + 5)
        self._reached = True

    def _await(
        self,
        waiting: set[int],
        fits: Callable[[Mapping[str, Any]], bool],
        result: Callable[[Mapping[str, Any]], Any],
        patience: float,
    ) -> dict[int, Any]:
        """The ``result`` of the first message that ``fits`` of each host in ``waiting``."""
        results, failed = dict[int, Any](), dict[int, str]()
        until = time.monotonic() + patience
        while waiting:
            try:
                told = self.told.get(timeout=max(0.0, until - time.monotonic()))
            except queue.Empty:
                failed |= dict.fromkeys(waiting, f"no answer within {patience:g} s")
                break
            if not told.message:
                words = self._each[told.host].last_words.splitlines() or ["ssh ended without a word"]
                failed[told.host] = words[-1]
            elif "refused" in told.message:
                failed[told.host] = told.message["refused"]
            elif fits(told.message):
                results[told.host] = result(told.message)
            else:
                continue
            waiting.discard(told.host)
        if failed:
            raise RunError(_unreachable({self._each[number].entry.name: why for number, why in sorted(failed.items())}))
        return results


def _agent_text() -> bytes:
    """The agent's program: what it keeps of files comes first."""
    return program_text(code_files, host_folder, host_agent).encode()


def program_text(*modules: ModuleType) -> str:
    """Return one program of the texts of ``modules``, each after those that it imports.

    It is sent to where no import finds them, or finds those of another version: their imports of Phalanx at the start
    of a line, each in one line, are left out.
    """
    parts: list[str] = []
    for module in modules:
        lines = Path(str(module.__file__)).read_text(encoding="utf-8").splitlines(keepends=True)
        text = "".join("\n" if line.startswith("from phalanx.") else line for line in lines)
        parts.append(f"exec(compile({text!r}, {module.__name__!r}, 'exec'))\n")
    return "".join(parts)


def _unreachable(failed: dict[str, str]) -> str:
    lines = [f"host {name} cannot be used: {why}" for name, why in failed.items()]
    return "\n".join([*lines, f"    try: {way_there(next(iter(failed)), ' '.join(failed.values()))}"])


def host_numbers(hosts: Sequence[HostEntry]) -> list[tuple[int, int]]:
    """The host and the number on it of each rank: neighbours are on one host."""
    return [(number, local) for number, host in enumerate(hosts) for local in range(host.devices)]
