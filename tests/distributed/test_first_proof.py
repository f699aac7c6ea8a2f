"""Where nothing has proven a plan's techniques, its first run does: once, and it goes on only where it is equal."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import phalanx as px
import small
from phalanx import verify
from phalanx.errors import RefusedError
from phalanx.events import read
from phalanx.hardware import proven


@pytest.fixture(autouse=True)
def _own_proofs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proven, "_folder", lambda: tmp_path / "proofs")


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The plans that a proof was made of, on a version of torch that nobody has tried."""
    plans: list[str] = []
    own = verify.prove

    def counted(job: px.Job, plan: px.Plan, **how: Any) -> Any:
        plans.append(str(plan))
        return own(job, plan, **how)

    monkeypatch.setattr(verify, "prove", counted)
    another_torch(monkeypatch)
    return plans


def another_torch(monkeypatch: pytest.MonkeyPatch, version: str = "9.1.0") -> None:
    monkeypatch.setattr(proven, "torch_version", lambda: version)


def fit(plan: str, folder: str, **how: Any) -> px.Run:
    return px.fit(small.job(steps=2, epochs=None), plan, folder=folder, forecast="none", **how)


def test_a_proven_kind_is_asked_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify, "prove", None)
    monkeypatch.setattr(proven, "store", None)
    fit("dp=2", "run")


def test_once_for_all_sizes_of_the_same_techniques(asked: list[str], caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "phalanx"):
        run = fit("dp=2", "first")
    lines = [one.getMessage() for one in caplog.records]
    assert len([line for line in lines if "was never proven" in line and "torch 9.1.0" in line]) == 1, lines
    assert asked == ["dp=2"]
    assert len(run.losses) == 2
    fit("dp=3", "second")
    fit("single", "third")  # replicas of something show that something alone
    assert asked == ["dp=2"]
    fit("fsdp=2", "fourth")
    assert asked == ["dp=2", "fsdp=2"]
