"""The glossary against the source: each technique is found by its file's name, each word has one home."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src" / "phalanx"
PAGE = (ROOT / "docs/reference/glossary.md").read_text()
TECHNIQUES, WORDS = (
    [[cell.strip() for cell in line.strip("|").split("|")] for line in part.splitlines() if line.startswith("| ")][2:]
    for part in PAGE.split("## ")[1:]
)
NOT_NAMES = """apart together across own told seen said heard known stated beside alone kept flight deal dealt dealing
foresight outlook foretell habits joined reach rest served desk servant keeper office part crew member child aside guard
sums holding statistics materialise tape sliced products shapes tiles how""".split()
"""Words that a file of this field is not looked for under."""

pytestmark = pytest.mark.quick


def home(cell: str) -> Path:
    return SOURCE / cell.strip("`")


@pytest.mark.parametrize(("name", "file"), [(row[0], row[-1]) for row in (*TECHNIQUES, *WORDS)])
def test_its_home_is_there(name: str, file: str) -> None:
    path = home(file)
    assert path.is_dir() if file.endswith("/`") else path.is_file(), f"{name}: no {file}"


@pytest.mark.parametrize(("name", "file"), [(row[0], row[-1]) for row in TECHNIQUES])
def test_a_technique_is_found_by_its_files_name(name: str, file: str) -> None:
    """A word of the technique, or its beginning, is in the file's name, its folder's where the folder is meant."""
    stem = re.sub(r"\W|_", "", home(file).stem)
    words = re.findall(r"[a-z0-9]+", name.lower().split(":")[0].replace("-", "").replace("gradient", "grad"))
    pairs = [first + second for first, second in pairwise(words)]
    assert any(word[:6] in stem for word in (*pairs, *words) if len(word) > 1), f"{name} in {file}"


def test_a_concept_stands_once() -> None:
    names = [row[0] for row in (*TECHNIQUES, *WORDS)]
    assert len(names) == len(set(names))
    assert len(TECHNIQUES) >= 24


def test_no_file_has_a_name_that_nobody_looks_for() -> None:
    stems = {path.stem: path for path in SOURCE.rglob("*.py")} | {path.name: path for path in SOURCE.rglob("*/")}
    assert {word: str(stems[word].relative_to(SOURCE)) for word in NOT_NAMES if word in stems} == {}
