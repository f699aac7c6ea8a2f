"""``phalanx show``: a plan drawn as text, as SVG and as JSON, of a job and of a run folder."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from rich.console import Console

from law_rows import in_one_test
from phalanx.cli import main
from phalanx.config import Plan
from phalanx.demo.jobs.gpt import gpt_job
from phalanx.placement.ownership import TensorPiece
from phalanx.placement.schedules import Action, Timed
from phalanx.placement.survey_file import survey_from_dict, survey_to_dict
from phalanx.report.drawing import Timeline, lines
from phalanx.report.show import Shown, described, of_job
from phalanx.report.show_output import grouped, runs, shown_text

GPT = str(Path(__file__).resolve().parents[2] / "examples" / "gpt.py")


def invoke(*argv: str) -> Result:
    return CliRunner().invoke(main, ["show", *argv], env={"COLUMNS": "100"})


def tiny(plan: str, **how: Any) -> Shown:
    return of_job(gpt_job(layers=4, width=32, heads=4, context=12, batch=16, **how), Plan.parse(plan))


def printed(shown: Shown, width: int = 100) -> str:
    console = Console(width=width, color_system=None)
    with console.capture() as capture:
        console.print(shown_text(shown, width), highlight=False)
    return capture.get()


class TestNames:
    def test_those_that_differ_by_numbers_are_one(self) -> None:
        names = ["head", *(f"blocks.{i}.{end}" for i in range(3) for end in ("up", "down"))]
        assert grouped(dict.fromkeys(names, 0)) == [
            ("head", ["head"]),
            ("blocks.{0..2}.up", [f"blocks.{i}.up" for i in range(3)]),
            ("blocks.{0..2}.down", [f"blocks.{i}.down" for i in range(3)]),
        ]

    def test_ranks(self) -> None:
        assert runs([3, 0, 1, 2, 8]) == "0-3, 8"
        assert runs(range(0, 20, 2)) == "0, 2, 4, ..., 18"


class TestParts:
    @in_one_test(
        ("shape", "dim", "kept", "words"),
        [
            ((8, 4), 0, ((0, 8),), "whole"),
            ((8, 4), 0, ((2, 4),), "rows 2:4"),
            ((8, 4), 1, ((0, 1), (2, 3)), "columns 0:1 2:3"),
            ((8,), 0, ((4, 8),), "4:8"),
            ((8, 4, 2), 0, ((0, 4),), "0:4 of dimension 0"),
            ((8, 4), 0, (), "nothing"),
            ((8, 4), 0, ((0, 1), (2, 3), (4, 5), (6, 7)), "rows 0:1 2:3 ... 6:7"),
        ],
    )
    def test_in_words(self, shape: tuple[int, ...], dim: int, kept: Any, words: str) -> None:
        assert described(TensorPiece.whole(shape).part(dim, kept), shape) == words


class TestTimeline:
    def test_every_action_is_drawn_where_it_happens(self) -> None:
        one = Timeline(
            title="",
            actions=(
                Timed(0, Action("F", 0, 0), 1, 2),
                Timed(1, Action("F", 1, 0), 2, 3),
                Timed(0, Action("B", 0, 0), 4, 6),
            ),
            ranks=(0, 4),
        )
        assert [line.plain for line in lines(one, 17)] == ["rank 0 F0····B0──", "rank 4 ··F0······"]
        assert one.idle == pytest.approx(1 - 4 / 10)


class TestText:
    def test_says_who_holds_what(self) -> None:
        said = printed(tiny("pp=2 tp=2 micro=4"))
        assert re.search(r"blocks\.\{0\.\.1\}\.up\.weight +128x32 +rows 0:64 +0 ", said), said
        assert re.search(r"^ +rows 64:128 +1 ", said, re.MULTILINE), said
        assert re.search(r"^ 1 +2-3 +blocks\.\{2\.\.3\}, norm, head +\S+ k +\d+%", said, re.MULTILINE), said
        assert "kept whole: position.weight" in said
        assert "planned: 1f1b, 4 micro-batches" in said
        assert re.search(r"^rank 2 ·+F0", said, re.MULTILINE), said

    @in_one_test("plan", ["dp=16", "pp=2 schedule=interleaved micro=1", "fsdp=16"])
    def test_fits_the_terminal(self, plan: str) -> None:
        shown = tiny(plan)
        for width in (60, 80, 140):
            drawn = [line for line in printed(shown, width).splitlines() if not line.startswith(("┌", "│", "└"))]
            assert max(map(len, drawn)) <= width


class TestJob:
    def test_everything_as_json(self) -> None:
        result = invoke(GPT, "--plan", "pp=2 tp=2 micro=8", "--json")
        assert result.exit_code == 0, result.stderr
        answer = json.loads(result.stdout)
        assert [rank["at"]["pp"] for rank in answer["ranks"]] == [0, 0, 1, 1]
        assert [rank["holds"] for rank in answer["ranks"]] == [0, 1, 2, 3]
        held = {one["name"]: one for one in answer["holds"][1]}
        assert held["token.weight"]["parameter"] == {"shape": [128, 128], "ranges": [[[128, 256]], [[0, 128]]]}
        assert held["token.weight"]["cut_over"] == ["tp"]
        assert sum(stage["cost_share"] for stage in answer["stages"]) == pytest.approx(1)
        assert answer["whole"] == ["position.weight"]
        assert {one["kind"] for one in answer["planned"]["actions"]} == {"F", "B"}
        assert 0 < answer["planned"]["idle_even"] < answer["planned"]["idle"] < 1
        assert answer["measured"] is None

    def test_picture_and_text(self, tmp_path: Path) -> None:
        result = invoke(GPT, "-n", "2", "--svg", "plan.svg")
        assert result.exit_code == 0, result.stderr
        assert result.stderr == "wrote plan.svg\n"
        assert "gpt under dp=2" in result.stdout
        text = (tmp_path / "plan.svg").read_text()
        assert ET.fromstring(text).tag == "{http://www.w3.org/2000/svg}svg"
        assert not re.search(r"href|url\((?!#)|<image|<script|@import|@font-face", text)
        assert "whole&#160;model" in text


class TestWrongUse:
    @in_one_test(
        ("argv", "words"),
        [
            (["runs/none"], "runs/none, which does not exist"),
            (["."], "a folder that holds no run"),
            ([GPT, "--plan", "dp=2", "-n", "3"], "try: -n 2"),
            ([GPT, "--plan", "pp=40"], "40 stages"),
            ([GPT, "--plan", "dp=64"], "64 replicas for a global batch of 32"),
            ([GPT, "--svg", "none/plan.svg"], "none/plan.svg: No such file or directory"),
        ],
    )
    def test_is_one_error(self, argv: list[str], words: str) -> None:
        result = invoke(*argv)
        assert result.exit_code == 2, result.output
        assert words in result.stderr
        assert result.stdout == ""


def write(folder: Path, *more: dict[str, Any], job: str = GPT) -> None:
    """A run folder of a pipeline over two ranks."""
    start: dict[str, Any] = {"event": "start", "time": 1.0, "schema": "1.2", "job": "gpt", "plan": "pp=2 micro=16"}
    start |= {"world_size": 2, "device": "cpu", "batch": 32, "samples": 64, "drop_last": False, "total_steps": 2}
    start |= {"first_step": 0, "parameters": 469_760, "notes": []}
    parts = {"parameters": 1, "gradients": 2**20, "optimizer": 3, "buffers": 4, "activations": 5}
    events = [start]
    for rank in range(2):
        memory: dict[str, Any] = {"event": "memory", "time": 2.0, "rank": rank, "peak_bytes": 2**21}
        events.append({**memory, **parts})
    (folder / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in [*events, *more]))
    (folder / "run.toml").write_text(f'job = "{job}"\nplan = "pp=2 micro=16"\nfolder = "{folder}"\n')


MEASURED = [
    [["F", 0, 0, 0.0, 1.0], ["F", 0, 1, 1.0, 2.0], ["B", 0, 0, 5.0, 7.0], ["B", 0, 1, 8.0, 10.0]],
    [["F", 1, 0, 1.5, 2.5], ["B", 1, 0, 2.5, 4.5], ["F", 1, 1, 4.5, 5.5], ["B", 1, 1, 5.5, 7.5]],
]
TIMELINE = [
    {"event": "timeline", "time": 2.0, "rank": rank, "step": 1, "actions": actions}
    for rank, actions in enumerate(MEASURED)
]


class TestRun:
    def test_measured_beside_planned(self, tmp_path: Path) -> None:
        write(tmp_path, *TIMELINE)
        result = invoke(str(tmp_path), "--job", GPT)
        assert result.exit_code == 0, result.stderr
        assert "measured: step 1, 10 s: 40% idle, 33% if messages took no time" in result.stdout
        assert re.search(r"planned: 1f1b, 2 micro-batches: \d+% idle, 33% if all stages cost the same", result.stdout)
        assert re.search(r"^ 0( to 1)? .*1\.0 MiB", result.stdout, re.MULTILINE)
        answer = json.loads(invoke(str(tmp_path), "--job", GPT, "--json").stdout)
        assert answer["measured"]["timeline"]["idle"] == pytest.approx(0.4)
        assert answer["measured"]["idle_without_messages"] == pytest.approx(1 / 3)
        assert answer["measured"]["memory"][1]["gradients"] == 2**20
        assert answer["missing"] == []

    def test_who_holds_what_is_drawn_from_what_the_run_stored(self, tmp_path: Path) -> None:
        write(tmp_path, *TIMELINE)
        model = gpt_job(batch=32)
        stored = of_job(model, Plan.parse("pp=2 micro=16")).survey
        assert stored is not None
        written = json.loads(json.dumps(survey_to_dict(stored)))
        written["parameters"][0]["name"] = "written.by.the.run"
        written["stages"][0]["parameters"][0] = "written.by.the.run"
        (tmp_path / "placement.json").write_text(json.dumps(written))
        answer = json.loads(invoke(str(tmp_path), "--json").stdout)
        assert answer["holds"][0][0]["name"] == "written.by.the.run"

    def test_what_is_stored_comes_back_as_it_was(self) -> None:
        for plan in ("fsdp=4 zero=3", "tp=2 pp=2 micro=2", "dp=2 fsdp=2 zero=1 micro=2"):
            survey = tiny(plan).survey
            assert survey is not None
            assert survey_from_dict(json.loads(json.dumps(survey_to_dict(survey)))) == survey

    def test_without_what_is_stored_the_rest_is_shown(self, tmp_path: Path) -> None:
        write(tmp_path, *TIMELINE)
        result = invoke(str(tmp_path))
        assert result.exit_code == 0, result.stderr
        said = re.sub(r"\s+", " ", result.stdout)
        assert f"has not stored it: phalanx show {tmp_path} --job JOB draws it" in said
        assert "idle 33% if all stages cost the same" in result.stdout
        assert json.loads(invoke(str(tmp_path), "--json").stdout)["holds"] is None

    def test_a_job_that_has_changed(self, tmp_path: Path) -> None:
        write(tmp_path)
        text = (tmp_path / "events.jsonl").read_text()
        (tmp_path / "events.jsonl").write_text(text.replace("469760", "7"))
        assert "469760 parameters now, 7 then" in invoke(str(tmp_path), "--job", GPT).stdout

    @pytest.mark.parametrize("named", ["stranger.py", "__init__.py"])
    def test_nothing_in_the_folder_is_run(self, tmp_path: Path, named: str, monkeypatch: pytest.MonkeyPatch) -> None:
        run, marker = tmp_path / "stranger", tmp_path / "marker"
        run.mkdir()
        (run / named).write_text(f"open({str(marker)!r}, 'w').close()\ndef job(): pass\n")
        write(run, *TIMELINE, job=str(run / "stranger.py"))
        monkeypatch.chdir(tmp_path)
        for argv in (["stranger"], ["stranger", "--json"], ["stranger", "--svg", "plan.svg"]):
            assert invoke(*argv).exit_code == 0
        for argv in (["audit", "stranger"], ["train", "gone.py", "--run", "stranger", "--resume"]):
            CliRunner().invoke(main, argv)
        assert not marker.exists()

    def test_what_a_stranger_wrote_does_not_steer_the_terminal(self, tmp_path: Path) -> None:
        steering = "\x1b]0;owned \x9b31m \u202e[/nope][red]"
        write(tmp_path, {"event": "warning", "time": 1.0, "message": steering})
        text = (tmp_path / "events.jsonl").read_text()
        (tmp_path / "events.jsonl").write_text(text.replace('"gpt"', json.dumps(steering)))
        for argv in ([str(tmp_path)], [str(tmp_path), "--json"], [str(tmp_path), "--svg", "plan.svg"]):
            result = invoke(*argv)
            assert result.exit_code == 0, result.output
            assert not re.search("[\x1b\x07\x9b\u202e]", result.output)
        assert "\\x1b]0;owned \\x9b31m \\u202e[/nope][red]" in re.sub(r"\n", "", invoke(str(tmp_path)).stdout)
        assert ET.parse("plan.svg")
