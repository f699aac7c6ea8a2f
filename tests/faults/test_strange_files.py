"""Files that users or strangers hand in, mutated at random: one clear error or an answer, nothing run, nothing written.

What each verb reads is mutated (bytes, lines, values, keys, the kind of the file); see ``Mutation``. The seed is the
test's number: ``pytest tests/faults/test_strange_files.py -k "seed_7-"`` repeats one.
"""

from __future__ import annotations

import json
import os
import random
import re
import socket
import tomllib
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from click.testing import CliRunner

from law_rows import longer
from phalanx.cli import main
from phalanx.config import Plan, RunSpec
from phalanx.data import Ledger, MicroBatch, StepBatch
from phalanx.demo.jobs.gpt import gpt_job
from phalanx.errors import SpecError
from phalanx.events import SCHEMA_VERSION
from phalanx.hardware import cluster
from phalanx.launch.runfile import RunFolder
from phalanx.parallel.survey import survey
from phalanx.placement.survey_file import survey_to_dict

SEEDS = 5  # of ten mutations each
LONG_SEEDS = 200
PLAN = "fsdp=2 zero=2 micro=2"
NASTY: list[Any] = [
    *(None, True, -1, 0, 2**53, 2**63, -(2**70), 10**400, 1e308, "1e999", "NaN", "", "\x1b]0;owned\x07", "[/nope]"),
    *("\u202eevil\u2066", "<script>alert(1)</script>", "a" * 5000, "../../victim", "/etc/passwd", "dp=2 pp=3", "\x00"),
    *([], {}, [[]], [{}], {"a": {"b": []}}, ["x"] * 300, "dp=1000000000", "pp=2 micro=1", "single", 0.5, "\ud800"),
    *("stranger.py", "./stranger.py:job", "\n", "\r\x9b31m", "[[[[" * 400),
]
BYTES = [b"\x00", b"\xff\xfe", b"\x1b[2J", b"[" * 3000, b"{" * 3000, b"NaN", b"1e999", b"\n\n", b"=", b'"', b"]", b"-"]


class Stranger:
    """A folder as a stranger may send it: a run, and the files that other verbs read. Nothing in it is to be run."""

    def __init__(self, base: Path) -> None:
        self.base, self.run, self.victim = base, base / "run", base / "victim"
        self.run.mkdir(parents=True)
        self.victim.mkdir()
        (self.victim / "mine").write_text("mine")
        self.marker = base / "marker"
        job = f"open({str(self.marker)!r}, 'w').close()\nimport phalanx\ndef job(): return 1\n"
        for path in (self.run / "stranger.py", base / "stranger.py", self.run / "__init__.py"):
            path.write_text(job)
        plan = Plan.parse(PLAN)
        run = RunSpec(job=str(self.run / "stranger.py"), plan=plan, folder=self.run)
        (self.run / "run.toml").write_text(run.to_toml())
        (self.run / "plan.toml").write_text(plan.to_toml())
        (self.run / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events()))
        (self.run / "placement.json").write_text(json.dumps(placement()))
        (self.run / "forecast.json").write_text(json.dumps(forecast()))
        (self.run / "launch").mkdir()
        (self.run / "launch" / "ticket.json").write_text(
            '{"to": "ray:http://127.0.0.1:1", "job": "gpt-1", "mark": "0"}'
        )
        (self.run / "launch" / "output.log").write_text("printed\n")
        writer = {"number": 1, "identity": "0", "host": socket.gethostname(), "pid": os.getpid(), "since": 1.0}
        (self.run / "writer.json").write_text(json.dumps(writer))
        micro = MicroBatch(batch=None, ids=(0, 1, 2, 3), samples=4)
        with Ledger(self.run / "ledger", rank=0, first_step=0, world_size=1) as ledger:
            ledger.record(StepBatch(step=0, epoch=0, samples=4, parts=((micro,),)))
        (base / "cluster.toml").write_text(cluster("2xH100").to_toml())
        (base / "prices.toml").write_text('currency = "EUR"\n[per_hour]\nH100 = 2.5\n')
        (base / "config.json").write_text(json.dumps(CONFIG))

    @property
    def files(self) -> list[Path]:
        found = [*self.run.glob("*.toml"), *self.run.glob("*.json*"), *self.run.glob("l*/*")]
        return sorted([*found, *self.base.glob("*.toml"), *self.base.glob("*.json")])

    def untouched(self) -> bool:
        mine = {path.name: path.read_text() for path in self.victim.iterdir()}
        return mine == {"mine": "mine"} and not self.marker.exists()


