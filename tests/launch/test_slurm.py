"""What a launch on Slurm asks for, without one: its script and its commands."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from launched import submission

from law_rows import in_one_test
from phalanx.errors import SpecError
from phalanx.launch.reaper import SAVED
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


def test_a_copied_folder_does_not_stop_the_run_that_it_is_a_copy_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = f"JobId=7 JobState=RUNNING Reason=None Command={tmp_path}/a run/launch/job.sh WorkDir=/"
    asked = pretend(tmp_path, monkeypatch, scontrol=f"echo '{job}'")
    target, ticket = SlurmTarget(""), {"job": 7, "cluster": "far"}
    (tmp_path / "linked").symlink_to(tmp_path)
    for folder, state in ((tmp_path / "copy" / "a run", "unknown"), (tmp_path / "linked" / "a run", "running")):
        assert target.standing(ticket, folder).state == state
        assert "scancel" not in asked.read_text()
        target.stop(ticket, folder)
    *before, last = asked.read_text().splitlines()
    assert last == "scancel -M far --signal=USR2 --batch 7"
    assert "scontrol -M far show job 7 --oneliner" in before


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
