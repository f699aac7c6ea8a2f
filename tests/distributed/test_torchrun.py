"""Scripts that torchrun starts and that call ``px.fit`` and ``px.build``: any number of times, in one folder."""

from __future__ import annotations

import json
import re
import subprocess
import time
from pathlib import Path
from typing import Any

import loops
import pytest
from small import fit, job

import phalanx as px
from law_rows import longer
from phalanx.errors import RefusedError

HEAD = f"""
import json, os, sys, time, traceback
from functools import partial
sys.path.insert(0, {str(Path(__file__).parent)!r})
import torch
import torch.distributed as dist
import phalanx as px
from phalanx.errors import RunError, SpecError
from small import job

torch.set_num_threads(1)
rank = int(os.environ["RANK"])
fit = partial(px.fit, forecast="none")

def say(of, **what):
    print(json.dumps({{"of": of, "rank": rank, **what}}) + "\\n", end="", flush=True)
"""


# One script calls these one after the other, in one folder; those whose px.build leaves a group joined come last.
PARTS = """
def own_group(of):
    dist.init_process_group("gloo")
    run = px.fit(job(), "dp=2", folder="own")
    ones = torch.ones(1)
    dist.all_reduce(ones)
    say(of, steps=len(run.losses), sum=ones.item())

def other_ranks(of):
    try:  # the group is still there: one made anew reads the addresses of the old one out of torchrun's store
        px.build(job(), "dp=2 sync=local every=4")
    except RunError as error:
        say(of, error=str(error))
    dist.destroy_process_group()

def taken(of):
    fit(job(), "dp=2", folder="taken")
    try:
        fit(job(), "dp=2", folder="taken")
    except SpecError as error:
        say(of, problems=[problem.given for problem in error.problems])

def chosen(of):
    here = os.getcwd()
    if rank == 1:
        time.sleep(0.5)
        os.makedirs("elsewhere")
        os.chdir("elsewhere")
    run = fit(job(name="chosen"), "dp=2", cores=2)
    say(of, folder=str(run.folder), threads=torch.get_num_threads())
    os.chdir(here)

def servers(of):
    runs = [fit(job(), "dp=1 server=1", folder=folder) for folder in ("s1", "s2")]
    say(of, steps=[len(run.losses) for run in runs])

def called(of):
    events = []
    callbacks = {"step": lambda event: events.append(event["step"]), "end": lambda event: events.append("end")}
    fit(job(callbacks=callbacks), "dp=2", folder="called")
    say(of, events=events)

def shown(of):
    print(f"{rank} watches\\n", end="", file=sys.stderr, flush=True)
    fit(job(), "dp=2", folder="shown")
    print(f"{rank} has watched\\n", end="", file=sys.stderr, flush=True)
    fit(job(), "dp=2", folder="silent", watch=False)
    print(f"{rank} looked away", file=sys.stderr, flush=True)
    say(of)

def fits_and_builds(of):
    first = fit(job(), "dp=2", folder="a", cores=1)
    second = fit(job(), "fsdp=2", folder="b")
    between = dist.is_initialized()
    losses = []
    for plan in ("dp=2", None):  # without one: that of as many processes as there are
        step, loader = px.build(job(), plan)
        losses.append([step(batch).loss for batch in loader])
    third = fit(job(), "dp=2", folder="c")
    fits = [run.losses for run in (first, second, third)]
    say(of, fits=fits, builds=losses, between=between, group=dist.is_initialized())

def saved(of):
    step, loader = px.build(job(), "dp=2", run="saved", checkpoint_every=2)
    losses = []
    for batch in loader:
        losses.append(step(batch).loss)
        if step.taken == 5:
            step.save()
            break
    step.close()
    step, loader = px.build(job(), "fsdp=2", run="saved", resume=True)
    losses += [step(batch).loss for batch in loader]
    say(of, losses=losses)

def replicas(of):
    dist.destroy_process_group()  # that of the builds
    plan = "dp=2 sync=diloco every=3"
    run = fit(job(), plan, folder="d")
    step, loader = px.build(job(), plan)
    losses = [step(batch).loss for batch in loader]
    both = fit(job(), "dp=2", folder="e")  # each replica was a world of its own: no group is in the way
    weights = [tensor.sum().item() for tensor in step.layout.parameters.values()]
    say(of, fit=run.losses, build=losses, weights=weights, steps=len(both.losses))

def ends():
    if dist.is_initialized():
        dist.destroy_process_group()
    step, loader = px.build(job(), "dp=2")
    step(next(iter(loader)))
    sys.setswitchinterval(20)  # from here on other threads get the interpreter's lock only while this one waits
    tensors = [torch.ones(1000) for _ in range(20)]
    for tensor in tensors:
        dist.all_reduce(tensor)

for part in (own_group, other_ranks, taken, chosen, servers, called, shown, fits_and_builds, saved, replicas):
    torch.set_num_threads(1)
    try:
        part(part.__name__)
    except Exception:
        say(part.__name__, failed=traceback.format_exc())
ends()  # a script that ends right after a collective ends well
"""
Said = dict[str, Any]


def torchrun(script: str, folder: Path) -> list[Said]:
    """What all ranks said, in rank order."""
    (folder / "script.py").write_text(HEAD + script)
    done = loops.torchrun(folder)
    assert done.returncode == 0, done.stderr
    (folder / "stderr").write_text(done.stderr)
    return sorted((json.loads(line) for line in done.stdout.splitlines()), key=lambda said: said["rank"])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("torchrun")


@pytest.fixture(scope="module")
def all_said(folder: Path) -> list[Said]:
    return torchrun(PARTS, folder)


