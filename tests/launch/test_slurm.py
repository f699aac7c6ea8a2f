"""What a launch on Slurm asks for, without one: its script, its commands, arrays of plans and their end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from launched import Queue, submission, write_job

from law_rows import in_one_test
from phalanx.cli import bench_queue, main
from phalanx.cli.bench_queue import QueueBench
from phalanx.config import Job, Plan
from phalanx.errors import RunError, SpecError
from phalanx.launch.reaper import SAVED
from phalanx.launch.targets import TARGETS, ArrayTarget, Prepared, Standing, Submission
from phalanx.launch.targets.slurm import SlurmTarget


def pretend(folder: Path, monkeypatch: pytest.MonkeyPatch, **tools: str) -> Path:
    """A Slurm whose commands are these lines of shell. Returns the file with what has been asked of it."""
    made = folder / "tools"
    made.mkdir()
    for name, text in {"sbatch": "echo 7", "scontrol": "exit 1", "scancel": "true", "sinfo": "true", **tools}.items():
        (made / name).write_text(f'#!/bin/sh\necho "{name} $*" >> {folder}/asked\n{text}\n')
        (made / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{made}{os.pathsep}{os.environ['PATH']}")
    return folder / "asked"


def test_what_a_shell_says_to_sbatch_is_no_more_than_what_the_script_leaves_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(tmp_path, monkeypatch, sbatch=f"env | grep ^SBATCH_ | sort > {tmp_path}/told; echo 7")
    for name in ("TIMELIMIT", "SIGNAL", "OUTPUT", "ERROR", "NO_REQUEUE", "OPEN_MODE", "JOB_NAME", "PARTITION", "QOS"):
        monkeypatch.setenv(f"SBATCH_{name}", "other")
    target = SlurmTarget("")
    prepared = target.prepare(submission("slurm", tmp_path, time="1h", partition="gpu"))
    assert target.submit(prepared) == {"job": 7}
    assert (tmp_path / "told").read_text() == "SBATCH_QOS=other\n"
    assert target.why_not(prepared) == ""
    assert (tmp_path / "told").read_text() == "SBATCH_QOS=other\n"


@pytest.mark.parametrize("task", [0, None])
def test_a_copied_folder_does_not_stop_the_run_that_it_is_a_copy_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, task: int | None
) -> None:
    home = tmp_path / "a run" if task is None else tmp_path
    job = f"JobId=7 JobState=RUNNING Reason=None Command={home}/launch/job.sh WorkDir=/"
    asked = pretend(tmp_path, monkeypatch, scontrol=f"echo '{job}'")
    target, ticket = SlurmTarget(""), {"job": 7, "cluster": "far", **({} if task is None else {"task": task})}
    (tmp_path / "linked").symlink_to(tmp_path)
    name, own = ("7", "a run") if task is None else ("7_0", "0")
    for folder, state in ((tmp_path / "copy" / own, "unknown"), (tmp_path / "linked" / own, "running")):
        assert target.standing(ticket, folder).state == state
        assert "scancel" not in asked.read_text()
        target.stop(ticket, folder)
    *before, last = asked.read_text().splitlines()
    assert last == f"scancel -M far --signal=USR2 --batch {name}"
    assert f"scontrol -M far show job {name} --oneliner" in before


def test_what_slurm_took_is_handed_over_also_where_it_says_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = pretend(tmp_path, monkeypatch, scontrol="echo busy >&2; exit 1")
    given = submission("slurm", tmp_path)
    assert SlurmTarget("").submit(SlurmTarget("").prepare(given)) == {"job": 7}
    assert given.runfile.exists()
    assert "scancel" not in asked.read_text()


@pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning"
)  # what is asked is killed, not waited for
def test_a_launch_that_is_interrupted_leaves_nothing_in_the_queue(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cancels = f"test -e {tmp_path}/run/launch/job.sh && echo with its files >> {tmp_path}/asked"
    asked = pretend(tmp_path, monkeypatch, scontrol="kill -INT $PPID; exec sleep 1", scancel=cancels)
    given = submission("slurm", tmp_path)
    prepared = SlurmTarget("").prepare(given)
    with pytest.raises(KeyboardInterrupt):
        SlurmTarget("").submit(prepared)
    assert asked.read_text().splitlines()[-2:] == ["scancel 7", "with its files"]
    assert not given.run.folder.exists()


@in_one_test(
    ("text", "slurms"),
    [
        *(("90s", "0-00:02:00"), ("12h", "0-12:00:00"), ("2d", "2-00:00:00"), ("30", "0-00:30:00")),
        *(("30:30", "0-00:31:00"), ("1:30:00", "0-01:30:00"), ("1-12", "1-12:00:00"), ("1-00:00:00", "1-00:00:00")),
    ],
)
def test_a_time_limit_may_be_written_as_slurm_does(tmp_path: Path, text: str, slurms: str) -> None:
    prepared = SlurmTarget("").prepare(submission("slurm", tmp_path, time=text))
    assert f"#SBATCH --time={slurms}\n" in prepared.shown()


def test_each_node_is_asked_for_what_its_workers_need(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def shown(partitions: str, plan: str = "dp=4", **options: str) -> str:
        tools = tmp_path / "bin"
        tools.mkdir(exist_ok=True)
        (tools / "sinfo").write_text(f"#!/bin/sh\nprintf '{partitions}'\n")
        (tools / "sinfo").chmod(0o755)
        monkeypatch.setenv("PATH", f"{tools}{os.pathsep}{os.environ['PATH']}")
        given = submission("slurm", tmp_path, plan, **options)
        return SlurmTarget("").prepare(given).files[given.folder / "job.sh"]

    without = shown("cpu*|8|1000|(null)\\ngpu|8|1000|gpu:8\\n")
    assert "#SBATCH --cpus-per-task=2\n" in without
    assert "gpus" not in without
    with_gpus = shown("cpu|8|1000|(null)\\ngpu*|8|1000|gpu:8\\n")
    assert "#SBATCH --gpus-per-node=2\n" in with_gpus
    assert "cpus" not in with_gpus.partition("\n\n")[0]
    assert "#SBATCH --gpus-per-node=2\n" in shown("gpu|8|1000|gpu:8\\n", partition="gpu")
    assert "--gpus" not in shown("gpu*|8|1000|gpu:8\\n", gpus_per_node="0")
    assert "--gres=gpu:a100:2\n" in shown("gpu*|8|1000|gpu:8\\n", gres="gpu:a100:2")
    assert "--gpus" not in shown("gpu*|8|1000|gpu:8\\n", gres="gpu:a100:2")
    assert "--gpus" not in shown("gpu*|8|1000|gpu:8\\n", plan="dp=4 device=cpu")
    with pytest.raises(SpecError, match=r"2 nodes with 1 x A100-80GB \(sinfo\) have 2"):
        shown("gpu*|8|1000|gpu:a100:1\\n")
    with pytest.raises(SpecError, match=r"which computes on GPUs: 2 nodes with 1 cores \(sinfo\)"):
        shown("cpu*|8|1000|(null)\\n", plan="dp=4 device=cuda")


GUESSED = "sinfo is not here: taken as nodes without GPUs; give --gpus-per-node"


@in_one_test(
    ("plan", "options", "words", "notes"),
    [
        ("dp=4", {"partition": "gpu"}, "--cpus-per-task=2", (GUESSED,)),
        ("dp=4", {"partition": "gpu", "gpus_per_node": "2"}, "--gpus-per-node=2", ()),
        ("dp=4", {"gpus_per_node": "0"}, "--cpus-per-task=2", ()),
        ("dp=4", {"gres": "gpu:2"}, "--gres=gpu:2", ()),
        ("dp=4 device=cuda", {"partition": "gpu"}, "--gpus-per-node=2", ()),
        ("dp=4 device=cpu", {"partition": "gpu"}, "--cpus-per-task=2", ()),
    ],
)
def test_what_is_taken_for_granted_without_slurm_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plan: str, options: dict[str, str], words: str, notes: Any
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    prepared = SlurmTarget("").prepare(submission("slurm", tmp_path, plan, **options))
    assert f"#SBATCH {words}\n" in prepared.shown()
    assert prepared.notes == notes
    assert prepared.shown().endswith("".join(f"\nnote: {note}" for note in notes))
    runs = [submission("slurm", tmp_path / "bench", plan, **options)]
    assert SlurmTarget("").prepare_array(runs, 1).notes == notes


def test_a_slurm_that_does_not_answer_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(tmp_path, monkeypatch, sinfo="exit 1")
    assert SlurmTarget("").prepare(submission("slurm", tmp_path)).notes == (
        GUESSED.replace("is not here", "does not answer"),
    )


@pytest.mark.parametrize(
    ("setup", "code", "said"),
    [
        ("export ONE=1 # comment\n# nothing\n\nexport TWO=$ONE", 0, ""),
        (
            "export ONE=1\nno-such-module load cuda\nexport TWO=2",
            3,
            "this line of --setup failed: no-such-module load cuda",
        ),
        (
            "[ -d /no/such/place ] # 'quoted",
            3,
            "the run does not begin: this line of --setup failed: [ -d /no/such/place ] # 'quoted",
        ),
    ],
)
def test_a_line_of_setup_that_fails_ends_the_job_before_anything_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, setup: str, code: int, said: str
) -> None:
    asked = pretend(tmp_path, monkeypatch, scontrol="echo NodeAddr=127.0.0.1", srun='echo "$ONE$TWO"')
    given = submission("slurm", tmp_path, setup=setup, gpus_per_node="1")
    script = SlurmTarget("").prepare(given).files[given.folder / "job.sh"]
    environment = {**os.environ, "SLURM_JOB_ID": "7", "SLURMD_NODENAME": "n1"}
    done = subprocess.run(["bash", "-c", script], env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == code, done.stderr
    assert said in done.stderr
    begun = "srun" in (asked.read_text() if asked.exists() else "")
    assert begun == (code == 0)
    assert done.stdout == ("11\n" if begun else "")


def test_a_line_break_in_the_current_folder_is_no_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (here := tmp_path / "a\ntouch b").mkdir()
    monkeypatch.chdir(here)
    with pytest.raises(SpecError, match="chdir: given"):
        SlurmTarget("").prepare(submission("slurm", tmp_path, gpus_per_node="1"))


def test_a_word_to_stop_that_comes_just_as_the_run_begins_is_heard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits = f"trap 'exit {SAVED}' USR1; for n in $(seq 200); do sleep 0.1; done"
    pretend(tmp_path, monkeypatch, scontrol="echo NodeAddr=127.0.0.1", srun=waits)
    given = submission("slurm", tmp_path, gpus_per_node="1")
    script = SlurmTarget("").prepare(given).files[given.folder / "job.sh"]
    begun = "step=$!\n"
    assert script.count(begun) == 1
    environment = {**os.environ, "SLURM_JOB_ID": "7", "SLURMD_NODENAME": "n1"}
    asked = script.replace(begun, f"{begun}sleep 1\nkill -USR2 $$\n")
    done = subprocess.run(["bash", "-c", asked], env=environment, capture_output=True, timeout=60, check=False)
    assert done.returncode == SAVED, done.stderr


def test_a_warning_does_not_hide_why_slurm_would_refuse(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = "sbatch: error: Batch job submission failed: Invalid qos specification"
    pretend(tmp_path, monkeypatch, sbatch=f"echo 'sbatch: warning: much' >&2; echo '{words}' >&2; exit 1")
    target = SlurmTarget("")
    assert target.why_not(target.prepare(submission("slurm", tmp_path))) == words


NODES = ("--to", "slurm", "--nodes", "2", "--steps", "5", "--run", "bench")


def test_the_script_is_shown_in_full_and_nothing_is_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "a b'c #%d\"e"
    folder.mkdir()
    monkeypatch.chdir(folder)
    write_job(folder)
    words = ("bench", "train.py", *NODES, "--plan", "dp=2", "--at-once", "2", "--time", "1h", "--dry-run")
    told = json.loads(CliRunner().invoke(main, [*words, "--json"]).stdout)
    names = ["launch/measured.py", "0/launch/run.toml", "1/launch/run.toml", "launch/job.sh"]
    assert list(told["files"]) == [str(folder / "bench" / name) for name in names]
    script = told["files"][str(folder / "bench" / "launch" / "job.sh")]
    assert "#SBATCH --array=0-1%2\n" in script
    assert "nodes=(1 2) " in script
    assert told["commands"] == [["sbatch", "--parsable", str(folder / "bench" / "launch" / "job.sh")]]
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)
    assert script in CliRunner().invoke(main, [*words]).stdout
    assert not (folder / "bench").exists()


@in_one_test(
    ("words", "said"),
    [
        (("--run", "there"), "--run: given without --to"),
        (("--at-once", "2"), "--at-once: given without --to"),
        (("--dry-run",), "--dry-run: given without --to"),
        (("--nodes", "2"), "No such option '--nodes'"),
        ((*NODES, "--hosts", "2"), "--hosts: given together with --to slurm"),
        ((*NODES, "--rate", "1gbit"), "--rate: given together with --to slurm"),
        (("--to", "ray://head:1", "--plan", "dp=2"), "which takes no arrays of jobs; allowed: slurm"),
        (("--to", "slurn", "--plan", "dp=2"), "--to slurm"),
        ((*NODES, "--plan", "dp=2", "--qoz", "long"), "try: --qos"),
        ((*NODES, "-n", "1", "--dry-run"), "--nodes: given 2, for the plans single"),
        ((*NODES, "-n", "2", "--time", "soon", "--dry-run"), "--time: given 'soon'"),
        ((*NODES, "--constraint", "a100", "--dry-run"), "which there are is not known here"),
        ((*NODES, "-n", "2", "--plan", "ep=2"), "refused"),
    ],
)
def test_what_cannot_be_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    write_job(tmp_path)
    done = CliRunner().invoke(main, ["bench", "train.py", *words])
    assert done.exit_code == 2, done.output
    assert said in done.output
    assert not (tmp_path / "bench").exists()


PLANS = [Plan(), Plan(dp=2), Plan(dp=4)]
REFUSED = RunError("Slurm refuses it: slurm: warning: slow\nUnable to contact slurm controller\n    try: sinfo")


class Array(Queue, ArrayTarget):
    def __init__(self, address: str) -> None:
        self.answers: list[Any] = []  # to looks at plans, in turn; the last again and again
        self.stopped: list[int] = []
        self.looks = 0

    def prepare_array(self, submissions: Sequence[Submission], at_once: int) -> Prepared:
        return self.prepare(submissions[0])

    def submit_array(self, prepared: Prepared, count: int) -> Sequence[Mapping[str, Any]]:
        for number in range(count):
            (prepared.submission.run.folder.parent / str(number) / "launch").mkdir(parents=True)
        return [{"job": 7, "task": task} for task in range(count)]

    def standing(self, ticket: Mapping[str, Any], folder: Path) -> Standing:
        self.looks += 1
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if callable(answer):
            answer()
            return Standing(state="running")
        if isinstance(answer, Exception):
            raise answer
        return Standing(state=answer)

    def stop(self, ticket: Mapping[str, Any], folder: Path) -> None:
        self.stopped.append(ticket["task"])
        if ticket["task"] == 1:
            raise REFUSED


@pytest.fixture
def queue(monkeypatch: pytest.MonkeyPatch) -> Array:
    monkeypatch.setitem(TARGETS, "queue", "test_slurm:Array")
    monkeypatch.setattr(bench_queue.time, "sleep", lambda seconds: None)
    return Array("")


def measure(queue: Array, folder: Path) -> Any:
    job = Job(name="job", model=list, data=list, loss=max, optimizer=list, batch=4, steps=3)
    how: dict[str, Any] = {"options": {}, "reference": "train.py", "at_once": 1}
    return QueueBench(target=queue, to="queue", folder=folder / "bench", job=job, plans=PLANS, **how).measure([])


def interrupted() -> None:
    raise KeyboardInterrupt


def ended() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.parametrize(("by", "raised"), [(interrupted, KeyboardInterrupt), (ended, SystemExit)])
def test_all_are_stopped_also_where_one_cannot_be_and_that_one_is_named(
    queue: Array, tmp_path: Path, capsys: pytest.CaptureFixture[str], by: Any, raised: type[BaseException]
) -> None:
    before = signal.getsignal(signal.SIGTERM)
    queue.answers = ["waiting", by]
    with pytest.raises(raised) as caught:
        measure(queue, tmp_path)
    assert getattr(caught.value, "code", 143) == 143
    assert queue.stopped == [2, 1, 0], "those first that wait"
    err = capsys.readouterr().err
    assert err.count("may still wait or run there") == 1
    assert "dp=2 may still wait or run there: Unable to contact slurm controller\n" in err
    assert f"try: phalanx stop {tmp_path}/bench/1" in err
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_queue_that_answers_no_more_is_given_up_and_what_goes_on_is_said(queue: Array, tmp_path: Path) -> None:
    queue.answers = ["running", REFUSED]
    with pytest.raises(RunError) as caught:
        measure(queue, tmp_path)
    assert queue.looks >= 30 * len(PLANS), "thirty looks at all of them"
    assert queue.stopped == []
    said = str(caught.value)
    assert said.startswith("queue has not answered 31 times: Unable to contact slurm controller; what it has goes on")
    assert f"try: the same command with --run {tmp_path}/bench, which finds it again" in said
    assert f"phalanx stop {tmp_path}/bench/0" in said


def test_one_answer_in_between_begins_the_count_anew(queue: Array, tmp_path: Path) -> None:
    silence = [REFUSED] * len(PLANS) * 30
    queue.answers = [*silence, "running", *silence, "ended"]
    assert len(measure(queue, tmp_path).failed) == len(PLANS), "nothing was measured, and nothing was given up"
