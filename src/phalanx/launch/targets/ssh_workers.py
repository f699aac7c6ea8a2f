"""The launcher of hosts that SSH reaches, and the workers there: ``SshLauncher``, ``SshWorkers``."""

from __future__ import annotations

import base64
import json
import queue
import shutil
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, final

from phalanx.comm import Place
from phalanx.config import RunSpec
from phalanx.errors import RunError
from phalanx.launch.failure import (
    ELSEWHERE,
    GATHERED,
    Failure,
    WorkerReports,
    failure_of_exit,
    first_failure,
    time_for_others,
)
from phalanx.launch.launcher import Launch, Launcher, Workers, refuse_what_needs_a_fork
from phalanx.launch.targets.hosts_file import HostsFile, refuse_size
from phalanx.launch.targets.launch_folder import append, attached_log
from phalanx.launch.targets.ssh_host import SshHosts, Told, host_numbers
from phalanx.launch.targets.ssh_sending import HostSending
from phalanx.launch.targets.ssh_storage import HostStorage

if TYPE_CHECKING:
    from phalanx.launch.targets.run_gathering import RunGathering
from phalanx.launch.worker_process import OutputRelay

_PORT = 10.0  # seconds for the first host to find a free port
_END = 2.0  # seconds for workers to be gone, once they are ended by force, and copies of the run folder


@final
class SshLauncher(Launcher):
    """Starts workers on the hosts of one file. Connects as it prepares, while the job is looked at."""

    here = False

    def __init__(self, file: HostsFile, hosts: SshHosts | None = None) -> None:
        """``hosts``: where they are being reached already."""
        self._file, self._hosts = file, hosts
        self._storage: HostStorage | None = None

    def place(self) -> Place | None:
        """A worker finds it in the variables that torchrun sets, too."""
        return None

    def prepare(self, launch: Launch) -> None:
        """Refuse what the hosts cannot serve, reach each of them, and have processes there load what workers need.

        Each host is asked what it shares with this machine.

        Raises:
            SpecError: the plan is for another number of devices, or new processes cannot load the job; the run needs
                a run folder that all hosts share, and they do not.
            RunError: a host cannot be reached; it says which, and why.
        """
        refuse_what_needs_a_fork(launch, "ssh")
        assert launch.run is not None
        refuse_size(launch.run, self._file)
        self._hosts = self._hosts or SshHosts(self._file, launch.threads)
        self._hosts.await_all()
        self._storage = HostStorage.of(self._hosts, self._file, launch.run)

    def release(self) -> None:
        """Hang up."""
        if self._hosts:
            self._hosts.close()
            self._hosts = None

    def start(self, launch: Launch) -> SshWorkers:
        hosts, self._hosts = self._hosts or SshHosts(self._file, launch.threads), None
        assert launch.run is not None
        try:
            storage = self._storage or HostStorage.of(hosts, self._file, launch.run)
            workers = SshWorkers(hosts, storage, launch, launch.run)
        except BaseException:
            hosts.close()
            raise
        return workers


