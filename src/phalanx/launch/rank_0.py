"""What rank 0 decides for all workers of a run, before they have a process group."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict

from torch.distributed import PrefixStore  # pyrefly: ignore

from phalanx.comm import Place
from phalanx.comm.process_group import meet
from phalanx.errors import Problem, RefusedError, RunError, SpecError

_LONGEST, _SOON = 3600.0, 0.02  # seconds


def decided_by_rank_0(place: Place, decide: Callable[[], str], about: str) -> str:
    """What ``decide`` gives on rank 0, where alone it is called; its error is every rank's. Collective.

    ``about``: what no other decision of these workers is called.
    """
    if place.world_size == 1:
        return decide()
    store = PrefixStore(f"phalanx/{about}", meet(place))
    if place.rank == 0:
        answer: dict[str, object] = {}
        try:
            answer = {"decision": (decision := decide())}
        except SpecError as error:
            refused = isinstance(error, RefusedError)
            answer = {"problems": [asdict(problem) for problem in error.problems], "refused": refused}
            raise
        except BaseException as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
            raise
        finally:
            store.set("answer", json.dumps(answer))
        return decision
    until = time.monotonic() + _LONGEST
    while not store.check(["answer"]) and time.monotonic() < until:  # a proof may take longer than any exchange
        time.sleep(_SOON)
    decided = json.loads(store.get("answer"))
    if "problems" in decided:
        kind = RefusedError if decided["refused"] else SpecError
        raise kind([Problem(**problem) for problem in decided["problems"]])
    if "error" in decided:
        raise RunError(f"rank 0 could not prepare the run: {decided['error']}")
    return decided["decision"]
