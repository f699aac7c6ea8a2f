"""Program that each host runs for a check: reads a question on stdin, prints one line of JSON, and ends with its asker.

The job is loaded in a process of its own, since user code may end it or hang.
"""

from __future__ import annotations

import json
import os
import platform
import resource
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from datetime import timedelta
from hashlib import sha256
from importlib import import_module
from pathlib import Path
from typing import Any

from phalanx.device_kinds import DeviceKind, probed_kinds
from phalanx.errors import SpecError
from phalanx.hardware import cores, memory_bytes
from phalanx.hardware.probe import network_of
from phalanx.launch.addresses import ANYWHERE, listen_at, own_address
from phalanx.launch.check_hosts.host_answer import MARK
from phalanx.launch.code_files import digest_of

_MEETING = 0.6  # share of the time for links in which all hosts have to come
_FULL = 8  # hosts; of more only the links of a ring are measured
_FIRST, _MORE, _FAST = 2**21, 2**24, 0.02  # bytes sent over a link, and over one that sends the first in so few seconds
_TRIES, _TRIPS = 3, 10
_SOON = 0.02  # seconds between looks at a process that is about to end


def main() -> None:
    """Answer the question in the first line of stdin."""
    began = time.time()
    question = json.loads(sys.stdin.buffer.readline())
    stdout = os.dup(1)
    os.dup2(2, 1)  # the job prints, too
    threading.Thread(target=_end_with_asker, daemon=True).start()
    answer = links(question) if "rank" in question else facts(question)
    if "rank" not in question:
        answer |= {"began": began, "ended": time.time()}
    with open(stdout, "w") as file:
        file.write(f"\n{MARK}{json.dumps(answer)}\n")
    os._exit(0)  # gloo may wait for hosts that have ended


def _end_with_asker() -> None:
    while os.read(0, 1):
        pass
    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
    time.sleep(1.0)
    os._exit(1)


