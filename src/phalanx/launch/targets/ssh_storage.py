"""What the hosts of a launch by SSH share with this machine, and the sending of what they do not: ``HostStorage``.

Nobody says it: each host is asked whether the job's file there is this machine's, and whether it sees what this
machine writes where the run folder is. Code that is not there, or is another, is sent as one pack, once. Where the run
folder is not the same on all, each host gets a copy, and ``run_gathering`` brings here what changes in any.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self, final

from phalanx.config import RunSpec
from phalanx.errors import RunError, SpecError
from phalanx.files import token_of
from phalanx.launch.check_hosts.host_findings import unshared_problems
from phalanx.launch.code_files import stamp_of
from phalanx.launch.jobfile import Reference
from phalanx.launch.runfile import absolute
from phalanx.launch.targets.code_pack import CodePack, folder_to_pack, job_within
from phalanx.launch.targets.hosts_file import HostsFile
from phalanx.launch.targets.ssh_host import SshHosts, host_numbers
from phalanx.units import show_names


@dataclass(frozen=True, kw_only=True, slots=True)
class HostStart:
    """What one host is told so that workers begin.

    Attributes:
        run: as workers there read it.
        ranks: rank → the variables by which a worker finds its place.
        folder: where they work.
    """

    run: RunSpec
    ranks: Mapping[str, Mapping[str, str]]
    folder: str


@dataclass(frozen=True, kw_only=True, slots=True)
class SentCode:
    """The job's code as it is sent.

    Attributes:
        digest: the SHA-256 of the pack.
        there: host that runs it → the folder it stands in.
        missing: of these, hosts that have not got it from an earlier launch.
    """

    pack: CodePack
    digest: str
    there: Mapping[int, str]
    missing: frozenset[int]


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class HostStorage:
    """What each host has, by its number in the file.

    Attributes:
        shared: all hosts see the run folder that this machine sees.
        scratch: by host, where what is sent stands.
        works: hosts that have the folder of this command, or the one the file names.
        code: ``None`` where all hosts have the job's code.
    """

    file: HostsFile
    shared: bool
    scratch: Mapping[int, str]
    works: frozenset[int]
    code: SentCode | None = None

    @classmethod
    def of(cls, hosts: SshHosts, file: HostsFile, run: RunSpec) -> Self:
        """Ask the hosts. What is sent is packed and counted here, not sent yet.

        Raises:
            SpecError: the run needs a run folder that all share, and they do not; the code is too much to send.
            RunError: a host does not answer.
        """
        job, numbers = Reference.parse(run.job).file, range(len(file.hosts))
        stamps = {path: stamp_of(path) for path in (*([str(job)] if job else []), file.folder)}
        with _probe(run.folder) as (probe, token):
            question = {"probe": probe, "token": token, "files": stamps, "scratch": file.scratch}
            looks = hosts.call("look", dict.fromkeys(numbers, question))
        shared = not token or all(look["sees"] for look in looks.values())
        if not shared and (problems := unshared_problems(run)):
            raise SpecError(problems)
        found = cls(
            file=file,
            shared=shared,
            scratch={number: look["scratch"] for number, look in looks.items()},
            works=frozenset(
                number for number, look in looks.items() if look["files"].get(file.folder, "missing") != "missing"
            ),
        )
        if not (job or file.code) and (without := [number for number in numbers if number not in found.works]):
            names = show_names([file.hosts[number].name for number in without])
            raise RunError(
                f'{names} has no {file.folder}\n    try: folder = "/path", in which workers are to work there'
            )
        states = {number: look["files"].get(str(job), "missing") for number, look in looks.items()} if job else {}
        if not job and file.code:
            states = dict.fromkeys(numbers, "other")
        if lacking := {number: state for number, state in states.items() if state != "same"}:
            return replace(found, code=found._code(hosts, run, lacking))
        return found

    @classmethod
    def alike(cls, file: HostsFile, run: RunSpec) -> Self:
        """Of hosts that have what this machine has, and share the run folder with it; none is asked.

        Raises:
            SpecError: code that all are sent, as the job is a module, is too much.
        """
        numbers = range(len(file.hosts))
        found = cls(file=file, shared=True, scratch=dict.fromkeys(numbers, file.scratch), works=frozenset(numbers))
        if Reference.parse(run.job).file or not file.code:
            return found
        pack = CodePack.of(folder_to_pack(run.job, file.code), without=run.folder.absolute())
        there = dict.fromkeys(numbers, f"{file.scratch}/code/{pack.digest}")
        return replace(found, code=SentCode(pack=pack, digest=pack.digest, there=there, missing=frozenset()))

    def start(self, number: int, run: RunSpec, port: str) -> HostStart:
        """What the host of that number is told; ``port``: of the first host, where all meet."""
        placed, folder = self.place(number, run, self.copy(number, run))
        entry, meeting = self.file.hosts[number], self.file.hosts[0].address
        ranks = {
            str(rank): {
                "RANK": str(rank),
                "LOCAL_RANK": str(local),
                "LOCAL_WORLD_SIZE": str(entry.devices),
                "WORLD_SIZE": str(self.file.devices),
                "MASTER_ADDR": meeting,
                "MASTER_PORT": port,
            }
            for rank, (host, local) in enumerate(host_numbers(self.file.hosts))
            if host == number
        }
        return HostStart(run=placed, ranks=ranks, folder=folder)

    def place(self, number: int, run: RunSpec, copy: str) -> tuple[RunSpec, str]:
        """The run as the host of that number has it, and the folder that workers work in there."""
        run, folder = absolute(run), self.file.folder
        file = Reference.parse(run.job).file
        if self.code and number in self.code.there:
            sent, job = self.code.there[number], job_within(run.job, self.code.pack.root)
            run = replace(run, job=f"{sent}/{job}" if file else job)
            folder = folder if self.file.folder_named else self._within(sent, self.code.pack)
        elif number not in self.works and file:
            folder = str(file.parent)
        return (run if self.shared else replace(run, folder=Path(copy))), folder

    def _within(self, sent: str, pack: CodePack) -> str:
        """The folder of the sent code that is the one of this command, where that was packed; else all of it."""
        here = Path(self.file.folder).resolve()
        if here.is_relative_to(pack.root) and (below := str(here.relative_to(pack.root))) != ".":
            return f"{sent}/{below}" if any(path.startswith(f"{below}/") for path in pack.files) else sent
        return sent

    def copy(self, number: int, run: RunSpec) -> str:
        """Where the copy of the run folder is on that host."""
        return f"{self.scratch[number]}/runs/{self.copy_name(number, run)}"

    def copy_name(self, number: int, run: RunSpec) -> str:
        """What the copy is called there: no two launches, and no two hosts of one, have the same."""
        token = token_of(run.folder)
        return f"{run.folder.name}-{token.identity[:16] if token else 'run'}-{number}"

    def _code(self, hosts: SshHosts, run: RunSpec, lacking: Mapping[int, str]) -> SentCode | None:
        root = folder_to_pack(run.job, self.file.code)
        pack = CodePack.of(root, without=run.folder.absolute())
        others = [number for number, state in lacking.items() if state == "other"]
        same: set[int] = set()
        if others:  # copied by hand, perhaps
            question = {"root": str(root), "digests": pack.digests}
            same = {number for number, alike in hosts.call("compare", dict.fromkeys(others, question)).items() if alike}
        if not (needing := set(lacking) - same):
            return None
        digest = pack.digest
        has = hosts.call("code", {one: {"scratch": self.scratch[one], "digest": digest} for one in needing})
        there = {number: f"{self.scratch[number]}/code/{digest}" for number in needing}
        missing = frozenset(number for number, folder in has.items() if not folder)
        return SentCode(pack=pack, digest=digest, there=there, missing=missing)


def code_to_send(run: RunSpec, file: HostsFile) -> str:
    """What a host that has not the job's folder is sent, for people; empty where a job is a module that hosts have."""
    if not (Reference.parse(run.job).file or file.code):
        return ""
    try:
        pack = CodePack.of(folder_to_pack(run.job, file.code), without=run.folder.absolute())
    except SpecError as error:  # hosts may have it
        return f"it cannot be sent: {error.problems[0].given}\n"
    return "\n".join([pack.headline, "", *(f"{size:>12,}  {path}" for path, size in pack.files.items())]) + "\n"


@contextmanager
def _probe(folder: Path) -> Iterator[tuple[str, str]]:
    """A file with a word, in what there is of the path to ``folder``; no word where it cannot be written."""
    whole = folder.absolute()
    above = next((one for one in (whole, *whole.parents) if one.exists()), whole)
    token = secrets.token_hex(16)
    path = above / f".phalanx-launch-{token}"
    try:
        path.write_text(token)
    except OSError:  # which is said when the folder is entered
        token = ""
    try:
        yield str(path), token
    finally:
        with suppress(OSError):
            path.unlink()
