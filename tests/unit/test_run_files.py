"""The one table of what a run folder holds: every name that the source has stands in it, and its page says no other."""

from __future__ import annotations

import re
from fnmatch import fnmatch
from pathlib import Path

import pytest

from phalanx.checkpoint.best import BEST
from phalanx.cli import bench_queue
from phalanx.config import Plan, RunSpec
from phalanx.config.run_files import EVENTS, LAUNCH_FILES, RUN_FILES
from phalanx.files import single_writer
from phalanx.launch import run_secret
from phalanx.launch.targets import kubernetes, kubernetes_log, ray, ray_actors, ray_code, sagemaker
from phalanx.launch.targets.launch_folder import CODE_LIST, FOLDER, OUTPUT, TICKET, attached_log
from phalanx.launch.targets.sagemaker_logs import TrainingLogs
from phalanx.launch.targets.slurm_script import SCRIPT
from phalanx.launch.targets.ssh_sending import FolderSnapshot
from phalanx.placement.survey_file import PLACEMENT
from phalanx.report.comparison import FORECAST

pytestmark = pytest.mark.quick

PAGE = Path(__file__).resolve().parents[2] / "docs" / "reference" / "run-folder.md"
NAMES = (BEST, PLACEMENT, FORECAST, EVENTS, FOLDER, single_writer.NAME, run_secret._NAME)  # pyright: ignore
LOGS = TrainingLogs(None, "digits-1", Path())  # pyright: ignore  (asks nothing for its names)
OF_LAUNCH = (
    *(SCRIPT, CODE_LIST, "slurm-7.out", bench_queue._JOB_FILE, TICKET),  # pyright: ignore
    *(kubernetes._MANIFESTS, kubernetes._ASKED, kubernetes_log._TAKEN, OUTPUT),  # pyright: ignore
    *(ray._REQUEST, ray_code.ARCHIVE, ray_actors.STANDING),  # pyright: ignore
    *(sagemaker._REQUEST, LOGS.path().name, LOGS.path(3).name, LOGS._tokens_file.name),  # pyright: ignore
    *(attached_log(Path(), None).name, attached_log(Path(), 3).name),
)


@pytest.mark.parametrize("name", NAMES)
def test_what_a_run_writes_stands_in_the_table(name: str) -> None:
    assert name in RUN_FILES


@pytest.mark.parametrize("name", OF_LAUNCH)
def test_what_a_launch_writes_stands_in_its_table(name: str) -> None:
    assert [one for one in LAUNCH_FILES if fnmatch(name, one)]


def test_the_tree_of_the_page_has_every_name_and_no_other() -> None:
    tree = PAGE.read_text().partition("```text\n")[2].partition("```")[0]
    assert sorted(re.findall(r"^  ([\w.-]+)/? ?", tree, re.MULTILINE)) == sorted(RUN_FILES)


def test_a_copy_begins_with_what_is_sent_and_with_what_the_user_has_put_there(tmp_path: Path) -> None:
    run = RunSpec(job="train.py", plan=Plan(), folder=tmp_path / "run", resume=False)
    for name in [*RUN_FILES, "notes.txt", "plots"]:
        path = run.folder / name if "." in name else run.folder / name / "file"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("x")
    sent = {path.partition("/")[0] for path in FolderSnapshot(run).files}
    expected = {name for name, file in RUN_FILES.items() if file.sent} | {"notes.txt", "plots"}
    assert sent == expected
