"""The record of a GPU and its page: fields, kills at any moment, failing steps; and the pack for such a machine."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import sysconfig
import time
import tomllib
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from packaging.requirements import Requirement

from gpu_record import pack, pack_install
from gpu_record.page import page, paragraph
from gpu_record.page_records import STEPS, read_records
from gpu_record.recorder import TRAINING, PlannedStep, Record, run_steps
from law_rows import longer

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "tools" / "gpu_record" / "run.py"
ENTRY = {"name", "status", "limit", "seconds", "reason", "traceback", "facts", "rows"}
TRAINING_FACTS = {"parameters", "flops_per_step", "sequence", "batch", "peak_tflops_used", "note"}
FACTS: dict[str, set[str]] = {
    "environment": {
        *("gpu", "gpus", "memory_bytes", "capability", "driver", "cuda", "hip", "torch", "python", "cores", "sm_mhz"),
        *("memory_mhz", "power_limit_w", "matmul_tflops", "copy_gbps", "peak_tflops"),
    },
    **dict.fromkeys(TRAINING, TRAINING_FACTS),
    "calibrate": {"cluster", "seconds"},
    "gpu_tests": {"passed", "failed", "skipped", "errors", "tail"},
    "trace": {"step_seconds", "compute_share", "launch_gap_share", "host_wait_share"},
}


def recorded(*words: str) -> tuple[int, dict[str, Any]]:
    """Run the script for CPUs; its exit code and record."""
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--device", "cpu", "--out", "record.json", *words],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.stderr == ""
    return done.returncode, json.loads(Path("record.json").read_text())


def check_fields(step: dict[str, Any]) -> None:
    """Compare a step of the file with the reader's table of columns."""
    columns = set(STEPS[step["name"]].row)
    assert set(step) == ENTRY
    assert (step["status"], step["reason"], step["traceback"]) == ("done", "", "")
    assert set(step["facts"]) >= FACTS.get(step["name"], set())
    assert bool(step["rows"]) == bool(columns)
    assert all(set(row) == columns for row in step["rows"])


def check_page() -> None:
    """Make the page of the file: the section of every step, and of each row its model."""
    (record,) = read_records([Path("record.json")])
    content, _ = page([record])
    for name, step in record.steps.items():
        _, found, section = content.partition(f"### {STEPS[name].title}\n")
        assert found, name
        assert [row for row in step["rows"] if "model" in row and f"| {row['model']}" not in section] == []


@pytest.mark.long
@pytest.mark.realtime("steps are timed")
@pytest.mark.timeout(400)
def test_every_step_has_a_small_version() -> None:
    code, record = recorded("--minutes", "4")
    assert {step["name"]: step["traceback"] for step in record["steps"] if step["traceback"]} == {}
    assert code == 0
    assert {step["name"] for step in record["steps"]} == set(STEPS)
    for step in record["steps"]:
        check_fields(step)
    check_page()
    proofs = next(step["rows"] for step in record["steps"] if step["name"] == "proof")
    assert {row["result"] for row in proofs} <= {"equal", "refused"}


# A step: records its process id, then waits as long as its parent lives.
SLEEPING = """
import json, os, sys, time
messages, name, seconds = sys.argv[1:]
parent = os.getppid()
with open(messages, "a") as file:
    for message in ({"facts": {"pid": os.getpid()}}, {"row": "1", "values": {"a": 1}}):
        file.write(json.dumps(message) + "\\n")
open(name, "w").close()
until = time.monotonic() + float(seconds)
while time.monotonic() < until and os.getppid() == parent:
    time.sleep(0.01)
"""
DRIVER = """
import sys, time
from pathlib import Path
from gpu_record.recorder import PlannedStep, Record, run_steps
step = (sys.executable, "-S", "-c", sys.argv[1], "{messages}")
steps = [PlannedStep(name=f"s{i}", limit=20, least=0, command=(*step, f"s{i}", "0.15")) for i in range(40)]
record = Record(path=Path("record.json"), header={"schema": 1}, until=time.monotonic() + 60)
sys.exit(run_steps(record, steps, None))
"""


def driven() -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-c", DRIVER, SLEEPING],
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": str(ROOT / "tools")},
    )


def wait_for(there: Callable[[], bool], seconds: float = 20.0) -> None:
    until = time.monotonic() + seconds
    while not there():
        assert time.monotonic() < until
        time.sleep(0.005)


def gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


@pytest.mark.parametrize("seed", [0, *longer(1)])
def test_a_kill_at_any_moment_leaves_a_whole_record(seed: int) -> None:
    process = driven()
    wait_for(Path("s1").exists)
    time.sleep(random.Random(seed).uniform(0.0, 1.0))
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    record = json.loads(Path("record.json").read_text())
    begun = sum(Path(step["name"]).exists() for step in record["steps"])
    assert begun > 1
    assert len(record["steps"]) == 40
    # A step begins only once the one before it has been written.
    for step in record["steps"][: begun - 1]:
        assert (step["status"], step["rows"]) == ("done", [{"a": 1}])
    assert not record["complete"]
    pids = [step["facts"]["pid"] for step in record["steps"] if step["facts"]]
    wait_for(lambda: all(map(gone, pids)))


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), *longer((signal.SIGINT, 130))])
def test_a_signal_ends_the_step_in_work_and_is_recorded(number: int, code: int) -> None:
    process = driven()
    wait_for(Path("s1").exists)
    process.send_signal(number)
    assert process.wait(20) == code
    steps = json.loads(Path("record.json").read_text())["steps"]
    assert steps[0]["status"] == "done"
    assert [step["status"] for step in steps if step["status"] not in ("done", "skipped")] in ([], ["failed"])
    assert steps[-1]["reason"] == f"stopped by {signal.Signals(number).name}"
    assert all(gone(step["facts"]["pid"]) for step in steps if step["facts"])


def python(code: str) -> tuple[str, ...]:
    return (sys.executable, "-S", "-c", code, "{messages}")


def steps_recorded(*steps: PlannedStep, memory: float | None = None) -> tuple[int, list[dict[str, Any]]]:
    record = Record(path=Path("record.json"), header={"schema": 1}, until=time.monotonic() + 30)
    code = run_steps(record, steps, memory)
    return code, json.loads(Path("record.json").read_text())["steps"]


GOOD = PlannedStep(name="good", limit=10, least=0, command=python("print(1)"))


@pytest.mark.parametrize(
    ("code", "reason", "text"),
    [
        ("raise ValueError('a fault')", "ValueError: a fault", "Traceback (most recent call last)"),
        ("import os; os.kill(os.getpid(), 9)", "killed by SIGKILL", ""),
    ],
)
def test_a_step_that_fails_is_recorded_and_the_next_runs(code: str, reason: str, text: str) -> None:
    bad = PlannedStep(name="bad", limit=10, least=0, command=python(code))
    ended, (first, second) = steps_recorded(bad, GOOD)
    assert (ended, first["status"], first["reason"], second["status"]) == (1, "failed", reason, "done")
    assert first["traceback"]
    assert first["traceback"].startswith(text)


def test_a_step_beyond_its_limit_is_killed_with_its_processes() -> None:
    code = (
        "import json, subprocess, sys, time\n"
        "child = subprocess.Popen(['sleep', '60'])\n"
        "open(sys.argv[1], 'a').write(json.dumps({'facts': {'pid': child.pid}}) + '\\n')\n"
        "time.sleep(60)"
    )
    slow = PlannedStep(name="slow", limit=1.5, least=0, command=python(code))
    ended, (first, second) = steps_recorded(slow, GOOD)
    assert ended == 1
    assert (first["status"], second["status"]) == ("timed out", "done")
    assert first["seconds"] == pytest.approx(1.5, abs=1.0)
    wait_for(lambda: gone(first["facts"]["pid"]))


CUDA = "class cuda:\n    is_available = staticmethod(lambda: False)\n"


@pytest.mark.parametrize(
    ("torch", "words", "said"),
    [
        ("raise ImportError('none')", [], "torch is not installed"),
        ("__version__ = '2.10.1+cu130'\n" + CUDA, [], "2.11 or newer"),
        ("__version__ = '2.11.0'\n" + CUDA, [], "Try: --device cpu"),
        ("", ["--only", "proof", "prove"], "--only: no step 'prove'"),
    ],
)
def test_what_cannot_be_recorded_is_refused_in_one_line(torch: str, words: list[str], said: str) -> None:
    stand_in = Path("stand_in")
    for name, text in (("torch", torch), ("phalanx", "")):
        (stand_in / name).mkdir(parents=True)
        (stand_in / name / "__init__.py").write_text(text)
    (stand_in / "phalanx" / "api.py").touch()
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *words],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(stand_in.absolute())},
    )
    assert done.returncode == 2
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1
    assert said in done.stderr
    assert not Path("gpu_record.json").exists()


