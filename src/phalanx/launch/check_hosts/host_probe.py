"""The program that one host runs to say what it has and what it lacks: one JSON document.

Its text is sent to the host, so that it also runs where Phalanx or torch is missing or old: it needs Python 3.8 and
nothing beside it. What needs torch is asked by ``job_probe``, in a process of its own, which may die or hang.
"""

from __future__ import annotations

import fcntl
import json
import os
import platform
import resource
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from typing import Any

MARK = "phalanx-check:"
"""What the line of the answer begins with: a host may greet whoever comes."""
TOKEN = "asker"
"""The file that whoever asks writes into the folder, beside which each host writes one of its own."""

ANYWHERE = "198.51.100.1"
"""An address kept for documentation: nothing is sent there, only a route looked up."""


def main() -> None:
    """Answer the question, JSON on stdin, by one line on stdout."""
    began = time.time()
    question = QUESTION  # pyrefly: ignore  # noqa: F821  (put there by what reads this text)
    document = answer(question)
    ended = time.time()
    print("\n" + MARK + json.dumps({**document, "began": began, "ended": ended}), flush=True)


def answer(question: dict[str, Any]) -> dict[str, Any]:
    """What there is to say but the time."""
    until = time.monotonic() + question["patience"]
    if question.get("cwd") and os.path.isdir(question["cwd"]):
        os.chdir(question["cwd"])
    job, life = _job_begun(question["boot"])
    return {
        "python": platform.python_version(),
        "executable": sys.executable,
        "host": socket.gethostname(),
        "cores": _cores(),
        "memory": _memory(),
        "limits": _limits(),
        "shm": _room("/dev/shm"),
        "folder": _folder(question["folder"], question["token"], question["name"]),
        "scratch": _scratch(question.get("scratch", "")),
        "gpus": _gpus(question["drivers"]),
        "address": _address(question["towards"]),
        "interface": _interface(_address(question["towards"])),
        "infiniband": os.path.isdir("/sys/class/infiniband") and bool(os.listdir("/sys/class/infiniband")),
        "meets": _port(question["towards"])[1] if question["meets"] else "",
        "free_port": _port()[0],
        **_asked(job, life, question, until),
    }


