"""``--to ssh:hosts.toml``: torchrun's agent on each host of a file, over one ``ssh`` connection a host.

This machine and all hosts have the run folder and the job's file at the same paths. Host keys are checked and no
password is asked for: ``ssh n1 true`` has to work by itself. This process follows the run, and the run ends with it.
When a worker or a host is lost, all workers start again from the newest checkpoint.
"""

from __future__ import annotations

import json
import re
import secrets
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import IO, Any, ClassVar, final

from phalanx import errors
from phalanx.config import RunSpec
from phalanx.config.run_files import EVENTS
from phalanx.errors import RunError, SpecError
from phalanx.events.log import EventReader, last_failure, outcome_of
from phalanx.files import replace_text
from phalanx.launch.check import CheckTime, TargetHost, run_here, survey
from phalanx.launch.check_findings import findings
from phalanx.launch.failure import Failure, failure_of_exit, record, signal_name, worker_error
from phalanx.launch.reaper import SAVED, StopRequest, raise_stopped
from phalanx.launch.restarts import Restarts
from phalanx.launch.targets.handed_over import (
    forget_handed_over,
    one_launch_at_a_time,
    refuse_handed_over,
    write_ticket,
)
from phalanx.launch.targets.hosts_file import HostEntry, HostsFile, refuse_size
from phalanx.launch.targets.launch_folder import append, attached_log
from phalanx.launch.targets.target import AttachedTarget, Option, Prepared, Submission
from phalanx.units import show_names, visible

