"""Writes the tables of the reference that repeat what the code says, between their markers.

``python tools/generate.py`` rewrites the pages; ``tests/unit/test_docs.py`` fails where one is behind the code.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

import click

import phalanx
from phalanx.cli import main as cli
from phalanx.config import Job, Plan, RunSpec
from phalanx.config.fields import choices
from phalanx.config.run import NOT_IN_FILE
from phalanx.config.run_files import LAUNCH_FILES, RUN_FILES
from phalanx.device_kinds import all_kinds
from phalanx.events import SCHEMA, SCHEMA_VERSION
from phalanx.hardware import entry, names
from phalanx.hardware.catalog import HEADINGS, cells
from phalanx.placement.schedules import SCHEDULES

DOCS = Path(__file__).resolve().parents[1] / "docs"
CONVERSIONS = DOCS.parent / "tests" / "conversions"

# Plans of each kind → their description. Those of a row are equally exact.
KINDS: tuple[tuple[tuple[str, ...], str], ...] = (
    (("single",), "one device"),
    (("threads=2",), "data parallelism in one process: a thread and a replica for each device"),
    (("dp=4",), "synchronous data parallelism, four processes"),
    (("fsdp=4 zero=1",), "shards the optimizer state; `zero=2` also the gradients; `zero=3` also the parameters"),
    (("dp=2 fsdp=4",), "hybrid sharding: two replicas, each in four shards"),
    (("tp=2", "tp=2 sequence=true"), "tensor parallelism: splits layers' weights; with `sequence`, also activations"),
    (("pp=2 micro=4",), f"pipeline of two stages with micro-batches of 4 samples; {len(SCHEDULES)} schedules"),
    (("cp=2",), "context parallelism: splits each sample's tokens; ring, all-to-all or gathered attention"),
    (("ep=2",), "expert parallelism: splits the experts of a mixture"),
    (("dp=2 tp=2 pp=2",), "several of these together"),
    (("dp=4 shares=auto", "dp=2 shares=3,1"), "more samples for faster devices"),
    (("dp=4 server=1",), "synchronous parameter server"),
    (("dp=4 server=1 staleness=4",), "parameter server; a worker waits only if it is more than 4 updates ahead"),
    (("dp=4 server=1 backup=1",), "parameter server that does not wait for the slowest worker of a step"),
    (("dp=2 fsdp=4 sync=diloco every=100",), "DiLoCo: replicas synchronise every 100 steps; `sync=local` is local SGD"),
    (("dp=4 compress=fp16",), "sends gradients in half the bytes; also `bf16`"),
    (("dp=4 compress=int8",), "sends gradients in a quarter of the bytes, with error feedback"),
    (("dp=4 compress=powersgd:4",), "sends a low-rank part of each gradient; `topk`: the largest values"),
    (("micro=8",), "micro-batches of 8 samples, with gradient accumulation"),
    (("precision=bf16",), "autocast; parameters and sums stay fp32; also `fp16`"),
    (("recompute=full", "recompute=selective"), "activation checkpointing"),
    (("fsdp=2 offload=optimizer",), "keeps the optimizer state in host memory; also `parameters`"),
    (("compile=true",), "`torch.compile` for each block"),
)


def kinds_table() -> str:
    """Plans of each kind, and whether their steps are those of one device."""
    rows = ["| plan | is | exact |", "| --- | --- | --- |"]
    for texts, meaning in KINDS:
        rows.append(f"| {', '.join(f'`{text}`' for text in texts)} | {meaning} | {_exact(texts)} |")
    return "\n".join(rows)


def _exact(texts: tuple[str, ...]) -> str:
    made = Plan.parse(texts[0])
    if any(Plan.parse(text).exactness != made.exactness for text in texts):
        raise ValueError(f"a row of plans that are not equally exact: {', '.join(texts)}")
    return f"no: {made.bound}" if made.exactness == "no" else made.exactness


def attributes(cls: type) -> dict[str, str]:
    """Field → meaning, from the ``Attributes`` section of a docstring."""
    section = (inspect.getdoc(cls) or "").partition("Attributes:\n")[2]
    entries = re.findall(r"^ {4}(\w+): (.*(?:\n {8}.*)*)", section, flags=re.MULTILINE)
    return {name: _markdown(" ".join(text.split())) for name, text in entries}


def plan_table() -> str:
    """Every key of a plan with its default and values."""
    meanings = attributes(Plan)
    rows = ["| key | values | default | meaning |", "| --- | --- | --- | --- |"]
    for field in fields(Plan):
        words = ", ".join(f"`{word}`" for word in choices().get(field.name, ()))
        values = words or _values(str(field.type), field.name)
        rows.append(f"| `{field.name}` | {values} | {_default(field.default)} | {meanings[field.name]} |")
    return "\n".join(rows)


def run_table() -> str:
    """Every key of a run file."""
    meanings = attributes(RunSpec)
    rows = ["| key | default | meaning |", "| --- | --- | --- |"]
    for field in (field for field in fields(RunSpec) if field.name not in NOT_IN_FILE):
        rows.append(f"| `{field.name}` | {_default(field.default)} | {meanings[field.name]} |")
    return "\n".join(rows)


def run_files_table() -> str:
    """Return the table of everything in a run folder."""
    rows = ["| name | what it is | written | read by |", "| --- | --- | --- | --- |"]
    for name, file in RUN_FILES.items():
        shown = f"{name}{'' if '.' in name else '/'}"
        rows.append(f"| `{shown}` | {file.what} | {file.written} | {file.read} |")
    return "\n".join(rows)


def launch_files_table() -> str:
    """Everything in the folder of a launch."""
    rows = [f"| `{name.replace('*', '…')}` | {what} |" for name, what in LAUNCH_FILES.items()]
    return "\n".join(["| name | what it is |", "| --- | --- |", *rows])


def names_table() -> str:
    """Every name that ``import phalanx`` offers, in one line each."""
    rows = ["| name | |", "| --- | --- |"]
    for name in sorted(phalanx.__all__, key=str.lower):
        offered = getattr(phalanx, name)
        summary = (inspect.getdoc(offered) or "").partition("\n\n")[0]
        shown = name if isinstance(offered, type) else f"{name}{_arguments(offered)}"
        rows.append(f"| `px.{shown}` | {_markdown(' '.join(summary.split()))} |")
    return "\n".join(rows)


def _arguments(function: Callable[..., object]) -> str:
    """The names of a function's arguments, those with a default after ``=``."""
    stars = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    parameters = inspect.signature(function).parameters.values()
    return f"({', '.join(stars.get(one.kind, '') + one.name for one in parameters)})"  # pyrefly: ignore[no-matching-overload]


