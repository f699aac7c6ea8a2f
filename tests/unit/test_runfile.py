"""The run folder before the first worker: what is refused, who writes it, and when its files are written."""

from __future__ import annotations

import re
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from phalanx import checkpoint
from phalanx.checkpoint.best import BEST
from phalanx.cli.settings import Given
from phalanx.cli.train import train_command
from phalanx.config import Plan, RunSpec
from phalanx.config.run_files import EVENTS, LAUNCH_FILES, RUN_FILES
from phalanx.errors import SpecError
from phalanx.files import single_writer
from phalanx.launch import run_secret
from phalanx.launch.runfile import RunFolder, absolute, default_folder, set_aside, settled
from phalanx.launch.targets import kubernetes, sagemaker
from phalanx.launch.targets.launch_folder import CODE_LIST, FOLDER, OUTPUT, TICKET, attached_log
from phalanx.launch.targets.slurm import SCRIPT
from phalanx.placement.survey_file import PLACEMENT
from phalanx.report.comparison import FORECAST


def spec(folder: Path = Path("run"), **changes: Any) -> RunSpec:
    return RunSpec(**{"job": "digits.py", "plan": Plan(), "folder": folder, **changes})


def saved(run: RunSpec, *steps: int) -> None:
    folder = run.folder / "checkpoints"
    for step in steps:
        checkpoint.save(folder, step=step, tensors={"weight": torch.zeros(2)}, state={"step": step}, keep=9)


def prepare_run(run: RunSpec, *, given: Path | None = None) -> Path:
    """What a run that begins at once does."""
    with RunFolder(run, given=given) as entered:
        entered.prepare()
        (run.folder / "run.toml").write_text(absolute(run).to_toml())
    return run.folder / "run.toml"


def refusal(run: RunSpec, given: Path | None = None) -> str:
    with pytest.raises(SpecError) as raised:
        prepare_run(run, given=given)
    (found,) = raised.value.problems
    return str(found)


def test_job_and_folder_are_written_with_their_absolute_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run = RunSpec.from_toml(prepare_run(spec(Path("runs/here"), job="digits.py:small")).read_text())
    assert (run.job, run.folder) == (f"{tmp_path}/digits.py:small", tmp_path / "runs" / "here")


def test_the_folders_own_run_file_is_taken_until_something_has_happened(tmp_path: Path) -> None:
    run = spec()
    runfile = prepare_run(run)
    assert prepare_run(run, given=runfile) == runfile
    elsewhere = tmp_path / "run.toml"
    elsewhere.write_text(runfile.read_text())
    assert "holds a run" in refusal(run, given=elsewhere)
    (run.folder / "events.jsonl").write_text("{}\n")
    assert "holds a run" in refusal(run, given=runfile)


def test_folder_that_holds_a_run() -> None:
    run = spec(Path("digits-1"))
    prepare_run(run)
    assert "digits-2" in refusal(run)
    saved(run, 120)
    assert "at step 120" in refusal(run)
    assert refusal(run).endswith("try: resume=True")


def test_resume_from_nothing() -> None:
    assert "does not exist" in refusal(spec(resume=True))
    prepare_run(spec())
    assert "holds no checkpoint" in refusal(spec(resume=True))


@pytest.mark.parametrize("resume", [False, True])
def test_folder_of_another_job_names_both(resume: bool, tmp_path: Path) -> None:
    run = spec(tmp_path / "run", job=str(tmp_path / "digits.py"))
    prepare_run(run)
    saved(run, 3)
    text = refusal(spec(run.folder, job=str(tmp_path / "gpt.py"), resume=resume))
    assert f"{tmp_path}/digits.py" in text
    assert text.endswith('gpt-1"')
    assert RunSpec.from_toml((run.folder / "run.toml").read_text()) == run


def test_file_in_place_of_a_folder() -> None:
    Path("taken").touch()
    assert "which is a file" in refusal(spec(Path("taken")))
    assert "Not a directory" in refusal(spec(Path("taken/run")))


def test_default_folder_is_the_first_free(tmp_path: Path) -> None:
    assert default_folder("digits", tmp_path) == tmp_path / "digits-1"
    (tmp_path / "digits-1").mkdir()
    (tmp_path / "digits-3").mkdir()
    assert default_folder("digits", tmp_path) == tmp_path / "digits-2"
    assert default_folder("my job/1", tmp_path) == tmp_path / "my-job-1-1"


@pytest.mark.parametrize("name", ["rank-0.log", "ticket.json"])
def test_no_link_is_followed_that_a_launch_would_write_through(tmp_path: Path, name: str) -> None:
    run = spec()
    (run.folder / "launch").mkdir(parents=True)
    (run.folder / "launch" / name).symlink_to(tmp_path / "nowhere")
    assert f"launch/{name}, which is a symbolic link" in refusal(run)


@pytest.mark.parametrize(
    "wrong",
    [
        *({"checkpoint_every": given} for given in (-1, True, 1.5, "15", "0m", "m", "15 minutes", "-3s")),
        *({"grace": given} for given in (-1, float("inf"), "30", True)),
        *({"restarts": given} for given in (-1, 1.5, None)),
        *({"keep_every": given} for given in (0, "10")),
        *({"resume": given} for given in ("yes", 1, None)),
        *({"from_step": 4, "resume": resume} for resume in (False, "auto")),
        {"from_step": -1, "resume": True},
    ],
)
def test_what_cannot_be_is_named(wrong: dict[str, Any]) -> None:
    with pytest.raises(SpecError) as raised:
        spec(**wrong)
    assert [problem.where for problem in raised.value.problems] == [f"run.{next(iter(wrong))}"]