_ALIVE = 5.0  # seconds between lines that tell an agent that this process is alive
_OTHERS = 5.0  # seconds for other agents to end, after the first that failed
_AFTER_GRACE = 10.0  # seconds, after which a host that should have stopped is ended
_BACK = 300.0  # seconds for a lost host to come back
_END = 3.0  # seconds for ssh to end once its input is closed
_LOOK = 0.1  # seconds
_LOST = 255  # exit code of ssh when the connection failed or a signal ended the agent
_LINE = 1 << 16  # bytes of a printed line
_ENDED = re.compile(r"rank (\d{1,6}) ended with (-?\d{1,3})")  # as an agent says it
_SSH = ("ssh", "-T", "-o", "BatchMode=yes", "-o", "StrictHostKeyChecking=yes", "-o", "ConnectTimeout=10")
_SSH += ("-o", "ServerAliveInterval=5", "-o", "ServerAliveCountMax=3")
_NODE = ("-m", "phalanx.launch.targets.ssh_node")
# Variables come on stdin: every user of a host sees its command lines. The program reads the rest of stdin.
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
        self._path = Path(address).absolute()
        self.file = HostsFile.read(Path(address))

    def prepare(self, submission: Submission) -> Prepared:
        refuse_size(submission.run, self.file)
        variables = ", ".join(self.file.environment) or "none"
        note = f"workers work in {self.file.folder}; variables of the hosts file: {variables}"
        files = {submission.runfile: submission.run.to_toml()}
        commands = tuple(tuple(_on_host(self.file, host, _NODE)) for host in self.file.hosts)
        return Prepared(submission=submission, files=files, commands=commands, notes=(note,))

    def hosts(self) -> list[SshAskedHost]:
        return [SshAskedHost(self.file, entry) for entry in self.file.hosts]

    def follow(
        self, prepared: Prepared, threads: int | None, watch: Callable[[], None], begun: Callable[[], None]
    ) -> None:
        run = prepared.submission.run
        port = self._ask(run)
        with one_launch_at_a_time(run.folder):
            refuse_handed_over(run.folder)
            prepared.write()
            write_ticket(prepared.submission, f"{self.name}:{self._path}", self.ticket())
        begun()
        try:
            self._supervise(prepared.submission, port, threads, watch)
        finally:
            forget_handed_over(run.folder)

    def _ask(self, run: RunSpec) -> int:
        """Return a free port of the first host, once every host is known to have what ``run`` needs.

        Raises:
            RunError: a host cannot be used.
        """
        said = survey(self.hosts(), run.folder, run.job, quick=True)
        if wrong := [one for one in findings(said) if one.fails]:
            lines = [f"host {show_names(one.hosts)} cannot be used: {one.what}" for one in wrong]
            raise RunError("\n".join([*lines, f"    try: {wrong[0].fix}"]))
        assert said.hosts[0].facts
        return said.hosts[0].facts.free_port

    def _supervise(self, submission: Submission, port: int, threads: int | None, watch: Callable[[], None]) -> None:
        """Start agents until the run ends, is stopped, or may not start again."""
        run, restarts = submission.run, Restarts(submission.run.restarts, submission.run.folder)
        events = EventReader(run.folder / EVENTS)
        events.new()  # of earlier starts
        with StopRequest(partial(raise_stopped, saved=False)) as stop:
            while True:
                restarts.started()
                with self._agents(submission, port, threads) as agents:
                    codes = _followed(agents, stop, run.grace, watch)
                    stop.held = True  # no signal cuts the clean-up short
                stop.held = False
                told = events.new()
                watch()
                saved = outcome_of(told) in ("ended", "stopped")
                raise_stopped(stop.number, saved=saved)
                if saved:
                    if outcome_of(told) == "stopped":  # asked on a host
                        raise SystemExit(SAVED)
                    return
                failure = _failure(agents, codes, told)
                error = worker_error(failure, run.plan.processes, memory_kills=0)
                if not restarts.allow(failure, begun=failure.step):
                    if failure.is_loss or not last_failure(told):
                        record(error, run.folder)
                    raise error
                first = next(iter(str(error).splitlines()), failure.kind)
                print(f"{visible(first)}: starting again", file=sys.stderr)
                port = self._ask_again(run, restarts.pause, stop)
                replace_text(submission.runfile, replace(run, resume="auto", from_step=None).to_toml())

    def _ask_again(self, run: RunSpec, pause: float, stop: StopRequest) -> int:
        """Ask after ``pause`` seconds, and as long as a host is not back, for at most ``_BACK``."""
        began = time.monotonic()
        while True:
            raise_stopped(stop.number, saved=False)
            try:
                if time.monotonic() >= began + pause:
                    return self._ask(run)
            except RunError as error:  # its shared folders may come back later than the host
                if time.monotonic() > began + _BACK:
                    record(error, run.folder)
                    raise
            time.sleep(_LOOK)

    @contextmanager
    def _agents(self, submission: Submission, port: int, threads: int | None) -> Iterator[list[_Agent]]:
        """Within, an agent runs on each host; leaving ends them and their workers."""
        hosts, found, first = self.file.hosts, list[_Agent](), 0
        variables = {**({"OMP_NUM_THREADS": str(threads)} if threads else {}), **self.file.environment}
        same = {"runfile": str(submission.runfile), "folder": self.file.folder, "nodes": len(hosts)}
        same |= {"meet": f"{hosts[0].address}:{port}", "start": secrets.token_hex(8)}
        try:
            for number, host in enumerate(hosts):
                place = {"name": host.name, "rank": number, "workers": host.devices, **same}
                log = attached_log(submission.run.folder, None)
                found.append(_Agent(host.name, first, _on_host(self.file, host, _NODE), log))
                found[-1].tell(f"{json.dumps(variables)}\n{json.dumps(place)}\n")
                first += host.devices
            yield found
        finally:
            for agent in found:
                agent.tell("end\n", last=True)
            deadline = time.monotonic() + _END
            for agent in found:
                agent.end(deadline)


@final
class SshAskedHost(TargetHost):
    """One host of a hosts file. A program runs there with the folder and the variables of workers."""

    def __init__(self, file: HostsFile, entry: HostEntry) -> None:
        self.name, self.address, self.processes = entry.name, entry.address, entry.devices
        self.folder, self._file, self._entry = file.folder, file, entry

    def run(self, arguments: Sequence[str], text: str, limit: CheckTime) -> str:
        lines = f"{json.dumps({**self._file.environment})}\n{text}"
        return run_here(_on_host(self._file, self._entry, arguments), lines, limit)


