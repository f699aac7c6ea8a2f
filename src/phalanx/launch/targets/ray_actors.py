"""The actors of a run on a Ray cluster: a supervisor, which outlives whoever launched the run, and one on each node.

The supervisor is a detached actor. It waits for a placement group, starts an actor in each bundle of it, and those
start torchrun's agent (``ray_node.py``). Where an actor or its node is lost, the supervisor takes another placement
group and starts all of them anew; the run goes on from its newest checkpoint. Ray itself starts the supervisor again
where that is lost, and ends what it had started.
"""

from __future__ import annotations

import json
import os
import platform
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from phalanx.config import RunSpec
from phalanx.config.run_files import CHECKPOINTS
from phalanx.files import replace_text
from phalanx.launch.addresses import LOOPBACK
from phalanx.launch.reaper import SAVED
from phalanx.launch.targets.launch_folder import OUTPUT, TICKET, append, last_word, run_from
from phalanx.launch.targets.ray_code import RequestCode
from phalanx.launch.targets.ray_request import RayLayout, own_version

if TYPE_CHECKING:
    from ray.util.placement_group import PlacementGroup

STANDING = "ray-standing.json"
LOST = -1000  # in place of an exit code: the actor is gone
_SOON = 0.5  # seconds
_OTHERS = 30  # seconds that other agents have to end, after one has failed
_SURVIVORS = 3  # seconds that those have to save what others lack, after one is lost
_AFTER_GRACE = 15  # seconds, after which an agent that was asked to stop is ended by force
_ANSWERS = 5  # seconds for an actor that is there


