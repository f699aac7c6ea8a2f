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
from phalanx.launch.code_files import digest_of

MARK = "phalanx-check:"
"""Beginning of the line with the answer: a login script may print, too."""
_MEETING = 0.6  # share of the time for links in which all hosts have to come
_FIRST, _MORE, _FAST, _SLOW = 2**21, 2**24, 0.02, 2.0  # bytes sent over a link; seconds after which more, or no more
_TRIES, _TRIPS = 3, 10
_SOON = 0.02  # seconds between looks at a process that is about to end


def main() -> None:
    """Answer the question in the first line of stdin."""
    question = json.loads(sys.stdin.buffer.readline())
    stdout = os.dup(1)
    os.dup2(2, 1)  # the job prints, too
    threading.Thread(target=_end_with_asker, daemon=True).start()
    answer = link(question) if "rank" in question else facts(question)
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
    """Return the fields of ``HostFacts``; for a ``quick`` answer those that need neither torch nor the job."""
    until = time.monotonic() + question["patience"]
    no_cwd = not os.path.isdir(question["cwd"])
    if not no_cwd:
        os.chdir(question["cwd"])
    own = {"no_cwd": no_cwd, **_own_facts(question)}
    return (
        own
        | ({"files": _files_of(question["file"])} if question["quick"] else _job_facts(question, until))
        | {"clock": time.time()}
    )


def _job_facts(question: dict[str, Any], until: float) -> dict[str, Any]:
    from phalanx.launch.side_process import SideProcess  # loads torch

    found = _driver()
    with SideProcess(lambda send: _probe_job(question, send)) as side:
        while message := side.next(max(0.0, until - time.monotonic())):
            found |= message
        if not side.done:
            found["ending"] = f"has not come to its end within {question['patience']:.0f} s"
        elif found.get("step", "begin"):
            while (code := side.exit_code()) is None:
                time.sleep(_SOON)
            found["ending"] = f"ended by signal {-code}" if code < 0 else "ended by itself"
    return found


def _own_facts(question: dict[str, Any]) -> dict[str, Any]:
    towards, file = question["towards"], question["file"]
    network = network_of(Path("/"))
    infiniband = network is not None and "InfiniBand" in network.name
    port, meets = _port(towards if question["first"] and towards != ANYWHERE else "")
    return {
        "python": platform.python_version(),
        "cores": cores(),
        "memory": memory_bytes(),
        "memory_free": _free_memory(),
        "open_files": _limit(resource.RLIMIT_NOFILE),
        "locked_memory": _limit(resource.RLIMIT_MEMLOCK),
        "processes": _limit(resource.RLIMIT_NPROC) if os.geteuid() else -1,  # none holds for root
        "shm_free": shutil.disk_usage("/dev/shm").free if os.path.isdir("/dev/shm") else -1,
        **_folder(Path(question["token"])),
        "missing": bool(file) and not os.path.isfile(file),
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
    if question["reference"] and not (file and not os.path.isfile(file)):
        _load(question["reference"], send)
        send({"files": _files_of(file)})
    send({"step": "", "versions": {**_versions(), **of_kinds}})


def _load(reference: str, send: Any) -> None:
    """Load the job, make its data and take the first sample, as a worker does."""
    from phalanx.data.map_style import is_stream
    from phalanx.launch.jobfile import load_job
    from phalanx.train.build_model import make_data

    try:
        job = load_job(reference)
    except SpecError as error:
        first = error.problems[0]
        given, by = first.given.splitlines()[-1].strip(" |"), f", with {sys.executable}"
        fix = first.fix + (by if first.fix.startswith("pip ") else "")
        send({"job_error": f"{first.where}: {given}", "job_fix": fix})
        return
    send({"step": "data", "loaders": job.workers})
    try:
        made: Any = make_data(job, job.data)
        streams = is_stream(made)
        next(iter(made if streams else map(made.__getitem__, range(len(made)))))
        send({"data_read": True, "samples": -1 if streams else len(made)})
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
    """Return the versions of all packages that are loaded; Phalanx's with a digest of its code."""
    modules = [(name, vars(one)) for name, one in [*sys.modules.items()] if "." not in name]
    found = {name: str(one["__version__"]) for name, one in sorted(modules) if one.get("__version__")}
    root = Path(sys.modules["phalanx"].__path__[0])
    code = sha256(b"".join(path.read_bytes() for path in sorted(root.rglob("*.py")))).hexdigest()
    found["phalanx"] += f"+{code[:12]}"
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


def _limit(kind: int) -> int:
    soft = resource.getrlimit(kind)[0]
    return -1 if soft == resource.RLIM_INFINITY else soft


def _folder(token: Path) -> dict[str, Any]:
    found: dict[str, Any] = {"shared": os.path.exists(token), "folder_error": "", "folder_free": 0}
    try:
        if token.parent.is_dir():
            found["folder_free"] = shutil.disk_usage(token.parent).free
            with tempfile.TemporaryFile(dir=token.parent) as trial:
                trial.write(b"phalanx")
    except OSError as error:
        found["folder_error"] = error.strerror or str(error)
    return found


def _port(address: str) -> tuple[int, str]:
    """Return a port that is free at this address, or the error."""
    try:
        with socket.create_server((address, 0)) as listener:
            return listener.getsockname()[1], ""
    except OSError as error:
        return 0, error.strerror or str(error)


def link(question: dict[str, Any]) -> dict[str, Any]:
    """Join the process group of all hosts, and measure the link from the host before this one in the ring."""
    import torch
    import torch.distributed as dist

    (host, port), rank, hosts = question["meeting"], question["rank"], question["hosts"]
    coming, met = timedelta(seconds=_MEETING * question["patience"]), False

    def exchange(size: int) -> float:
        out, into = torch.zeros(size, dtype=torch.uint8), torch.empty(size, dtype=torch.uint8)
        began = time.perf_counter()
        sending = dist.isend(out, (rank + 1) % hosts)
        dist.recv(into, (rank - 1) % hosts)
        took = time.perf_counter() - began
        sending.wait()  # pyrefly: ignore
        return took

    try:
        listen_at(own_address(host, one_host=False))
        store = dist.TCPStore(host, port, is_master=not rank, wait_for_workers=False, timeout=coming)
        met = True
        dist.init_process_group("gloo", store=store, rank=rank, world_size=hosts, timeout=coming)
        latency, size, bandwidth = 2 * min(exchange(1) for _ in range(_TRIPS)), _FIRST, 0.0
        for _ in range(_TRIES):
            took = exchange(size)
            bandwidth, slowest = max(bandwidth, size / took), torch.tensor(took)
            dist.all_reduce(slowest, dist.ReduceOp.MAX)  # also lets all begin at the same time
            if slowest > _SLOW:
                break
            size = _MORE if slowest < _FAST else size
        return {"met": True, "latency": latency, "bandwidth": bandwidth}
    except (OSError, RuntimeError, ValueError) as error:
        words = getattr(error, "strerror", None) or str(error).strip() or type(error).__name__
        return {"met": met, "error": words.splitlines()[0][:200]}


if __name__ == "__main__":
    main()
