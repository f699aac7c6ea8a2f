"""What the containers of a training job printed, fetched from CloudWatch into the run folder as it is asked for."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, final

from phalanx.errors import RunError, SpecError
from phalanx.files import read_json, replace_text
from phalanx.launch.targets.aws_calls import AwsCalls
from phalanx.launch.targets.launch_folder import append

GROUP = "/aws/sagemaker/TrainingJobs"
_OF_RANK = re.compile(r"\[rank (\d+)\] (.*)")  # as node_agent.py marks it
_NONE = ("ResourceNotFoundException",)


@final
class TrainingLogs:
    """The logs of one job in ``folder``: ``JOB.log`` with all lines, ``JOB.rank-N.log`` with those of a rank.

    How far they have been fetched stands beside them, in ``JOB.fetched.json``.
    """

    def __init__(self, calls: AwsCalls, job: str, folder: Path) -> None:
        self._calls, self._job, self._folder = calls, job, folder

    def path(self, rank: int | None = None) -> Path:
        """The file with what ``rank`` printed, or all."""
        return self._folder / (f"{self._job}.log" if rank is None else f"{self._job}.rank-{rank}.log")

    def fetch(self) -> None:
        """Append what has been printed since the last time.

        Raises:
            RunError: CloudWatch refuses it, or cannot be asked.
        """
        tokens = self._tokens()
        lines: list[tuple[int, str]] = []
        for stream in _streams_of(self._calls, self._job):
            for event, token in self._events(stream, tokens.get(stream)):
                tokens[stream] = token
                if event:
                    lines.append((event["timestamp"], event["message"].rstrip("\n")))
        lines.sort(key=lambda line: line[0])  # stable: of one host as they came
        of: dict[Path, list[str]] = {}
        for _, text in lines:
            of.setdefault(self.path(), []).append(text)
            if found := _OF_RANK.fullmatch(text):
                of.setdefault(self.path(int(found[1])), []).append(found[2])
        self._folder.mkdir(parents=True, exist_ok=True)
        for path, texts in of.items():
            append(path, "".join(f"{text}\n" for text in texts).encode())
        replace_text(self._tokens_file, json.dumps(tokens) + "\n")

    @property
    def _tokens_file(self) -> Path:
        return self._folder / f"{self._job}.fetched.json"

    def _tokens(self) -> dict[str, str]:
        if self._tokens_file.exists():
            with suppress(SpecError):
                found = read_json(self._tokens_file, where="RUN", fix=f"rm {self._tokens_file}")
                if isinstance(found, dict):
                    return {str(stream): str(token) for stream, token in found.items()}
        return {}

    def _events(self, stream: str, token: str | None) -> Iterator[tuple[dict[str, Any] | None, str]]:
        """Each line since ``token``, and the token to go on with: the same again says that there is no more."""
        while True:
            more = {"nextToken": token} if token else {"startFromHead": True}
            asked = {"logGroupName": GROUP, "logStreamName": stream, **more}
            told = self._calls.ask("logs", "get_log_events", nothing=_NONE, **asked)
            if told is None:
                return
            following = str(told.get("nextForwardToken", ""))
            if not following:
                raise RunError(f"CloudWatch says nothing of {stream} that could be gone on from")
            yield from ((event, following) for event in told.get("events", []))
            yield None, following
            if following == token:
                return
            token = following


def _streams_of(calls: AwsCalls, job: str) -> Iterator[str]:
    """The log streams of a job: one a host, and more where the job has been started again.

    Raises:
        RunError: CloudWatch refuses it, or cannot be asked.
    """
    more: dict[str, Any] = {}
    while True:
        asked = {"logGroupName": GROUP, "logStreamNamePrefix": f"{job}/", **more}
        told = calls.ask("logs", "describe_log_streams", nothing=_NONE, **asked)
        yield from (one["logStreamName"] for one in (told or {}).get("logStreams", []))
        if not (told and told.get("nextToken")):
            return
        more = {"nextToken": told["nextToken"]}