def facts(question: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of ``HostFacts``, without its times."""
    until = time.monotonic() + question["patience"]
    if os.path.isdir(question["cwd"]):
        os.chdir(question["cwd"])
    from phalanx.launch.side_process import SideProcess  # loads torch

    found: dict[str, Any] = {}
    with SideProcess(lambda send: _probe_job(question, send)) as side:
        own = _own_facts(question)
        while message := side.next(max(0.0, until - time.monotonic())):
            found |= message
        if not side.done:
            found["ending"] = f"has not come to its end within {question['patience']:.0f} s"
        elif found.get("step", "begin"):
            while (code := side.exit_code()) is None:
                time.sleep(_SOON)
            found["ending"] = f"ended by signal {-code}" if code < 0 else "ended by itself"
    return {**own, **found}


def _own_facts(question: dict[str, Any]) -> dict[str, Any]:
    towards = question["towards"]
    shm, network = _room("/dev/shm"), network_of(Path("/"))
    infiniband = network is not None and "InfiniBand" in network.name
    port, meets = _port(towards if question["first"] and towards != ANYWHERE else "")
    return {
        "python": platform.python_version(),
        "executable": sys.executable,
        "cores": cores(),
        "memory": memory_bytes(),
        "memory_free": _free_memory(),
        **_limits(),
        "shm": shm[0],
        "shm_free": shm[1],
        **_folder(Path(question["token"])),
        **_driver(),
        "address": own_address(towards, one_host=False),
        "speed": network.bandwidth if network and not infiniband else 0.0,
        "infiniband": infiniband,
        "meets": meets,
        "free_port": port,
    }


def _probe_job(question: dict[str, Any], send: Any) -> None:
    """Send facts about torch, the devices and the job, a few at a time; the last message has an empty ``step``."""
    send({"step": "devices", "versions": _versions()})
    found = [(kind, *_probed(kind)) for kind in probed_kinds()]
    of_kinds = {name: version for _, versions, _ in found for name, version in versions.items() if version}
    kind, devices = next(((kind.name, devices) for kind, _, devices in found if devices), ("", []))
    send({"step": "job", "kind": kind, "devices": devices})
    file = question["file"]
    lacking = bool(file) and not os.path.isfile(file)
    if question["reference"] and not lacking:
        _load(question["reference"], send)
        send({"files": _files_of(file)})
    send({"step": "", "missing": lacking, "versions": {**_versions(), **of_kinds}})


def _load(reference: str, send: Any) -> None:
    """Load the job, make its data and take the first sample, as a worker does."""
    from phalanx.data.map_style import is_stream
    from phalanx.launch.jobfile import load_job
    from phalanx.train.build_model import make_data

    try:
        job = load_job(reference)
    except SpecError as error:
        first = error.problems[0]
        given = first.given.splitlines()[-1].strip(" |")
        send({"job_error": f"{first.where}: {given}", "job_fix": first.fix})
        return
    send({"step": "data", "loaders": job.workers})
    try:
        made: Any = make_data(job, job.data)
        if is_stream(made):
            next(iter(made))
            send({"data_read": True})
        elif len(made):
            made[0]
            send({"data_read": True, "samples": len(made)})
        else:
            send({"data_error": "holds no sample"})
    except StopIteration:
        send({"data_error": "holds no sample"})
    except Exception as error:  # user code
        send({"data_error": f"{type(error).__name__}: {error}"})


def _probed(kind: DeviceKind) -> tuple[dict[str, str], list[dict[str, Any]]]:
    """Return versions by the names of ``kind.versions``, and the devices, after computing something on each."""
    import torch

    module: Any = torch.get_device_module(kind.torch_type)
    versions, devices = {kind.name: getattr(torch.version, kind.name, None) or ""}, list[dict[str, Any]]()
    count = module.device_count() if module.is_available() else 0
    if count:
        with suppress(Exception):  # a build without it
            backend = import_module(f"{module.__name__}.{kind.backend}")
            versions[kind.backend] = ".".join(map(str, backend.version()))
    for index in range(count):
        device: dict[str, Any] = {"index": index, "error": ""}
        devices.append(device)
        try:
            device["name"] = module.get_device_name(index)
            device["free"], device["total"] = module.mem_get_info(index)
            ones = torch.ones(64, 64, device=kind.device(index))
            device["error"] = "" if float((ones @ ones).sum()) == 64.0**3 else "computes wrong numbers"
        except Exception as error:  # errors of devices are of many kinds
            device["error"] = str(error).partition("\n")[0]
    return versions, devices


def _driver() -> dict[str, Any]:
    found = ((kind, *kind.driver()) for kind in probed_kinds())
    kind, count, version, error = next((one for one in found if one[1] or one[3]), (None, 0, "", ""))
    topology = kind.topology() if kind and count > 1 else ""
    return {"driver": version, "driver_error": error, "driver_devices": count, "topology": topology}


def _versions() -> dict[str, str]:
    """Return the versions of all packages that are loaded, and a digest of the code of Phalanx beside its own."""
    modules = [(name, vars(one)) for name, one in [*sys.modules.items()] if "." not in name]
    found = {name: str(one["__version__"]) for name, one in sorted(modules) if one.get("__version__")}
    root = Path(sys.modules["phalanx"].__path__[0])
    texts = "".join(f"{path.relative_to(root)} {digest_of(path)}\n" for path in sorted(root.rglob("*.py")))
    found["phalanx"] += f"+{sha256(texts.encode()).hexdigest()[:12]}"
    return {name: version for name, version in found.items() if name not in sys.stdlib_module_names}


def _files_of(file: str) -> dict[str, str]:
    """Return the job's file and the modules loaded from its folder, with their SHA-256."""
    folder = os.path.dirname(file)
    modules = [str(getattr(module, "__file__", "")) for module in [*sys.modules.values()]] if file else []
    found = {path for path in (file, *modules) if path.startswith(f"{folder}/") and os.path.isfile(path)}
    return {os.path.relpath(path, folder): digest_of(path) for path in sorted(found)} if file else {}


def _free_memory() -> int:
    with suppress(OSError, StopIteration):
        lines = Path("/proc/meminfo").read_text().splitlines()
        free = next(line.split()[1] for line in lines if line.startswith("MemAvailable:"))
        return min(int(free) * 1024, memory_bytes())
    return memory_bytes()


def _limits() -> dict[str, int]:
    kinds = {"open_files": resource.RLIMIT_NOFILE, "locked_memory": resource.RLIMIT_MEMLOCK}
    kinds["processes"] = resource.RLIMIT_NPROC
    soft = {name: resource.getrlimit(kind)[0] for name, kind in kinds.items()}
    soft["processes"] = soft["processes"] if os.geteuid() else -1  # none holds for root
    return {name: -1 if limit == resource.RLIM_INFINITY else limit for name, limit in soft.items()}


def _folder(token: Path) -> dict[str, Any]:
    told: dict[str, Any] = {"shared": False, "folder_error": "", "folder_free": _room(token.parent)[1]}
    with suppress(OSError):
        told["shared"] = token.read_text() == token.name
    try:
        if token.parent.is_dir():
            with tempfile.TemporaryFile(dir=token.parent) as trial:
                trial.write(b"phalanx")
    except OSError as error:
        told["folder_error"] = error.strerror or str(error)
    return told


def _room(path: str | Path) -> tuple[int, int]:
    with suppress(OSError):
        usage = shutil.disk_usage(path)
        return usage.total, usage.free
    return 0, 0


def _port(address: str) -> tuple[int, str]:
    """Return a port that is free at this address, or the error."""
    try:
        with socket.create_server((address, 0)) as listener:
            return listener.getsockname()[1], ""
    except OSError as error:
        return 0, error.strerror or str(error)


def links(question: dict[str, Any]) -> dict[str, Any]:
    """Join the process group of all hosts, and return the fields of ``LinkFacts``."""
    until = time.monotonic() + question["patience"]
    try:
        return _joined(question, until)
    except (OSError, RuntimeError, ValueError) as error:
        words = getattr(error, "strerror", None) or str(error).strip() or type(error).__name__
        return {"error": words.splitlines()[0][:200]}


def _joined(question: dict[str, Any], until: float) -> dict[str, Any]:
    import torch.distributed as dist

    (host, port), rank, hosts = question["meeting"], question["rank"], question["hosts"]
    meeting = until - (1 - _MEETING) * question["patience"]
    listen_at(own_address(host, one_host=False))
    coming, whole = (timedelta(seconds=max(1.0, one - time.monotonic())) for one in (meeting, until))
    store = dist.TCPStore(host, port, is_master=not rank, wait_for_workers=False, timeout=coming)
    store.set(f"host/{rank}", "1")
    store.set_timeout(whole)
    if not rank:
        here: list[int] = []
        while len(here) < hosts and time.monotonic() < meeting:
            time.sleep(0.05)
            here = [one for one in range(hosts) if store.check([f"host/{one}"])]
        store.set("here", json.dumps(here))
    here = json.loads(store.get("here"))
    if rank not in here:
        return {"error": "came too late"}
    group, me, count = dist.PrefixStore("links", store), here.index(rank), len(here)
    if count == 1:
        return {}
    dist.init_process_group("gloo", store=group, rank=me, world_size=count, timeout=whole)
    shifts = [*range(1, count)] if count <= _FULL else [1, count - 1]
    measured = zip(shifts, _measured(shifts, me, count, until), strict=False)
    found = {str(here[(me - shift) % count]): rates for shift, rates in measured}
    return {"links": found, "unmeasured": len(set(shifts)) - len(found)}


def _measured(shifts: list[int], me: int, count: int, until: float) -> Iterator[tuple[float, float]]:
    """Yield round trip and bytes per second of the link from the host ``shift`` before, until the time is over.

    All hosts send at once, each to one host and from one host, so that no link is shared.
    """
    import torch
    import torch.distributed as dist

    def exchange(size: int, shift: int) -> float:
        out, into = torch.zeros(size, dtype=torch.uint8), torch.empty(size, dtype=torch.uint8)
        began = time.perf_counter()
        sending = dist.isend(out, (me + shift) % count)
        dist.recv(into, (me - shift) % count)
        took = time.perf_counter() - began
        sending.wait()  # pyrefly: ignore
        return took

    for shift in shifts:
        trip = 2 * min(exchange(1, shift) for _ in range(_TRIPS))
        size, best = _FIRST, 0.0
        for _ in range(_TRIES):
            took = exchange(size, shift)
            best = max(best, size / took)
            agreed = torch.tensor([took, time.monotonic() > until - 1.0], dtype=torch.float64)
            dist.all_reduce(agreed, dist.ReduceOp.MAX)  # also lets all begin at the same time
            size = _MORE if agreed[0] < _FAST else size
            if agreed[1]:
                return
        yield trip, best


if __name__ == "__main__":
    main()
