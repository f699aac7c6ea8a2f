"""Pages: their commands and snippets, links, generated tables, the log, the glossary, and the keys of Accelerate.

A fenced ``console`` block holds commands after ``$``; a ``python`` block is run, or written to the file its ``title``
names (so is a ``toml`` block). A comment on the line before a block changes that: ``<!-- not run: reason -->`` leaves
it out, ``<!-- exit 2 -->`` says which exit code is right.

Every run of the tests runs all of README and the tutorials. On all other pages it parses each command and checks its
job, plan and options; ``make long`` runs those pages as well. Verbs that only these pages show are run by other tests.
"""

from __future__ import annotations

import importlib
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
from types import MappingProxyType
from typing import Any

import click
import pytest

from forked import Forked
from law_rows import longer
from phalanx.cli import main as cli
from phalanx.config import Plan, RunSpec
from phalanx.errors import PhalanxError

ROOT = Path(__file__).resolve().parents[2]
DOCS, SOURCE = ROOT / "docs", ROOT / "src" / "phalanx"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.rglob("*.md"))]
WHOLE = [PAGES[0], *sorted((DOCS / "tutorial").glob("*.md"))]
VERBS = {
    "bench": "distributed/test_cli_runs.py",
    "calibrate": "unit/test_machine.py",
    "checkpoint": "distributed/test_trained_model.py",
    "devices": "unit/test_cli_planner.py",
    "export": "distributed/test_trained_model.py",
    "scale": "unit/test_cli_planner.py",
    "sweep": "distributed/test_sweep.py",
    "worker": "faults/test_launch_worker.py",
}
"""Verbs that README and tutorials do not show, and the tests that run each by its command line."""
FENCE = re.compile(
    r"(?:^<!-- (?P<note>[^\n]*?) -->\n)?^```(?P<language>\w+)(?P<options>[^\n]*)\n(?P<text>.*?)^```$",
    flags=re.MULTILINE | re.DOTALL,
)
_PATIENCE = 200  # seconds for a command
LANGUAGES = {"console", "python", "toml", "text", "mermaid", "json"}


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


def shown(page: Path) -> list[str]:
    return [
        text for block in blocks(page) if not block.left_out and block.language == "console" for text in commands(block)
    ]


def verb(text: str) -> str:
    found = re.search(r"(?:^|\s)phalanx (\w+)", text)
    return found[1] if found else ""


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


def with_examples(folder: Path) -> Path:
    shutil.copytree(ROOT / "examples", folder / "examples", ignore=shutil.ignore_patterns("__pycache__"))
    return folder


def walked(page: Path, folder: Path, forked: Forked) -> str:
    """Run what the page shows in order, and return what goes wrong."""
    fresh = {"train"} if page.name == "README.md" else set[str]()
    for block in blocks(with_examples(folder) and page):
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


def looked_at(page: Path, folder: Path) -> Iterator[str]:
    """Compile what Python the page shows, parse its commands, and check their jobs, plans and options."""
    os.chdir(with_examples(folder))
    for block in blocks(page):
        if block.left_out:
            continue
        if block.language == "python":
            compile(block.text, f"{name_of(page)}:{block.line}", "exec")
        if block.title:
            (folder / block.title).write_text(block.text)
        elif block.language == "console" and block.exit_code == 0:
            for text in commands(block):
                words = shlex.split(text, comments=True)
                try:
                    if words[0] == "phalanx":
                        look_at_command(words[1], words[2:])
                    elif words[0] == "python" and words[1].endswith(".py"):
                        assert (folder / words[1]).exists(), "no such file"
                except (AssertionError, PhalanxError, click.ClickException, ImportError) as error:
                    yield f"{name_of(page)}:{block.line}: $ {text}\n{error}"


ONLY_HERE = ("worker", "status", "logs", "stop")  # their argument is a folder that an earlier command of the page makes


