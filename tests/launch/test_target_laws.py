"""What holds of every target, by what it prepares; and a target of one file, handed over, found again and stopped."""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from launched import await_steps, by_hand, write_job

import phalanx as px
from phalanx.cli import main
from phalanx.cli.launch import launch_command, launch_question
from phalanx.cli.settings import Given, earlier_run
from phalanx.config import RunSpec
from phalanx.errors import RunError, SpecError
from phalanx.launch.check import HostSurvey
from phalanx.launch.reaper import fork
from phalanx.launch.targets import ssh
from phalanx.launch.targets.find_target import TARGETS, find_target, settled_options, target_class
from phalanx.launch.targets.handed_over import ticket_of
from phalanx.launch.targets.target import AttachedTarget, Prepared, QueueTarget, Standing, Submission, Target
from phalanx.preflight import launch_check

HOSTS = "".join(f'[[host]]\nname = "{name}"\naddress = "127.0.0.1"\n' for name in ("n1", "n2"))
SAGEMAKER = (
    *("--instance", "ml.g5.12xlarge", "--image", "123456789012.dkr.ecr.eu-west-1.amazonaws.com/train:1"),
    *("--role", "arn:aws:iam::123456789012:role/train", "--bucket", "s3://bucket/phalanx"),
)


@dataclass(frozen=True, kw_only=True)
class Case:
    """A target as ``--to`` names it, and a launch that it takes: ``own`` words of its options, ``run``: of the run.

    ``elsewhere``: what the run file says otherwise there than the submission does.
    """

    to: str
    own: Sequence[str] = ()
    run: Sequence[str] = ("--plan", "dp=2", "--grace", "10", "--lr-scale", "2", "--keep", "3", "--steps", "4")
    elsewhere: Mapping[str, Any]


CASES = {
    "ssh": Case(to="ssh:hosts.toml", elsewhere={}),
    "slurm": Case(to="slurm", own=("--nodes", "2", "--time", "2h"), elsewhere={}),
    "kubernetes": Case(
        to="kubernetes",
        own=("--image", "registry/train:1", "--volume", "data:HERE", "--nodes", "4"),
        run=("-n", "2:8", "--mirror", "s3://bucket/runs/1", "--batch", "8", "--keep", "3", "--steps", "4"),
        elsewhere={},
    ),
    "ray": Case(to="ray:http://head:8265", own=("--nodes", "2"), elsewhere={}),
    "sagemaker": Case(to="sagemaker", own=SAGEMAKER, elsewhere={"job": "train.py", "folder": Path("checkpoints")}),
    "sky": Case(
        to="sky:gpus=L4:1,cloud=aws,spot",
        own=("--nodes", "2", "--shared", "/data/1", "--setup", "pip install phalanx"),
        elsewhere={"job": "train.py", "folder": Path("/data/1")},
    ),
}
QUEUES = [name for name in CASES if name != "ssh"]


@pytest.fixture(autouse=True)
def _here(tmp_path: Path) -> Iterator[None]:
    write_job(tmp_path)
    Path("hosts.toml").write_text(HOSTS)
    yield
    sys.modules.pop("train", None)


def own_words(name: str) -> list[str]:
    return [word.replace("HERE", os.getcwd()) for word in CASES[name].own]


def submission(name: str) -> tuple[Target, Submission]:
    target = find_target(CASES[name].to)
    context = launch_command.make_context("launch", ["train.py", "--to", name, *CASES[name].run])
    names = ("job", "to", "python", "dry_run", "no_check", "quiet", "as_json", "overrides")
    options = {key: value for key, value in context.params.items() if key not in names}
    given = Given.of("train.py", {**options, "folder": Path("run")})
    question, _ = launch_question(target, given, settled_options(target, own_words(name)))
    assert question.submission
    return target, question.submission


def phalanx(verb: str, name: str, *words: str) -> Result:
    argv = [verb, "train.py", "--to", CASES[name].to, "--run", "run", *own_words(name), *words]
    return CliRunner().invoke(main, argv)


def test_every_target_has_a_case() -> None:
    assert list(CASES) == list(TARGETS)


@pytest.mark.parametrize("name", CASES)
def test_the_run_file_that_it_prepares_is_the_run(name: str) -> None:
    target, given = submission(name)
    prepared = target.prepare(given)
    files = {path: text for path, text in prepared.files.items() if path.name.endswith("run.toml")}
    assert files
    for path, text in files.items():
        assert RunSpec.from_toml(text) == replace(given.run, **CASES[name].elsewhere), path
    shown = prepared.shown()
    assert all(text.rstrip() in shown for text in prepared.files.values())


