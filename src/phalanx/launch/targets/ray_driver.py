"""Entry point of a run's job on a Ray cluster: ``python -m … RUNFILE JOB VERSION NODES CPUS GPUS``.

It waits for a placement group and starts one actor a node, which runs torchrun's agent in a process of its own. If an
actor or its node is lost, all are started again in another placement group, and resume from the newest checkpoint.
"""

from __future__ import annotations

import json
import os
import platform
import select
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from phalanx.config import RunSpec
from phalanx.errors import PhalanxError, RefusedError, RunError, SpecError
from phalanx.events import RunLog
from phalanx.launch.addresses import LOOPBACK
from phalanx.launch.reaper import SAVED, StopRequest, die_with, ignore_signal
from phalanx.launch.targets.launch_folder import OUTPUT, append, run_from
from phalanx.launch.targets.node_agent import NodePlace, be_agent, meeting_options, worker_words

LOST = -1000  # in place of an exit code: the actor is gone
_SOON = 0.5  # seconds
_AFTER_GRACE = 15  # seconds until an agent that was asked to stop is ended by force
_AFTER_FAILURE = 30  # seconds for the other agents to end after one has failed
_BEGINS = 600  # seconds for all actors to begin, with packages of the runtime environment
_AFTER_LOSS = 3  # seconds to save for the other agents after an actor is lost


def main(words: Sequence[str]) -> int:
    """Train a run, or with a last word, in JSON, be the agent of one of its nodes. Returns the exit code of both."""
    runfile, job, version, *layout = words
    try:
        if version != (own := sys.modules["phalanx"].__version__):
            given = f"Phalanx {version} here, and {own} on {platform.node()}"
            fix = f"pip install phalanx=={version} there, or --runtime-env with pip"
            raise RefusedError.of("--to", given, "the same version", fix)
        spec = run_from(Path(runfile), "--run with a folder at the same path on all nodes")
        if len(layout) > 3:
            return _be_node(spec, Path(runfile), job, json.loads(layout[3]))
        return RayDriver(spec, Path(runfile), words).train()
    except PhalanxError as error:
        print(f"phalanx: {' '.join(str(error).split())}", flush=True)
        return error.exit_code


def _be_node(spec: RunSpec, runfile: Path, job: str, told: Mapping[str, Any]) -> int:
    die_with(told["actor"])
    options = meeting_options(told["meet"], start=told["start"], rank=told["rank"])
    options["max-restarts"] = str(spec.restarts)
    place = NodePlace(name=platform.node(), nodes=told["nodes"], cores=told["cores"], options=options)
    return be_agent(spec, place, worker_words(runfile, runfile.parent, marked=False, job=job and os.path.abspath(job)))


class RayNode:
    """Actor that holds the devices of one node, and has torchrun's agent there."""

    def __init__(self, words: Sequence[str], cores: int) -> None:
        self._words, self._cores, self._asked = words, cores, False
        self._agent: subprocess.Popen[Any] | None = None

    def place(self) -> tuple[str, str, int]:
        """Return the node's name, its address and a free port."""
        import ray

        with socket.create_server(("", 0)) as free:
            return platform.node(), ray.util.get_node_ip_address(), free.getsockname()[1]

    def train(self, told: Mapping[str, Any]) -> Iterator[bytes | int]:
        """Run the agent. Yields its output, and last its exit code, negative for a signal."""
        words = [*self._words, json.dumps({**told, "cores": self._cores, "actor": os.getpid()})]
        by_ray = ("OMP_NUM_THREADS", str(self._cores))  # for all workers of the node together
        environment = {name: value for name, value in os.environ.items() if (name, value) != by_ray}
        how: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "start_new_session": True}
        with subprocess.Popen(words, env=environment, stdin=subprocess.DEVNULL, **how) as agent:
            self._agent = agent
            if self._asked:
                agent.terminate()
            assert agent.stdout
            pipe = agent.stdout.fileno()
            while (ready := select.select([pipe], [], [], _SOON)[0]) or agent.poll() is None:
                if ready and not (text := os.read(pipe, 65536)):
                    break  # else a job's child in the background keeps it open
                if ready:
                    yield text
            yield agent.wait()

    def stop(self) -> None:
        """Have the workers save and end."""
        self._asked = True
        if self._agent:
            self._agent.terminate()


