"""On which kinds of device plans are proven: the table that ships, and what runs of this user have shown.

A proof is of a kind of device with its collectives, a version of torch, and the techniques that a plan uses. What ships
is a small table, ``proven.toml``. What was proven on this machine or another with the same home stands in one file a
proof, in ``~/.cache/phalanx/proofs``: each is written whole, so that runs which prove at the same time do not disturb
each other, and one that is damaged or lost is a proof that is asked for again.
"""

from __future__ import annotations

import hashlib
import json
import time
import tomllib
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, final

from phalanx.config import Plan
from phalanx.device_kinds import kind_named
from phalanx.errors import PhalanxError
from phalanx.files import json_value, read_text, replace_text
from phalanx.hardware.probe import device_name

FILE = Path(__file__).with_name("proven.toml")
"""The table that ships."""

_MOST = 2**16  # bytes of one stored proof
_REPLICAS = {"dp", "fsdp", "zero=1", "zero=2"}


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Ground:
    """What a proof is of: where a plan computes, with which versions, and what it uses.

    Attributes:
        kind: of device, as plans say it, such as ``cuda``.
        name: of the device, as its driver says it: ``NVIDIA H100 80GB HBM3``.
        backend: what carries collectives between such devices, such as ``nccl``.
        torch: its version.
        phalanx: its version.
        techniques: of the plan, by ``techniques``.
    """

    kind: str
    name: str
    backend: str
    torch: str
    phalanx: str
    techniques: str

    @classmethod
    def of(cls, plan: Plan, kind: str) -> Ground:
        """That of ``plan`` on this machine's devices of that ``kind``."""
        return cls(
            kind=kind,
            name=device_name(kind_named(kind)),
            backend=kind_named(kind).backend,
            torch=torch_version(),
            phalanx=_phalanx_version(),
            techniques=techniques(plan),
        )

    def __str__(self) -> str:
        named = f"{self.kind} ({self.name})" if self.name and self.name != self.kind else self.kind
        return f"{named} with {self.backend} and torch {self.torch}"


def techniques(plan: Plan) -> str:
    """What ``plan`` uses, whatever the sizes: ``dp tp micro precision=bf16`` of ``dp=4 tp=2 micro=8 precision=bf16``.

    Keys with words stay whole, of those with numbers the name stays, but for ``zero``, whose stages are techniques of
    their own. ``micro`` is one as well: gradients are accumulated.
    """
    found: list[str] = []
    for word in str(plan).split():
        key, _, value = word.partition("=")
        if key == "device":
            continue
        if key == "compress":
            found.append(f"{key}={value.partition(':')[0]}")  # its rank or share is a size
        elif key in ("split", "shares") or (key != "zero" and value.replace(".", "", 1).isdecimal()):
            found.append(key)
        else:
            found.append(word)
    return " ".join(found) or "single"


def missing_proof(plan: Plan, kind: str) -> Ground | None:
    """The proof that what ``plan`` uses lacks on this machine's devices of that ``kind``, by the table and by runs.

    ``None`` where it is proven.
    """
    if ships_proven(kind):
        return None
    ground = Ground.of(plan, kind)
    return ground if stored(ground) is None else None


def ships_proven(kind: str, torch: str = "") -> bool:
    """Whether the table that ships has devices of that ``kind``, their collectives, and that version of ``torch``.

    Without one: this process's.
    """
    minor = ".".join((torch or torch_version()).split(".")[:2])
    backend = kind_named(kind).backend
    return any(row["kind"] == kind and row["backend"] == backend and minor in row["torch"] for row in shipped())


@cache
def shipped() -> tuple[dict[str, Any], ...]:
    """The rows of the table that ships."""
    return tuple(tomllib.loads(FILE.read_text(encoding="utf-8"))["proven"])


def stored(ground: Ground) -> dict[str, Any] | None:
    """What a run of this user has shown there; ``None`` where none has, or what it wrote cannot be read."""
    try:
        found = json_value(read_text(_path(ground), where="proof", fix="phalanx prove", most=_MOST))
    except (PhalanxError, ValueError, RuntimeError):  # the last: this user has no home
        return None
    return found if isinstance(found, dict) and found.get("of") == asdict(ground) else None


def store(ground: Ground, shown: Mapping[str, Any]) -> str:
    """Keep that plans of ``ground`` were proven equal there; ``shown`` by what, as JSON.

    Replicas of something show that something alone, too: a run that goes on with fewer devices is not asked again.

    Returns:
        Why it could not be kept; empty where it was.
    """
    alone = " ".join(word for word in ground.techniques.split() if word not in _REPLICAS) or "single"
    told = {"when": time.time(), **shown}
    try:
        _folder().mkdir(parents=True, exist_ok=True)
        for one in (ground, replace(ground, techniques=alone)):
            replace_text(_path(one), json.dumps({"of": asdict(one), **told}, indent=2) + "\n")
    except (OSError, PhalanxError, RuntimeError) as error:
        return str(error)
    return ""


def torch_version() -> str:
    """The version of torch that this process has."""
    import torch

    return str(torch.__version__)


def _phalanx_version() -> str:
    from importlib.metadata import PackageNotFoundError, version  # takes longer than the whole look

    with suppress(PackageNotFoundError):
        return version("phalanx")
    return "unknown"


def _folder() -> Path:
    return Path.home() / ".cache" / "phalanx" / "proofs"


def _path(ground: Ground) -> Path:
    of = json.dumps(asdict(ground), sort_keys=True)
    return _folder() / f"{hashlib.sha256(of.encode()).hexdigest()[:32]}.json"