@pytest.mark.parametrize("name", CASES)
def test_prepared_twice_it_is_the_same_and_another_launch_has_other_names(name: str) -> None:
    target, given = submission(name)
    first = target.prepare(given)
    assert target.prepare(given) == first
    _, other = submission(name)
    assert other == given
    assert other.token != given.token
    if name in ("kubernetes", "sagemaker", "sky"):
        assert target.prepare(other).files != first.files


@pytest.mark.parametrize("name", CASES)
def test_options_of_another_target_are_refused_by_name(name: str) -> None:
    target = find_target(CASES[name].to)
    for other in TARGETS:
        for option in set(target_class(other).options) - set(target.options):
            with pytest.raises(SpecError) as caught:
                settled_options(target, [f"--{option}", "2"])
            (problem,) = caught.value.problems
            assert problem.given == f"{name}, with --{option}"


@pytest.fixture
def prepared_for(monkeypatch: pytest.MonkeyPatch) -> list[Submission]:
    """All that targets are asked to prepare, in order; no host and no engine is asked, and nothing begins."""
    seen: list[Submission] = []
    for name in TARGETS:
        kind = target_class(name)

        def prepare(self: Any, given: Submission, own: Any = kind.prepare) -> Prepared:
            seen.append(given)
            return own(self, given)

        monkeypatch.setattr(kind, "prepare", prepare)
        monkeypatch.setattr(kind, "offer", lambda self, options: None)
        if issubclass(kind, AttachedTarget):
            monkeypatch.setattr(kind, "follow", lambda *given: _raise(RunError("begun")))
        else:
            monkeypatch.setattr(kind, "why_not", lambda self, prepared, patience: "")
            monkeypatch.setattr(kind, "submit", _submitted)
            monkeypatch.setattr(kind, "standing", lambda self, ticket, folder: Standing(state="ended"))
    nobody = HostSurvey(hosts=(), folder=Path("run"))
    monkeypatch.setattr(launch_check, "survey", lambda hosts, *asked: nobody)
    return seen


def _raise(error: Exception) -> None:
    raise error


def _submitted(self: QueueTarget, prepared: Prepared) -> Mapping[str, Any]:
    prepared.write()
    return {"job": "j", "run": "s3://bucket/run", "region": "us-east-1"}


@pytest.mark.parametrize("name", CASES)
def test_the_check_judges_the_run_that_is_launched(name: str, prepared_for: list[Submission]) -> None:
    """By itself and before a launch: a launch is taken that is right, and is right in all that it asks for."""
    _, given = submission(name)
    result = phalanx("check", name, *CASES[name].run, "--json")
    assert result.exit_code == 0, result.output
    checked = len(prepared_for)
    result = phalanx("launch", name, *CASES[name].run)
    assert (result.exit_code, "begun" in result.stderr) == ((3, True) if name == "ssh" else (0, False)), result.output
    assert 0 < checked < len(prepared_for)
    assert all(one == given for one in prepared_for)
    assert name == "ssh" or len({one.token for one in prepared_for}) == 2  # one a command


@pytest.mark.parametrize(
    ("name", "words", "said"),
    [
        ("kubernetes", ("--mirror", "s3://me:word@bucket/runs"), "--mirror"),
        ("slurm", ("-n", "1:2"), "-n: given 1:2, on Slurm"),
        ("sagemaker", ("-n", "1:2"), "-n: given 1:2, on SageMaker"),
        ("sagemaker", ("--grace", "200"), "--grace: given 200"),
        ("slurm", ("--resume", "--from", "3"), "--from: given 3, with slurm"),
        ("ssh", ("-n", "1:2"), "-n: given 1:2, on hosts by SSH"),
        ("ssh", ("--python", "/opt/python"), "python = in the hosts file"),
    ],
)
def test_what_it_cannot_do_is_refused_before_anything_is_looked_at(
    name: str, words: Sequence[str], said: str, prepared_for: list[Submission], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch_check, "survey", lambda hosts, question: _raise(AssertionError("hosts were asked")))
    plan = [] if "-n" in words else ["--plan", "dp=4" if name == "kubernetes" else "dp=2"]
    own = [] if name == "kubernetes" else own_words(name)
    own = own or ["--image", "i:1", "--volume", f"data:{os.getcwd()}"]
    own = [] if name == "ssh" else own
    result = CliRunner().invoke(
        main, ["launch", "train.py", "--to", CASES[name].to, "--run", "run", *own, *plan, *words]
    )
    assert result.exit_code == 2, result.output
    assert said in result.stderr
    assert not Path("run").exists()


