"""The command line without processes: help, wrong use, completion, and what goes where."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result

from phalanx.cli import app, main
from phalanx.cli.options import PlanText
from phalanx.cli.output import json_option, print_json
from phalanx.data import Ledger, MicroBatch, StepBatch
from phalanx.errors import LossError, Problem, SpecError, WorkerError
from phalanx.launch.targets import TARGETS, target_class

JOB = """
import phalanx as px, torch

def other() -> px.Job:
    return px.Job(model=lambda: torch.nn.Linear(2, 1), data=lambda: [], loss=lambda o, b: o.mean(),
                  optimizer=lambda p: torch.optim.SGD(p, lr=0.1), batch={batch}, steps=1)
"""


def invoke(*argv: str) -> Result:
    return CliRunner().invoke(main, list(argv))


@pytest.fixture
def verb(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Puts a command of the test's own in place of the verb ``try``."""

    def install(action: Any) -> None:
        @click.command("try")
        @json_option
        def command(as_json: bool) -> None:
            action()
            if as_json:
                print_json({"value": float("nan")})

        monkeypatch.setattr(app.Verbs, "get_command", lambda self, ctx, name: command if name == "try" else None)

    return install


def _parts(command: click.Command | None) -> list[str]:
    """Names of the commands that a verb is made of."""
    assert isinstance(command, click.Group), "it has no --json"
    return list(command.commands)