class Supervisor:
    """Sees to one run until it ends.

    It begins only when the run folder has the ticket by which it is found again, so that a launcher which ends before
    has left nothing.
    """

    def __init__(self, actor: str, request: Mapping[str, Any], layout: Mapping[str, int]) -> None:
        """``actor``: its own name. ``request`` and ``layout``: as ``ray_request.py`` has them."""
        import ray

        self._actor, self._runfile, self._asked = actor, Path(request["runfile"]), threading.Event()
        self._folder = self._runfile.parent
        self._me = ray.get_runtime_context().current_actor
        self._settings = _ActorSettings(
            request=dict(request), layout=RayLayout(**layout), supervisor=self._me, asked=self._asked
        )
        self._standing = {"actor": actor, "state": "waiting", "detail": "for its ticket"}
        threading.Thread(target=self._live, daemon=True).start()

    def versions(self) -> dict[str, str]:
        """What is installed here, and the run file that is seen from here: empty where it is not."""
        seen = str(self._runfile) if self._runfile.is_file() else ""
        return {"phalanx": own_version(), "runfile": seen, "node": platform.node()}

    def standing(self) -> dict[str, str]:
        """State and detail."""
        return dict(self._standing)

    def stop(self) -> None:
        """Have the run save and stop; returns at once."""
        self._asked.set()

    def take(self, text: bytes) -> None:
        """Append what a node's workers have printed."""
        append(self._folder / OUTPUT, text)

    def _live(self) -> None:
        import ray

        try:
            before = _read(self._folder / STANDING)
            if before.get("actor") == self._actor and before["state"] not in ("waiting", "running"):
                return  # Ray has started it again after its end
            if self._ticket_comes():
                state, detail = self._train()
                self._tell(state, detail)
        except BaseException as error:
            self._tell("failed", f"{type(error).__name__}: {error}")
            raise
        finally:
            ray.kill(self._me)

    def _ticket_comes(self) -> bool:
        until = time.monotonic() + self._settings.request["patience"]
        while _read(self._folder / TICKET).get("actor") != self._actor:
            taken_back = not self._runfile.is_file()  # by a launcher that was interrupted
            if taken_back or time.monotonic() > until or self._asked.is_set():
                return False
            time.sleep(_SOON / 5)
        return True

    def _train(self) -> tuple[str, str]:
        """Start all actors as often as the run allows. Returns state and detail of its end."""
        from ray.util.placement_group import remove_placement_group

        spec = run_from(self._runfile, "phalanx launch JOB --to ray")
        lost, starts, known = 0, 0, _checkpoints(spec)
        while not self._asked.is_set():
            group = self._place(f", after {starts} earlier starts" if starts else "")
            if group is None:
                break
            try:
                codes = self._train_in(group, spec, f"{self._actor}-{starts}")
            finally:
                remove_placement_group(group)
            if LOST not in codes.values() or self._asked.is_set():
                return self._end(spec, codes)
            starts += 1
            saved = _checkpoints(spec)
            lost, known = (1 if saved != known else lost + 1), saved
            gone = ", ".join(name for name, code in codes.items() if code == LOST)
            self.take(f"phalanx: lost the actor on {gone}; starting all anew\n".encode())
            if lost > spec.restarts:
                often = f"{lost} times with nothing saved in between" if lost > 1 else "with restarts = 0"
                return "failed", f"the actor on {gone} was lost, {often}"
        return "stopped", "before it began" if not starts else ""

    def _train_in(self, group: PlacementGroup, spec: RunSpec, start: str) -> dict[str, int]:
        """Node → exit code of its agent, ``LOST`` where its actor is gone."""
        from ray.exceptions import RayActorError

        with _node_actors(self._settings, group) as nodes:
            try:
                places = nodes.places()
            except RayActorError as error:
                return {f"a node ({str(error).splitlines()[0]})": LOST}
            self._tell("running", f"on {', '.join(place['name'] for place in places)}")
            codes = nodes.train(places, spec, start)
        shown = [f"{place['name']}" + (f" ({number})" if number else "") for number, place in enumerate(places)]
        return {shown[number]: codes[number] for number in sorted(codes)}

    def _place(self, again: str) -> PlacementGroup | None:
        """A placement group, once Ray has room for it; ``None`` where the run was asked to stop."""
        from ray.util.placement_group import placement_group, remove_placement_group

        layout = self._settings.layout
        self._tell("waiting", f"for {layout}{again}")
        spread = "STRICT_SPREAD" if layout.nodes > 1 else "PACK"
        group = placement_group([layout.bundle()] * layout.nodes, strategy=spread)
        while not group.wait(_SOON):
            if self._asked.is_set():
                remove_placement_group(group)
                return None
        return group

    def _end(self, spec: RunSpec, codes: Mapping[str, int]) -> tuple[str, str]:
        word = last_word(spec.folder)
        if word == "error":
            return "failed", ""  # the log says why
        if all(code == 0 for code in codes.values()) or (self._asked.is_set() and word == "end"):
            return "ended", ""
        if self._asked.is_set() or SAVED in codes.values():
            return "stopped", ""
        bad = ", ".join(f"{name}: {code}" for name, code in codes.items() if code)
        return "failed", f"torchrun's agent ended with an exit code: {bad}"

    def _tell(self, state: str, detail: str) -> None:
        self._standing = {"actor": self._actor, "state": state, "detail": detail}
        with suppress(OSError):
            replace_text(self._folder / STANDING, json.dumps(self._standing) + "\n")


@dataclass(frozen=True, kw_only=True, slots=True)
class _ActorSettings:
    """What the actors of a run are made from; ``asked`` is set where the run is to stop."""

    request: dict[str, Any]
    layout: RayLayout
    supervisor: Any
    asked: threading.Event


@contextmanager
def _node_actors(settings: _ActorSettings, group: PlacementGroup) -> Iterator[_NodeActors]:
    """Within, there is an actor in each bundle of a placement group that is there."""
    import ray
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    kind, actors = ray.remote(NodeActor), list[Any]()
    try:
        for number in range(settings.layout.nodes):
            here = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=number)
            cpus, gpus = settings.layout.cpus, settings.layout.gpus
            made = kind.options(num_cpus=cpus, num_gpus=gpus, max_concurrency=4, scheduling_strategy=here)
            actors.append(made.remote(settings.supervisor, settings.request, cpus))
        yield _NodeActors(settings, actors)
    finally:
        for actor in actors:
            ray.kill(actor)


