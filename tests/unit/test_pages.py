"""Pages that scripts write are what the scripts write: each is rendered from what was stored of its measurement."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

import phalanx as px

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"

# page → the script that writes it from what is stored, measuring nothing
RENDERED: dict[str, tuple[str, ...]] = {
    "reference/parity.md": ("tests/parity/write_page.py", "--render"),
    "reference/recommended.md": ("tests/recommended/write_recommended.py", "--render"),
    "reference/cases.md": ("tests/cases/run_cases.py", "--render"),
    "reference/zoo.md": ("tests/zoo/run_zoo.py", "--render"),
    "project/quality.md": ("bench/quality.py", "--render", "--page"),
    "project/staleness.md": ("bench/staleness.py", "--render", "--page"),
    "reference/resumed.md": ("tests/parity/write_resumed.py", "--render"),
    "reference/chaos.md": ("bench/chaos_kills.py", "--render", "--page"),
}


def rendered(page: str, into: Path) -> str:
    script, *options = RENDERED[page]
    argv = [sys.executable, str(ROOT / script), *options, str(into)]
    subprocess.run(argv, check=True, capture_output=True, text=True, timeout=100)
    return into.read_text()


@pytest.mark.parametrize("page", RENDERED)
def test_pages_are_what_their_scripts_write(page: str, tmp_path: Path) -> None:
    assert (DOCS / page).read_text() == rendered(page, tmp_path / Path(page).name), (
        f"try: python {' '.join(RENDERED[page])} ..."
    )


@pytest.mark.parametrize("page", RENDERED)
def test_every_row_has_as_many_cells_as_its_heading(page: str) -> None:
    heading = 0
    for line in (DOCS / page).read_text().splitlines():
        if not line.startswith("|"):
            heading = 0
            continue
        cells = len(re.findall(r"(?<!\\)\|", line)) - 1
        heading = heading or cells
        assert cells == heading, line


def test_every_how_to_page_is_found_from_where_readers_begin() -> None:
    begin = (ROOT / "README.md").read_text() + (DOCS / "index.md").read_text()
    lost = [page.name for page in sorted((DOCS / "how-to").glob("*.md")) if f"how-to/{page.name})" not in begin]
    assert lost == [], "linked from neither README.md nor docs/index.md"


def test_timelines_are_drawn_from_the_orders_that_run() -> None:
    script = str(ROOT / "tools" / "timelines.py")
    code = f"import runpy, sys; sys.stdout.write(runpy.run_path({script!r})['drawn']())"
    drawn = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=100).stdout
    assert (ROOT / "docs" / "explanation" / "pipeline.svg").read_text() == drawn, "try: python tools/timelines.py"


def test_the_readme_states_the_accuracy_that_was_measured() -> None:
    rows = (DOCS / "project" / "accuracy-here.md").read_text().splitlines()
    (every,) = [line for line in rows if line.startswith("| all |")]
    _, _, plans, error, _, _, inside, *_ = (cell.strip() for cell in every.split("|"))
    told = (
        f"{error.removesuffix('%')} % off in the median of {plans} plans, {inside.removesuffix('%')} % of them within"
    )
    assert told in re.sub(r"\s+", " ", (ROOT / "README.md").read_text())


def test_the_readme_states_the_parity_that_was_measured() -> None:
    found = re.search(r"Of the others (\d+) of (\d+) are equal", (DOCS / "reference" / "parity.md").read_text())
    assert found
    assert found[1] == found[2]
    assert f"all {found[1]} combinations of a plan and a model that can run" in (ROOT / "README.md").read_text()


def test_the_readme_is_short_and_has_a_place_for_the_gpu_record() -> None:
    lines = (ROOT / "README.md").read_text().splitlines()
    assert len(lines) <= 200
    assert lines.index("<!-- generated: gpu -->") < lines.index("<!-- end -->")


def test_the_python_reference_has_every_public_name() -> None:
    page = (DOCS / "reference/python.md").read_text()
    told = re.findall(r"^::: (\S+)", page, re.MULTILINE)
    missing = [
        name
        for name in px.__all__
        if not any(one.endswith(f".{name}") or one == getattr(px, name).__module__ for one in told)
    ]
    assert missing == []
    for one in told:
        module, _, name = one.rpartition(".")
        assert _is_module(one) or hasattr(importlib.import_module(module), name), one


def _is_module(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False
