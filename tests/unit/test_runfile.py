"""The run folder before the first worker: what is refused, who writes it, and when its files are written."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from phalanx import checkpoint
from phalanx.config import Plan, RunSpec
from phalanx.errors import SpecError
from phalanx.launch.runfile import RunFolder, absolute, default_folder


def spec(tmp_path: Path, **changes: object) -> RunSpec:
    run = RunSpec(job=str(tmp_path / "digits.py"), plan=Plan(dp=2), folder=tmp_path / "runs" / "digits-1")
    return dataclasses.replace(run, **changes)  # pyright: ignore[reportArgumentType]


def prepare_run(run: RunSpec, *, given: Path | None = None) -> Path:
    """What a run that begins at once does."""
    with RunFolder(run, given=given) as entered:
        entered.prepare()
        (run.folder / "run.toml").write_text(absolute(run).to_toml())
    return run.folder / "run.toml"


def refusal(run: RunSpec) -> str:
    with pytest.raises(SpecError) as raised:
        prepare_run(run)
    (found,) = raised.value.problems
    return str(found)


def save(run: RunSpec, step: int) -> None:
    checkpoint.save(run.folder / "checkpoints", step=step, tensors={"weight": torch.zeros(2)}, state={"step": step})


def test_what_was_asked_is_not_written_before_the_run_begins(tmp_path: Path) -> None:
    run = spec(tmp_path)
    with RunFolder(run) as entered:
        assert not run.folder.exists()
        entered.prepare()
        assert [path.name for path in run.folder.iterdir()] == ["writer.json"]


def test_job_is_written_with_its_absolute_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    runfile = prepare_run(spec(tmp_path, job="digits.py:small"))
    assert RunSpec.from_toml(runfile.read_text()).job == f"{tmp_path}/digits.py:small"


def test_folder_is_written_with_its_absolute_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    runfile = prepare_run(spec(tmp_path, folder=Path("runs/here")))
    assert RunSpec.from_toml(runfile.read_text()).folder == tmp_path / "runs" / "here"


def test_the_folders_own_run_file_is_taken_until_something_has_happened(tmp_path: Path) -> None:
    run = spec(tmp_path)
    runfile = prepare_run(run)
    assert prepare_run(run, given=runfile) == runfile
    elsewhere = tmp_path / "run.toml"
    elsewhere.write_text(runfile.read_text())
    with pytest.raises(SpecError, match="holds a run"):
        prepare_run(run, given=elsewhere)
    (run.folder / "events.jsonl").write_text("{}\n")
    with pytest.raises(SpecError, match="holds a run"):
        prepare_run(run, given=runfile)


def test_folder_that_holds_a_run(tmp_path: Path) -> None:
    run = spec(tmp_path)
    prepare_run(run)
    text = refusal(run)
    assert "without a checkpoint" in text
    assert "digits-2" in text
    save(run, 120)
    text = refusal(run)
    assert f"holds a run of {tmp_path}/digits.py at step 120" in text
    assert text.endswith("try: resume=True")


def test_resume_takes_the_new_plan(tmp_path: Path) -> None:
    run = spec(tmp_path)
    prepare_run(run)
    save(run, 3)
    again = spec(tmp_path, resume=True, plan=Plan(fsdp=4))
    prepare_run(again)
    assert RunSpec.from_toml((run.folder / "run.toml").read_text()) == again


def test_resume_from_nothing(tmp_path: Path) -> None:
    run = spec(tmp_path, resume=True)
    assert "does not exist" in refusal(run)
    prepare_run(spec(tmp_path))
    assert "holds no checkpoint" in refusal(run)


@pytest.mark.parametrize("resume", [False, True])
def test_folder_of_another_job_names_both(resume: bool, tmp_path: Path) -> None:
    run = spec(tmp_path)
    prepare_run(run)
    save(run, 3)
    text = refusal(spec(tmp_path, job=str(tmp_path / "gpt.py"), resume=resume))
    assert f"{tmp_path}/digits.py" in text
    assert f"{tmp_path}/gpt.py" in text
    assert text.endswith('gpt-1"')
    assert RunSpec.from_toml((run.folder / "run.toml").read_text()) == run


def test_file_in_place_of_a_folder(tmp_path: Path) -> None:
    (tmp_path / "taken").touch()
    assert "which is a file" in refusal(spec(tmp_path, folder=tmp_path / "taken"))
    assert "Not a directory" in refusal(spec(tmp_path, folder=tmp_path / "taken" / "run"))


def test_default_folder_is_the_first_free(tmp_path: Path) -> None:
    assert default_folder("digits", tmp_path) == tmp_path / "digits-1"
    (tmp_path / "digits-1").mkdir()
    (tmp_path / "digits-3").mkdir()
    assert default_folder("digits", tmp_path) == tmp_path / "digits-2"
    assert default_folder("my job/1", tmp_path) == tmp_path / "my-job-1-1"


@pytest.mark.parametrize("name", ["output.log", "rank-0.log", "run.toml", "job.sh", "ticket.json"])
def test_no_link_is_followed_that_a_launch_would_write_through(tmp_path: Path, name: str) -> None:
    run = spec(tmp_path)
    (run.folder / "launch").mkdir(parents=True)
    (run.folder / "launch" / name).symlink_to(tmp_path / "nowhere")
    assert f"launch/{name}, which is a symbolic link" in refusal(run)
