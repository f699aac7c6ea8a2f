"""Text that stands for a time: one reader for the options of the command line and for a run file."""

from __future__ import annotations

from pathlib import Path

import pytest

from phalanx.cli.options import deadline_of
from phalanx.config import Plan, RunSpec
from phalanx.errors import SpecError
from phalanx.units import parse_duration, show_number

TIMES = {"90s": 90.0, "15m": 900.0, "1.5h": 5400.0, "3d": 259200.0, ".5h": 1800.0, "1e3s": 1000.0, " 5 m ": 300.0}
NO_TIMES = ["", "m", "15", "0m", "-3s", "15 minutes", "20ms", "infs", "nand", "1e308d", "2w"]


@pytest.mark.parametrize(("text", "seconds"), TIMES.items())
def test_a_time_means_the_same_wherever_it_is_given(text: str, seconds: float) -> None:
    run = RunSpec(job="digits.py", plan=Plan(), folder=Path("runs/1"), checkpoint_every=text)
    assert parse_duration(text) == deadline_of(text) == run.save_seconds == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("number", "text"), [(0, "0"), (1650.4, "1,650"), (12.34, "12.3"), (0.00123, "0.00123"), (1e7, "10,000,000")]
)
def test_numbers_have_no_exponent(number: float, text: str) -> None:
    assert show_number(number) == text


@pytest.mark.parametrize("text", NO_TIMES)
def test_what_is_no_time_is_refused_wherever_it_is_given(text: str) -> None:
    with pytest.raises(ValueError, match="s, m, h or d, such as 15m"):
        parse_duration(text)
    with pytest.raises(SpecError, match="s, m, h or d"):
        deadline_of(text)
    with pytest.raises(SpecError, match="s, m, h or d"):
        RunSpec(job="digits.py", plan=Plan(), folder=Path("runs/1"), checkpoint_every=text)
