"""Run the checks that find the planted faults, on the code as it is."""

from __future__ import annotations

import pytest
from mutant_checks import check
from run_mutants import KERNEL


@pytest.mark.parametrize("words", KERNEL)
def test_the_check_finds_nothing_wrong(words: str) -> None:
    assert check(words) == ""