def look_at_command(name: str, words: list[str]) -> None:
    from phalanx.cli.settings import Given, settle
    from phalanx.hardware import cluster
    from phalanx.launch.jobfile import load_function, load_job, with_values
    from phalanx.launch.targets.find_target import find_target, settled_options
    from phalanx.parallel import check
    from phalanx.train.look_ahead import preview

    found = cli.get_command(click.Context(cli), name)
    assert found, f"no verb {name}"
    if isinstance(found, click.Group):
        name, words = words[0], words[1:]
        found = found.get_command(click.Context(found), name)
        assert found, f"no verb {name}"
    if name in ONLY_HERE:
        return
    context = found.make_context(name, words)
    given = context.params
    if given.get("to"):
        settled_options(find_target(given["to"]), context.args)
    else:
        assert not context.args, f"left over: {context.args}"
    reference = given.get("job") or given.get("what") or ""
    if not re.search(r"\.py(:\w+)?$", reference):
        return
    job = load_job(with_values(reference, dict(pair.split("=", 1) for pair in given.get("overrides") or ())))
    if given.get("against"):
        load_function(given["against"])
    plans = given.get("plan") or given.get("plans") or ()
    if "from_step" in given:
        kept = {"plan", "devices", "folder", "resume", "from_step", *(one.name for one in fields(RunSpec))} - {"job"}
        asked = Given.of(reference, {option: value for option, value in given.items() if option in kept})
        plans = settle(asked, None, job)[0].plan
    if given.get("on"):
        assert given["on"].endswith(".toml") or cluster(given["on"])
    elif not given.get("to") and name != "show":
        for plan in plans if isinstance(plans, tuple | list) else (plans,):
            assert not (problems := check(job, plan)), problems
            if plan.kind == "split":
                preview(job, plan)


@pytest.fixture(scope="module")
def forked() -> Iterator[Forked]:
    with closing(Forked(environment())) as process:
        yield process


RUN = [page for page in PAGES if has_something_to_run(page)]


def needs_keras(page: Path) -> bool:
    return "import keras" in page.read_text() and find_spec("keras") is None


@pytest.mark.timeout(400)
@pytest.mark.parametrize("page", [*WHOLE, *longer(*(page for page in RUN if page not in WHOLE))], ids=name_of)
def test_what_the_page_shows_runs(page: Path, forked: Forked, tmp_path: Path) -> None:
    if needs_keras(page):
        pytest.skip("Keras is not installed: pip install 'phalanx[keras]'")
    wrong = walked(page, tmp_path, forked)
    assert not wrong, wrong


def test_each_verb_that_pages_show_runs() -> None:
    run_here = {verb(text) for page in WHOLE for text in shown(page)} | VERBS.keys()
    assert {verb(text) for page in RUN for text in shown(page)} - {""} <= run_here
    tests = Path(__file__).parents[1]
    assert [one for one, file in VERBS.items() if f'"{one}"' not in (tests / file).read_text()] == []


@pytest.mark.timeout(400)
def test_commands_of_the_other_pages_are_parsed_and_their_jobs_and_plans_checked(
    forked: Forked, tmp_path: Path
) -> None:
    pages = [str(page) for page in RUN if page not in WHOLE and not needs_keras(page)]
    here = Path(__file__)
    code = f"""
import sys
from pathlib import Path
sys.path[:0] = [{str(here.parent)!r}, {str(here.parents[1])!r}]
from test_docs import looked_at
wrong = []
for number, page in enumerate({pages!r}):
    folder = Path({str(tmp_path)!r}) / str(number)
    folder.mkdir()
    wrong += looked_at(Path(page), folder)
print(*wrong, sep="\\n")
sys.exit(bool(wrong))
"""
    ended, told = forked.run(["-c", code], tmp_path, patience=2 * _PATIENCE)
    assert ended == 0, told


def test_blocks_and_links_can_be_read() -> None:
    wrong = list[str]()
    for page in PAGES:
        for block in blocks(page):
            where = f"{name_of(page)}:{block.line}"
            if block.language not in LANGUAGES:
                wrong.append(f"{where}: {block.language} is none of {', '.join(sorted(LANGUAGES))}")
            if block.language == "json":
                json.loads(block.text)
            if block.note.startswith("not run") and len(block.note) <= len("not run: "):
                wrong.append(f"{where}: no reason given")
            if block.language == "console" and not commands(block):
                wrong.append(f"{where}: a console block without a line '$ ...'")
        for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text()):
            if "://" not in target and not (page.parent / target).exists():
                wrong.append(f"{name_of(page)}: {target}")
    assert wrong == []


