"""``--to ray://head:10001``: a run as actors in a placement group of a Ray cluster that is there.

The folder of the job goes with it as one file (``ray_code.py``). A detached actor (``ray_actors.py``) starts torchrun's
agent on each node, starts all anew where one is lost, and ends with the run. Every question to the cluster is asked by
a process of its own (``ray_ask.py``).
"""

from __future__ import annotations

import json
import os
import re
import sys
import tempfile
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar, final

from phalanx.errors import MissingExtraError, Problem, RefusedError, RunError, SpecError
from phalanx.launch.targets.code_pack import CodePack
from phalanx.launch.targets.launch_folder import CODE_LIST, FOLDER, LAST_WORDS, State, attached_log, last_word
from phalanx.launch.targets.offer import Offer, ask_program
from phalanx.launch.targets.ray_actors import STANDING
from phalanx.launch.targets.ray_code import ARCHIVE
from phalanx.launch.targets.ray_request import OPTIONS, NodeOffer, RayRequest, offer_of
from phalanx.launch.targets.target import Option, Prepared, QueueTarget, Standing, Submission

_STATES: tuple[State, ...] = ("waiting", "running", "ended", "stopped", "failed")
_OVER = ("ended", "stopped", "failed")
_REQUEST = "ray.json"
_PATIENCE = 180.0  # seconds for an answer, all told
_HOST = re.compile(r"([\w.-]+|\[[0-9a-fA-F:]+\]):([1-9]\d{0,4})")


@final
class RayTarget(QueueTarget):
    """The cluster at an address: ``//head:10001`` of Ray's client server, ``head:6379`` from one of its nodes, or none
    for the one that this machine belongs to.
    """

    name: ClassVar[str] = "ray"
    options: ClassVar[Mapping[str, Option]] = OPTIONS
    python: ClassVar[str] = ""  # that of Ray's own processes there

    def __init__(self, address: str) -> None:
        if address not in ("", "auto") and not _HOST.fullmatch(address.removeprefix("//")):
            allowed = "ray://head:10001, or ray for the cluster that this machine belongs to"
            raise SpecError.of("--to", f"'ray:{address}'", allowed, "--to ray://head:10001")
        self.address = f"ray:{address}" if address.startswith("//") else address or "auto"

    def prepare(self, submission: Submission) -> Prepared:
        request = RayRequest.of(submission)
        pack = CodePack.of(Path(request.code), without=submission.run.folder)
        request = replace(request, sha256=pack.digest)
        file = submission.folder / _REQUEST
        return Prepared(
            submission=submission,
            files={
                submission.folder / CODE_LIST: pack.to_text(),
                submission.runfile: submission.run.to_toml(),
                file: json.dumps(request.to_dict(), indent=2) + "\n",
            },
            commands=(_words(self.address, "submit", str(file)),),
        )

    def offer(self, options: Mapping[str, str]) -> Offer | None:
        """
        Raises:
            MissingExtraError: Ray is not installed here.
            RunError: the cluster is not there, or does not answer.
        """
        told = _ask(_words(self.address, "nodes", "all"), self.address)
        return offer_of([NodeOffer(**one) for one in told["nodes"]], options)

    def submit(self, prepared: Prepared) -> Mapping[str, Any]:
        """
        Raises:
            MissingExtraError: Ray is not installed here.
            RefusedError: the cluster has too little for the plan, with what it has.
            RunError: the cluster is not there, or refuses it, or the code has changed meanwhile.
        """
        with prepared.written(), _packed(prepared):
            (words,) = prepared.commands
            return _ask(words, self.address)

    def why_not(self, prepared: Prepared, patience: float = _PATIENCE) -> str:
        request = next(text for path, text in prepared.files.items() if path.name == _REQUEST)
        with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
            file.write(request)
            file.flush()
            try:
                _ask(_words(self.address, "fits", file.name), self.address, patience)
            except (RunError, SpecError) as error:
                return str(error).partition("\n")[0]
        return ""

    def standing(self, ticket: Mapping[str, Any], folder: Path) -> Standing:
        actor, cluster = self._named(ticket)
        if over := _ended(actor, folder):
            return over
        told = _answer(_words(cluster, "standing", actor), cluster)
        if told.get("unreachable"):
            return Standing(state="unknown", detail=_unreachable(told, cluster))
        _raise_refusal(told, cluster)
        if told.get("state") in _STATES:
            return Standing(state=told["state"], detail=told["detail"])
        if over := _ended(actor, folder):  # meanwhile
            return over
        return Standing(state=LAST_WORDS.get(last_word(folder), "unknown"), detail="Ray has no such actor")

    def stop(self, ticket: Mapping[str, Any], folder: Path) -> None:
        actor, cluster = self._named(ticket)
        if not _ended(actor, folder):
            _ask(_words(cluster, "stop", actor), cluster)

    def log(self, ticket: Mapping[str, Any], folder: Path, rank: int | None) -> Path:
        return attached_log(folder, rank)

    def _named(self, ticket: Mapping[str, Any]) -> tuple[str, str]:
        """Return the supervisor's name, and the address of its cluster."""
        return ticket["actor"], ticket.get("cluster") or self.address