def test_the_batch_of_the_run_is_what_its_plan_is_held_against(prepared_for: list[Submission]) -> None:
    assert phalanx("check", "slurm", "--plan", "dp=4", "--batch", "2", "--grace", "10").exit_code == 1
    assert phalanx("check", "slurm", "--plan", "dp=4", "--grace", "10").exit_code == 0


@pytest.mark.parametrize(
    ("words", "said"),
    [(("--steps", "4"), "--steps"), (("--anyway",), "--anyway or --no-forecast"), (("-n", "2"), "-n")],
)
def test_words_of_a_run_without_a_job_are_refused(words: Sequence[str], said: str) -> None:
    result = CliRunner().invoke(main, ["check", *words])
    assert result.exit_code == 2, result.output
    assert f"{said}: of a run, and no JOB was named" in result.stderr


@pytest.mark.parametrize("name", QUEUES)
def test_a_run_whose_folder_is_elsewhere_goes_on_as_it_was_launched(name: str, prepared_for: list[Submission]) -> None:
    result = phalanx("launch", name, *CASES[name].run, "--no-check")
    assert result.exit_code == 0, result.output
    assert not Path("run/run.toml").exists()
    given = prepared_for[-1]
    again = ["launch", name, *(["--mirror", given.run.mirror] if given.run.mirror else [])]  # of the command line alone
    result = phalanx(*again, "--resume", "auto", "--dry-run", "--json")
    assert result.exit_code == 0, result.output
    assert prepared_for[-1] == given
    phalanx(*again, "--resume", "auto", "--dry-run", "--keep", "5")
    assert prepared_for[-1].run == replace(given.run, keep=5)
    if name in ("kubernetes", "sagemaker"):  # which need not see from here what there is to go on from
        result = phalanx(*again, "--resume", "--no-check")
        assert result.exit_code == 0, result.output
        assert prepared_for[-1] == given


def test_without_a_ticket_a_run_file_of_a_launch_is_none_to_go_on_with() -> None:
    folder = Path("run/launch")
    folder.mkdir(parents=True)
    text = 'job = "job/train.py?lr=0.5"\nplan = "dp=2"\nfolder = "checkpoints"\nkeep = 7\n'
    (folder / "run.toml").write_text(text)
    asked = {"plan": None, "devices": None, "from_step": None, "resume": "auto"}
    given = Given.of("train.py", {**asked, "folder": Path("run")})
    assert earlier_run(given) is None
    (folder / "ticket.json").write_text("{}")
    found = earlier_run(given)
    assert found
    assert (found.job, found.folder, found.keep) == ("train.py?lr=0.5", Path("run"), 7)
    (folder / "run.toml").write_text(text.replace("job/train.py", "job/other.py"))
    found = earlier_run(given)
    assert found
    assert found.job == "train.py"


@pytest.fixture
def ssh_to_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "bin" / "ssh"
    program.parent.mkdir()
    program.write_text('#!/bin/sh\nwhile [ "$1" != "--" ]; do shift; done\nshift 2\nexec sh -c "$*"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    environment = f'environment = {{PYTHONPATH = "{os.environ.get("PYTHONPATH", "")}", OMP_NUM_THREADS = "1"}}\n'
    Path("hosts.toml").write_text(environment + HOSTS)


@pytest.mark.usefixtures("ssh_to_here")
def test_a_dry_run_by_ssh_shows_the_file_and_the_commands_of_the_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    result = phalanx("launch", "ssh", *CASES["ssh"].run, "--dry-run", "--json")
    assert result.exit_code == 0, result.output
    shown, started = json.loads(result.stdout), list[list[str]]()

    def begin(self: ssh._Agent, name: str, first: int, words: Sequence[str], log: Path) -> None:
        started.append([*words])
        own(self, name, first, words, log)

    own = ssh._Agent.__init__
    monkeypatch.setattr(ssh._Agent, "__init__", begin)
    result = phalanx("launch", "ssh", *CASES["ssh"].run, "--no-check", "--quiet")
    assert result.exit_code == 0, result.output
    assert started == shown["commands"]
    assert [Path(path).read_text() for path in shown["files"]] == [*shown["files"].values()]
    assert "PYTHONPATH, OMP_NUM_THREADS" in shown["notes"][0]


ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def _example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = re.search(r'```python title="background.py"\n(.*?)```', (ROOT / "CONTRIBUTING.md").read_text(), re.DOTALL)
    assert found
    (tmp_path / "background.py").write_text(found[1])
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "background", raising=False)
    monkeypatch.setitem(TARGETS, "background", "background:BackgroundTarget")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def command(*words: str) -> int:
    """The exit code of ``phalanx`` in a process forked from this one, which ends before what it has started."""
    return os.waitstatus_to_exitcode(os.waitpid(begun(*words), 0)[1])