@final
class SshWorkers(Workers):
    """The agents, and what the workers there have left for their launcher, copied here.

    Workers begin once each host has what it does not share with this machine; what they write in a run folder that is
    not shared is brought here, also once they have ended.
    """

    def __init__(self, hosts: SshHosts, storage: HostStorage, launch: Launch, run: RunSpec) -> None:
        self._hosts, self._storage, self._launch, self._run = hosts, storage, launch, run
        self._host_of = host_numbers(storage.file.hosts)
        self._running = set(range(launch.world_size))
        self._failures: list[Failure] = []
        self._lost: dict[int, str] = {}
        self._stopped, self._ending, self._ends = 0, False, 0.0
        self._relays = {
            (rank, stream): OutputRelay(rank, stream) for rank in self._running for stream in ("stdout", "stderr")
        }
        self._folder = Path(tempfile.mkdtemp(prefix="phalanx-ssh-"))
        self._reports = WorkerReports(self._folder)
        self._gathering: RunGathering | None = None
        self._sending: HostSending | None = None
        try:
            self._reports.write_run(run, launch.findings)
            self._sending = HostSending(list(hosts), storage, run)
            if self._sending.snapshot:
                from phalanx.launch.targets.run_gathering import RunGathering

                self._gathering = RunGathering(list(hosts), run, self._sending.snapshot.log)
            if not self._sending.goes_on:
                self._start()
        except BaseException:
            hosts.close()
            self._let_go()
            raise

    def _start(self) -> None:
        """Have workers begin: each host has all that they need."""
        if self._sending:
            self._sending.close()
            self._sending = None
        files = {path.name: path.read_text(encoding="utf-8") for path in self._folder.iterdir() if path.is_file()}
        files |= {ELSEWHERE: "", **({GATHERED: ""} if self._gathering else {})}
        port = self._free_port(self._storage.file.hosts[0].address)
        for host in self._hosts:
            start = self._storage.start(host.number, self._run, str(port))
            host.ask("start", files={**files, "run.toml": start.run.to_toml()}, ranks=start.ranks, folder=start.folder)

    def _free_port(self, address: str) -> int:
        self._hosts[0].ask("port", address=address)
        until = time.monotonic() + _PORT
        while time.monotonic() < until:
            try:
                told = self._hosts.told.get(timeout=max(0.0, until - time.monotonic()))
            except queue.Empty:
                break
            if "port" in told.message:
                return told.message["port"]
            self._take(told)
            if self._failures:
                raise RunError(self._failures[0].message)
        name = self._hosts[0].entry.name
        raise RunError(
            f"host {name} does not listen at {address}, where workers are to meet\n"
            f'    try: address = "10.0.0.1" for {name} in the hosts file: an address of its own that others reach'
        )

    def follow(self, timeout: float) -> bool:
        """Take in what agents tell, for at most ``timeout`` seconds."""
        self._take_for(timeout)
        if self._sending and not self._sending.goes_on and not self._lost:
            self._start()
        failed = self._failures or self._lost or self._reports.failures()
        if failed and not self._ends:
            until = time.monotonic() + time_for_others(self.known_failures())
            while self._running and time.monotonic() < until:
                self._take_for(until - time.monotonic())
            self._ends = time.monotonic()
            if self._gathering:  # workers that are left write nothing more, and all that was written comes here
                self._ask_end()
        if not self._gathering:
            return bool(self._running) and not failed
        if not self._gathering.goes_on and self._gathering.lacking and not failed:
            names = ", ".join(self._gathering.lacking)
            self._fail(0, f"the connection to host {names} ended before all that it has of the run had come here")
        return self._gathering.goes_on

    def request_stop(self, number: int) -> bool:
        """By a signal to every worker."""
        if all(self._reports.step(rank) is None for rank in range(len(self._host_of))):
            return False
        for host in self._hosts:
            host.ask("signal", number=int(number))
        return True

    @property
    def stopped(self) -> int:
        return self._stopped

    def stop(self) -> None:
        """Have agents end what is left, and hang up."""
        gathering, sending = self._gathering, self._sending
        self._gathering = self._sending = None  # nothing more is taken in
        self._ask_end()
        gone, until = set(self._lost), time.monotonic() + _END
        self._hear_each("over", gone, until)
        if gathering and (sending or not (gathering.goes_on or gathering.lacking)):
            gathering.drop()
            self._hear_each("drop", gone, until)
        elif gathering:
            for host in self._hosts:
                where = f"{host.entry.name}:{self._storage.copy(host.number, self._run)}"
                print(f"not all of the run has come here; what a host has of it stays there: {where}", file=sys.stderr)
        self._hosts.close()
        if sending:
            sending.close()
        for relay in self._relays.values():
            relay.close()
        self._failures, self._stopped = self.known_failures(), self._reports.stopped()
        self._let_go()

    def _hear_each(self, word: str, gone: set[int], until: float) -> None:
        """Take in what agents tell until each that is not ``gone`` has said ``word``, or what that call gives.

        ``until``: by ``time.monotonic``, at the latest.
        """
        waiting = {number for number, _ in self._host_of} - gone
        while waiting and time.monotonic() < until:
            try:
                told = self._hosts.told.get(timeout=max(0.0, until - time.monotonic()))
            except queue.Empty:
                return
            self._take(told)
            if not told.message:
                gone.add(told.host)
            if not told.message or word in (*told.message, told.message.get("files")):
                waiting.discard(told.host)

    def _ask_end(self) -> None:
        self._ending = True
        for host in self._hosts:
            host.ask("end")

    def _let_go(self) -> None:
        if self._sending:
            self._sending.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def failure(self) -> Failure | None:
        known = self.known_failures()
        return first_failure(known) if known else None

    def known_failures(self) -> list[Failure]:
        """What workers have said of themselves goes before what is seen of their end."""
        reported = self._reports.failures()
        ranks = {failure.rank for failure in reported}
        known = [*reported, *(failure for failure in self._failures if failure.rank not in ranks)]
        entries = self._storage.file.hosts  # those that were reached may be let go of
        return [replace(failure, host=entries[self._host_of[failure.rank][0]].name) for failure in known]

    def _take_for(self, timeout: float) -> None:
        until = time.monotonic() + timeout
        while self._running or self._gathering:
            try:
                self._take(self._hosts.told.get(timeout=max(0.0, until - time.monotonic())))
            except queue.Empty:
                return
            if time.monotonic() >= until:  # there may always be more
                return

    def _take(self, told: Told) -> None:
        message = told.message
        if self._sending:
            self._sending.take(told.host, message)
        if self._gathering:
            self._gathering.take(told.host, message) if message else self._gathering.lose(told.host)
        if not message:
            self._lose(told.host)
        elif "refused" in message:
            self._lose(told.host, message["refused"])
        elif "output" in message:
            self._print(message["output"], message["stream"], base64.b64decode(message["data"]))
        elif "file" in message:
            self._copy(message["file"], base64.b64decode(message["data"]), message["now"])
        elif "ended" in message:
            rank, code = message["ended"], message["code"]
            self._running.discard(rank)
            if code and not self._reports.stopped():  # agents tell of none that they have ended by force
                self._failures.append(failure_of_exit(rank, self._reports.step(rank), code))

    def _print(self, rank: int, stream: str, data: bytes) -> None:
        """What a worker prints goes on to this process's streams, and into the run folder as this machine sees it."""
        if relay := self._relays.get((rank, stream)):
            relay.feed(data)
        for path in (attached_log(self._run.folder, None), attached_log(self._run.folder, rank)):
            with suppress(OSError):  # a full disk ends no run by what was printed
                append(path, data)

    def _lose(self, number: int, refused: str = "") -> None:
        """The connection to a host is over, or its agent has ``refused`` to do what it was asked."""
        ranks = [rank for rank, (host, _) in enumerate(self._host_of) if host == number and rank in self._running]
        self._running -= set(ranks)
        if number in self._lost or self._ending or not ranks:
            return
        host, rank = self._hosts[number], ranks[0]
        name, said = host.entry.name, host.last_words.splitlines()[-1] if host.last_words else "without a word"
        why = f"the connection to host {name}, of ranks {ranks[0]} to {ranks[-1]}, ended: {said}"
        self._lost[number] = why = f"host {name}: {refused}" if refused else why
        self._fail(rank, why)

    def _fail(self, rank: int, why: str) -> None:
        facts = {"kind": "host lost", "message": why, "traceback": "", "time": time.monotonic(), "expected": True}
        self._failures.append(Failure(rank=rank, step=self._reports.step(rank), **facts))

    def _copy(self, name: str, data: bytes, now: float) -> None:
        """Have a file that a worker left stand here, too. A failure's time becomes one of this machine's clock."""
        if name.startswith("failure-"):
            told = json.loads(data)
            data = json.dumps({**told, "time": time.monotonic() - max(0.0, now - told["time"])}).encode()
        partial = self._folder / f".{name}"
        partial.write_bytes(data)
        partial.replace(self._folder / name)
