"""Pages are what scripts write; pins/ lists what is installed, by hash; what grows with ranks keeps its laws."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import phalanx as px
import pins
import scale
from law_rows import in_one_test
from scale_costs import Cost
from scale_laws import LAWS, WORLDS, Law, broken

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


SEVERAL = """
import json, runpy, sys
from pathlib import Path
for script, *options in json.loads(sys.argv[1]):
    sys.path[:0] = [str(Path(script).parent), str(Path(script).parents[1] / "tools")]
    sys.argv = [script, *options]
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as ended:
        assert not ended.code, script
"""


def test_pages_are_what_their_scripts_write(tmp_path: Path) -> None:
    """All in one process: to import what they render with takes longer than to render."""
    pages = {page: tmp_path / page.replace("/", "-") for page in RENDERED}
    asked = [[str(ROOT / RENDERED[page][0]), *RENDERED[page][1:], str(into)] for page, into in pages.items()]
    done = subprocess.run(
        [sys.executable, "-c", SEVERAL, json.dumps(asked)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    behind = [page for page, into in pages.items() if (DOCS / page).read_text() != into.read_text()]
    assert behind == [], f"try: python {' '.join(RENDERED[behind[0]])} ..."


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


def test_timelines_are_drawn_from_the_orders_that_run() -> None:
    script = str(ROOT / "tools" / "timelines.py")
    code = f"import runpy, sys; sys.stdout.write(runpy.run_path({script!r})['drawn']())"
    drawn = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=100).stdout
    assert (ROOT / "docs" / "explanation" / "pipeline.svg").read_text() == drawn, "try: python tools/timelines.py"


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


SMALL = (WORLDS[0], 8 * WORLDS[0])


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.name)
def test_nothing_grows_faster_than_its_law(law: Law) -> None:
    assert broken(law, SMALL, [law.cost(world) for world in SMALL]) == []


@in_one_test("law", LAWS)
def test_what_grows_with_another_power_is_found(law: Law) -> None:
    faster = law.power + 0.5
    costs = [Cost(operations=int(1000 * (world / 1024) ** faster)) for world in SMALL]
    (said,) = broken(law, SMALL, costs)
    assert law.name in said
    assert broken(replace(law, power=faster), SMALL, costs) == []


def test_every_law_was_measured_and_is_on_the_page() -> None:
    store = json.loads(scale.RESULTS.read_text())
    assert store["laws"].keys() == {law.name for law in LAWS}
    for law in LAWS:
        costs = [Cost(**cost) for cost in store["laws"][law.name]]
        assert broken(law, WORLDS, costs) == []
    assert scale.page(scale.PAGE.read_text(), store) == scale.PAGE.read_text(), "try: python tools/scale.py --render"