def test_generated_tables_are_those_of_the_code() -> None:
    """Made in a process of its own: click remembers a help option as the first test to call it had it."""
    script = str(ROOT / "tools" / "generate.py")
    code = f"""
import json, runpy
scope = runpy.run_path({script!r})
print(json.dumps({{table: scope["page"](table)[1] for table in scope["TABLES"]}}))
"""
    made = json.loads(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)
    scope: dict[str, Any] = runpy.run_path(script)
    behind = [table for table, text in made.items() if scope["page"](table)[0].read_text() != text]
    assert behind == [], "behind the code\n    try: python tools/generate.py"


def test_pages_name_every_key_of_a_plan_and_every_page() -> None:
    page = (DOCS / "reference" / "plan.md").read_text()
    assert [field.name for field in fields(Plan) if f"| `{field.name}` |" not in page] == []
    navigation = (ROOT / "mkdocs.yml").read_text()
    assert [str(page) for page in DOCS.rglob("*.md") if str(page.relative_to(DOCS)) not in navigation] == []


def test_commands_named_in_passing_exist() -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    verbs = set(cli.list_commands(click.Context(cli)))
    named = {(name_of(page), *found) for page in PAGES for found in NAMED.findall(page.read_text())}
    assert len(named) > 20
    assert [each for each in sorted(named) if each[2] not in (targets if each[1] == "make" else verbs)] == []


NAMED = re.compile(r"(?:^ {4}|^\$ |`)(make|phalanx) ([a-z]+)", flags=re.MULTILINE)


class TestGlossary:
    """Each technique is found by its file's name, each word has one home."""

    @pytest.fixture
    def tables(self) -> list[list[list[str]]]:
        """Rows of the techniques, and of the words."""
        parts = (DOCS / "reference" / "glossary.md").read_text().split("## ")[1:]
        lines = [[line for line in part.splitlines() if line.startswith("| ")] for part in parts]
        return [[[cell.strip() for cell in line.strip("|").split("|")] for line in part][2:] for part in lines]

    def test_each_home_is_there_and_each_name_once(self, tables: list[list[list[str]]]) -> None:
        rows = [row for table in tables for row in table]
        homes = {row[0]: row[-1].strip("`") for row in rows}
        assert [
            (name, home)
            for name, home in homes.items()
            if not ((SOURCE / home).is_dir() if home.endswith("/") else (SOURCE / home).is_file())
        ] == []
        assert len(rows) == len(homes)
        assert len(tables[0]) >= 24


class TestAccelerateConfig:
    """The page on Accelerate's config leaves no key of it out, and every plan on it is one."""

    PAGE = (DOCS / "how-to" / "from-accelerate-config.md").read_text()
    NEEDS = MappingProxyType({"attention": "cp=2", "offload": "fsdp=2"})  # key → what it goes with alone

    def test_every_plan_and_the_config_on_the_page_are_read(self, tmp_path: Path) -> None:
        names = "|".join(one.name for one in fields(Plan))
        plans = set(re.findall(rf"[`\"]((?:(?:{names})=\S+? ?)+)[`\"]", self.PAGE))
        assert len(plans) > 20
        for plan in plans:
            Plan.parse(f"{self.NEEDS.get(plan.partition('=')[0], '')} {plan}".strip())
        pytest.importorskip("accelerate")
        found = re.search(r'title="default_config.yaml"\n(.*?)```', self.PAGE, re.DOTALL)
        assert found
        (tmp_path / "default_config.yaml").write_text(found[1])
        args = importlib.import_module("accelerate.commands.config.config_args")
        config = args.load_config_from_file(str(tmp_path / "default_config.yaml"))
        assert (config.num_processes, config.distributed_type, config.mixed_precision) == (2, "FSDP", "bf16")
