"""When a run saves and what it goes on from: what may be said, and what is made of it before a worker starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
import pytest
import torch
from click.testing import CliRunner

from phalanx import checkpoint
from phalanx.cli.settings import Given
from phalanx.cli.train import command
from phalanx.config import Plan, RunSpec
from phalanx.errors import SpecError
from phalanx.files import replace_text
from phalanx.launch.runfile import RunFolder, absolute, set_aside, settled


def spec(folder: Path = Path("run"), **how: Any) -> RunSpec:
    return RunSpec(job="digits.py", plan=Plan(), folder=folder, **how)


def saved(run: RunSpec, *steps: int) -> None:
    folder = run.folder / "checkpoints"
    for step in steps:
        checkpoint.save(folder, step=step, tensors={"weight": torch.zeros(2)}, state={"step": step}, keep=9)


@pytest.mark.parametrize(
    ("given", "steps", "seconds"),
    [(500, 500, 0.0), (0, 0, 0.0), ("90s", 0, 90.0), ("15m", 0, 900.0), ("2h", 0, 7200.0), ("1.5m", 0, 90.0)],
)
def test_checkpoints_come_by_steps_or_by_time(given: int | str, steps: int, seconds: float) -> None:
    run = spec(checkpoint_every=given)
    assert (run.save_steps, run.save_seconds) == (steps, seconds)
    assert RunSpec.from_toml(run.to_toml()) == run


def test_by_default_they_come_every_15_minutes() -> None:
    assert spec().save_seconds == 900


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
        kept = {name for one in command.params if (name := one.name) not in ("launcher", "tensorboard")}
        given = Given.of(job, {name: options[name] for name in kept - {"job", "quiet", "explain", "as_json"}})
        found.update(resume=given.resume, from_step=given.from_step, **given.values)

    tried = type(command)("train", callback=settle, params=command.params)
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


def test_the_time_between_checkpoints_is_taken_as_it_is_written() -> None:
    assert told("job.py", "--checkpoint-every", "15m")["checkpoint_every"] == "15m"
    assert told("job.py", "--checkpoint-every", "500")["checkpoint_every"] == 500


def test_what_does_not_go_together_is_refused() -> None:
    for argv in (["--resume", "auto"], ["--from", "3"], ["--run", "r", "--resume", "auto", "--from", "3"]):
        with pytest.raises(SpecError):
            told("job.py", *argv)
    with pytest.raises(click.UsageError):
        told("job.py", "--run", "r", "--resume=maybe")


def prepare_run(run: RunSpec) -> None:
    """What a run that begins at once does."""
    with RunFolder(run) as entered:
        entered.prepare()
        (run.folder / "run.toml").write_text(absolute(run).to_toml())


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
    with pytest.raises(SpecError, match=r"04 is damaged: .* 0 bytes.*; step-00000002 is damaged: ") as refused:
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


@pytest.mark.parametrize("begun", [False, True])
def test_a_run_that_is_refused_before_it_begins_has_set_nothing_aside(begun: bool, tmp_path: Path) -> None:
    prepare_run(spec(tmp_path / "run"))
    run = spec(tmp_path / "run", resume=True, from_step=2)
    saved(run, 2, 4, 6)
    with RunFolder(run) as entered:
        assert entered.prepare().from_step is None
        assert checkpoint.latest(run.folder / "checkpoints") == run.folder / "checkpoints" / "step-00000002"
        if begun:
            replace_text(run.folder / "run.toml", absolute(run).to_toml())
    there = sorted(path.name for path in (run.folder / "checkpoints").iterdir())
    refused, went_on = ["step-00000002", "step-00000004", "step-00000006"], ["set-aside-1", "step-00000002"]
    assert there == (went_on if begun else refused)


def test_a_step_of_which_there_is_no_checkpoint_is_told_which_there_are(tmp_path: Path) -> None:
    run = spec(tmp_path / "run", resume=True, from_step=3)
    saved(run, 2, 4)
    with pytest.raises(
        SpecError, match=r"run\.from_step: given 3, .*; allowed: one of 2, 4\n    try: resume=True, from_step=4"
    ):
        set_aside(run)


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