@pytest.fixture
def said(request: pytest.FixtureRequest, all_said: list[Said]) -> list[Said]:
    """What ranks said in the part that the test is named after."""
    found = [one for one in all_said if one["of"] == request.node.originalname.removeprefix("test_")]
    assert not [one["failed"] for one in found if "failed" in one]
    assert [one["rank"] for one in found] == [0, 1]
    return found


def test_own_group(said: list[Said]) -> None:
    """The user's own group is used, and stays."""
    assert [(one["steps"], one["sum"]) for one in said] == [(8, 2.0)] * 2


def test_other_ranks(said: list[Said]) -> None:
    """A group of other ranks than a replica is refused."""
    for one in said:
        assert "joined a group of 2 ranks, and the plan needs one of 1" in one["error"]


def test_taken(said: list[Said]) -> None:
    """A folder that is taken is refused on every rank."""
    first, second = said
    assert "holds a run" in first["problems"][0]
    assert first["problems"] == second["problems"]


def test_chosen(said: list[Said], folder: Path) -> None:
    """Rank 0 chooses the folder for all."""
    assert [(one["folder"], one["threads"]) for one in said] == [(str(folder / "runs" / "chosen-1"), 2)] * 2
    assert sorted(path.name for path in (folder / "runs").iterdir()) == ["chosen-1"]


def test_servers(said: list[Said]) -> None:
    """Servers and workers of a second run meet each other, and nobody of the first."""
    assert [one["steps"] for one in said] == [[8, 8]] * 2


def test_called(said: list[Said]) -> None:
    """Callbacks are those of rank 0 alone, and hear all of it before ``fit`` gives back the run."""
    assert [one["events"] for one in said] == [[*range(8), "end"], []]


def test_shown(said: list[Said], folder: Path) -> None:
    """Progress is rank 0's lines on stderr, unless nobody is to look."""
    printed = (folder / "stderr").read_text()
    watched = printed[printed.index("0 watches") : printed.index("0 has watched")]
    assert len(re.findall(r"^step +8/8  loss ", watched, re.MULTILINE)) == 1
    assert "loss" not in printed[printed.index("0 has watched") : printed.index("0 looked away")]


def test_fits_and_builds(said: list[Said]) -> None:
    """One after the other, any number of times; in a loop of one's own, too."""
    alone = fit("single", "one").losses
    for one in said:
        assert (one["between"], one["group"]) == (False, True)
        (first, second, third), builds = one["fits"], one["builds"]
        assert len(first) == 8
        assert first == third == builds[0] == builds[1]
        assert first == pytest.approx(alone, rel=1e-6)
        assert second == pytest.approx(first, rel=1e-6)


def test_replicas(said: list[Said]) -> None:
    """Replicas step by themselves in a loop of one's own, too."""
    first, second = said
    assert first["fit"] == first["build"]  # the log is the first replica's
    assert second["build"] != first["build"]
    assert first["weights"] == second["weights"]
    assert (first["steps"], second["steps"]) == (8, 8)


def test_saved(said: list[Said]) -> None:
    """A loop of one's own that is saved goes on under another plan."""
    alone = fit("single", "alone").losses
    assert [one["losses"] for one in said] == [pytest.approx(alone, rel=1e-5)] * 2


SLOW = """
def loss(output, batch):
    if dist.is_initialized() and dist.get_backend() == "gloo":  # not the process that looks at the job beside the run
        open(f"pid-{os.getpid()}", "w").close()
    time.sleep(0.05)
    return px.cross_entropy(output, batch["y"])

px.fit(job(loss=loss, epochs=1000), "dp=2", folder="slow")
"""


@pytest.mark.realtime("workers notice by themselves, and soon, that their agent is gone")
def test_workers_of_a_script_end_with_their_agent(tmp_path: Path) -> None:
    """The agent is killed: it can tell its workers nothing."""
    (tmp_path / "script.py").write_text(HEAD + SLOW)
    deadline = time.monotonic() + 90.0
    with subprocess.Popen(loops.torchrun_command(), stderr=subprocess.DEVNULL, cwd=tmp_path) as agent:
        while len(noted := list(tmp_path.glob("pid-*"))) < 2 and time.monotonic() < deadline:
            time.sleep(0.05)
        agent.kill()
    assert len(noted) == 2
    killed = time.monotonic()
    while there := [path.name for path in noted if _runs(int(path.name.removeprefix("pid-")))]:
        assert time.monotonic() < killed + 5.0, f"{there} train on"
        time.sleep(0.05)


FAILS_EARLY = """
from phalanx.train.run_recorder import RunRecorder

def loss(output, batch):
    if rank == 1:
        raise ValueError("of the job")
    return px.cross_entropy(output, batch["y"])

def late(*given, **how):
    time.sleep(0.5 if rank == 0 else 0.0)
    return start(*given, **how)

start, RunRecorder.start = RunRecorder.start, late
px.fit(job(loss=loss), "PLAN", folder="early")
"""


@pytest.mark.parametrize("plan", ["dp=2", *longer("dp=2 sync=local every=4")])
def test_an_error_stands_behind_the_start_of_its_run(plan: str, tmp_path: Path) -> None:
    """Rank 1 fails in its first step, while rank 0 is still about to write that the run has begun."""
    (tmp_path / "script.py").write_text(HEAD + FAILS_EARLY.replace("PLAN", plan))
    done = loops.torchrun(tmp_path)
    assert done.returncode == 1, done.stderr
    events = [event["event"] for event in px.load(tmp_path / "early").events()]
    assert [name for name in events if name != "step"] == ["start", "error"]  # some are of a replica by itself


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_build_outside_torchrun_says_how(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(RefusedError, match=r"dp=2 for 1 workers(.|\n)*torchrun --nproc-per-node 2 script.py"):
        px.build(job(), "dp=2")
