"""Scripts that torchrun starts and that call ``px.fit`` and ``px.build``: any number of times, in one folder."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from small import job

import phalanx as px
from phalanx.errors import RefusedError

HEAD = f"""
import json, os, sys, time
sys.path.insert(0, {str(Path(__file__).parent)!r})
import torch
torch.set_num_threads(1)
import torch.distributed as dist
import phalanx as px
from small import job

rank = int(os.environ["RANK"])

def say(**what):
    print(json.dumps({{"rank": rank, **what}}) + "\\n", end="", flush=True)
"""


def torchrun(script: str, folder: Path, ranks: int = 2) -> list[dict[str, Any]]:
    """What all ranks said, in rank order."""
    (folder / "script.py").write_text(HEAD + script)
    command = [
        sys.executable,
        "-W",
        "ignore",
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        f"{ranks}",
        "--standalone",
    ]
    done = subprocess.run([*command, "script.py"], capture_output=True, text=True, timeout=100, cwd=folder)
    assert done.returncode == 0, done.stderr
    return sorted((json.loads(line) for line in done.stdout.splitlines()), key=lambda said: said["rank"])


def test_fits_and_builds_one_after_the_other(tmp_path: Path) -> None:
    script = """
first = px.fit(job(), "dp=2", folder="a", cores=1)
second = px.fit(job(), "fsdp=2", folder="b")
between = dist.is_initialized()
losses = []
for _ in range(2):
    step, loader = px.build(job(), "dp=2")
    losses.append([step(batch).loss for batch in loader])
third = px.fit(job(), "dp=2", folder="c")
say(fits=[run.losses for run in (first, second, third)], builds=losses, between=between, group=dist.is_initialized())
"""
    for said in torchrun(script, tmp_path):
        assert (said["between"], said["group"]) == (False, True)
        (first, second, third), builds = said["fits"], said["builds"]
        assert len(first) == 8
        assert first == third == builds[0] == builds[1]
        assert second == pytest.approx(first, rel=1e-6)


def test_the_users_own_group_is_used_and_stays(tmp_path: Path) -> None:
    script = """
dist.init_process_group("gloo")
run = px.fit(job(), "dp=2", folder="a")
ones = torch.ones(1)
dist.all_reduce(ones)
say(steps=len(run.losses), sum=ones.item())
dist.destroy_process_group()
"""
    assert [(said["steps"], said["sum"]) for said in torchrun(script, tmp_path)] == [(8, 2.0)] * 2


def test_replicas_step_by_themselves_in_a_loop_of_ones_own(tmp_path: Path) -> None:
    script = """
plan = "dp=2 sync=diloco every=3"
run = px.fit(job(), plan, folder="a")
step, loader = px.build(job(), plan)
losses = [step(batch).loss for batch in loader]
both = px.fit(job(), "dp=2", folder="b")  # each replica was a world of its own: no group is in the way
weights = [tensor.sum().item() for tensor in step.layout.parameters.values()]
say(fit=run.losses, build=losses, weights=weights, steps=len(both.losses))
"""
    first, second = torchrun(script, tmp_path)
    assert first["fit"] == first["build"]  # the log is the first replica's
    assert second["build"] != first["build"]
    assert first["weights"] == second["weights"]
    assert (first["steps"], second["steps"]) == (8, 8)


def test_a_group_of_other_ranks_than_a_replica_is_refused(tmp_path: Path) -> None:
    script = """
from phalanx.errors import RunError
dist.init_process_group("gloo")
try:
    px.build(job(), "dp=2 sync=local every=4")
except RunError as error:
    say(error=str(error))
dist.destroy_process_group()
"""
    for said in torchrun(script, tmp_path):
        assert "joined a group of 2 ranks, and the plan needs one of 1" in said["error"]


def test_a_script_that_ends_right_after_a_collective_ends_well(tmp_path: Path) -> None:
    script = """
step, loader = px.build(job(), "dp=6")
step(next(iter(loader)))
sys.setswitchinterval(20)  # from here on other threads get the interpreter's lock only while this one waits
tensors = [torch.ones(1000) for _ in range(20)]
for tensor in tensors:
    dist.all_reduce(tensor)
say()
"""
    assert len(torchrun(script, tmp_path, 6)) == 6


def test_rank_0_chooses_the_folder_for_all(tmp_path: Path) -> None:
    script = """
if rank == 1:
    time.sleep(0.5)
    os.makedirs("elsewhere")
    os.chdir("elsewhere")
torch.set_num_threads(1)
run = px.fit(job(name="chosen"), "dp=2", cores=2)
say(folder=str(run.folder), threads=torch.get_num_threads())
"""
    said = torchrun(script, tmp_path)
    assert [(one["folder"], one["threads"]) for one in said] == [(str(tmp_path / "runs" / "chosen-1"), 2)] * 2
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == ["chosen-1"]


def test_a_folder_that_is_taken_is_refused_on_every_rank(tmp_path: Path) -> None:
    script = """
from phalanx.errors import SpecError
px.fit(job(), "dp=2", folder="a")
try:
    px.fit(job(), "dp=2", folder="a")
except SpecError as error:
    say(problems=[problem.given for problem in error.problems])
"""
    first, second = torchrun(script, tmp_path)
    assert "holds a run" in first["problems"][0]
    assert first["problems"] == second["problems"]


def test_build_outside_torchrun_says_how(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(RefusedError, match=r"dp=2 for 1 workers(.|\n)*torchrun --nproc-per-node 2 script.py"):
        px.build(job(), "dp=2")


def test_a_proof_leaves_the_callers_random_numbers_alone() -> None:
    before = torch.random.get_rng_state()
    px.prove(job(), "single", steps=1)
    assert torch.equal(torch.random.get_rng_state(), before)