def told(*argv: str) -> dict[str, Any]:
    found: dict[str, Any] = {}

    def settle(job: str, **options: Any) -> None:
        kept = {name for one in train_command.params if (name := one.name) not in ("launcher", "tensorboard")}
        given = Given.of(job, {name: options[name] for name in kept - {"job", "quiet", "explain", "as_json"}})
        found.update(resume=given.resume, from_step=given.from_step, **given.values)

    tried = type(train_command)("train", callback=settle, params=train_command.params)
    result = CliRunner().invoke(tried, argv, standalone_mode=False)
    if result.exception:
        raise result.exception
    return found


@pytest.mark.parametrize(
    ("argv", "resume", "step"),
    [
        (["--run", "r", "job.py"], False, None),
        (["--run", "r", "--resume", "job.py"], True, None),
        (["job.py", "--run", "r", "--resume"], True, None),
        (["job.py", "--run", "r", "--resume", "--steps", "3"], True, None),
        (["job.py", "--run", "r", "--resume", "auto"], "auto", None),
        (["job.py", "--run", "r", "--from", "120"], True, 120),
    ],
)
def test_resume_stands_by_itself_or_is_auto(argv: list[str], resume: bool | str, step: int | None) -> None:
    found = told(*argv)
    assert (found["resume"], found["from_step"]) == (resume, step)


def test_auto_goes_on_or_begins_and_never_takes_another_jobs_folder(tmp_path: Path) -> None:
    run = spec(tmp_path / "run", resume="auto")
    prepare_run(run)
    assert settled(run).resume is False
    (run.folder / "events.jsonl").write_text("{}\n")
    prepare_run(run)  # what was begun and not saved begins anew
    saved(run, 4)
    prepare_run(run)
    assert settled(run).resume is True
    with pytest.raises(SpecError, match="holds a run of"):
        prepare_run(RunSpec(job="other.py", plan=Plan(), folder=run.folder, resume="auto"))


@pytest.mark.parametrize("resume", [True, "auto"])
def test_a_run_whose_checkpoints_are_all_damaged_does_not_begin_anew(resume: bool | str, tmp_path: Path) -> None:
    run = spec(tmp_path / "run", resume=resume)
    prepare_run(spec(run.folder))
    saved(run, 2, 4)
    for step in (2, 4):
        (run.folder / "checkpoints" / f"step-0000000{step}" / "rank-00000.safetensors").write_bytes(b"")
    with pytest.raises(SpecError, match=r"04 is damaged: .*; step-00000002 is damaged: ") as refused:
        prepare_run(run)
    assert refused.value.problems[0].fix == f'folder="{tmp_path / "run-1"}"'
    assert settled(run).resume is True  # workers that are started again name them, too


def test_a_checkpoint_that_a_crash_moved_aside_is_gone_on_from(tmp_path: Path) -> None:
    run = spec(tmp_path / "run", resume="auto")
    prepare_run(run)
    saved(run, 2, 4)
    newest = run.folder / "checkpoints" / "step-00000004"
    newest.rename(newest.with_name(".step-00000004.old"))
    prepare_run(run)
    assert checkpoint.latest(newest.parent) == newest


def test_who_goes_on_from_an_earlier_step_gives_later_ones_up(tmp_path: Path) -> None:
    run = spec(tmp_path / "run", resume=True, from_step=4)
    saved(run, 2, 4, 6, 8)
    set_aside(run)
    folder = run.folder / "checkpoints"
    assert sorted(path.name for path in folder.glob("step-*")) == ["step-00000002", "step-00000004"]
    assert sorted(path.name for path in (folder / "set-aside-1").iterdir()) == ["step-00000006", "step-00000008"]
    newest = checkpoint.latest(folder)
    assert newest is not None
    assert newest.name == "step-00000004"
    set_aside(run)
    saved(run, 6)
    set_aside(run)
    assert [path.name for path in (folder / "set-aside-2").iterdir()] == ["step-00000006"]


def test_a_step_whose_checkpoint_is_damaged_is_not_gone_on_from(tmp_path: Path) -> None:
    """It was named: another is not taken in its place, and nothing is set aside for it."""
    run = spec(tmp_path / "run", resume=True, from_step=4)
    saved(run, 2, 4, 6)
    flip(run.folder / "checkpoints" / "step-00000004")
    with pytest.raises(SpecError, match=r"given 4, whose checkpoint is damaged: .*\n    try: resume=True, from_step=6"):
        set_aside(run)
    assert not list((run.folder / "checkpoints").glob("set-aside-*"))


def flip(path: Path) -> None:
    """Change one bit of the tensors of a checkpoint."""
    (file,) = path.glob("*.safetensors")
    content = bytearray(file.read_bytes())
    content[-2] ^= 1
    file.write_bytes(content)


PAGE = Path(__file__).resolve().parents[2] / "docs" / "reference" / "run-folder.md"
NAMES = (BEST, PLACEMENT, FORECAST, EVENTS, FOLDER, single_writer.NAME, run_secret._NAME)
OF_LAUNCH = (
    *(SCRIPT, CODE_LIST, "slurm-7.out", TICKET),
    *(kubernetes._MANIFESTS, kubernetes._ASKED, OUTPUT),
    sagemaker._REQUEST,
    *(attached_log(Path(), None).name, attached_log(Path(), 3).name),
)


def test_what_a_run_and_a_launch_write_stands_in_the_tables() -> None:
    assert {*NAMES} <= {*RUN_FILES}
    assert [name for name in OF_LAUNCH if not any(fnmatch(name, one) for one in LAUNCH_FILES)] == []


def test_the_tree_of_the_page_has_every_name_and_no_other() -> None:
    tree = PAGE.read_text().partition("```text\n")[2].partition("```")[0]
    assert sorted(re.findall(r"^  ([\w.-]+)/? ?", tree, re.MULTILINE)) == sorted(RUN_FILES)
