"""The table of the law has a row for every key of a plan, or a reason why not."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from typing import Any

import table

from phalanx.config import Plan
from phalanx.config.plan import words

ELSEWHERE = {
    "device": "says where, not how; the GPU tests have theirs",
    "compile": "tests/distributed/test_inputs_of_train.py runs it: a compiler's kernels round otherwise",
    "precision": "tests/parity/test_proof_edges.py: bounds of half precision",
    "staleness": "not exact but for 0, which servers have without it",
    "compensate": "of stale gradients, so not exact",
    "backup": "leaves samples out, so not exact",
    "split": "tests/distributed/test_pipeline.py: where stages are cut, by name",
    "stages": "tests/distributed/test_pipeline.py: more of them on a rank than the schedule needs",
    "fragments": "of replicas apart, so not exact",
    "outer_lr": "of the outer optimizer, so not exact",
    "outer_momentum": "of the outer optimizer, so not exact",
    "compress": "not exact: tests/distributed/test_compress.py",
}


def texts(value: Any) -> Iterator[str]:
    """Every text in a table, however deep."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for one in value.values():
            yield from texts(one)
    elif isinstance(value, tuple):
        for one in value:
            yield from texts(one)


def test_each_key_of_a_plan_has_a_row_or_a_reason() -> None:
    every = [one for name, value in vars(table).items() if name.isupper() and name != "REFUSED" for one in texts(value)]
    used = {word.partition("=")[0] for one in every if "=" in one for word in words(one)}
    assert {one.name for one in fields(Plan)} - used == set(ELSEWHERE)
