"""Slurm's commands, as this machine has them. They are asked the same whatever job's shell this process is in."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Collection

from phalanx.errors import RunError

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
    try:
        done = subprocess.run(
            words,
            env=environment,
            capture_output=True,
            text=True,
            timeout=patience,
            check=False,
            stdin=subprocess.DEVNULL,
        )
    except FileNotFoundError:
        raise RunError(
            f"{words[0]} is not on this machine, so that it cannot hand anything to Slurm\n"
            "    try: on a login node of the cluster; --dry-run shows the script to take there"
        ) from None
    except subprocess.TimeoutExpired:
        raise RunError(
            f"Slurm does not answer: {words[0]} took more than {patience:.0f} seconds\n    try: sinfo"
        ) from None
    if done.returncode:
        said = (done.stderr or done.stdout).strip() or f"{words[0]} ended with {done.returncode}"
        raise RunError(f"{REFUSES}{said}\n    try: sinfo, which says what there is")
    return done.stdout