def job_table() -> str:
    """Every field of a job."""
    rows = ["| field | default | meaning |", "| --- | --- | --- |"]
    for field in fields(Job):
        empty = field.default is MISSING and field.default_factory is not MISSING
        rows.append(
            f"| `{field.name}` | {'none' if empty else _default(field.default)} | {attributes(Job)[field.name]} |"
        )
    return "\n".join(rows)


def event_tables() -> str:
    """Every event and its fields."""
    parts = [f"This is version {SCHEMA_VERSION} of the schema."]
    for event, columns in SCHEMA.items():
        rows = [f"## {event}", "", "| field | type | meaning |", "| --- | --- | --- |"]
        for name, (kind, meaning) in columns.items():
            kinds = kind if isinstance(kind, tuple) else (kind,)
            types = " or ".join("null" if each is type(None) else each.__name__ for each in kinds)
            rows.append(f"| `{name}` | {types} | {meaning} |")
        parts.append("\n".join(rows))
    return "\n\n".join(parts)


def device_kinds_table() -> str:
    """Every kind of device with what it can do."""
    heads = ("`device=`", "`auto`", "collectives", "devices of a run", "of a process", "forked", "streams")
    heads += ("pinned memory", "computes in", "widest sums", "fitted")
    rows = [f"| {' | '.join(heads)} |", "| --- |" + " --- |" * (len(heads) - 1)]
    for kind in all_kinds():
        words = (
            f"`{kind.name}`",
            "where there is nothing else" if kind.on_host else _yes(kind.automatic),
            f"`{kind.backend}`" if kind.most is None else "none",
            "any number" if kind.most is None else str(kind.most),
            "several" if kind.shared else "1",
            *map(_yes, (kind.forks, kind.streams, kind.pinned)),
            ", ".join(f"`{one}`" for one in kind.precisions),
            f"`{kind.widest()}`".replace("torch.", ""),
            _yes(kind.fitted),
        )
        rows.append(f"| {' | '.join(words)} |")
    return "\n".join(rows)


def _yes(fact: bool) -> str:
    return "yes" if fact else "no"


def cli_help() -> str:
    """The help text of every verb, as the terminal shows it at 80 columns."""
    parts = []
    root = click.Context(cli, info_name="phalanx", terminal_width=80)
    for name in cli.list_commands(root):
        command = cli.get_command(root, name)
        assert command is not None
        context = click.Context(command, info_name=name, parent=root, terminal_width=80)
        parts.append(f"## phalanx {name}\n\n```text\n{command.get_help(context)}\n```")
    return "\n\n".join(parts)


