"""Killed workers that a launch replaces: by processes that begin anew at the same rank, as often as there are some."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from phalanx.comm import Place
from phalanx.comm.process_group import meet
from phalanx.errors import WorkerError
from phalanx.launch.local import launch


def _killed_until(last: int, rank: int = 1) -> Callable[[Place, Callable[[int], None]], Any]:
    def work(place: Place, report: Callable[[int], None]) -> Any:
        report(place.generation)
        if place.rank == rank and place.generation < last:
            os.kill(os.getpid(), signal.SIGKILL)
        print(f"rank {place.rank} lives")
        return [place.rank, place.world_size, place.generation]

    return work


def test_a_killed_worker_is_replaced_at_its_rank(capsys: pytest.CaptureFixture[str]) -> None:
    assert launch(_killed_until(2), 3, reserves=3) == [[0, 3, 0], [1, 3, 2], [2, 3, 0]]
    assert "[rank 1] rank 1 lives" in capsys.readouterr().out


def test_rank_0_is_replaced_too() -> None:
    assert launch(_killed_until(1, rank=0), 1, reserves=1) == [[0, 1, 1]]


def test_when_reserves_are_used_up_the_run_fails() -> None:
    with pytest.raises(WorkerError, match=r"rank 1 of 2 was ended in step 2 by SIGKILL"):
        launch(_killed_until(9), 2, reserves=2)


def test_without_reserves_nobody_is_replaced() -> None:
    with pytest.raises(WorkerError, match="SIGKILL"):
        launch(_killed_until(1), 2)


def test_an_error_is_no_reason_to_begin_anew(tmp_path: Path) -> None:
    def work(place: Place, report: Callable[[int], None]) -> None:
        (tmp_path / f"{place.rank}-{place.generation}").touch()
        raise ValueError("wrong in the job")

    with pytest.raises(WorkerError, match="wrong in the job"):
        launch(work, 1, reserves=2)
    assert [file.name for file in tmp_path.iterdir()] == ["0-0"]


def test_who_comes_back_finds_the_store() -> None:
    def work(place: Place, report: Callable[[int], None]) -> str:
        store = meet(place)
        if place.generation == 0:
            store.set("left", "behind")
            os.kill(os.getpid(), signal.SIGTERM)
        return store.get("left").decode()

    assert launch(work, 1, reserves=1) == ["behind"]