def begun(*words: str) -> int:
    pid = fork()
    if pid == 0:
        code = 3
        try:
            main(list(words))
        except SystemExit as ended:
            code = int(ended.code or 0)
        finally:
            os._exit(code)
    return pid


def await_end(pid: int) -> None:
    """Wait until the process is gone, or nobody has asked for how it ended."""
    until = time.monotonic() + 60
    with suppress(OSError):  # it is gone
        while Path(f"/proc/{pid}/cmdline").read_bytes():
            assert time.monotonic() < until
            time.sleep(0.05)


GIVEN = ("launch", "train.py", "--to", "background", "--run", "run", "--plan", "dp=2", "--no-check")


def launch(*words: str) -> int:
    return command(*GIVEN, *words)


@pytest.mark.usefixtures("_example")
def test_of_two_launches_of_a_folder_at_the_same_time_one_is_refused(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    write_job(tmp_path, pause=1.0, steps=30)
    both = [begun(*GIVEN) for _ in range(2)]
    assert sorted(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in both) == [0, 2]
    err = capfd.readouterr().err
    assert "whose run background has already" in err or "in which another training goes on" in err
    ticket = json.loads(Path("run/launch/ticket.json").read_text())
    assert command("stop", "run") == 0
    await_end(ticket["pid"])


@pytest.mark.timeout(300)
@pytest.mark.usefixtures("_example")
def test_a_run_is_handed_over_found_by_its_folder_stopped_and_goes_on(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    write_job(tmp_path, pause=1.0, steps=30)
    assert launch("--nice", "1", "--json") == 0
    told = json.loads(capfd.readouterr().out)
    assert told["to"] == "background"
    await_steps(Path("run"), 2)
    assert command("status", "run", "--json") == 0
    assert json.loads(capfd.readouterr().out)["state"] == "running"
    assert launch() == 2
    assert "whose run background has already: running" in capfd.readouterr().err
    assert command("stop", "run") == 0
    await_end(told["pid"])
    assert command("status", "run") == 0
    assert "stopped" in capfd.readouterr().out
    write_job(tmp_path, steps=30)
    assert launch("--resume", "--json") == 0
    again = json.loads(capfd.readouterr().out)
    await_end(again["pid"])
    assert command("status", "run", "--json") == 0
    assert json.loads(capfd.readouterr().out)["state"] == "ended"
    target, ticket = ticket_of(Path("run"))
    assert isinstance(target, QueueTarget)
    assert target.standing(ticket, Path("run")).state == "ended"
    assert command("logs", "run") == 0
    assert command("logs", "run", "--rank", "1") == 2
    assert "none: all ranks print into one file" in capfd.readouterr().err
    assert px.load("run").losses == pytest.approx(by_hand(30), rel=1e-4)


@pytest.mark.usefixtures("_example")
def test_a_folder_that_was_used_needs_resume_and_resume_needs_one(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    write_job(tmp_path)
    assert launch("--resume") == 2
    assert "does not exist" in capfd.readouterr().err
    assert command("train", "train.py", "--run", "run", "--plan", "dp=2", "--quiet") == 0
    assert launch() == 2
    assert "which holds a run of" in capfd.readouterr().err
    assert not (Path("run") / "launch").exists()


@pytest.mark.usefixtures("_example")
def test_a_run_that_goes_on_here_is_no_more_its_targets(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    write_job(tmp_path)
    assert launch("--json") == 0
    told = json.loads(capfd.readouterr().out)
    assert command("train", "train.py", "--run", "run", "--plan", "dp=2", "--resume", "auto", "--quiet") == 2
    assert "whose run background has already: running" in capfd.readouterr().err
    await_end(told["pid"])
    write_job(tmp_path, steps=8)
    assert command("train", "train.py", "--run", "run", "--resume", "--quiet") == 0
    assert not (Path("run") / "launch" / "ticket.json").exists()
    capfd.readouterr()
    assert command("status", "run", "--json") == 0
    found = json.loads(capfd.readouterr().out)
    assert (found["state"], found["to"], found["step"]) == ("ended", "", 7)


@pytest.mark.usefixtures("_example")
def test_a_run_of_another_machine_is_not_taken_for_one_that_has_ended(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "run.toml").touch()
    owner = {"number": 1, "identity": "a", "host": "n7.invalid", "pid": 4711, "since": 0.0}
    (folder / "writer.json").write_text(json.dumps(owner))
    assert command("status", "run") == 0
    assert "written by process 4711 on n7.invalid" in capfd.readouterr().out
    assert command("stop", "run") == 3
    assert "ssh -- n7.invalid kill -TERM 4711" in capfd.readouterr().err