class RayDriver:
    """Sees to one run until it ends, is asked to stop by SIGTERM, or has lost too many actors."""

    def __init__(self, spec: RunSpec, runfile: Path, words: Sequence[str]) -> None:
        """``words``: arguments of this process."""
        self._spec, self._output, self._stop = spec, runfile.with_name(OUTPUT), StopRequest(ignore_signal)
        self._words = [sys.executable, "-m", "phalanx.launch.targets.ray_driver", *words]
        self._nodes, self._cpus, self._gpus = map(int, words[-3:])

    def train(self) -> int:
        """Start all actors as often as the run allows. Returns 0 at its end, ``SAVED`` if it was stopped, else 1."""
        import ray

        ray.init(log_to_driver=False)  # before signals are caught: it has a handler of its own
        with self._stop:
            for starts in range(self._spec.restarts + 1):
                if self._stop.number:
                    return SAVED
                codes = self._start(starts)
                if LOST not in codes.values() or self._stop.number:
                    return self._end(codes)
                gone = ", ".join(name for name, code in codes.items() if code == LOST)
                self._say(f"lost the actor on {gone}, {starts + 1} of {self._spec.restarts + 1} times")
            return 1

    def _start(self, starts: int) -> dict[str, int]:
        """Map each node to the exit code of its agent; ``LOST`` if its actor is gone.

        Raises:
            RunError: actors do not begin.
        """
        import ray
        from ray.exceptions import GetTimeoutError, RayActorError
        from ray.util.placement_group import placement_group, remove_placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        again = f", after {starts} earlier starts" if starts else ""
        each = f"{self._cpus} CPUs, {self._gpus} GPUs of each"
        self._say(f"waiting for room on {self._nodes} nodes: {each}, of which ray status says what there is{again}")
        bundle = {"CPU": float(self._cpus), **({"GPU": float(self._gpus)} if self._gpus else {})}
        group = placement_group([bundle] * self._nodes, strategy="STRICT_SPREAD" if self._nodes > 1 else "PACK")
        actors = list[Any]()
        try:
            while not group.wait(_SOON):
                if self._stop.number:
                    return {}
            for number in range(self._nodes):
                here = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=number)
                how: Any = {"num_cpus": self._cpus, "num_gpus": self._gpus, "scheduling_strategy": here}
                actors.append(ray.remote(RayNode).options(max_concurrency=4, **how).remote(self._words, self._cpus))
            places: list[tuple[str, str, int]] = ray.get([actor.place.remote() for actor in actors], timeout=_BEGINS)
            self._say(f"running on {', '.join(name for name, _, _ in places)}")
            _, address, port = places[0]
            meet = f"{address if self._nodes > 1 else LOOPBACK}:{port}"
            codes = self._follow(actors, {"meet": meet, "start": f"{self._spec.folder}-{starts}", "nodes": self._nodes})
            return {f"{places[number][0]} (node {number})": code for number, code in sorted(codes.items())}
        except RayActorError:
            return {"a node": LOST}
        except GetTimeoutError:
            what = f"Ray has not started an actor on each of {self._nodes} nodes within {_BEGINS} s"
            raise RunError(f"{what}\n    try: ray list actors, which says why") from None
        finally:
            for actor in actors:
                ray.kill(actor)
            remove_placement_group(group)

    def _follow(self, actors: Sequence[Any], told: Mapping[str, Any]) -> dict[int, int]:
        """Have all actors train, and keep their output. Returns the exit code of each.

        ``LOST`` for an actor that is gone, or does not end though another has failed.
        """
        import ray
        from ray.exceptions import RayActorError

        trains = [actor.train.options(num_returns="streaming") for actor in actors]
        running: dict[Any, int] = {train.remote({**told, "rank": rank}): rank for rank, train in enumerate(trains)}
        codes, until, stopping = dict[int, int](), float("inf"), False
        while running and time.monotonic() < until:
            if self._stop.number and not stopping:
                stopping, until = True, time.monotonic() + self._spec.grace + _AFTER_GRACE
                for actor in actors:
                    actor.stop.remote()
            ready: list[Any] = ray.wait(list(running), timeout=_SOON)[0]
            for stream in ready:
                try:
                    said: Any = ray.get(next(stream))
                except (RayActorError, StopIteration):
                    said = LOST
                if isinstance(said, bytes):
                    self._keep(said)
                    continue
                codes[running.pop(stream)] = said
                if said and not stopping:
                    patience = min(_AFTER_LOSS, self._spec.grace) if said == LOST else _AFTER_FAILURE
                    until = min(until, time.monotonic() + patience)
        return {**codes, **dict.fromkeys(running.values(), 1 if stopping else LOST)}

    def _end(self, codes: Mapping[str, int]) -> int:
        outcome, asked = RunLog(self._spec.folder).outcome, self._stop.number
        if (codes and not any(codes.values())) or (asked and outcome == "ended"):
            return 0
        if outcome != "failed" and (asked or SAVED in codes.values()):
            return SAVED
        bad = ", ".join(f"{name}: {code}" for name, code in codes.items() if code)
        self._say(f"torchrun's agent ended with an exit code: {bad}")
        return 1

    def _say(self, text: str) -> None:
        print(f"phalanx: {text}", flush=True)
        self._keep(f"phalanx: {text}\n".encode())

    def _keep(self, text: bytes) -> None:
        with suppress(OSError, SpecError):  # a full disk does not end the run
            append(self._output, text)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
