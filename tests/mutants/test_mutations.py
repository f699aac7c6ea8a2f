"""The list of faults stays in step with the code: `make mutants` runs them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from mutant_checks import TESTS, check
from mutant_jobs import JOBS
from mutation import SOURCE
from run_mutants import ALL, KERNEL, Found, judged

from phalanx.config import Plan


def test_there_are_enough_and_each_has_a_name_of_its_own() -> None:
    assert len(ALL) >= 150
    assert len({one.fault for one in ALL}) == len(ALL)


def test_each_fault_applies_and_is_python(tmp_path: Path) -> None:
    gone = [f"{one.fault}: {one.file} must have this text exactly once:\n{one.old}" for one in ALL if not one.applies]
    assert not gone, "\n".join(gone)
    for number, one in enumerate(ALL):
        assert one.old != one.new, one.fault
        text = (SOURCE / one.file).read_text().replace(one.old, one.new)
        (tmp_path / f"m{number}.py").write_text(f"# {one.fault}\n{text}")
    names = [sys.executable, "-m", "ruff", "check", "--isolated", "--select", "F821", "--output-format", "full", "."]
    done = subprocess.run(names, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"names that are gone would be found, and not the fault:\n{done.stdout}"


def test_each_check_can_be_read(request: pytest.FixtureRequest) -> None:
    ids = [item.nodeid.lower() for item in request.session.items]
    whole = not request.config.option.file_or_dir and not request.config.option.keyword
    for words in sorted({words for one in ALL for words in one.checks}):
        kind, job, plan = [*words.split(" ", 2), ""][:3]
        if kind == "test":
            assert plan in (TESTS / job).read_text(), words
            assert not whole or any(one.startswith(f"tests/{job}::") and plan.lower() in one for one in ids), words
        else:
            assert job in JOBS, words
            Plan.parse(plan)


def test_text_that_cannot_run_is_no_find() -> None:
    assert [judged(Found("prove", words)).check for words in ("NameError: name 'a'", "KeyError: 3")] == ["", "prove"]


def test_the_page_has_each_fault_and_a_check_of_it() -> None:
    page = (SOURCE.parents[1] / "docs" / "project" / "mutants.md").read_text()
    assert f"\n{len(ALL)} of {len(ALL)} are found.\n" in page
    rows = [line.removeprefix("| ").split(" | ") for line in page.splitlines() if line.startswith("| ")][2:]
    assert [row[:2] for row in rows] == [[one.fault, f"`{one.file}`"] for one in ALL], "as make mutants writes it"
    assert [row for row, one in zip(rows, ALL, strict=True) if row[2].strip("`") not in one.checks] == []


def test_faults_lie_in_every_package() -> None:
    packages = {path.name for path in SOURCE.iterdir() if path.is_dir() and not path.name.startswith("_")} - {"demo"}
    assert packages - {one.file.partition("/")[0] for one in ALL} == set()


@pytest.mark.parametrize("words", KERNEL)
def test_the_check_finds_nothing_wrong(words: str) -> None:
    assert check(words) == ""
