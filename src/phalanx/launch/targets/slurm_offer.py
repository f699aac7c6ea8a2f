"""Slurm's commands, as this machine has them, and what nodes of a partition offer: GPUs, cores and memory."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping, Sequence

from phalanx.errors import RunError
from phalanx.hardware.catalog import find
from phalanx.launch.targets.offer import Offer, ask_program

_COLUMNS = "%P|%c|%m|%G"  # partition (with * where jobs go to it unasked), cores, MiB and generic resources of a node
_GPUS = re.compile(r"(?:gres/)?gpu(?::(?P<kind>[A-Za-z][\w.-]*))?(?::(?P<count>\d+))?(?:\(.*?\))?")
_SHARES = re.compile(r"(?:gres/)?(?:gpu|shard|mps)\b")  # of which part of a GPU, or of how many, nothing is said
_UNSAID = ("constraint", "nodelist", "exclude")  # of which nodes a run has, sinfo does not say by these
_PATIENCE = 30  # seconds


def slurm_offer(options: Mapping[str, str]) -> Offer | None:
    """What so many nodes of the partition have; ``None`` where Slurm does not say, or they differ."""
    said = "gres" in options or options.get("gpus-per-node") == "0"
    return offer_of([] if said else _nodes(options.get("partition")) or [], options)


def offer_of(rows: Sequence[tuple[str, str, str]], options: Mapping[str, str]) -> Offer | None:
    """From cores, MiB and resources of each kind of node in the partition, and the options of a launch.

    Options that are wrong offer nothing: what prepares the launch says so.
    """
    count, gres = options.get("gpus-per-node", ""), options.get("gres", "")
    nodes = _whole(options.get("nodes", "1"))
    kinds = {(cores.rstrip("+"), memory.rstrip("+"), resources) for cores, memory, resources in rows}
    if len(kinds) > 1 or any(name in options for name in _UNSAID) or not nodes:
        return None
    ((cores, memory, resources),) = kinds or {("", "", "")}
    found = [match for one in (gres or resources).split(",") if (match := _GPUS.fullmatch(one.strip()))]
    if count == "0" or (kinds and not (found or count)):
        share = _whole(options.get("cpus-per-task", "1"))  # which is what a launch asks for where it is not given
        part = min(1.0, share / _whole(cores)) if _whole(cores) else 1.0
        room = int(part * _whole(memory) * 2**20)
        by = "--gpus-per-node 0" if count == "0" else "sinfo"
        return Offer(nodes=nodes, devices=1, cores=share, memory=room, by=by) if share else None
    known = find(found[0]["kind"] or "") if len(found) == 1 else None
    each = _whole(count or found[0]["count"] or "1") if known else 0
    by = "--gpus-per-node" if count else "--gres" if gres else "sinfo"
    return Offer(nodes=nodes, devices=each, device=known.device.name, by=by) if known and each else None


def gpus_in(gres: str) -> int | None:
    """GPUs that generic resources such as ``gpu:a100:8`` ask for; ``None`` where that cannot be told."""
    parts = [one.strip() for one in gres.split(",")]
    found = [_GPUS.fullmatch(one) for one in parts]
    if any(not match and _SHARES.match(one) for match, one in zip(found, parts, strict=True)):
        return None
    return sum(_whole(match["count"] or "1") for match in found if match)


def has_gpus(partition: str | None) -> bool | None:
    """Whether a node of the partition, or of the one that jobs go to, has GPUs; ``None``: Slurm cannot be asked."""
    rows = _nodes(partition)
    return None if rows is None else any("gpu" in resources for _, _, resources in rows)


def _whole(text: str) -> int:
    return int(text) if text.isascii() and text.isdecimal() else 0


def _nodes(partition: str | None) -> list[tuple[str, str, str]] | None:
    """Cores, MiB and generic resources of each kind of node in the partition, or in the one that jobs go to.

    ``None`` where Slurm does not say.
    """
    of_one = [f"--partition={partition}"] if partition else []
    try:
        told = ask_slurm("sinfo", "--noheader", "--exact", f"--format={_COLUMNS}", *of_one, patience=_PATIENCE)
    except (RunError, OSError):
        return None
    rows = [line.strip().split("|") for line in told.splitlines()]
    return [(row[1], row[2], row[3]) for row in rows if len(row) == 4 and (partition or row[0].endswith("*"))]


PATIENCE = 60.0
"""Seconds for an answer."""

REFUSES = "Slurm refuses it: "
"""What an error begins with that says why, in Slurm's own words."""

# Other variables are of an earlier job, in whose shell this process may be: they say what this one is not asked for.
_KEPT = ("SLURM_CONF", "SLURM_CLUSTERS")


def ask_slurm(*words: str, without: Collection[str] = (), patience: float = PATIENCE) -> str:
    """What the command prints. ``without``: variables of the environment that it does not get.

    Raises:
        RunError: it is not on this machine, does not answer within ``patience`` seconds, or refuses.
    """
    environment = {
        name: value
        for name, value in os.environ.items()
        if (name in _KEPT or not name.startswith("SLURM_")) and name not in without
    }
    lacking = "on a login node of the cluster; --dry-run shows the script to take there"
    done = ask_program(words, "Slurm", patience, lacking, "sinfo", env=environment)
    if done.returncode:
        said = (done.stderr or done.stdout).strip() or f"{words[0]} ended with {done.returncode}"
        raise RunError(f"{REFUSES}{said}\n    try: sinfo, which says what there is")
    return done.stdout
