"""Ask all hosts of a check at the same time, then the links between them; nothing is judged here."""

from __future__ import annotations

import json
import os
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from phalanx.errors import RunError
from phalanx.launch.addresses import ANYWHERE
from phalanx.launch.check_hosts.asked_program import CheckTime, TargetHost, asking, ended_by_signals
from phalanx.launch.check_hosts.host_answer import HostAnswer, HostFacts, LinkAnswer, LinkFacts, read_answer
from phalanx.launch.jobfile import Reference

T = TypeVar("T")

PROGRAM = ("-m", "phalanx.launch.check_hosts.host_probe")
"""Arguments of the Python of a host."""
_OF_HOST, _OF_JOB = 0.7, 0.6  # share of the time left for a host's answer, and for the job's process there
_OF_LINKS, _LEAST = 20.0, 5.0  # seconds for the links, and those they have in any case


@dataclass(frozen=True, kw_only=True, slots=True)
class HostSurvey:
    """The answers of all hosts.

    Attributes:
        links: an answer for each link, or for each host that did not measure its links.
        folder: in which hosts looked for this machine's file.
        folder_error: reason why this machine could not write there.
        unmeasured: links for which no time was left.
    """

    hosts: tuple[HostAnswer, ...]
    links: tuple[LinkAnswer, ...] = ()
    folder: Path
    folder_error: str = ""
    unmeasured: int = 0

    @property
    def not_looked_at(self) -> list[str]:
        """The parts of the check that were left out, and why."""
        return [f"{self.unmeasured} links between hosts: no time was left"] if self.unmeasured else []


def survey(
    hosts: Sequence[TargetHost], folder: Path, reference: str = "", limit: CheckTime | None = None
) -> HostSurvey:
    """Return the answers of all ``hosts``; Ctrl-C or SIGTERM end it without leaving anything behind.

    Args:
        folder: of the run; the nearest folder above it if it is not there yet.
        reference: of the job; empty: none.
    """
    limit, where = limit or CheckTime(), Reference.parse(reference) if reference else None
    file = str(where.file) if where and where.file else ""
    with ended_by_signals(), _token_file(folder) as (token, error), asking(hosts, limit) as pool:
        question = {
            "reference": str(where or ""),
            "file": file,
            "token": str(token),
            "towards": (hosts[0].address if hosts else "") or ANYWHERE,
        }
        answers = [*pool.map(lambda host: _ask(host, {**question, "first": host is hosts[0]}, limit), hosts)]
        there = [(host, one.facts) for host, one in zip(hosts, answers, strict=True) if one.facts]
        links, unmeasured = _links(there, pool, limit) if len(there) > 1 else ([], 0)
    return HostSurvey(
        hosts=tuple(answers), links=tuple(links), folder=token.parent, folder_error=error, unmeasured=unmeasured
    )


def _ask(host: TargetHost, question: Mapping[str, Any], limit: CheckTime) -> HostAnswer:
    known: dict[str, Any] = {"name": host.name, "processes": host.processes}
    own = {"cwd": host.folder or os.getcwd(), "patience": _OF_JOB * limit.left}
    before = time.time()
    try:
        facts = _run(host, {**question, **own}, _OF_HOST * limit.left, HostFacts)
    except RunError as error:
        return HostAnswer(**known, error=str(error))
    ahead = (facts.ended - time.time(), facts.began - before)
    facts = replace(facts, address=host.address) if question["first"] and host.address else facts
    return HostAnswer(**known, facts=facts, ahead=ahead)


def _run(host: TargetHost, question: Mapping[str, Any], patience: float, form: type[T]) -> T:
    if not patience:
        raise RunError("was not asked: no time was left")
    answer = read_answer(host.run(PROGRAM, json.dumps(question) + "\n", patience), form)
    if answer is None:
        raise RunError("gives another answer than this version of Phalanx asks for")
    return answer


def _links(
    there: Sequence[tuple[TargetHost, HostFacts]], pool: Executor, limit: CheckTime
) -> tuple[list[LinkAnswer], int]:
    """Have all hosts join one process group and measure their links; return links, and how many were left out."""
    meeting, patience = there[0][1], max(_LEAST, min(_OF_LINKS, limit.left))
    question = {"hosts": len(there), "meeting": [meeting.address, meeting.free_port], "patience": patience}

    def ask(rank: int) -> LinkFacts:
        try:
            # the program imports torch, in its own time
            return _run(there[rank][0], {**question, "rank": rank}, patience + _LEAST, LinkFacts)
        except RunError as error:
            return LinkFacts(error=str(error))

    names = [host.name for host, _ in there]
    found, unmeasured = list[LinkAnswer](), 0
    for name, facts in zip(names, pool.map(ask, range(len(there))), strict=True):
        unmeasured += facts.unmeasured
        if facts.error:
            found += [LinkAnswer(source=name, target=names[0], error=facts.error)]
        found += [
            LinkAnswer(source=names[int(number)], target=name, latency=said[0], bandwidth=said[1])
            for number, said in facts.links.items()
            if number in map(str, range(len(names))) and len(said) == 2 and min(said) > 0
        ]
    return found, unmeasured


@contextmanager
def _token_file(folder: Path) -> Iterator[tuple[Path, str]]:
    """Write a file with its own name in ``folder``, or in the nearest folder above it; yield it and the error."""
    whole = folder.absolute()
    above = next((one for one in (whole, *whole.parents) if one.exists()), whole)
    token, error = above / f".phalanx-check-{secrets.token_hex(8)}", ""
    try:
        token.write_text(token.name)
    except OSError as failure:
        error = failure.strerror or str(failure)
    try:
        yield token, error
    finally:
        with suppress(OSError):
            token.unlink()