class _NodeActors:
    """The actors of one start."""

    def __init__(self, settings: _ActorSettings, actors: Sequence[Any]) -> None:
        self._settings, self._actors = settings, actors

    def places(self) -> list[dict[str, Any]]:
        """Where each is.

        Raises:
            RayActorError: one is gone.
        """
        import ray

        return ray.get([actor.place.remote() for actor in self._actors])

    def train(self, places: Sequence[Mapping[str, Any]], spec: RunSpec, start: str) -> dict[int, int]:
        """Have all train, and wait. Returns the number of each → exit code of its agent, or ``LOST``."""
        import ray

        host = LOOPBACK if len(places) == 1 else places[0]["address"]
        told = {"meet": f"{host}:{places[0]['port']}", "start": start, "nodes": len(places)}
        running = {actor.train.remote({**told, "rank": number}): number for number, actor in enumerate(self._actors)}
        codes, until, asked = dict[int, int](), float("inf"), False
        while running and time.monotonic() < until:
            if self._settings.asked.is_set() and not asked:
                asked, until = True, time.monotonic() + spec.grace + _AFTER_GRACE
                for actor in self._actors:
                    actor.stop.remote()
            done, _ = ray.wait(list(running), timeout=_SOON)
            for future in done:
                codes[running.pop(future)] = code = _code(future)
                if code and not asked:
                    patience = min(_SURVIVORS, spec.grace) if code == LOST else _OTHERS
                    until = min(until, time.monotonic() + patience)
        return {**codes, **{number: 1 if asked or self._answers(number) else LOST for number in running.values()}}

    def _answers(self, number: int) -> bool:
        import ray
        from ray.exceptions import RayError

        with suppress(RayError):
            ray.get(self._actors[number].answer.remote(), timeout=_ANSWERS)
            return True
        return False


class NodeActor:
    """Holds the devices of one node of a run, and has torchrun's agent there."""

    def __init__(self, supervisor: Any, request: Mapping[str, Any], cores: int) -> None:
        self._supervisor, self._request, self._cores = supervisor, request, cores
        self._agent: subprocess.Popen[bytes] | None = None
        self._asked, self._lock = False, threading.Lock()

    def place(self) -> dict[str, Any]:
        """Where this node is reached, with a port that is free."""
        import ray

        with socket.create_server(("", 0)) as free:
            port = free.getsockname()[1]
        return {"name": platform.node(), "address": ray.util.get_node_ip_address(), "port": port}

    def answer(self) -> None:
        """Nothing: it is there."""

    def train(self, told: Mapping[str, Any]) -> int:
        """Be with the agent until it ends. Returns its exit code, negative for a signal."""
        with tempfile.TemporaryDirectory(prefix="phalanx-code-", ignore_cleanup_errors=True) as scratch:
            return self._train(told, scratch)

    def _train(self, told: Mapping[str, Any], scratch: str) -> int:
        request = self._request
        own = {"name": platform.node(), "cores": self._cores, "scratch": scratch}
        place = json.dumps({**told, **own, "code": RequestCode.of(request).to_dict()})
        python = request["python"] or sys.executable
        words = [python, "-m", "phalanx.launch.targets.ray_node", request["runfile"], place]
        with self._lock:
            if self._asked:
                return SAVED
            self._agent = agent = subprocess.Popen(
                words,
                env=self._environment(),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        reader = threading.Thread(target=self._pass_on, args=(agent,), daemon=True)
        reader.start()
        code = agent.wait()
        reader.join(_ANSWERS)  # what a job has left in the background may keep the pipe open
        return code

    def stop(self) -> None:
        """Have the workers save and end."""
        with self._lock:
            self._asked = True
            if self._agent:
                self._agent.terminate()

    def _environment(self) -> dict[str, str]:
        given = dict(os.environ)
        if given.get("OMP_NUM_THREADS") == str(self._cores):  # Ray's doing: for all workers of the node together
            del given["OMP_NUM_THREADS"]
        return given

    def _pass_on(self, agent: subprocess.Popen[bytes]) -> None:
        import ray

        assert agent.stdout
        taken = None
        while text := os.read(agent.stdout.fileno(), 65536):
            taken = self._supervisor.take.remote(text)
        if taken is not None:
            ray.get(taken)


def _code(future: Any) -> int:
    import ray
    from ray.exceptions import RayActorError

    try:
        return ray.get(future)
    except RayActorError:
        return LOST


def _checkpoints(spec: RunSpec) -> Sequence[str]:
    with suppress(OSError):
        return sorted(os.listdir(spec.folder / CHECKPOINTS))
    return []


def _read(path: Path) -> dict[str, Any]:
    """The file in JSON; empty where it is not there, or not that."""
    with suppress(OSError, ValueError):
        told = json.loads(path.read_text())
        return told if isinstance(told, dict) else {}
    return {}