CONFIG = {"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 2, "vocab_size": 64, "n_positions": 16}


def events() -> list[dict[str, Any]]:
    start: dict[str, Any] = {"event": "start", "time": 1.0, "schema": SCHEMA_VERSION, "job": "gpt", "plan": PLAN}
    start |= {"exact": "yes", "world_size": 2, "device": "cpu", "batch": 4, "samples": 8, "drop_last": False}
    start |= {"total_steps": 2, "first_step": 0, "parameters": 4992, "notes": ["a note"]}
    parts = {"parameters": 1, "gradients": 2, "optimizer": 3, "buffers": 4, "activations": 5}
    step = {"epoch": 0, "loss": 1.0, "count": 4.0, "samples": 4, "lr": 0.1, "grad_norm": 1.0, "skipped": False}
    actions = [["F", 0, 0, 0.0, 1.0], ["B", 0, 0, 1.0, 2.0]]
    return [
        start,
        {"event": "warning", "time": 1.0, "message": "careful"},
        *({"event": "step", "time": 2.0, "step": number, "seconds": 0.1, **step} for number in range(2)),
        {"event": "evaluate", "time": 3.0, "step": 2, "loss": 1.0, "samples": 4, "metrics": {"a": 1.0}, "seconds": 1.0},
        {"event": "checkpoint", "time": 3.0, "step": 2, "path": "checkpoints/step-00000002", "bytes": 1, "seconds": 1},
        *({"event": "memory", "time": 3.0, "rank": rank, "peak_bytes": 100, **parts} for rank in range(2)),
        {"event": "timeline", "time": 3.0, "rank": 0, "step": 1, "actions": actions},
        {"event": "shares", "time": 3.0, "step": 1, "shares": [2, 2], "seconds": []},
        {"event": "sync", "time": 3.0, "step": 1, "seconds": 1.0, "bytes": 5, "whole": 5, "loss": None},
        {"event": "traffic", "time": 3.0, "rank": 0, "sent": 5, "kept": 0, "whole": 9, "steps": 2},
        {"event": "update", "time": 3.0, "step": 1, "version": 1, "staleness": [0], "workers": [0], "dropped": 0},
        {"event": "worked", "time": 3.0, "rank": 0, "samples": 4, "pieces": 1, "seconds": 1.0},
        {"event": "timing", "time": 3.0, "passes": 0.1, "update": 0.01},
        {"event": "end", "time": 4.0, "step": 2, "samples": 8, "seconds": 1.0, "loss": 1.0},
    ]


def placement() -> dict[str, Any]:
    with __import__("torch").device("meta"):
        module = gpt_job(layers=1, width=8, heads=2, context=4, batch=4).model()
    return survey_to_dict(survey(module, Plan.parse(PLAN))[0].for_batch(4))


def forecast() -> dict[str, Any]:
    names = ("products", "attention", "memory", "recompute", "launches", "gradients", "update", "rest")
    parts = dict.fromkeys(("parameters", "gradients", "optimizer", "activations", "gathered"), 1.0)
    numbers = {"step": 1.0, "reserved": 1.0, "room": 2.0}
    return {"forecast": {**numbers, "seconds": dict.fromkeys(names, 0.1), "parts": parts, "notes": ["n"]}}


VERBS: list[list[str]] = [
    ["show", "run"],
    ["show", "run", "--json"],
    ["show", "run", "--svg", "run.svg"],
    ["audit", "run"],
    ["audit", "run", "--json"],
    *(["status", "run"], ["logs", "run", "--json"], ["stop", "run"]),
    ["train", "gone.py", "--run", "run"],
    ["train", "gone.py", "--run", "run", "--resume"],
    "forecast config.json --batch 8 --plan run/plan.toml --on cluster.toml --price prices.toml".split(),
    "forecast config.json --batch 8 --plan dp=2 --on 2xH100 --html page.html".split(),
]


def reading(name: str, seed: int) -> list[list[str]]:
    forecasts = name in ("plan.toml", "cluster.toml", "prices.toml", "config.json")
    those = [argv for argv in VERBS if (argv[0] == "forecast") == forecasts]
    return random.Random(seed).sample(those, 1 if forecasts else 3)


class Mutation:
    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def __call__(self, stranger: Stranger) -> str:
        path = self._random.choice(stranger.files)
        change = self._random.choice([self._bytes, self._bytes, self._values, self._values, self._values, self._kind])
        return f"{path.name}: {change(path, stranger)}"

    def _bytes(self, path: Path, stranger: Stranger) -> str:
        content = bytearray(path.read_bytes())
        for _ in range(self._random.choice([1, 1, 3, 20])):
            at = self._random.randrange(len(content) + 1)
            match self._random.randrange(4):
                case 0 if content:
                    content[min(at, len(content) - 1)] ^= 1 << self._random.randrange(8)
                case 1:
                    content[at:at] = self._random.choice(BYTES)
                case 2:
                    del content[at : at + self._random.randrange(1, 40)]
                case _:
                    lines = bytes(content).split(b"\n")
                    lines.insert(self._random.randrange(len(lines)), self._random.choice(lines))
                    content = bytearray(b"\n".join(lines))
        path.write_bytes(content)
        return "bytes"

    def _values(self, path: Path, stranger: Stranger) -> str:
        if path.suffix == ".toml":
            table = tomllib.loads(path.read_text())
            said = self._change(table)
            try:
                path.write_text(tomli_w.dumps(table))
            except (TypeError, ValueError):
                return self._bytes(path, stranger)
        elif path.suffix == ".json":
            table = json.loads(path.read_text())
            said = self._change(table)
            path.write_text(json.dumps(table))
        elif path.suffix == ".jsonl":
            lines = [json.loads(line) for line in path.read_text().splitlines()]
            said = ", ".join(self._change(self._random.choice(lines)) for _ in range(self._random.choice([1, 2, 5])))
            path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        else:
            return self._bytes(path, stranger)
        return said

    def _change(self, value: Any) -> str:
        where: list[str] = []
        while True:
            keys = list(value) if isinstance(value, dict) else list(range(len(value)))
            if not keys:
                return "nothing"
            key = self._random.choice(keys)
            where.append(str(key))
            if isinstance(value[key], dict | list) and value[key] and self._random.random() < 0.8:
                value = value[key]
                continue
            if self._random.random() < 0.2:
                del value[key]
                return f"{'.'.join(where)} taken away"
            value[key] = self._random.choice(NASTY)
            if isinstance(value, dict) and self._random.random() < 0.1:
                value[str(self._random.choice(NASTY))] = value.pop(key)
            return f"{'.'.join(where)} changed"

    def _kind(self, path: Path, stranger: Stranger) -> str:
        kind = self._random.choice(["empty", "folder", "fifo", "link", "link to a folder", "gone", "long", "ledger"])
        path.unlink()
        match kind:
            case "empty":
                path.touch()
            case "folder":
                path.mkdir()
            case "fifo":
                os.mkfifo(path)
            case "link":
                path.symlink_to(stranger.victim / "mine")
            case "link to a folder":
                path.symlink_to(stranger.victim)
            case "long":
                path.write_text("a" * 10_000_000)
            case "ledger":
                for left in (stranger.run / "ledger").iterdir():
                    left.unlink()
                (stranger.run / "ledger").rmdir()
                (stranger.run / "ledger").symlink_to(stranger.victim)
            case _:
                pass
        return kind


def judge(stranger: Stranger, argv: list[str], what: str) -> None:
    result = CliRunner().invoke(main, argv, env={"COLUMNS": "100"})
    told = f"{' '.join(argv)} with {what}\n{result.output}\n{result.exception!r}"
    assert result.exception is None or isinstance(result.exception, SystemExit), told
    assert result.exit_code in (0, 1, 2), told
    assert "Traceback" not in result.output, told
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]", result.output), told
    if result.exit_code == 2:
        assert result.stderr.startswith(("error", "refused", "Usage")), told
    assert stranger.untouched(), told


