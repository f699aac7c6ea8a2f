"""Errors say what to write where the user writes: arguments in Python, options on the command line."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

import phalanx
from phalanx.cli.bench import command as bench
from phalanx.cli.export import command as export
from phalanx.cli.forecast import command as forecast
from phalanx.cli.output import show_error
from phalanx.cli.prove import command as prove
from phalanx.cli.train import command as train
from phalanx.errors import LossError, PhalanxError, SpecError

SOURCES = Path(phalanx.__file__).parent
OF_COMMANDS = (  # what these say is said by commands alone
    *("train/batch_scaling.py", "launch/jobfile.py"),
    *("planner/nearest_fit.py", "planner/question.py", "planner/rank.py", "planner/advise.py"),
    *("launch/targets/", "launch/check_hosts/", "preflight/launch_check.py"),  # no call launches elsewhere
    *("launch/unshared_folder.py", "config/run_files.py"),  # of hosts by SSH, and of a page
)
OPTIONS = [
    name
    for command in (train, prove, bench, forecast, export)
    for one in command.params
    if isinstance(one, click.Option)
    for name in one.opts
    if name.startswith("--")
]
OPTION = re.compile(rf"(?<![\w-])(?:{'|'.join(OPTIONS)})(?![\w-])")
NO_SUCH_CALL = re.compile(r"(?<![\w.])job\(\w+=")


def said() -> Iterator[tuple[str, str]]:
    """What the code that trains may say: file and text, docstrings left out."""
    for folder in (
        "config",
        "data",
        "comm",
        "files",
        "checkpoint",
        "launch",
        "parallel",
        "train",
        "preflight",
        "placement",
        "planner",
        "verify",
    ):
        for path in sorted((SOURCES / folder).rglob("*.py")):
            if "chaos" in path.parts:  # which runs the command line
                continue
            tree = ast.parse(path.read_text())
            alone = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
            for node in ast.walk(tree):
                if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in alone:
                    yield str(path.relative_to(SOURCES)), node.value


def test_a_run_says_nothing_in_the_words_of_the_command_line() -> None:
    wrong = [
        (path, text)
        for path, text in said()
        if OPTION.search(text) and text.strip() not in OPTIONS and "phalanx " not in text
    ]
    assert [one for one in wrong if not one[0].startswith(OF_COMMANDS)] == []


def test_no_call_is_advised_that_there_is_not() -> None:
    assert [(path, text) for path, text in said() if NO_SUCH_CALL.search(text)] == []


@pytest.mark.parametrize(
    ("error", "shown"),
    [
        (SpecError.of("run.folder", "a", "b", "resume=True"), "try: --resume\n"),
        (SpecError.of("run.folder", "a", "b", 'folder="runs/my run-1"'), "try: --run 'runs/my run-1'\n"),
        (SpecError.of("run.folder", "a", "b", 'folder="r-2", or wait for it'), "try: --run r-2, or wait for it\n"),
        (SpecError.of("run.from_step", "a", "b", "resume=True, from_step=4"), "try: --resume --from 4\n"),
        (SpecError.of("run.folder", "a", "b", 'resume="auto", which begins'), "try: --resume auto, which begins\n"),
        (SpecError.of("plan", "a", "b", 'plan="dp=2 fsdp=4"'), 'try: --plan "dp=2 fsdp=4"\n'),
        (SpecError.of("plan", "a", "b", 'cluster="8xA100-80GB"'), "try: --on 8xA100-80GB\n"),
        (
            SpecError.of("cluster", "8xA100", "b", "batch=8"),
            "--on: given 8xA100; allowed: b\n    try: --batch 8\n",
        ),
        (
            SpecError.of("dropout", "dropout=True together with against=loop", "b", 'dropout=True, plan="dp=2"'),
            "--dropout: given --dropout together with --against FILE:FUNCTION; allowed: b\n"
            '    try: --dropout --plan "dp=2"\n',
        ),
        (SpecError.of("hosts", "0", "b", "Hosts(2)"), "try: --hosts 2\n"),
        (SpecError.of("factor", "0", "b", "hosts.throttle(1, 4)"), "try: --slow 1:4x\n"),
        (SpecError.of("plan", "a", "b", 'forecast="anyway"'), "try: --anyway\n"),
        (SpecError.of("plan", "a", "b", "see more; unproven=True trains"), "try: see more; --unproven trains\n"),
        (SpecError.of("plan", "a", "b", 'plan="micro=8 dp=2"'), 'try: --plan "micro=8 dp=2"\n'),
        (SpecError.of("run", "a", "b", 'px.RunSpec(folder="a")'), 'try: px.RunSpec(folder="a")\n'),
        (LossError('a\n    try: resume=True, on_spike="skip"; or b'), "try: --resume --on-spike skip; or b\n"),
        (
            LossError('resume=True\n\nwhat to do: alone: plan="single"'),
            "resume=True\n\nwhat to do: alone: --plan single\n",
        ),
    ],
)
def test_the_command_line_says_it_in_options(
    error: PhalanxError, shown: str, capsys: pytest.CaptureFixture[str]
) -> None:
    show_error(error, as_json=False)
    assert capsys.readouterr().err.endswith(shown)
