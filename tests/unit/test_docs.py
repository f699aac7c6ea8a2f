"""Every command and every snippet that README and docs show is run, page by page, in the order shown.

A fenced ``console`` block holds commands after ``$``; a ``python`` block is run, or written to the file its ``title``
names (so is a ``toml`` block). A comment on the line before a block changes that: ``<!-- not run: reason -->`` leaves
it out, ``<!-- exit 2 -->`` says which exit code is right.

The first command of each verb in the README starts as a user's does, and so does its Python; the others are forked from
a process that has imported torch (``forked.py``).
"""

from __future__ import annotations

import json
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, fields
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click
import pytest

from forked import Forked
from phalanx.cli import main as cli
from phalanx.config import Plan

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(
    r"(?:^<!-- (?P<note>[^\n]*?) -->\n)?^```(?P<language>\w+)(?P<options>[^\n]*)\n(?P<text>.*?)^```$",
    flags=re.MULTILINE | re.DOTALL,
)
_PATIENCE = 200  # seconds for a command
LANGUAGES = {"console", "python", "toml", "text", "mermaid"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    """One fenced block: where it begins, and what its note, language and title say."""

    line: int
    note: str
    language: str
    title: str
    text: str

    @property
    def left_out(self) -> bool:
        return self.note.startswith("not run: ")

    @property
    def exit_code(self) -> int:
        return int(self.note.removeprefix("exit ")) if self.note.startswith("exit ") else 0


def blocks(page: Path) -> Iterator[Block]:
    text = page.read_text()
    for match in FENCE.finditer(text):
        title = re.search(r'title="([^"]+)"', match["options"])
        yield Block(
            line=text.count("\n", 0, match.start("language")) + 1,
            note=match["note"] or "",
            language=match["language"],
            title=title[1] if title else "",
            text=match["text"],
        )


def commands(block: Block) -> list[str]:
    """The commands of a console block, continuation lines joined."""
    joined = block.text.replace("\\\n", " ")
    return [line.removeprefix("$ ") for line in joined.splitlines() if line.startswith("$ ")]


def has_something_to_run(page: Path) -> bool:
    return any(block.language in ("console", "python") and not block.left_out for block in blocks(page))


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def environment() -> dict[str, str]:
    tools = Path(sys.executable).parent
    return {**os.environ, "PATH": f"{tools}{os.pathsep}{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}


def run(argv: list[str], folder: Path) -> tuple[int, str]:
    """Exit code and output of a command; one that does not end in time fails with 124, as ``timeout`` has it."""
    argv = ["timeout", str(_PATIENCE), *argv]
    done = subprocess.run(argv, cwd=folder, env=environment(), capture_output=True, text=True, check=False)
    return done.returncode, f"{done.stdout}{done.stderr}"


def command(text: str, folder: Path, forked: Forked, fresh: set[str]) -> tuple[int, str]:
    """Run a command of a console block; the first of each verb in ``fresh`` in an interpreter of its own."""
    words = shlex.split(text)
    if words[0] != "phalanx" or words[1] in fresh or re.search(r"[|&;<>$`]", text):
        fresh -= set(words[1:2])
        return run(["bash", "-c", text], folder)
    return forked.run(words[1:], folder, patience=_PATIENCE)


def walked(page: Path, folder: Path, forked: Forked) -> str:
    """What goes wrong when everything on the page is run in order; empty where nothing does."""
    shutil.copytree(ROOT / "examples", folder / "examples", ignore=shutil.ignore_patterns("__pycache__"))
    fresh = set(cli.list_commands(click.Context(cli))) if page.name == "README.md" else set()
    for block in blocks(page):
        if block.left_out:
            continue
        if block.title:
            (folder / block.title).write_text(block.text)
        elif block.language == "python":
            argv = ["-c", block.text]
            code, told = run([sys.executable, *argv], folder) if fresh else forked.run(argv, folder, patience=_PATIENCE)
            if code:
                return f"{name_of(page)}:{block.line}\n{block.text}\n{told}"
        elif block.language == "console":
            for text in commands(block):
                code, told = command(text, folder, forked, fresh)
                if code != block.exit_code:
                    return f"{name_of(page)}:{block.line}: exit {code}\n$ {text}\n{told}"
    return ""


@pytest.fixture(scope="module")
def forked() -> Iterator[Forked]:
    with closing(Forked(environment())) as process:
        yield process


@pytest.mark.timeout(400)
@pytest.mark.parametrize("page", [page for page in PAGES if has_something_to_run(page)], ids=name_of)
def test_what_the_page_shows_runs(page: Path, forked: Forked, tmp_path: Path) -> None:
    if "import keras" in page.read_text() and find_spec("keras") is None:
        pytest.skip("Keras is not installed: pip install 'phalanx[keras]'")
    wrong = walked(page, tmp_path, forked)
    assert not wrong, wrong


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_blocks_can_be_read(page: Path) -> None:
    for block in blocks(page):
        where = f"{name_of(page)}:{block.line}"
        assert block.language in LANGUAGES, f"{where}: {block.language} is none of {', '.join(sorted(LANGUAGES))}"
        assert not block.note.startswith("not run") or len(block.note) > len("not run: "), f"{where}: no reason given"
        assert block.language != "console" or commands(block), f"{where}: a console block without a line '$ ...'"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text()):
        assert "://" in target or (page.parent / target).exists(), f"{name_of(page)}: {target}"


GENERATE: dict[str, Any] = runpy.run_path(str(ROOT / "tools" / "generate.py"))


@pytest.fixture(scope="module")
def generated() -> dict[str, str]:
    """Table → page, from a process of its own: click remembers a help option as the first test to call it had it."""
    script = str(ROOT / "tools" / "generate.py")
    code = f"""
import json, runpy
scope = runpy.run_path({script!r})
print(json.dumps({{table: scope["page"](table)[1] for table in scope["TABLES"]}}))
"""
    return json.loads(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)


@pytest.mark.parametrize("table", sorted(GENERATE["TABLES"]))
def test_generated_tables_are_those_of_the_code(table: str, generated: dict[str, str]) -> None:
    path, _ = GENERATE["page"](table)
    assert path.read_text() == generated[table], "behind the code\n    try: python tools/generate.py"


def test_plan_page_names_every_key() -> None:
    page = (ROOT / "docs" / "reference" / "plan.md").read_text()
    assert [field.name for field in fields(Plan) if f"| `{field.name}` |" not in page] == []


def test_every_page_is_in_the_navigation() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text()
    pages = [str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md")]
    assert [page for page in pages if page not in navigation] == []


LOG = ROOT / "docs" / "project" / "log.md"
SAID = re.compile(
    r"\*\*When\*\* (\d{4}-\d\d-\d\d|not recorded) · \*\*machine\*\* (\S.*) · "
    r"\*\*command\*\* (.*`.+`.*|not recorded) · \*\*spread\*\* (\S.*)"
)


def entries() -> dict[str, str]:
    """Title of each entry of the log → its first paragraph, on one line."""
    parts = re.split(r"^## (.+)$", LOG.read_text(), flags=re.MULTILINE)[1:]
    return {
        title: " ".join(text.strip().split("\n\n")[0].split())
        for title, text in zip(parts[::2], parts[1::2], strict=True)
    }


@pytest.mark.parametrize("title", entries())
def test_log_entries_say_when_on_what_how_and_how_far_they_spread(title: str) -> None:
    assert SAID.fullmatch(entries()[title]), f"{title}: {entries()[title]}"


def test_log_entries_are_newest_first() -> None:
    said = (SAID.fullmatch(text) for text in entries().values())
    dates = [found[1] for found in said if found and found[1] != "not recorded"]
    assert dates == sorted(dates, reverse=True)
    assert len(dates) > 10


def test_commands_named_in_passing_exist() -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    verbs = set(cli.list_commands(click.Context(cli)))
    named = {(name_of(page), *found) for page in PAGES for found in NAMED.findall(page.read_text())}
    assert len(named) > 20
    assert [each for each in sorted(named) if each[2] not in (targets if each[1] == "make" else verbs)] == []


NAMED = re.compile(r"(?:^ {4}|^\$ |`)(make|phalanx) ([a-z]+)", flags=re.MULTILINE)
