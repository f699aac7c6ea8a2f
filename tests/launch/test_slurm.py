"""A launch on Slurm without a cluster: its script, and the commands it runs."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from launched import submission

from law_rows import in_one_test
from phalanx.errors import RunError, SpecError
from phalanx.launch.reaper import SAVED
from phalanx.launch.targets.slurm import SlurmTarget

SLURM = SlurmTarget("")


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A Slurm whose commands ``pretend`` writes; the file with the commands that were run."""
    (tmp_path / "tools").mkdir()
    monkeypatch.setenv("PATH", f"{tmp_path / 'tools'}{os.pathsep}{os.environ['PATH']}")
    pretend(tmp_path, sbatch="echo 7", scontrol="exit 1", scancel="true", sinfo="true")
    return tmp_path / "asked"


def pretend(folder: Path, **tools: str) -> None:
    for name, text in tools.items():
        (folder / "tools" / name).write_text(f'#!/bin/sh\necho "{name} $*" >> {folder}/asked\n{text}\n')
        (folder / "tools" / name).chmod(0o755)


def script(folder: Path, plan: str = "dp=4", **options: str) -> str:
    given = submission("slurm", folder, plan, **options)
    return SLURM.prepare(given).files[given.folder / "job.sh"]


def run_script(text: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "SLURM_JOB_ID": "7", "SLURMD_NODENAME": "n1"}
    return subprocess.run(["bash", "-c", text], env=environment, capture_output=True, text=True, timeout=60)


def test_variables_of_a_shell_say_only_what_the_script_leaves_open(
    tmp_path: Path, asked: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(tmp_path, sbatch=f"env | grep ^SBATCH_ | sort > {tmp_path}/told; echo 7")
    for name in ("TIMELIMIT", "SIGNAL", "OUTPUT", "ERROR", "NO_REQUEUE", "OPEN_MODE", "JOB_NAME", "PARTITION", "QOS"):
        monkeypatch.setenv(f"SBATCH_{name}", "other")
    prepared = SLURM.prepare(submission("slurm", tmp_path, time="1h", sbatch="--partition=gpu"))
    for ask in (lambda: SLURM.submit(prepared) == {"job": 7}, lambda: SLURM.why_not(prepared) == ""):
        assert ask()
        assert (tmp_path / "told").read_text() == "SBATCH_QOS=other\n", "the script's own partition holds"


@in_one_test(
    ("state", "commands"),
    [
        ("PENDING", ["scontrol -M far update JobId=7 Requeue=0", "scancel -M far 7"]),
        ("COMPLETING", ["scontrol -M far update JobId=7 Requeue=0", "scancel -M far 7"]),
        ("RUNNING", ["scontrol -M far update JobId=7 Requeue=0", "scancel -M far --signal=USR2 --batch 7"]),
        *((state, []) for state in ("COMPLETED", "CANCELLED", "FAILED", "TIMEOUT")),
    ],
)
def test_a_stop_saves_a_running_job_and_removes_a_waiting_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state: str, commands: list[str]
) -> None:
    (tmp_path / "tools").mkdir(exist_ok=True)
    monkeypatch.setenv("PATH", f"{tmp_path / 'tools'}{os.pathsep}{os.environ['PATH']}")
    pretend(tmp_path, scontrol=f"echo 'JobId=7 JobState={state}'", scancel="true")
    (tmp_path / "asked").unlink(missing_ok=True)
    SLURM.stop({"job": 7, "cluster": "far"}, tmp_path)
    first, *rest = (tmp_path / "asked").read_text().splitlines()
    assert (first, rest) == ("scontrol -M far show job 7 --oneliner", commands)


def test_a_refusal_is_said_in_slurms_words_and_leaves_nothing(tmp_path: Path, asked: Path) -> None:
    words = "sbatch: error: Batch job submission failed: Invalid qos specification"
    pretend(tmp_path, sbatch=f"echo 'sbatch: warning: much' >&2; echo '{words}' >&2; exit 1")
    given = submission("slurm", tmp_path)
    prepared = SLURM.prepare(given)
    assert words in SLURM.why_not(prepared)
    with pytest.raises(RunError, match="Invalid qos"):
        SLURM.submit(prepared)
    assert not given.run.folder.exists()


@in_one_test(
    ("text", "slurms"), [("90s", "0-00:02:00"), ("12h", "0-12:00:00"), ("2d", "2-00:00:00"), ("1.5h", "0-01:30:00")]
)
def test_a_time_limit_is_written_as_slurm_counts(tmp_path: Path, text: str, slurms: str) -> None:
    assert f"#SBATCH --time={slurms}\n" in script(tmp_path, time=text, gpus_per_node="0")


@in_one_test(
    ("plan", "options", "asks"),
    [
        ("dp=4", {}, "--gpus-per-node=2"),
        ("dp=4", {"gpus_per_node": "4"}, "--gpus-per-node=4"),
        ("dp=4", {"gpus_per_node": "0"}, "--cpus-per-task=2"),
        ("dp=4", {"gpus_per_node": "0", "sbatch": "--cpus-per-task=8"}, "--cpus-per-task=8"),
        ("dp=4", {"sbatch": "--gres=gpu:a100:2"}, "--gres=gpu:a100:2"),
        ("dp=4 device=cpu", {}, "--cpus-per-task=2"),
        ("dp=4 device=cuda", {}, "--gpus-per-node=2"),
    ],
)
def test_each_node_is_asked_for_what_its_workers_need(
    tmp_path: Path, plan: str, options: dict[str, str], asks: str
) -> None:
    text = script(tmp_path, plan, **options).partition("\n\n")[0]
    assert [line for line in text.splitlines() if "-per-" in line or "gres" in line][1:] == [f"#SBATCH {asks}"]


@pytest.mark.parametrize(
    ("setup", "failed"),
    [
        ("export ONE=1 # comment\n# nothing\n\nexport TWO=$ONE", ""),
        ("export ONE=1\nno-such-module load cuda\nexport TWO=2", "no-such-module load cuda"),
        ("[ -d /no/such/place ] # 'quoted", "[ -d /no/such/place ] # 'quoted"),
    ],
)
def test_a_line_of_setup_that_fails_ends_the_job_before_anything_begins(
    tmp_path: Path, asked: Path, setup: str, failed: str
) -> None:
    pretend(tmp_path, scontrol="echo NodeAddr=127.0.0.1", srun='echo "$ONE$TWO"')
    done = run_script(script(tmp_path, setup=setup, gpus_per_node="2"))
    assert done.returncode == (3 if failed else 0), done.stderr
    assert not failed or f"this line of --setup failed: {failed}" in done.stderr
    assert done.stdout == ("" if failed else "11\n")


def test_a_line_break_in_the_current_folder_is_no_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (here := tmp_path / "a\ntouch b").mkdir()
    monkeypatch.chdir(here)
    with pytest.raises(SpecError, match="chdir: given"):
        script(tmp_path, gpus_per_node="2")


def test_a_word_to_stop_that_comes_just_as_the_run_begins_is_heard(tmp_path: Path, asked: Path) -> None:
    waits = f"trap 'exit {SAVED}' USR1; for n in $(seq 200); do sleep 0.1; done"
    pretend(tmp_path, scontrol="echo NodeAddr=127.0.0.1", srun=waits)
    text, begun = script(tmp_path, gpus_per_node="2"), "step=$!\n"
    assert text.count(begun) == 1
    done = run_script(text.replace(begun, f"{begun}sleep 1\nkill -USR2 $$\n"))
    assert done.returncode == SAVED, done.stderr
