"""What is proven where: the table that ships, what a plan's techniques are, and proofs that are stored."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from phalanx.config import Plan, RunSpec
from phalanx.errors import RefusedError
from phalanx.hardware import proven
from phalanx.hardware.proven import Ground, missing_proof, shipped, ships_proven, store, stored, techniques
from phalanx.launch.proof_asked import refuse_unproven

pytestmark = pytest.mark.quick
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where a test's proofs stand."""
    return tmp_path / "proofs"


def ground(words: str = "dp", **how: str) -> Ground:
    given = {"kind": "cuda", "name": "NVIDIA H100", "backend": "nccl", "torch": "2.13.0+cu130", "phalanx": "0.1.0"}
    return Ground(**{**given, **how}, techniques=words)


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        ("single", "single"),
        ("dp=2", "dp"),
        ("dp=512", "dp"),
        ("dp=2 device=cpu", "dp"),
        ("micro=8", "micro"),
        ("fsdp=4", "fsdp"),
        ("fsdp=4 zero=2", "fsdp zero=2"),
        ("dp=2 tp=2 sequence=true", "dp tp sequence=true"),
        ("pp=2 micro=4 schedule=gpipe", "pp schedule=gpipe micro"),
        ("pp=2 split=layers.1", "pp split"),
        ("cp=2 attention=alltoall", "cp attention=alltoall"),
        ("dp=2 shares=3,1", "dp shares"),
        ("dp=2 shares=auto", "dp shares"),
        ("dp=2 compress=powersgd:4", "dp compress=powersgd"),
        ("dp=2 sync=diloco every=10 outer_lr=0.5", "dp sync=diloco every outer_lr"),
        ("dp=2 server=1 staleness=4", "dp server staleness"),
        ("precision=bf16 compile=true", "precision=bf16 compile=true"),
    ],
)
def test_techniques_are_the_keys_without_their_sizes(plan: str, words: str) -> None:
    assert sorted(techniques(Plan.parse(plan)).split()) == sorted(words.split())


def test_no_version_of_torch_is_claimed_but_those_the_suite_runs() -> None:
    pinned = re.search(r"^torch==(\d+\.\d+)\.", (ROOT / "constraints.txt").read_text(), flags=re.MULTILINE)
    assert pinned
    for row in shipped():
        assert row["torch"] == [pinned[1]]
        assert (ROOT / "docs" / "reference" / row["shown"]).is_file()
    assert ships_proven("cpu", f"{pinned[1]}.7+cpu")
    assert not ships_proven("cpu", f"{pinned[1]}1.0")
    assert not ships_proven("cuda", f"{pinned[1]}.0")


def test_a_kind_that_ships_proven_costs_no_look(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("device_name", "stored", "_phalanx_version", "_path"):
        monkeypatch.setattr(proven, name, None)
    assert missing_proof(Plan.parse("dp=2 tp=2"), "cpu") is None


def test_a_stored_proof_is_of_its_ground_alone(folder: Path) -> None:
    assert store(ground(), {"plan": "dp=2"}) == ""
    found = stored(ground())
    assert found is not None
    assert found["plan"] == "dp=2"
    other = {"kind": "xpu", "name": "NVIDIA H200", "backend": "gloo", "torch": "2.13.1+cu130", "phalanx": "0.2.0"}
    for name, value in other.items():
        assert stored(replace(ground(), **{name: value})) is None, name
    for words in ("dp tp", "tp", "dp precision=bf16", "fsdp"):
        assert stored(ground(words)) is None, words


@pytest.mark.parametrize(
    ("words", "alone"),
    [("dp", "single"), ("dp tp", "tp"), ("fsdp zero=1 precision=bf16", "precision=bf16"), ("dp fsdp", "single")],
)
def test_replicas_of_something_show_it_alone(folder: Path, words: str, alone: str) -> None:
    store(ground(words), {})
    assert stored(ground(alone)) is not None


@pytest.mark.parametrize(
    "damage",
    [
        b"",
        b"{",
        b"[]",
        b"{}",
        b'"of"',
        b"\xff\xfe",
        b'{"of": {"kind": "cuda"}}',
        b'{"of": 1, "of": 2}',
        b"[" * 10_000,
        b" " * 2**20,
    ],
)
def test_a_damaged_proof_is_none(folder: Path, damage: bytes) -> None:
    store(ground(), {})
    for path in folder.iterdir():
        path.write_bytes(damage)
    assert stored(ground()) is None
    assert store(ground(), {}) == ""
    assert stored(ground()) is not None


def test_a_proof_of_another_ground_under_its_name_is_none(folder: Path) -> None:
    store(ground(), {})
    for path in folder.iterdir():
        path.write_text(json.dumps({"of": asdict(ground("tp"))}))
    assert stored(ground()) is None


def test_a_folder_that_cannot_be_written_says_why(folder: Path) -> None:
    folder.write_text("a file")
    assert store(ground(), {})
    assert stored(ground()) is None


def test_a_worker_refuses_what_nothing_has_proven_there(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = RunSpec(job="a.py", plan=Plan(dp=4), folder=Path("run"))
    assert refuse_unproven(run, 4) == ""
    monkeypatch.setattr(proven, "torch_version", lambda: "9.1.0")
    with pytest.raises(RefusedError, match=r"dp=4 on cpu .* torch 9\.1\.0, where dp was never proven") as refused:
        refuse_unproven(run, 4)
    assert "unproven=True" in str(refused.value)
    assert refuse_unproven(replace(run, unproven=True), 4).startswith("not proven: dp on cpu")
    store(Ground.of(Plan(dp=2), "cpu"), {})
    assert refuse_unproven(run, 4) == ""
