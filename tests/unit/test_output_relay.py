"""What workers print: rank 0's as it comes, the others' in whole lines, and one progress bar for all."""

from __future__ import annotations

import sys
import warnings
from typing import Any

import pytest
from tqdm import tqdm

from phalanx.launch.worker_process import OutputRelay, leave_warnings_to_rank_0

pytestmark = pytest.mark.quick


def printed(rank: int, pieces: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    relay = OutputRelay(rank, "stdout")
    for piece in pieces:
        relay.feed(piece.encode())
    relay.close()
    return capsys.readouterr().out


def test_other_ranks_print_whole_lines(capsys: pytest.CaptureFixture[str]) -> None:
    assert printed(1, ["one\ntw", "o\nthree"], capsys) == "[rank 1] one\n[rank 1] two\n[rank 1] three\n"
    assert printed(0, ["one\ntw", "o"], capsys) == "one\ntwo"


def test_a_progress_bar_is_drawn_by_rank_0_alone(capsys: pytest.CaptureFixture[str]) -> None:
    for _ in tqdm(range(3), desc="Loading weights", file=sys.stdout, mininterval=0):
        pass
    bar = capsys.readouterr().out
    assert "100%" in bar
    assert printed(0, [bar], capsys) == bar
    assert (
        printed(1, ["before\n", bar, "\nafter\n"], capsys).replace("[rank 1] \n", "")
        == "[rank 1] before\n[rank 1] after\n"
    )
    assert printed(1, [bar], capsys) == ""


@pytest.mark.parametrize(
    "how",
    [
        {"total": 3, "desc": "Map", "unit": " examples"},
        {"desc": "Generating train split", "unit": " examples"},
        {"desc": "files"},
        {"total": 3000, "unit": "B", "unit_scale": True},
    ],
)
def test_bars_of_data_sets_are_known_too(how: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    for _ in tqdm(iter(range(3)), file=sys.stdout, mininterval=0, **how):
        pass
    assert printed(1, [capsys.readouterr().out], capsys) in ("", "[rank 1] \n")


def test_other_ranks_leave_the_warnings_of_libraries_to_rank_0() -> None:
    def said(rank: int, module: str) -> int:
        with warnings.catch_warnings(record=True) as caught:
            warnings.resetwarnings()
            leave_warnings_to_rank_0(rank)
            warnings.warn_explicit("tied", UserWarning, "a.py", 1, module=module)
        return len(caught)

    assert [said(0, "peft.tuners.lora"), said(1, "peft.tuners.lora"), said(1, "mine.model")] == [1, 0, 1]


@pytest.mark.parametrize("line", ["50% of | it\n", "a\rb\n", "step 3\rat 5 [1:2]\n", "loss 0.5 | 3/4\n"])
def test_what_is_no_progress_bar_stays(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert printed(2, [line], capsys) == f"[rank 2] {line}"