@final
class _Agent:
    """torchrun's agent on one host, as this machine sees it: its ``ssh`` process."""

    def __init__(self, name: str, first: int, words: Sequence[str], log: Path) -> None:
        self.name, self.first, self.said, self._log = name, first, list[str](), log
        pipes: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        self._ssh = subprocess.Popen(words, start_new_session=True, **pipes)  # Ctrl-C is for this process alone
        streams = ((self._ssh.stdout, sys.stdout), (self._ssh.stderr, sys.stderr))
        self._readers = [threading.Thread(target=self._pass_on, args=each, daemon=True) for each in streams]
        self.poll = self._ssh.poll  # exit code of ssh, which is that of the agent
        for reader in self._readers:
            reader.start()

    def tell(self, text: str, *, last: bool = False) -> None:
        """Send ``text``, and close the connection after the ``last``; does nothing once it is over."""
        assert self._ssh.stdin
        with suppress(OSError, ValueError):
            self._ssh.stdin.write(text.encode())  # pyrefly: ignore
            self._ssh.stdin.flush()
        with suppress(OSError):
            if last:
                self._ssh.stdin.close()

    def end(self, deadline: float) -> None:
        """Wait for ssh to end until ``deadline``, then kill it."""
        with suppress(subprocess.TimeoutExpired):
            self._ssh.wait(max(0.0, deadline - time.monotonic()))
        self._ssh.kill()
        self._ssh.wait()
        for reader in self._readers:
            reader.join(max(_LOOK, deadline - time.monotonic()))

    def _pass_on(self, stream: IO[bytes], to: IO[str]) -> None:
        with stream:
            while data := stream.readline(_LINE):
                line = visible(data.decode(errors="replace").rstrip("\r\n"))
                if stream is self._ssh.stderr:
                    self.said = [*self.said, line][-50:]
                with suppress(OSError, SpecError):
                    append(self._log, f"{line}\n".encode())
                with suppress(OSError, ValueError):  # a terminal that is closed
                    print(line, file=to, flush=True)


def _followed(agents: Sequence[_Agent], stop: StopRequest, grace: float, watch: Callable[[], None]) -> list[int | None]:
    """Return the exit code of each agent once all have ended; None for an agent that still has to be ended."""
    deadline, asked, alive = float("inf"), False, 0.0
    while True:
        codes, now = [agent.poll() for agent in agents], time.monotonic()
        if None not in codes or now > deadline:
            return codes
        if any(code not in (None, 0, SAVED) for code in codes):
            deadline = min(deadline, now + _OTHERS)
        words = ""
        if stop.number and not asked:
            asked, deadline, words = True, min(deadline, now + grace + _AFTER_GRACE if grace else now), "stop"
            text = f"{signal_name(stop.number)}: saving after this step, {grace:g} s at most"
            print(f"{text}; Ctrl-C ends the run at once", file=sys.stderr)
        if words or now > alive:
            alive = now + _ALIVE
            for agent in agents:
                agent.tell(f"{words}\n")
        watch()
        time.sleep(_LOOK)


def _failure(agents: Sequence[_Agent], codes: Sequence[int | None], events: Sequence[Mapping[str, Any]]) -> Failure:
    """Return the first failure of a run: by its events, else by the words and exit codes of the agents."""
    told, step = last_failure(events), max((one["step"] for one in events if one["event"] == "step"), default=None)
    seen: dict[str, Any] = {"step": step, "traceback": "", "time": 0.0, "expected": True, "everywhere": True}
    of_rank: dict[str, Any] = {name: told.get(name) for name in ("rank", "kind", "message")}
    if told and not told.get("lost", True):
        where = next((agent.name for agent in reversed(agents) if agent.first <= told["rank"]), "a host")
        seen["exit_code"] = getattr(vars(errors).get(told["kind"]), "exit_code", 3)
        of_rank["message"] += f"\n    on {where}; the output of all ranks is above, and in phalanx logs RUN"
        return Failure(**of_rank, **seen)
    for agent in agents:
        for rank, code in _ENDED.findall("\n".join(agent.said)):
            if int(code) < 0:
                return replace(failure_of_exit(int(rank), step, int(code)), host=agent.name)
    ended = [(agent, code) for agent, code in zip(agents, codes, strict=True) if code not in (None, 0, SAVED)]
    agent, code = next((one for one in ended if one[1] == _LOST), ended[0] if ended else (agents[0], 0))
    if told and code != _LOST:
        return Failure(lost_peer=True, **of_rank, **seen)
    how = "was lost" if code == _LOST else "ended before the run did; its last words"
    message = f"host {agent.name} {how}: {agent.said[-1] if agent.said else 'none'}"
    kind = "lost host" if code == _LOST else f"exit {code}"
    return Failure(rank=agent.first, kind=kind, message=message, lost_peer=code == _LOST, **seen)


def _on_host(file: HostsFile, host: HostEntry, arguments: Sequence[str]) -> list[str]:
    """Return the command that runs the host's Python with ``arguments``, and variables from a line of stdin."""
    return [*_SSH, *file.ssh, "--", host.name, shlex.join([file.python, "-c", _BOOT, file.python, *arguments])]
