"""What rank 0 decides for all workers before they train."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, replace
from itertools import count
from pathlib import Path

from torch.distributed import PrefixStore  # pyright: ignore[reportPrivateImportUsage]

from phalanx.comm import Place
from phalanx.comm.place import meet
from phalanx.errors import Problem, RunError, SpecError
from phalanx.launch.runfile import prepare_run
from phalanx.spec import RunSpec

_decisions = count()


def enter(run: RunSpec, place: Place, *, runfile: Path | None = None) -> RunSpec:
    """Have rank 0 prepare the run folder, and give back the run with the folder it took. Collective.

    Args:
        run: as this worker knows it.
        place: of this worker.
        runfile: the file that ``run`` was read from, if any.

    Raises:
        SpecError: on every rank, if the folder cannot be used.
    """
    folder = as_rank_0_decides(place, lambda: str(prepare_run(run, given=runfile).parent.absolute()))
    return replace(run, folder=Path(folder))


def as_rank_0_decides(place: Place, decide: Callable[[], str]) -> str:
    """What ``decide`` gives on rank 0, where alone it is called; its error is every rank's. Collective."""
    if place.world_size == 1:
        return decide()
    store = PrefixStore(f"phalanx/decision/{next(_decisions)}", meet(place))
    if place.rank == 0:
        answer: dict[str, object] = {}
        try:
            answer = {"decision": (decision := decide())}
        except SpecError as error:
            answer = {"problems": [asdict(problem) for problem in error.problems]}
            raise
        except BaseException as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
            raise
        finally:
            store.set("answer", json.dumps(answer))
        return decision
    heard = json.loads(store.get("answer"))
    if "problems" in heard:
        raise SpecError([Problem(**problem) for problem in heard["problems"]])
    if "error" in heard:
        raise RunError(f"rank 0 could not prepare the run: {heard['error']}")
    return heard["decision"]