class TestHelp:
    def test_group_lists_every_verb(self) -> None:
        result = invoke("--help")
        assert result.exit_code == 0
        assert [verb for verb in app.VERBS if not re.search(rf"^  {verb}  ", result.stdout, re.MULTILINE)] == []

    @pytest.mark.parametrize("verb", app.VERBS)
    def test_every_verb_shows_an_example_and_json(self, verb: str) -> None:
        result = invoke(verb, "--help")
        assert result.exit_code == 0
        examples = re.findall(rf"^ +(phalanx {verb} .+|phalanx {verb})$", result.stdout, re.MULTILINE)
        assert examples, result.stdout
        command = main.get_command(click.Context(main), verb)
        assert "--json" in result.stdout or all(
            "--json" in invoke(verb, one, "--help").stdout for one in _parts(command)
        )

    @pytest.mark.parametrize("verb", app.VERBS)
    def test_options_of_the_examples_exist(self, verb: str) -> None:
        context = click.Context(main)
        command = main.get_command(context, verb)
        assert command is not None
        parts = [command, *(command.commands.values() if isinstance(command, click.Group) else ())]
        known = {name for part in parts for parameter in part.params for name in parameter.opts}
        if verb in ("launch", "bench", "check"):
            known |= {f"--{name}" for target in TARGETS for name in target_class(target).options}
        for example in re.findall(rf"phalanx {verb} [^\n]*", command.help or ""):
            used = set(re.findall(r"(?<= )--?[a-z][a-z-]*", re.sub(r'"[^"]*"', "", example)))
            assert used <= known

    def test_neither_torch_nor_rich_is_imported(self) -> None:
        code = (
            "import sys; from phalanx.cli import main\n"
            "for verb in ([], ['train'], ['bench']): main([*verb, '--help'], standalone_mode=False)\n"
            "print([m for m in ('torch', 'rich', 'numpy', 'sklearn') if m in sys.modules])"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        assert done.stdout.endswith("[]\n")


START: dict[str, Any] = {
    "event": "start",
    "time": 1.0,
    "batch": 3,
    "samples": 3,
    "drop_last": False,
    "schema": "1.1",
    "job": "j",
    "plan": "single",
    "world_size": 1,
    "device": "cpu",
    "total_steps": 1,
    "first_step": 0,
    "parameters": 1,
    "notes": [],
}


class TestAudit:
    @pytest.mark.parametrize(("ids", "code"), [((0, 1, 2), 0), ((0, 1, 1), 1)])
    def test_exit_code_says_the_answer(self, tmp_path: Path, ids: tuple[int, ...], code: int) -> None:
        (tmp_path / "events.jsonl").write_text(json.dumps(START) + "\n")
        with Ledger(tmp_path / "ledger", rank=0, first_step=0, world_size=1) as book:
            part = MicroBatch(batch=None, ids=ids, samples=3)
            book.record(StepBatch(step=0, epoch=0, samples=3, parts=((part,),)))
        result = invoke("audit", str(tmp_path), "--json")
        assert result.exit_code == code
        answer = json.loads(result.stdout)
        assert (answer["once"], answer["epochs"], bool(answer["wrong"])) == (code == 0, 1, code == 1)
        assert answer["log"] == ["the run has not ended, or was ended from outside"]
        assert any("replicas" in sentence for sentence in answer["not_checked"])

    def test_what_the_log_says_of_errors_stands_beside_the_answer(self, tmp_path: Path) -> None:
        error = {"event": "error", "time": 2.0, "rank": 1, "step": 0, "kind": "hang", "message": "rank 1 did not come"}
        (tmp_path / "events.jsonl").write_text(f"{json.dumps(START)}\n{json.dumps(error)}\n")
        (tmp_path / "ledger").mkdir()
        assert json.loads(invoke("audit", str(tmp_path), "--json").stdout)["log"] == ["error: rank 1 did not come"]

    def test_a_folder_without_a_run(self, tmp_path: Path) -> None:
        result = invoke("audit", str(tmp_path))
        assert result.exit_code == 2
        assert "holds no log of a run" in result.stderr


class TestWrongUse:
    def test_unknown_plan_key_names_the_nearest(self) -> None:
        result = invoke("train", "job.py", "--plan", "fdsp=2")
        assert result.exit_code == 2
        assert "'fdsp'" in result.stderr
        assert "try: fsdp=2" in result.stderr
        assert "Traceback" not in result.output

    def test_everything_wrong_in_a_plan_at_once(self) -> None:
        result = invoke("prove", "job.py", "--plan", "dp=0 precision=fp7")
        assert result.exit_code == 2
        assert "2 things are wrong" in result.stderr

    def test_as_json_the_problem_is_on_stdout(self) -> None:
        result = invoke("train", "job.py", "--plan", "fdsp=2", "--json")
        error = json.loads(result.stdout)["error"]
        assert (error["kind"], error["exit_code"]) == ("SpecError", 2)
        assert error["problems"][0]["fix"] == "fsdp=2"
        assert "fdsp" in result.stderr

    def test_plan_and_count_that_do_not_agree(self) -> None:
        result = invoke("train", "job.py", "--plan", "dp=2 fsdp=2", "-n", "3")
        assert result.exit_code == 2
        assert "refused" in result.stderr
        assert "try: -n 4" in result.stderr

    @pytest.mark.parametrize(
        ("argv", "words"),
        [
            (["train", "job.py", "-n", "0"], "try: -n 2"),
            (["train", "job.py", "--resume"], "--run runs/digits-1 --resume"),
            (["train", "job.py", "--plan", "missing.toml"], "missing.toml"),
            (["train", "missing.py"], "missing.py, which does not exist"),
            (["prove", "missing.py"], "--plan"),
            (["prove", "missing.py", "--plan", "dp=2"], "missing.py, which does not exist"),
            (["prove", "job.py", "--plan", "dp=2", "--steps", "0"], "--steps"),
            (["bench", "missing.py", "-n", "1,two"], "try: -n 1,2,4"),
            (["bench", "missing.py"], "missing.py, which does not exist"),
            (["bench", "job.py", "--slow", "1"], "try: --slow 1:4x"),
            (["bench", "job.py", "--rate", "1gbit"], "try: --hosts 2 --rate"),
            (["bench", "job.py", "--hosts", "2", "-n", "2"], "try: --hosts 2 --plan dp=2"),
            (["bench", "job.py", "--hosts", "2", "--delay", "20"], "try: --delay 20ms"),
            (["bench", "job.py", "--hosts", "0"], "1 to 200"),
            (["worker", "missing.toml"], "missing.toml"),
            (["completion", "tcsh"], "'bash', 'zsh', 'fish'"),
            (["trian"], "trian"),
        ],
    )
    def test_is_exit_code_2(self, argv: list[str], words: str) -> None:
        result = invoke(*argv)
        assert result.exit_code == 2, result.output
        assert words in result.stderr
        assert result.stdout == ""

    @pytest.mark.parametrize("verb", ["train", "launch"])
    def test_a_verb_of_runs_with_nothing_behind_it(self, verb: str) -> None:
        result = invoke(verb)
        assert (result.exit_code, "Missing argument 'JOB'" in result.stderr) == (2, True), result.stderr

    def test_check_with_nothing_behind_it_is_of_this_machine(self) -> None:
        command = main.get_command(click.Context(main), "check")
        assert command is not None
        assert command.make_context("check", []).params["job"] == ""

    def test_usage_as_json(self) -> None:
        result = invoke("prove", "job.py", "--json")
        assert json.loads(result.stdout)["error"]["exit_code"] == 2

    def test_job_file_without_job(self, tmp_path: Path) -> None:
        path = tmp_path / "mine.py"
        path.write_text(JOB.format(batch=4))
        result = invoke("train", str(path))
        assert result.exit_code == 2
        assert "no function job()" in result.stderr
        assert "it has: other" in result.stderr

    @pytest.mark.parametrize(("batch", "argv"), [(0, []), (4, ["--batch", "0"])])
    def test_batch_of_zero(self, tmp_path: Path, batch: int, argv: list[str]) -> None:
        path = tmp_path / f"zero{batch}.py"
        path.write_text(JOB.format(batch=batch))
        result = invoke("train", f"{path}:other", *argv)
        assert result.exit_code == 2
        assert "batch" in result.stderr
        assert "Traceback" not in result.output

    def test_more_ranks_than_samples(self, tmp_path: Path) -> None:
        path = tmp_path / "few.py"
        path.write_text(JOB.format(batch=2))
        for argv in (["train", "-n", "3", "--run", str(tmp_path / "run")], ["bench", "-n", "3"]):
            result = invoke(argv[0], f"{path}:other", *argv[1:])
            assert result.exit_code == 2, result.output
            assert "3 replicas for a global batch of 2" in result.stderr
        assert not (tmp_path / "run").exists()


class TestExitCodes:
    def raising(self, error: BaseException) -> Any:
        def action() -> None:
            raise error

        return action

    def test_a_run_that_failed_is_3(self, verb: Any) -> None:
        verb(self.raising(LossError("the loss is NaN")))
        result = invoke("try")
        assert result.exit_code == 3
        assert result.stderr == "error: the loss is NaN\n"

    def test_a_worker_error_brings_its_own_code(self, verb: Any) -> None:
        error = WorkerError("rank 1 of 2: wrong", rank=1, step=None, kind="SpecError", traceback="", exit_code=2)
        verb(self.raising(error))
        assert invoke("try").exit_code == 2

    def test_problems_are_one_block(self, verb: Any) -> None:
        verb(self.raising(SpecError([Problem(where="a", given="1", allowed="2", fix="a=2")])))
        assert invoke("try").stderr == "error: a: given 1; allowed: 2\n    try: a=2\n"

    @pytest.mark.parametrize(
        ("fix", "option"),
        [
            ("keep=2", "--keep 2"),
            ('checkpoint_every="15m"', "--checkpoint-every 15m"),
            ("devices=\"1:4\", grow_after='5m'", "-n 1:4 --grow-after 5m"),
            ("resume = true", "resume = true"),
        ],
    )
    def test_ways_out_of_a_run_are_options(self, verb: Any, fix: str, option: str) -> None:
        verb(self.raising(SpecError([Problem(where="run.x", given="1", allowed="2", fix=fix)])))
        assert invoke("try").stderr.endswith(f"try: {option}\n")
        told = json.loads(invoke("try", "--json").stdout)["error"]
        assert told["problems"][0]["fix"] == option
        assert told["message"].endswith(option)

    def test_a_fault_of_ours_is_3_not_1(self, verb: Any) -> None:
        verb(self.raising(ZeroDivisionError("ours")))
        result = invoke("try")
        assert result.exit_code == 3
        assert "ZeroDivisionError: ours" in result.stderr

    def test_ctrl_c_is_130(self, verb: Any) -> None:
        verb(self.raising(KeyboardInterrupt()))
        result = invoke("try")
        assert result.exit_code == 130
        assert "stopped" in result.stderr

    def test_json_alone_is_on_stdout(self, verb: Any) -> None:
        verb(lambda: print("chatter of the job"))
        result = invoke("try", "--json")
        assert json.loads(result.stdout) == {"value": None}  # JSON knows no NaN
        assert "chatter" in result.stderr


class TestCompletion:
    @pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
    def test_prints_a_script(self, shell: str) -> None:
        result = invoke("completion", shell)
        assert result.exit_code == 0
        assert f"_PHALANX_COMPLETE={shell}_complete" in result.stdout
        assert json.loads(invoke("completion", shell, "--json").stdout)["script"] in result.stdout

    def test_bash_takes_the_script(self) -> None:
        script = invoke("completion", "bash").stdout
        subprocess.run(["bash", "-n"], input=script, text=True, check=True)

    @pytest.mark.parametrize(
        ("typed", "expected"),
        [
            ("fs", ["fsdp="]),
            ("fsdp=2 z", ["fsdp=2 zero="]),
            ("precision=", [f"precision={name}" for name in ("fp32", "tf32", "bf16", "fp16", "fp8")]),
            ("dp=2 recompute=s", ["dp=2 recompute=selective"]),
            ("dp=2 d", ["dp=2 device="]),
            ("zero=", ["zero=1", "zero=2", "zero=3"]),
            ("nothing=", []),
        ],
    )
    def test_plans(self, typed: str, expected: list[str]) -> None:
        command = main.get_command(click.Context(main), "train")
        assert command is not None
        items = PlanText().shell_complete(click.Context(command), command.params[1], typed)
        assert [item.value for item in items] == expected

    def test_the_shell_gets_plan_keys(self) -> None:
        environment = {**os.environ, "_PHALANX_COMPLETE": "bash_complete", "COMP_CWORD": "4"}
        environment["COMP_WORDS"] = "phalanx train job.py --plan thr"
        code = "from phalanx.cli import main; main()"
        done = subprocess.run(
            [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False
        )
        assert done.stdout == "plain,threads=\n"


def test_version() -> None:
    assert invoke("--version").stdout.startswith("phalanx, version ")