@pytest.mark.quick
def test_the_committed_page_and_readme_are_those_of_the_records() -> None:
    records = read_records(sorted((ROOT / "tools" / "published" / "gpu").glob("*.json")))
    content, plots = page(records)
    again = "try: python tools/gpu_record/page.py"
    assert (ROOT / "docs" / "project" / "gpu.md").read_text() == content, again
    drawn = {path.name: path.read_text() for path in (ROOT / "docs" / "project").glob("gpu-*.svg")}
    assert drawn == plots, again
    readme = (ROOT / "README.md").read_text()
    assert f"<!-- generated: gpu -->\n\n{paragraph(records)}\n\n<!-- end -->" in readme, again


HERE = f"{sys.version_info[0]}.{sys.version_info[1]}"
MODULES = {"tomli-w": "tomli_w"}  # where a package's module has another name
LOADED = """
import importlib, json, pkgutil, sys
for name in sys.argv[1:]: importlib.import_module(name)
import phalanx
for name in phalanx.__all__: getattr(phalanx, name)
for module in pkgutil.walk_packages(phalanx.__path__, "phalanx."):
    if not module.name.startswith(("phalanx.__main__", "phalanx.train.keras.")): importlib.import_module(module.name)
from phalanx.demo.jobs import digits
assert len(digits.digits(training=False)) == 297
print(json.dumps({name: module.__file__ for name, module in sys.modules.items() if getattr(module, "__file__", None)}))
"""


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the pack for this Python once."""
    folder = tmp_path_factory.mktemp("pack")
    try:
        pack.build(folder, HERE)
    except pack.DownloadError as error:
        pytest.skip(str(error))
    return folder


@pytest.fixture(scope="module")
def installed(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("installed") / "target"
    pack_install.install(built, target)
    return target


@pytest.fixture(scope="module")
def torch_alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Link torch and its requirements into a folder that stands for a machine with torch alone."""
    folder = tmp_path_factory.mktemp("torch")
    for name in pack.closure(["torch"], HERE):
        try:
            files = distribution(name).files or []
        except PackageNotFoundError:
            continue
        for top in {file.parts[0] for file in files} - {"..", "__pycache__"}:
            (folder / top).symlink_to(Path(str(distribution(name).locate_file(top))))
    return folder


def bare_python(*arguments: str, paths: tuple[Path, ...], cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run this interpreter with ``paths`` and the standard library alone."""
    environment = {"PYTHONPATH": ":".join(map(str, paths)), "OMP_NUM_THREADS": "1", "PATH": "/usr/bin:/bin"}
    command = [sys.executable, "-S", "-P", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False, cwd=cwd)


def dependencies() -> list[str]:
    """Return the modules of Phalanx' own dependencies, without torch."""
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    found = [Requirement(text).name for text in declared]
    return [MODULES.get(name, name) for name in found if name != "torch"]


@pytest.mark.long
class TestInstalled:
    def test_everything_loads_from_the_pack(self, installed: Path, torch_alone: Path) -> None:
        done = bare_python("-c", LOADED, *dependencies(), paths=(installed, torch_alone))
        assert done.returncode == 0, done.stderr
        known = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib")]
        site = sysconfig.get_path("purelib")
        strange = {
            name: file
            for name, file in json.loads(done.stdout.splitlines()[-1]).items()
            if Path(file).is_absolute()  # torch.ops and torch.classes have no file
            and not Path(file).is_relative_to(installed)
            and not Path(file).is_relative_to(torch_alone)
            and (Path(file).is_relative_to(site) or not any(Path(file).is_relative_to(one) for one in known))
        }
        assert strange == {}


def test_the_digits_are_those_of_scikit_learn() -> None:
    from phalanx.demo.jobs.digits import IMAGES

    theirs = distribution("scikit-learn").locate_file("sklearn/datasets/data/digits.csv.gz")  # what load_digits reads
    table = np.loadtxt(IMAGES, delimiter=",", dtype=np.int64)
    assert table.shape == (1797, 65)
    np.testing.assert_array_equal(table, np.loadtxt(str(theirs), delimiter=","))
