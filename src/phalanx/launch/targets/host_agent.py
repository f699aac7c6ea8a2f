"""The process on each host of a launch by SSH: it starts the workers there, and none outlives it or its launcher.

Its text is sent to the host's interpreter, so it is of the standard library alone. It takes a line of JSON at a time on
standard input, and ends with all its workers when that is closed, or silent for a minute:

    {"do": "port", "address": A}    find a free port of that address
    {"do": "files", "call": C, ...} what ``HostFiles`` does under that name; its result comes as ``files``, if asked for
    {"do": "read", ...}             a ``piece`` of a file of the run folder's copy, or the ``error`` in its place
    {"do": "load", ...}             start processes that load what workers need: see ``Agent.load``
    {"do": "start", ...}            have them be workers: see ``Agent.start``
    {"do": "signal", "number": N}   send it to each worker
    {"do": "end"}                   end workers by force
    {"do": "still"}                 the launcher is still there

It answers with lines of JSON on standard output, known by one key each: ``hello``, ``port``, ``output`` of a worker, a
``file`` that a worker left for its launcher, ``ended`` with a worker's exit code, ``over`` once there is none left,
``refused`` with why, ``files`` and ``piece`` as above. Unasked it tells which files of the run folder's copy are others
than the launcher knows of, ``changed``, and which are ``gone``.
"""

from __future__ import annotations

import base64
import json
import os
import queue
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from typing import Any

from phalanx.launch.targets.host_folder import HostFiles  # whose text comes before this one's

SILENCE = 60.0  # seconds after which the launcher is taken to be gone
_LOOK = 0.05  # seconds between looks at workers and what they left
_TOLD = ("progress-", "failure-", "stopped-")
_KILL = 1.0  # seconds that workers have to be gone after SIGKILL
_BRING = 0.25  # seconds between looks at what has changed in the run folder
_WAITING = 64  # messages that wait to be answered; what sends more waits


