"""What asks a Ray cluster: ``python -m phalanx.launch.targets.ray_ask ADDRESS WORD [WHAT]``, in a process of its own.

So nothing of Ray's (its threads, its handlers, its own retries) is in the process of a command, and an answer is waited
for no longer than it is worth. The last line printed is the answer in JSON; with ``error``, where there is none.
"""

from __future__ import annotations

import json
import logging
import os
import re
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from phalanx.errors import RefusedError

NAMESPACE = "phalanx"
"""Supervisors have their names in this namespace of the cluster."""

_REACHED = 3.0  # seconds until a port takes a connection
_CONNECTED = 75.0  # seconds until Ray has let this process in
_STARTED = 60.0  # seconds until an actor is there
_LEAVES = 3.0  # seconds until the connection is let go of
_NAMED = 10.0  # seconds in which the name of an actor that ends goes
_BUSY = "Initialization failure"  # of the process that Ray's client server starts for each client
_CLIENT = "ray://"


def main(address: str, word: str, what: str) -> dict[str, Any]:
    """Connect to the cluster at ``address`` (``auto``, ``host:port``, ``ray://host:port``) and ask it.

    ``word``: ``fits`` or ``submit`` with the file of a request, ``standing`` or ``stop`` with the name of a supervisor,
    ``nodes`` with anything.
    """
    asked: Mapping[str, Callable[[str], dict[str, Any]]] = {
        "fits": _fits,
        "nodes": _nodes,
        "submit": _submit,
        "standing": _standing,
        "stop": _stop,
    }
    answer = asked[word]
    if address != "auto" and (closed := _closed(address)):
        return {"error": f"{closed}", "unreachable": True}
    threading.Thread(target=_give_up, daemon=True).start()
    for again in (True, False):
        try:
            _connect(address, what if word == "submit" else "")
            break
        except Exception as error:  # of many kinds, most of them Ray's own
            if not again or _BUSY not in str(error):
                return {"error": first_words(error), "unreachable": True}
    try:
        told = answer(what)
        return {**told, "cluster": _where()} if word == "submit" and address == "auto" else told
    except RefusedError as error:
        return {"error": str(error), "problems": [asdict(problem) for problem in error.problems]}
    except Exception as error:
        return {"error": first_words(error)}


def _connect(address: str, request: str) -> None:
    import ray

    environment: dict[str, Any] | None = None
    if request and (file := json.loads(Path(request).read_text())["runtime_env"]):
        environment = json.loads(Path(file).read_text())
    how: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR, "namespace": NAMESPACE}
    ray.init(address, runtime_env=environment, **how)
    _in.set()


_in = threading.Event()


def _give_up() -> None:
    if not _in.wait(_CONNECTED):
        _answer({"error": f"no answer of Ray's within {_CONNECTED:g} s", "unreachable": True})
        os._exit(0)


def _closed(address: str) -> str:
    """Why nothing listens at the address; empty where something does."""
    host, _, port = address.removeprefix(_CLIENT).rpartition(":")
    try:
        with socket.create_connection((host, int(port)), timeout=_REACHED):
            return ""
    except TimeoutError:
        return f"no answer within {_REACHED:g} s"
    except OSError as error:
        return (error.strerror or str(error)).lower()


def _fits(file: str) -> dict[str, Any]:
    return {"layout": str(_layout(json.loads(Path(file).read_text())))}


def _nodes(_: str) -> dict[str, Any]:
    import ray

    from phalanx.launch.targets.ray_request import offers

    return {"nodes": [asdict(node) for node in offers(ray.nodes())]}


def _layout(told: dict[str, Any]) -> Any:
    import ray

    from phalanx.launch.targets.ray_request import RayRequest, offers

    return RayRequest(**told).laid_on(offers(ray.nodes()))


