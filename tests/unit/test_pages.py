"""Pages that scripts write are what the scripts write; pins/ lists what development and CI install, by hash."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import audit
import phalanx as px
import pins
from in_one_test import in_one_test

ROOT = Path(__file__).resolve().parents[2]


DOCS = ROOT / "docs"


# page → the script that writes it from what is stored, measuring nothing
RENDERED: dict[str, tuple[str, ...]] = {
    "reference/parity.md": ("tests/parity/write_page.py", "--render"),
    "reference/recommended.md": ("tests/recommended/write_recommended.py", "--render"),
    "reference/cases.md": ("tests/cases/run_grid.py", "--render", "cases"),
    "reference/zoo.md": ("tests/cases/run_grid.py", "--render", "zoo"),
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


@in_one_test("page", RENDERED)
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


PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


LISTED = {name: pins.entries((ROOT / "pins" / name).read_text()) for name in pins.HEADS}


TORCH = ["torch.txt", "torch-cpu.txt"]


PYTHONS = ["3.11.7", "3.12.1", "3.13.0", "3.14.0"]


def asked(*extras: str) -> Iterator[Requirement]:
    """What the project and its ``extras`` ask for, those that extras name in turn included."""
    texts = [*PROJECT["dependencies"], *(text for extra in extras for text in PROJECT["optional-dependencies"][extra])]
    for requirement in map(Requirement, texts):
        if requirement.name == PROJECT["name"]:
            yield from asked(*sorted(requirement.extras))
        else:
            yield requirement


def versions(requirement: Requirement, *files: str) -> list[str]:
    name = canonicalize_name(requirement.name)
    return [pins.version(block) for file in files for block in LISTED[file].get(name, [])]


class TestLists:
    @in_one_test(
        ("requirement", "files"),
        [*((one, ["dev.txt"] if one.name != "torch" else TORCH) for one in asked("dev"))]
        + [(Requirement(one), ["audit.txt"]) for one in PROJECT["optional-dependencies"]["audit"]]
        + [(Requirement(one), ["zoo.txt"]) for one in PROJECT["optional-dependencies"]["zoo"]],
    )
    def test_has_what_is_asked_for_within_its_bounds(self, requirement: Requirement, files: list[str]) -> None:
        assert (found := versions(requirement, *files)), "try: make pins"
        assert [one for one in found if one not in requirement.specifier] == [], "try: make pins"

    @in_one_test("file", LISTED)
    def test_every_entry_has_hashes(self, file: str) -> None:
        blocks = [block for found in LISTED[file].values() for block in found]
        assert blocks
        assert [block for block in blocks if not re.search(r" \\\n    --hash=sha256:[0-9a-f]{64}\b", block)] == []

    @in_one_test("file", LISTED)
    def test_nothing_stands_beside_the_entries(self, file: str) -> None:
        """No index, no link, no place of a machine: where packages come from is the installer's business."""
        strange = re.compile(r"^(?!#|[a-z0-9-]+==|    --hash=sha256:[0-9a-f]{64}( \\)?$|    # via )", re.MULTILINE)
        text = (ROOT / "pins" / file).read_text().rstrip("\n")
        assert strange.findall(text) == []
        assert not re.search(r"://|file:|/(tmp|home|opt)/", text)

    @in_one_test("python", PYTHONS)
    def test_each_python_has_one_version_of_each(self, python: str) -> None:
        here = {**default_environment(), "python_full_version": python, "python_version": python.rpartition(".")[0]}
        for name, blocks in LISTED["dev.txt"].items():
            serving = [Requirement(block.partition(" \\")[0]) for block in blocks]
            fitting = [one for one in serving if one.marker is None or one.marker.evaluate(here)]
            assert len(fitting) <= 1, name
            assert len(fitting) == 1 or "sys_platform" in blocks[0], name

    def test_only_its_own_files_have_torch_and_cuda(self) -> None:
        assert [list(LISTED[file]) for file in TORCH] == [["torch"], ["torch"]]
        cpu, registry = (versions(Requirement("torch"), file) for file in reversed(TORCH))
        assert cpu == [f"{registry[0]}+cpu"]
        for file in ("dev.txt", "audit.txt", "zoo.txt"):
            assert "torch" not in LISTED[file]
            assert [name for name in LISTED[file] if name.startswith(("nvidia", "cuda", "triton"))] == []

    def test_constraints_say_the_same(self) -> None:
        for line in (ROOT / "constraints.txt").read_text().splitlines():
            if not line.startswith("#"):
                requirement = Requirement(line)
                assert versions(requirement, "dev.txt", "torch.txt", "zoo.txt") == [str(requirement.specifier)[2:]], (
                    "try: make pins"
                )

    def test_the_libraries_of_the_zoo_ask_for_nothing(self) -> None:
        assert sorted(LISTED["zoo.txt"]) == sorted(
            Requirement(one).name for one in PROJECT["optional-dependencies"]["zoo"]
        )


class TestAudit:
    """pip-audit itself is stood in for: what it says is what it said where the service did not answer."""

    @staticmethod
    def say(monkeypatch: pytest.MonkeyPatch, out: object, complaint: str = "") -> None:
        def run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
            return subprocess.CompletedProcess(command, 1, out if isinstance(out, str) else json.dumps(out), complaint)

        monkeypatch.setattr(audit.subprocess, "run", run)

    @in_one_test(
        ("out", "complaint", "why"),
        [
            ("", "Traceback\nERROR: connection refused\n", "connection refused"),
            ({"dependencies": [{"name": "rich", "skip_reason": "not found"}]}, "", "1 of 1 left out: not found"),
        ],
    )
    def test_says_in_a_line_that_it_could_not_ask(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], out: object, complaint: str, why: str
    ) -> None:
        self.say(monkeypatch, out, complaint)
        assert audit.main() == 2
        shown = capsys.readouterr()
        assert shown.out == ""
        assert shown.err.count("\n") == 1
        assert why in shown.err