@pytest.mark.parametrize(
    "seed",
    [*(pytest.param(seed, id=f"seed_{seed}-") for seed in range(SEEDS)), *longer(*range(SEEDS, LONG_SEEDS))],
)
def test_mutated_files_give_an_answer_or_one_error(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(10):
        stranger = Stranger(tmp_path / str(number))
        monkeypatch.chdir(stranger.base)
        what = Mutation(10 * seed + number)(stranger)
        for argv in reading(what.partition(":")[0], 10 * seed + number):
            judge(stranger, argv, what)
        refused_or_taken(stranger, resume=number % 2 == 0)


def test_what_is_whole_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stranger = Stranger(tmp_path / "s")
    monkeypatch.chdir(stranger.base)
    codes = [CliRunner().invoke(main, argv, env={"COLUMNS": "100"}).exit_code for argv in VERBS]
    assert codes == [0, 0, 0, 0, 0, 0, 0, 2, 2, 2, 0, 0]
    shown = json.loads(CliRunner().invoke(main, ["show", "run", "--json"]).stdout)
    assert shown["holds"] is not None
    assert stranger.untouched()


def refused_or_taken(stranger: Stranger, resume: bool) -> None:
    run = RunSpec(job=str(stranger.base / "own.py"), plan=Plan(), folder=stranger.run, resume=resume)
    with suppress(SpecError), RunFolder(run) as entered:
        entered.prepare()
    assert stranger.untouched()
