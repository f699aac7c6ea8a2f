"""How far a run on SageMaker has come, for whoever cannot see its folder: by what is copied to S3, or what is printed.

The folder of a run on one instance is copied to S3. That of a run on several is on their file system: there the agent
of the first prints the newest step and checkpoint from time to time, which then stand in CloudWatch.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any, final

from phalanx.config.run_files import EVENTS
from phalanx.errors import RunError
from phalanx.launch.targets.aws_calls import AwsCalls
from phalanx.launch.targets.sagemaker_logs import GROUP, streams_of

_MARK = "phalanx event: "
_KINDS = ("step", "checkpoint")
_TAIL = 1 << 18  # bytes of a run's events that are looked at
_BACK = 3600.0  # seconds of a log, from its end, that are looked at


@final
class StepsTold:
    """In a container: prints what is new in the events of a run, each time that it is asked to."""

    def __init__(self, events: Path) -> None:
        self._events, self._told = events, dict[str, str]()

    def tell(self) -> None:
        """Print the newest step and checkpoint, where they have not been."""
        newest: dict[str, Mapping[str, Any]] = {}
        with suppress(OSError), self._events.open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL))
            newest = {event["event"]: event for event in _parsed(file.read().splitlines()) if event["event"] in _KINDS}
        for kind, event in newest.items():
            line = json.dumps(event)
            if self._told.get(kind) != line:
                self._told[kind] = line
                print(f"{_MARK}{line}", flush=True)


def last_events(calls: AwsCalls, job: str, run: object, described: Mapping[str, Any] | None) -> list[Mapping[str, Any]]:
    """The last events of the run of a training job; none where nothing tells.

    ``run``: where it stands, as its ticket has it. ``described``: what SageMaker says of the job.
    """
    with suppress(RunError):  # whoever may ask for a job need not read its bucket, or its log
        if isinstance(run, str) and run.startswith("s3://"):
            return _parsed(calls.tail(f"{run}/{EVENTS}", _TAIL).splitlines())
        if described:
            return _printed(calls, job, described.get("TrainingEndTime"))
    return []


def _printed(calls: AwsCalls, job: str, ended: object) -> list[Mapping[str, Any]]:
    names, found = [*streams_of(calls, job)], list[Mapping[str, Any]]()
    until = ended.timestamp() if isinstance(ended, datetime) else time.time()
    more: dict[str, Any] = {"startTime": int((until - _BACK) * 1000), "filterPattern": f'"{_MARK}"'}
    while names:
        told = calls.ask("logs", "filter_log_events", logGroupName=GROUP, logStreamNames=names[-100:], **more) or {}
        messages = [str(one["message"]) for one in told.get("events", [])]
        found += _parsed(text.removeprefix(_MARK) for text in messages if text.startswith(_MARK))
        if not told.get("nextToken"):
            break
        more["nextToken"] = told["nextToken"]
    return found


def _parsed(lines: Iterable[str | bytes]) -> list[Mapping[str, Any]]:
    found: list[Mapping[str, Any]] = []
    for line in lines:
        with suppress(ValueError):  # of the first there may be the end alone, of the last the beginning
            event = json.loads(line)
            found += [event] if isinstance(event, dict) and "event" in event else []
    return found
