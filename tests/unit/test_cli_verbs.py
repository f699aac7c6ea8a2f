"""The command line without workers: help, wrong use, exit codes, completion, and where values of a run come from."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result

from phalanx.cli import app, main, plan_verbs
from phalanx.cli.options import PlanText
from phalanx.cli.output import Answer, json_option
from phalanx.cli.settings import Given, earlier_run, settle
from phalanx.config import Job, Plan, RunSpec
from phalanx.data import Ledger, MicroBatch, StepBatch
from phalanx.errors import LossError, Problem, RefusedError, SpecError, WorkerError
from phalanx.launch.targets.find_target import TARGETS, target_class


def invoke(*argv: str) -> Result:
    return CliRunner().invoke(main, list(argv))


@pytest.fixture
def verb(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Puts a command of the test's own in place of the verb ``try``."""

    def install(action: Any) -> None:
        @click.command("try")
        @json_option
        def command() -> Answer:
            action()
            return Answer({"value": float("nan")})

        monkeypatch.setattr(app.Verbs, "get_command", lambda self, ctx, name: command if name == "try" else None)

    return install


class TestHelp:
    def test_every_verb_shows_an_example_whose_options_exist_and_has_json(self) -> None:
        overview = invoke("--help").stdout
        wrong = list[str]()
        for verb in app.VERBS:
            command = main.get_command(click.Context(main), verb)
            assert command is not None
            parts = [command, *(command.commands.values() if isinstance(command, click.Group) else ())]
            known = {name for part in parts for parameter in part.params for name in parameter.opts}
            if verb in ("launch", "bench", "check"):
                known |= {f"--{name}" for target in TARGETS for name in target_class(target).options}
            examples = re.findall(
                rf"^ +(phalanx {verb} .+|phalanx {verb})$", invoke(verb, "--help").stdout, re.MULTILINE
            )
            used = set(re.findall(r"(?<= )--?[a-z][a-z-]*", re.sub(r'"[^"]*"', "", "\n".join(examples))))
            json_there = all(
                "--json" in [name for one in part.params for name in one.opts] for part in parts[1:] or parts
            )
            if not (re.search(rf"^  {verb}  ", overview, re.MULTILINE) and examples and json_there and used <= known):
                wrong.append(f"{verb}: {examples}, {sorted(used - known)}")
        assert wrong == []
        assert invoke("--version").stdout.startswith("phalanx, version ")

    def test_every_setting_of_a_run_is_an_option_of_train_launch_and_check(self) -> None:
        settings = {field.name for field in fields(RunSpec)} - {"job", "asked_plan"}
        for verb in ("train", "launch", "check"):
            command = main.get_command(click.Context(main), verb)
            assert command is not None
            assert settings <= {one.name for one in command.params if isinstance(one, click.Option) and one.help}, verb

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