def catalog_table() -> str:
    """The catalog as a table in markdown, followed by the sources of each device."""
    lines = [f"| {' | '.join(HEADINGS)} |", f"| --- |{' ---: |' * (len(HEADINGS) - 1)}"]
    entries = [entry(name) for name in names()]
    lines += [f"| {' | '.join(cells(one).values())} |" for one in entries]
    lines += ["", "## Names and sources", "", "| device | also called | source of its figures | year |"]
    lines += ["| --- | --- | --- | --- |"]
    for one in entries:
        source = one.sources[0]
        aliases = ", ".join(f"`{alias}`" for alias in one.aliases)
        lines.append(f"| {one.device.name} | {aliases} | {source.document} | {source.year} |")
    return "\n".join(lines)


def conversion(name: str) -> str:
    """A script for another tool and the job that does the same, with their lines; both are run by a test."""
    files = dict(zip(("before.py", "after.py"), conversion_files(name), strict=True))
    rows = ["| | lines, without blank ones and comments |", "| --- | ---: |"]
    rows += [f"| `{title}` | {lines_of(path)} |" for title, path in files.items()]
    texts = [f'```python title="{title}"\n{path.read_text()}```' for title, path in files.items()]
    return "\n\n".join(["\n".join(rows), *texts])


def conversion_files(name: str) -> tuple[Path, Path]:
    """The script, and the job: one of its own, or the one that several scripts come to."""
    own = CONVERSIONS / name / "after.py"
    return CONVERSIONS / name / "before.py", own if own.exists() else CONVERSIONS / "digits_after.py"


def lines_of(path: Path) -> int:
    """Lines of a file that are neither blank nor a comment alone."""
    return sum(1 for line in path.read_text().splitlines() if line.strip() and not line.strip().startswith("#"))


# marker → page, table
TABLES: dict[str, tuple[str, Callable[[], str]]] = {
    "kinds": ("reference/plan.md", kinds_table),
    "plan": ("reference/plan.md", plan_table),
    "run": ("reference/run-folder.md", run_table),
    "run_files": ("reference/run-folder.md", run_files_table),
    "launch_files": ("reference/run-folder.md", launch_files_table),
    "events": ("reference/events.md", event_tables),
    "names": ("reference/python.md", names_table),
    "job": ("reference/python.md", job_table),
    "cli": ("reference/cli.md", cli_help),
    "devices": ("reference/devices.md", catalog_table),
    "device_kinds": ("reference/device-kinds.md", device_kinds_table),
    "from_ddp": ("how-to/from-ddp.md", lambda: conversion("from_ddp")),
    "from_accelerate": ("how-to/from-accelerate.md", lambda: conversion("from_accelerate")),
    "from_transformers_trainer": (
        "how-to/from-transformers-trainer.md",
        lambda: conversion("from_transformers_trainer"),
    ),
    "from_lightning": ("how-to/from-lightning.md", lambda: conversion("from_lightning")),
}


def page(name: str) -> tuple[Path, str]:
    """A page's path, and its text with the table as the code has it now."""
    path, table = DOCS / TABLES[name][0], TABLES[name][1]
    start, end = f"<!-- generated: {name} -->\n", "<!-- end -->"
    head, found, rest = path.read_text().partition(start)
    _, closed, tail = rest.partition(end)
    if not (found and closed):
        raise ValueError(f"{path} has no line {start.strip()!r} with a line {end!r} after it")
    return path, f"{head}{start}\n{table()}\n\n{end}{tail}"


def _values(kind: str, name: str) -> str:
    if name == "zero":
        return "`1`, `2`, `3`"
    if name == "shares":
        return "`auto`, or numbers, 1 or more, joined by commas"
    if name == "staleness":
        return "a number, 0 or more; `unbounded`"
    if name == "compress":
        return "`none`, `fp16`, `bf16`, `int8`, `powersgd`, `powersgd:4`, `topk`, `topk:0.01`"
    if name in ("outer_lr", "outer_momentum"):
        return "a number"
    if name in ("server", "after", "backup"):
        return "a number, 0 or more"
    if kind == "str":
        return "names of modules"
    return "`true`, `false`" if kind == "bool" else "a number, 1 or more"


def _default(value: Any) -> str:
    if value is MISSING:
        return "required"
    if value is None or callable(value):  # a function stands for what was not given
        return "not given"
    if value == "":
        return "empty"
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


def _markdown(text: str) -> str:
    return text.replace("``", "`").replace("|", "\\|")


def main() -> int:
    """Rewrite the pages that are behind the code."""
    for name in TABLES:
        path, text = page(name)
        if path.read_text() != text:
            path.write_text(text)
            print(f"wrote {path.relative_to(DOCS.parent)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
