"""The record of a GPU: every step's fields, kills at any moment, failing steps, and input that cannot be served."""

from __future__ import annotations

import importlib.util
import json
import os
import random
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

from gpu_record import run
from gpu_record.measure import relative
from gpu_record.page import page
from gpu_record.page_records import STEPS, read_records
from gpu_record.recorder import TRAINING, PlannedStep, Record, run_steps
from gpu_record.steps import training
from gpu_record.workloads import workload

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "tools" / "gpu_record" / "run.py"
ENTRY = {"name", "status", "limit", "seconds", "reason", "traceback", "facts", "rows"}
TOP = {"schema", "started", "seconds", "minutes", "device", "small", "phalanx", "complete", "steps"}
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


@pytest.mark.timeout(240)
def test_a_record_has_every_field_of_its_steps() -> None:
    code, record = recorded("--minutes", "3", "--only", "overhead", "environment")
    assert code == 0
    assert set(record) == TOP
    assert (record["schema"], record["device"], record["small"], record["complete"]) == (1, "cpu", True, True)
    assert [step["name"] for step in record["steps"]] == ["environment", "overhead"]
    for step in record["steps"]:
        check_fields(step)
    check_page()
    ratio = {row["method"]: row["ratio"] for row in record["steps"][1]["rows"]}
    assert ratio["bare loop"] is None
    assert ratio["phalanx"] > 0


@pytest.mark.long
@pytest.mark.alone
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


@pytest.mark.parametrize("seed", range(2))
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


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
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


def test_a_step_is_skipped_with_too_little_memory_or_time() -> None:
    large = PlannedStep(name="large", limit=10, gib=16.1, least=0, command=GOOD.command)
    late = PlannedStep(name="late", limit=10, least=100, command=GOOD.command)
    fits = PlannedStep(name="fits", limit=10, gib=16, least=0, command=GOOD.command)
    code, steps = steps_recorded(large, late, fits, memory=16 * 2**30)
    assert (code, [step["status"] for step in steps]) == (0, ["skipped", "skipped", "done"])
    assert "GiB of device memory" in steps[0]["reason"]
    assert "at least 100 s" in steps[1]["reason"]


def test_broken_lines_and_numbers_that_are_not_finite_do_no_harm() -> None:
    lines = [
        '{"row": "a", "values": {"x": 1, "y": 2}}',
        '{"row": "a", "val',
        '{"row": "a", "values": {"y": NaN}}',
        "[]",
        '{"row": "b", "values": {"x": 1}}',
        "{half",
    ]
    code = f"import sys; open(sys.argv[1], 'a').write({chr(10).join(lines)!r})"
    _, (step,) = steps_recorded(PlannedStep(name="one", limit=10, least=0, command=python(code)))
    assert step["rows"] == [{"x": 1, "y": None}, {"x": 1}]


CUDA = "class cuda:\n    is_available = staticmethod(lambda: False)\n"


@pytest.mark.parametrize(
    ("torch", "words", "said"),
    [
        ("raise ImportError('none')", [], "torch is not installed"),
        ("__version__ = '2.10.1+cu130'\n" + CUDA, [], "2.11 or newer"),
        ("__version__ = '2.11.0'\n" + CUDA, [], "Try: --device cpu"),
        ("", ["--only", "proof", "prove"], "--only: no step 'prove'"),
        ("", ["--minutes", "nan"], "--minutes"),
        ("", ["--out", "nowhere/record.json"], "--out"),
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


def test_every_dependency_is_probed() -> None:
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    assert {*run._NEEDED.values(), "torch"} == {Requirement(text).name for text in declared}
    assert [name for name in run._NEEDED if importlib.util.find_spec(name) is None] == []


def test_a_step_ends_with_the_programme(tmp_path: Path) -> None:
    """Its limit is cut to the time that is left."""
    step = PlannedStep(
        name="long", limit=60, least=0, command=(sys.executable, "-S", "-c", "import time; time.sleep(60)")
    )
    record = Record(path=tmp_path / "record.json", header={}, until=time.monotonic() + 3.5)
    assert run_steps(record, [step], None) == 1
    assert record.steps[0]["status"] == "timed out"
    assert record.steps[0]["limit"] < 3.5


def test_flops_of_a_step_by_hand() -> None:
    llama = workload("llama_1b", small=False, memory_gib=80)
    block = 2 * 2048 * 2048 + 2 * 2048 * 512 + 3 * 2048 * 8192 + 2 * 2048  # projections, SwiGLU, norms
    products = 16 * block + 2048 + 2048 * 32000  # blocks, last norm, head; no embedding
    attention = 12 * 16 * 2048 * 2048  # layers, width, tokens
    assert llama.flops(4) == 4 * 2048 * (6 * products + attention)
    lora = workload("lora_8b", small=False)
    trained = sum(one.numel() for one in lora.on_meta().parameters() if one.requires_grad)
    frozen = sum(one.numel() for one in lora.on_meta().parameters() if not one.requires_grad) - 128256 * 4096
    assert lora.flops(1) == 2048 * (6 * trained + 4 * frozen + 12 * 32 * 4096 * 2048)
    assert workload("resnet50", small=False).flops(1) == pytest.approx(
        3 * 2 * 4.09e9, rel=0.01
    )  # He et al.: 4.1e9 products


def test_numbers_of_a_row() -> None:
    work = workload("gpt2_124m", small=True)
    method = training.Method(
        name=training.EAGER, plan="", take=lambda count: None, held=0, peak=7, seconds=[2.0, 4.0, 3.0]
    )
    row = training._row(work, method, 1.5, {"batch": 2, "flops_per_step": 6e12, "peak": 10e12})
    assert (row["step_seconds"], row["rate"], row["mfu"], row["ratio"]) == (3.0, 2 * 64 / 3, 0.2, 0.5)
    assert relative(1.2, 1.0) == pytest.approx(0.2)