@contextmanager
def _packed(prepared: Prepared) -> Generator[None]:
    """Within, the code is packed in the run folder; with its end as the archive that nodes read, unless it fails."""
    submission = prepared.submission
    asked = json.loads(prepared.files[submission.folder / _REQUEST])
    archive = submission.folder / ARCHIVE
    partial = archive.with_name(f"{ARCHIVE}.partial")
    try:
        if CodePack.of(Path(asked["code"]), without=submission.run.folder).write(partial) != asked["sha256"]:
            what = f"{asked['code']} changed while it was handed over"
            raise RunError(f"{what}\n    try: once more, when nothing writes there")
        yield
        partial.replace(archive)
    finally:
        partial.unlink(missing_ok=True)


def _ended(actor: str, folder: Path) -> Standing | None:
    """How the run has ended, as its supervisor left word in the run folder; ``None`` where it has not yet."""
    try:
        told = json.loads((folder / FOLDER / STANDING).read_text())
        if told["actor"] == actor and told["state"] in _OVER:
            return Standing(state=told["state"], detail=str(told["detail"]))
    except (OSError, ValueError, KeyError, TypeError):
        pass
    return None


def _words(address: str, word: str, what: str) -> tuple[str, ...]:
    return sys.executable, "-m", "phalanx.launch.targets.ray_ask", address, word, what


def _ask(words: tuple[str, ...], address: str, patience: float = _PATIENCE) -> dict[str, Any]:
    """
    Raises:
        MissingExtraError: Ray is not installed here.
        RefusedError: the cluster cannot serve the plan.
        RunError: the cluster cannot be asked, or refuses.
    """
    told = _answer(words, address, patience)
    if told.get("unreachable"):
        fix = "ray start --head" if address == "auto" else f"ray status --address {address.removeprefix('ray://')}"
        raise RunError(f"{_unreachable(told, address)}\n    try: {fix}")
    _raise_refusal(told, address)
    return told


def _answer(words: tuple[str, ...], address: str, patience: float = _PATIENCE) -> dict[str, Any]:
    """What the process says that asks the cluster, whatever it is."""
    if find_spec("ray") is None:
        raise MissingExtraError("ray", "ray")
    environment = {**os.environ, "RAY_USAGE_STATS_ENABLED": "0"}
    done = ask_program(words, f"Ray at {address}", patience, "", "ray status", env=environment)
    try:
        return json.loads(done.stdout.splitlines()[-1])
    except (ValueError, IndexError):
        said = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise RunError(f"Ray at {address} could not be asked: {said}\n    try: ray status") from None


def _unreachable(told: Mapping[str, Any], address: str) -> str:
    return f"no Ray cluster to be had at {address}: {told['error']}"


def _raise_refusal(told: Mapping[str, Any], address: str) -> None:
    if "problems" in told:
        raise RefusedError([Problem(**one) for one in told["problems"]])
    if "error" in told:
        raise RunError(f"Ray at {address} refuses it: {told['error']}\n    try: ray status, which says what there is")
