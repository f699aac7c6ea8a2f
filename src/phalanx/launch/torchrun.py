"""Workers that torchrun started. The one place where its environment variables are read.

``torchrun --nproc-per-node 2 --no-python phalanx worker RUN/run.toml`` runs what ``phalanx train`` runs, on any hosts
that torchrun reaches.
"""

from __future__ import annotations

import os
from datetime import timedelta

from phalanx.comm import Place
from phalanx.errors import Problem, SpecError

_NUMBERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
_NAMES = (*_NUMBERS, "MASTER_ADDR", "MASTER_PORT")


def place_from_environment() -> Place | None:
    """This process's place among those of torchrun, or ``None`` where torchrun did not start it.

    Raises:
        SpecError: some of torchrun's variables are there and others are missing or no numbers.
    """
    if "RANK" not in os.environ and "WORLD_SIZE" not in os.environ:
        return None
    problems = [
        Problem(
            where=f"environment variable {name}",
            given=repr(os.environ[name]) if name in os.environ else "nothing",
            allowed="what torchrun sets: RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT together",
            fix="torchrun --nproc-per-node 2 --no-python phalanx worker RUN/run.toml",
        )
        for name in _NAMES
        if name not in os.environ or (name in (*_NUMBERS, "MASTER_PORT") and not os.environ[name].isdecimal())
    ]
    if problems:
        raise SpecError(problems)
    rank, world_size, local_rank = (int(os.environ[name]) for name in _NUMBERS)
    here = os.environ.get("LOCAL_WORLD_SIZE", "")
    return Place(
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        store="env://",
        local_world_size=int(here) if here.isdecimal() else 0,
    )


def claim(key: str, *, patience: timedelta = timedelta(seconds=2)) -> bool:
    """Whether this worker is the first of all to ask for ``key``; also true where that cannot be found out.

    It asks torchrun's own store, which outlives the workers, so that it works while they are failing.
    """
    from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return True
    try:
        store = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False, timeout=patience)
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        return store.add(f"phalanx/{attempt}/{key}", 1) == 1
    except RuntimeError:
        return True