class Agent:
    """The workers of one host."""

    def __init__(self) -> None:
        self._asked: queue.Queue[dict[str, Any] | None] = queue.Queue(_WAITING)
        self._files = HostFiles()
        self._brought = 0.0
        self._waiting: list[subprocess.Popen[bytes]] = []
        self._workers: dict[int, subprocess.Popen[bytes]] = {}
        self._readers: list[threading.Thread] = []
        self._folder = ""
        self._seen: dict[str, tuple[int, int]] = {}
        self._speaking = threading.Lock()

    def run(self) -> None:
        """Serve the launcher until it is gone."""
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # of a host that shuts down
        threading.Thread(target=self._listen, daemon=True).start()
        self.say(hello=socket.gethostname(), pid=os.getpid(), python=sys.version.split()[0])
        heard = time.monotonic()
        try:
            while time.monotonic() - heard < SILENCE:
                with suppress(queue.Empty):
                    asked = self._asked.get(timeout=_LOOK if self._workers else 1.0)
                    if asked is None:
                        break
                    heard = time.monotonic()
                    try:
                        self.answer(asked)
                    except OSError as error:
                        self.say(refused=f"{error.strerror}: {error.filename}" if error.filename else str(error))
                self.look()
        finally:
            self.end()
            self._files.give_up()

    def answer(self, asked: dict[str, Any]) -> None:
        """Do what is asked."""
        if asked["do"] == "port":
            with socket.create_server((asked["address"], 0)) as free:
                self.say(port=free.getsockname()[1])
        elif asked["do"] == "start":
            self.start(asked["files"], asked["ranks"], asked["folder"])
        elif asked["do"] == "load":
            there = asked["named"] or os.path.isdir(asked["folder"])
            self.load(asked["folder"] if there else "", asked["environment"], asked["argv"], asked["count"])
        elif asked["do"] == "files":
            self._call_files(asked["call"], asked["with"], asked["tells"])
        elif asked["do"] == "read":
            self.say(**self._files.read(asked["path"], asked["at"]))
        elif asked["do"] == "signal":
            for worker in self._workers.values():
                with suppress(ProcessLookupError):
                    worker.send_signal(asked["number"])
        elif asked["do"] == "end":
            self.end()
            self.say(over=True)

    def load(self, folder: str, environment: dict[str, str], argv: list[str], count: int) -> None:
        """Start so many processes, which load what takes its time and then wait to be told who they are.

        ``folder``: where they load it, which need not be where they work; empty: a place of their own. ``environment``:
        of all; ``argv``: the command, in which ``{reports}`` is the place for what is the launcher's to know.
        """
        self._folder = tempfile.mkdtemp(prefix="phalanx-host-")
        threads = str(max(1, len(os.sched_getaffinity(0)) // count))
        words = [word.replace("{reports}", self._folder) for word in argv]
        for _ in range(count):
            waiting = subprocess.Popen(
                words,
                cwd=folder or self._folder,
                env={"OMP_NUM_THREADS": threads, **os.environ, **environment},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
            )
            self._waiting.append(waiting)

    def start(self, files: dict[str, str], ranks: dict[str, dict[str, str]], folder: str) -> None:
        """Have processes that were loaded be the workers ``ranks``, which holds the environment of each.

        ``files``: what stands in their folder beforehand, name → text; ``folder``: where they work.
        """
        for name, text in files.items():
            with open(os.path.join(self._folder, name), "w", encoding="utf-8") as file:
                file.write(text)
        for rank, own in ranks.items():
            worker = self._workers[int(rank)] = self._waiting.pop()
            for stream, pipe in (("stdout", worker.stdout), ("stderr", worker.stderr)):
                reader = threading.Thread(target=self._relay, args=(int(rank), stream, pipe), daemon=True)
                reader.start()
                self._readers.append(reader)
            with suppress(OSError):  # it has ended, which the next look tells
                assert worker.stdin
                worker.stdin.write(json.dumps({"environment": own, "folder": folder}).encode() + b"\n")
                worker.stdin.close()

    def look(self) -> None:
        """Tell what workers have left, and who has ended."""
        if self._tell_ended() and not self._workers:
            self._finish()
            self._tell_changes()
            self.say(over=True)
        elif time.monotonic() - self._brought > _BRING:
            self._tell_changes()

    def end(self) -> None:
        """End workers and what they started by force. Who has ended before that is told, as ever."""
        every = (*self._workers.values(), *self._waiting)
        self._tell_ended()
        for worker in every:
            for kill in (os.killpg, os.kill):
                with suppress(ProcessLookupError, PermissionError):
                    kill(worker.pid, signal.SIGKILL)
        until = time.monotonic() + _KILL
        for worker in every:
            with suppress(subprocess.TimeoutExpired):
                worker.wait(max(0.0, until - time.monotonic()))
        if self._folder:
            self._tell_files()
        self._workers.clear()
        self._waiting.clear()
        self._finish()
        self._tell_changes()

    def say(self, **told: Any) -> None:
        """Tell the launcher."""
        with self._speaking, suppress(OSError):
            sys.stdout.buffer.write(json.dumps(told).encode() + b"\n")
            sys.stdout.buffer.flush()

    def _tell_ended(self) -> bool:
        """Tell what workers have left, and who has ended by itself. Returns whether any has."""
        ended = {rank: code for rank, one in self._workers.items() if (code := one.poll()) is not None}
        self._tell_files()  # of those that have ended, too: before their end is told
        for rank, code in ended.items():
            del self._workers[rank]
            self.say(ended=rank, code=code)
        return bool(ended)

    def _call_files(self, call: str, given: dict[str, Any], tells: bool) -> None:
        if call == "hold":
            self._tell_changes()  # what belongs to that checkpoint is known before it
        result = getattr(self._files, call)(**given)
        if tells:
            self.say(files=call, result=result)

    def _tell_changes(self) -> None:
        self._brought = time.monotonic()
        with suppress(OSError):
            if changes := self._files.changes():
                self.say(**changes)

    def _finish(self) -> None:
        for reader in self._readers:
            reader.join(_KILL)
        self._readers.clear()
        if self._folder:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = ""
            self._seen.clear()

    def _listen(self) -> None:
        for line in iter(sys.stdin.buffer.readline, b""):
            self._asked.put(json.loads(line))
        self._asked.put(None)

    def _relay(self, rank: int, stream: str, pipe: Any) -> None:
        while data := pipe.read1(65536):
            self.say(output=rank, stream=stream, data=base64.b64encode(data).decode())
        pipe.close()

    def _tell_files(self) -> None:
        if not self._folder:
            return
        for entry in list(os.scandir(self._folder)):
            if not entry.name.startswith(_TOLD) or entry.name.endswith(".partial"):
                continue
            with suppress(OSError):
                found = entry.stat()
                state = (found.st_mtime_ns, found.st_size)
                if self._seen.get(entry.name) != state:
                    with open(entry.path, "rb") as file:
                        data = base64.b64encode(file.read()).decode()
                    self._seen[entry.name] = state
                    self.say(file=entry.name, data=data, now=time.monotonic())


if __name__ == "__main__":
    with suppress(SystemExit):
        Agent().run()
    sys.stdout.flush()
    os._exit(0)  # the thread that reads may be within a read, which Python would wait for, and then abort
