"""The secret of workers that are programs of their own: a file for this user alone, gone once all have read it."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from phalanx.comm import Place
from phalanx.comm.handshake import SECRET
from phalanx.errors import RunError
from phalanx.launch import run_secret
from phalanx.launch.local import launch
from phalanx.launch.run_secret import share_secret


def test_every_rank_has_it_and_the_file_is_gone(tmp_path: Path) -> None:
    (tmp_path / ".secret").write_bytes(b"of a run that was killed")

    def work(place: Place, report: Callable[[int], None]) -> list[object]:
        secret = share_secret(place, tmp_path)
        return [len(secret), hashlib.sha256(secret).hexdigest()]

    first, *others = launch(work, 3)
    assert first[0] == SECRET
    assert others == [first, first]
    assert list(tmp_path.iterdir()) == []


def test_each_run_of_the_same_workers_has_its_own(tmp_path: Path) -> None:
    def work(place: Place, report: Callable[[int], None]) -> list[str]:
        runs = (replace(place, number=number) for number in range(3))
        return [hashlib.sha256(share_secret(run, tmp_path)).hexdigest() for run in runs]

    first, *others = launch(work, 2)
    assert others == [first]
    assert len(set(first)) == 3


def test_only_this_user_reads_it(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        run_secret._write(tmp_path / "s", b"x")
    finally:
        os.umask(before)
    assert (tmp_path / "s").stat().st_mode & 0o777 == 0o600


def test_a_link_in_its_place_is_not_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "elsewhere").write_bytes(b"mine")
    (tmp_path / "s").symlink_to(tmp_path / "elsewhere")
    run_secret._write(tmp_path / "s", b"x")
    assert (tmp_path / "elsewhere").read_bytes() == b"mine"
    (tmp_path / "s").unlink()
    (tmp_path / "s").symlink_to(tmp_path / "elsewhere")
    monkeypatch.setattr(run_secret, "_SEEN_AFTER", 0.0)
    with pytest.raises(RunError, match="storage that all machines share"):
        run_secret._read(tmp_path / "s", hashlib.sha256(b"mine").hexdigest())


def test_another_file_than_the_one_told_of_is_not_believed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "s").write_bytes(b"a stranger's")
    monkeypatch.setattr(run_secret, "_SEEN_AFTER", 0.1)
    with pytest.raises(RunError, match="does not see"):
        run_secret._read(tmp_path / "s", hashlib.sha256(b"ours").hexdigest())


def test_a_file_system_without_permissions_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.fstat
    open_to_all = lambda descriptor: os.stat_result([0o100777, *list(real(descriptor))[1:]])  # noqa: E731
    monkeypatch.setattr(os, "fstat", open_to_all)
    with pytest.raises(RunError, match=r"keeps no permissions(?s:.*)try: a run folder on another"):
        run_secret._write(tmp_path / "s", b"x")