def _submit(file: str) -> dict[str, Any]:
    """Start a supervisor. Returns its name."""
    import ray

    from phalanx.launch.targets.ray_actors import Supervisor
    from phalanx.launch.targets.ray_request import own_version

    request = json.loads(Path(file).read_text())
    layout = _layout(request)
    name = f"{re.sub(r'[^A-Za-z0-9_.-]+', '-', request['job'])}-{secrets.token_hex(4)}"
    made = ray.remote(Supervisor).options(
        name=name, namespace=NAMESPACE, lifetime="detached", num_cpus=0, max_restarts=-1
    )
    actor: Any = made.remote(name, request, asdict(layout))
    try:
        there: Any = ray.get(actor.versions.remote(), timeout=_STARTED)
        _refuse_others(there, request["runfile"], own_version())
    except BaseException:
        with suppress(Exception):
            ray.kill(actor)
        raise
    return {"actor": name}


def _where() -> str:
    """The address of the cluster that this process has come to."""
    import ray

    return ray.get_runtime_context().gcs_address


def _refuse_others(there: Mapping[str, str], runfile: str, version: str) -> None:
    if there["phalanx"] != version:
        raise RefusedError.of(
            where="--to",
            given=f"a cluster with Phalanx {there['phalanx']} on {there['node']}, and {version} here",
            allowed="the same version",
            fix=f"pip install phalanx=={version} there, or --runtime-env with pip",
        )
    if not there["runfile"]:
        raise RefusedError.of(
            where="run.folder",
            given=f"{Path(runfile).parents[1]}, which {there['node']} of the cluster does not see",
            allowed="a folder at the same path here and on all nodes, as on a file system that they share",
            fix="--run /shared/runs/1",
        )


def _standing(name: str) -> dict[str, Any]:
    """As the supervisor says it; empty where there is none of that name."""
    import ray
    from ray.exceptions import GetTimeoutError, RayActorError

    actor = _supervisor(name)
    if actor is None:
        return {}
    try:
        told: Any = ray.get(actor.standing.remote(), timeout=_STARTED)
        return told
    except RayActorError:  # it has just ended
        return {}
    except GetTimeoutError:
        return {"state": "waiting", "detail": "its supervisor is being started again"}


def _stop(name: str) -> dict[str, Any]:
    import ray
    from ray.exceptions import RayActorError

    if (actor := _supervisor(name)) is not None:
        with suppress(RayActorError):  # it has ended
            ray.get(actor.stop.remote(), timeout=_STARTED)
    return {}


def _supervisor(name: str) -> Any:
    """The supervisor of that name; ``None`` where it has ended.

    Ray looks the actor up by its name, and then its class in a table of the job that made it, which is dropped with the
    job's last actor. Where the supervisor ends between the two, Ray finds no class, and an assertion of its own fails:
    "Expected str or bytes, got NoneType". Its name may be there for a moment more.
    """
    import ray

    until = time.monotonic() + _NAMED
    while True:
        try:
            return ray.get_actor(name, namespace=NAMESPACE)
        except ValueError:
            return None
        except AssertionError:
            if time.monotonic() > until:
                raise
            time.sleep(0.2)


def first_words(error: Exception) -> str:
    """What an error says, in few lines: those of Ray's carry the traces of other processes."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip() and "Traceback (" not in line]
    named = [
        line
        for line in lines
        if re.match(r"(\w+\.)*\w*Error: |Version mismatch|The cluster was|This process|Ray:|Python:", line)
    ]
    return " ".join(named[-1:] if named and "Error: " in named[-1] else named or lines[:2]) or type(error).__name__


def _leave() -> None:
    """End this process, and before it what Ray's client server keeps for it, which would wait for it to come again."""
    threading.Thread(target=lambda: (time.sleep(_LEAVES), os._exit(0)), daemon=True).start()
    if "ray" in sys.modules:
        import ray

        with suppress(Exception):
            ray.shutdown()
    os._exit(0)  # Ray's threads have nothing more to say


def _answer(told: Mapping[str, Any]) -> None:
    print("\n" + json.dumps(told), flush=True)


if __name__ == "__main__":
    _answer(main(sys.argv[1], sys.argv[2], sys.argv[3]))
    _leave()
