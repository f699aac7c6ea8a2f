"""The list of faults stays in step with the code: `make mutants` runs them."""

from __future__ import annotations

import ast

import pytest
from mutant_jobs import JOBS
from mutation import SOURCE, Mutation
from run_mutants import ALL

from phalanx.config import Plan


def test_there_are_enough_and_each_has_a_name_of_its_own() -> None:
    assert len(ALL) >= 40
    assert len({one.fault for one in ALL}) == len(ALL)


@pytest.mark.parametrize("mutation", ALL, ids=lambda one: one.fault)
def test_a_fault_applies_and_is_python(mutation: Mutation) -> None:
    assert mutation.applies, f"{mutation.file} does not have this text exactly once:\n{mutation.old}"
    assert mutation.old != mutation.new
    ast.parse((SOURCE / mutation.file).read_text().replace(mutation.old, mutation.new))


@pytest.mark.parametrize("words", sorted({words for one in ALL for words in one.checks}))
def test_a_check_can_be_read(words: str) -> None:
    kind, job, *plan = words.split(" ", 2)
    if kind == "test":
        assert (SOURCE.parents[1] / "tests" / job).exists()
    else:
        assert job in JOBS
        Plan.parse(plan[0])