class TestWrongUse:
    def test_as_json_the_problem_is_on_stdout(self) -> None:
        result = invoke("train", "job.py", "--plan", "fdsp=2", "--json")
        error = json.loads(result.stdout)["error"]
        assert (error["kind"], error["exit_code"]) == ("SpecError", 2)
        assert error["problems"][0]["fix"] == "fsdp=2"
        assert "fdsp" in result.stderr

    WRONG = (
        (["train", "job.py", "-n", "0"], "try: -n 2"),
        (["train", "job.py", "--resume"], "--run runs/digits-1 --resume"),
        (["train", "job.py", "--plan", "missing.toml"], "missing.toml"),
        (["train", "missing.py"], "missing.py, which does not exist"),
        (["prove", "missing.py"], "--plan"),
        (["prove", "missing.py", "--plan", "dp=2"], "missing.py, which does not exist"),
        (["prove", "job.py", "--plan", "dp=2", "--steps", "0"], "--steps"),
        (["bench", "missing.py", "-n", "1,two"], "try: -n 1,2,4"),
        (["bench", "missing.py"], "missing.py, which does not exist"),
        (["worker", "missing.toml"], "missing.toml"),
        (["completion", "tcsh"], "'bash', 'zsh', 'fish'"),
        (["tarin"], "Did you mean 'train'?"),
        (["train", "job.py", "--lr", "3"], "'--set lr=1e-3"),
        (["train", "job.py", "--gpus", "2"], "Did you mean '-n 2'?"),
        (["plan", "job.py", "--seq-len", "2"], "Did you mean '--seq 4096'?"),
        (["plan", "job.py", "-n", "4"], "Did you mean '--on 8xH100'?"),
        (["train"], "Missing argument 'JOB'"),
        (["launch"], "Missing argument 'JOB'"),
    )

    def test_is_exit_code_2(self) -> None:
        found = {" ".join(argv): (invoke(*argv), words) for argv, words in self.WRONG}
        assert {
            argv: result.output
            for argv, (result, words) in found.items()
            if (result.exit_code, result.stdout) != (2, "") or words not in result.stderr
        } == {}


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

    @pytest.mark.parametrize(
        ("fix", "option"),
        [
            ("keep=2", "--keep 2"),
            ('checkpoint_every="15m"', "--checkpoint-every 15m"),
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
    def test_plans(self) -> None:
        command = main.get_command(click.Context(main), "train")
        assert command is not None
        for typed, expected in (
            ("fs", ["fsdp="]),
            ("fsdp=2 z", ["fsdp=2 zero="]),
            ("precision=", [f"precision={name}" for name in ("fp32", "tf32", "bf16", "fp16", "fp8")]),
            ("dp=2 recompute=s", ["dp=2 recompute=selective"]),
            ("dp=2 d", ["dp=2 device="]),
            ("zero=", ["zero=1", "zero=2", "zero=3"]),
            ("nothing=", []),
        ):
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


def job(**changes: Any) -> Job:
    given: dict[str, Any] = dict.fromkeys(("model", "data", "loss", "optimizer"), print)
    return Job(**{**given, "batch": 64, "epochs": 3, "name": "toy", **changes})


def given(**changes: Any) -> Given:
    none: dict[str, Any] = {"plan": None, "devices": None, "folder": None, "resume": False, "values": {}}
    return Given(**{**none, "job": "toy.py", **changes})


def sources(settings: Any) -> dict[str, tuple[str, str]]:
    return {one.name: (one.value, one.source) for one in settings}


@pytest.mark.quick
def test_a_broken_pipe_is_not_taken_for_a_closed_stdout(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(**given: Any) -> None:
        raise BrokenPipeError(32, "Broken pipe")

    monkeypatch.setattr(plan_verbs.devices_command, "callback", broken)
    done = CliRunner().invoke(main, ["devices"])
    assert (done.exit_code, done.stdout) == (3, "")
    assert "has ended: [Errno 32] Broken pipe" in done.stderr


@pytest.mark.quick
class TestSettings:
    """Values come from the argument, the run file, the job, the default, in this order."""

    def test_job_and_defaults(self) -> None:
        run, settings = settle(given(plan=Plan()), None, job())
        assert (run.batch, run.epochs, run.steps) == (None, None, None)
        found = sources(settings)
        assert found["batch"] == ("64", "job")
        assert found["epochs"] == ("3", "job")
        assert found["keep"] == ("2", "default")
        assert found["plan"] == ("single", "argument")
        assert found["run"][1] == "default"
        assert "steps" not in found

    def test_arguments_win(self, tmp_path: Path) -> None:
        earlier = RunSpec(job="toy.py", plan=Plan(dp=4), folder=tmp_path, batch=32, epochs=7, lr_scale=2.0, keep=5)
        values = {"steps": 10, "keep": 1, "batch": None}
        run, settings = settle(given(devices=2, folder=tmp_path, resume=True, values=values), earlier, job())
        assert (run.plan, run.steps, run.epochs, run.batch, run.lr_scale, run.keep) == (
            Plan(dp=2),
            10,
            None,
            32,
            2.0,
            1,
        )
        found = sources(settings)
        assert found["steps"] == ("10", "argument")
        assert found["batch"] == ("32", "run file")
        assert found["lr-scale"] == ("2.0", "run file")
        assert found["plan"] == ("dp=2", "argument")
        assert found["keep"] == ("1", "argument")

    def test_a_resume_takes_each_setting_of_the_run_file(self, tmp_path: Path) -> None:
        """Else the command that a run prints as it dies, such as one begun with --anyway, would be refused."""
        changed: dict[str, Any] = {
            "lr_scale": 2.0,
            "checkpoint_every": 7,
            "checkpoint": "trainable",
            "keep": 5,
            "keep_every": 3,
            "grace": 5.0,
            "restarts": 9,
            "log_every": 4,
            "on_nonfinite": "skip",
            "spike": 8.0,
            "on_spike": "skip",
            "timeout": 90.0,
            "drift": "warn",
            "drift_every": 6,
            "forecast": "anyway",
            "check": "off",
            "devices": "1:2",
        }
        asked_anew = {
            "mirror",
            "job",
            "plan",
            "asked_plan",
            "folder",
            "resume",
            "from_step",
            "batch",
            "epochs",
            "steps",
        }
        assert {field.name for field in fields(RunSpec)} == {*changed, *asked_anew}
        for plan, lacking in (
            (Plan(dp=2), set[str]()),
            (Plan(dp=2, server=1), {"devices", "checkpoint"}),
        ):
            kept = {name: value for name, value in changed.items() if name not in lacking}
            earlier = RunSpec(job="toy.py", plan=plan, folder=tmp_path, **kept)
            run, settings = settle(given(folder=tmp_path, resume=True), earlier, job())
            assert {name: getattr(run, name) for name in kept} == kept
            assert {sources(settings)[name.replace("_", "-")][1] for name in kept} == {"run file"}
            with pytest.raises(SpecError, match=r"run.toml names s3://a/b.*\n.*--mirror s3://a/b"):
                settle(given(folder=tmp_path, resume=True), replace(earlier, mirror="s3://a/b"), job())

    def test_only_a_resume_reads_the_run_file(self, tmp_path: Path) -> None:
        (tmp_path / "run.toml").write_text(RunSpec(job="toy.py", plan=Plan(dp=2), folder=tmp_path).to_toml())
        assert earlier_run(given(folder=tmp_path)) is None
        read = earlier_run(given(folder=tmp_path, resume=True))
        assert read is not None
        assert read.plan == Plan(dp=2)

    def test_threads_count_as_devices(self) -> None:
        given(plan=Plan(threads=2), devices=2)
        with pytest.raises(RefusedError, match="threads = n"):
            given(plan=Plan(threads=2), devices=4)