def _job_begun(boot: str) -> tuple[Any, int]:
    """The process of ``job_probe``, and the pipe by which it is told and lives."""
    reading, writing = os.pipe()
    pipes = {"stdin": reading, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    job = subprocess.Popen([sys.executable, "-c", boot], start_new_session=True, **pipes)
    os.close(reading)
    return job, writing


def _asked(job: Any, life: int, question: dict[str, Any], until: float) -> dict[str, Any]:
    """What ``job_probe`` says ``until`` then, as far as it comes: each of its lines says more."""
    ending = ""
    room = tempfile.mkdtemp(prefix="phalanx-check-")  # for code that comes with the question
    said = json.dumps({"program": question["job_probe"], "job": {**question["job"], "room": room}})
    telling = threading.Thread(target=_tell, args=(life, said.encode() + b"\n"), daemon=True)
    telling.start()
    try:
        out, err = job.communicate(timeout=max(0.0, until - time.monotonic()))
    except subprocess.TimeoutExpired:
        os.killpg(job.pid, 9)
        out, err = job.communicate()
        ending = f"has not come to its end within {question['patience']:.0f} s"
    finally:
        if job.poll() is None:  # whoever asked is gone
            os.killpg(job.pid, 9)
        shutil.rmtree(room, ignore_errors=True)
    telling.join()
    os.close(life)
    if job.returncode and not ending:
        number, lines = job.returncode, err.decode(errors="replace").strip().splitlines()
        ending = f"ended by signal {-number}" if number < 0 else (lines or [f"exit code {number}"])[-1]
    document: dict[str, Any] = {}
    for line in out.decode(errors="replace").splitlines():
        if line.startswith(MARK):
            document.update(json.loads(line[len(MARK) :]))
    return {**document, "ending": ending}


def _tell(pipe: int, text: bytes) -> None:
    left = memoryview(text)
    try:
        while left:
            left = left[os.write(pipe, left) :]
    except OSError:  # it has ended
        pass


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _memory() -> dict[str, int]:
    """Bytes of the machine, or of a control group where that is less, and those that are free."""
    told = {}
    for line in _read("/proc/meminfo").splitlines():
        name, _, number = line.partition(":")
        told[name] = int(number.split()[0]) * 1024
    if "MemTotal" not in told:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return {"total": total, "free": total}
    total, free = told["MemTotal"], told.get("MemAvailable", told.get("MemFree", 0))
    for folder in _groups():
        most, used = _read(folder + "/memory.max").strip(), _read(folder + "/memory.current").strip()
        if most.isdigit() and used.isdigit():
            kept = [line.split()[1] for line in _read(folder + "/memory.stat").splitlines() if "inactive_file " in line]
            held = int(used) - (int(kept[0]) if kept else 0)
            total, free = min(total, int(most)), min(free, max(0, int(most) - held))
    return {"total": total, "free": free}


def _groups() -> list[str]:
    """The folder of this process's control group, and those above it."""
    lines = [line for line in _read("/proc/self/cgroup").splitlines() if line.startswith("0::")]
    path = lines[0][3:].strip("/") if lines else ""
    parts = path.split("/") if path else []
    return ["/sys/fs/cgroup/" + "/".join(parts[:count]) for count in range(len(parts), -1, -1)]


def _limits() -> dict[str, int]:
    """Soft limits of this process; -1 where there is none, as there is none of processes for root."""
    names = {"open_files": "RLIMIT_NOFILE", "memlock": "RLIMIT_MEMLOCK"}
    names.update({"processes": "RLIMIT_NPROC"} if os.geteuid() else {})
    kinds = {name: getattr(resource, kind) for name, kind in names.items() if hasattr(resource, kind)}
    soft = {name: resource.getrlimit(kind)[0] for name, kind in kinds.items()}
    return {name: -1 if limit == resource.RLIM_INFINITY else limit for name, limit in soft.items()}


def _room(path: str) -> dict[str, int]:
    try:
        usage = shutil.disk_usage(path)
    except OSError:
        return {"total": 0, "free": 0}
    return {"total": usage.total, "free": usage.free}


def _folder(path: str, token: str, name: str) -> dict[str, Any]:
    """Whether the asker's word is in the folder, and whether one of this host's can be put beside it."""
    told: dict[str, Any] = {"path": path, "exists": os.path.isdir(path), "shared": False, "error": ""}
    if not told["exists"]:
        return told
    told["shared"] = _read(os.path.join(path, TOKEN)).strip() == token
    within = path if told["shared"] else os.path.dirname(path)
    told["free"] = _room(within)["free"]
    try:
        if told["shared"]:
            own = os.path.join(path, name)
            with open(own, "w") as file:
                file.write(token)
        else:
            with tempfile.TemporaryFile(dir=path) as trial:
                trial.write(token.encode())
    except OSError as error:
        told["error"] = error.strerror or str(error)
    return told


def _scratch(path: str) -> dict[str, Any]:
    """Whether something can be put below ``path``, or what there is of it; nothing is."""
    if not path:
        return {"path": "", "error": "", "free": 0}
    path = above = os.path.abspath(os.path.expanduser(path))
    while not os.path.exists(above) and os.path.dirname(above) != above:
        above = os.path.dirname(above)
    error = "" if os.path.isdir(above) and os.access(above, os.W_OK | os.X_OK) else f"{above} cannot be written to"
    return {"path": path, "error": error, "free": _room(above)["free"]}


def _gpus(drivers: dict[str, str]) -> dict[str, Any]:
    """What the first driver of these kinds of device says that says anything, by the text of its ``driver_told()``."""
    told: dict[str, Any] = {"error": "", "devices": [], "driver": "", "pids": [], "topology": ""}
    for kind, text in drivers.items():
        scope: dict[str, Any] = {}
        exec(compile(text, kind, "exec"), scope)
        found = scope["driver_told"]()
        if found["devices"] or found["error"]:
            return {**told, **found}
    return told


def _address(towards: str) -> str:
    """The address that this host sends from to another; empty where it knows no way there."""
    try:
        family, kind, _, _, where = socket.getaddrinfo(towards, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(where)  # of datagrams: looks the route up, sends nothing
            return str(probe.getsockname()[0])
    except OSError:
        return ""


def _interface(address: str) -> dict[str, Any]:
    """The interface of an address, and the bytes per second it says it has; 0 where it does not say, or is no card."""
    for _, name in socket.if_nameindex() if sys.platform == "linux" else ():
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            try:
                request = struct.pack("256s", name.encode()[:15])
                own = socket.inet_ntoa(fcntl.ioctl(probe.fileno(), 0x8915, request)[20:24])  # SIOCGIFADDR
            except OSError:
                continue
        if own == address:
            speed = _read(f"/sys/class/net/{name}/speed").strip()
            card = os.path.exists(f"/sys/class/net/{name}/device") and speed.isdigit()
            return {"name": name, "speed": int(speed) * 125000.0 if card else 0.0}
    return {"name": "", "speed": 0.0}


def _port(address: str = "") -> tuple[int, str]:
    """A port that can be listened at by an address of this host, or why there is none."""
    try:
        with socket.socket() as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(("" if address == ANYWHERE else address, 0))
            listener.listen()
            return listener.getsockname()[1], ""
    except OSError as error:
        return 0, error.strerror or str(error)


def _read(path: str) -> str:
    try:
        with open(path, errors="replace") as file:
            return file.read()
    except OSError:
        return ""


if __name__ == "__main__":
    main()
