"""Jobs by SkyPilot, through a stand-in for its program ``sky`` whose nodes are processes of this machine."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from launched import await_none_left, await_steps, by_hand, steps_in, submission, until, write_job

import phalanx as px
from phalanx.errors import RunError
from phalanx.launch.runfile import newest_step
from phalanx.launch.targets.sky import SkyTarget
from phalanx.launch.targets.target import Standing, Submission

pytestmark = pytest.mark.timeout(300)
STEPS = 30
# What sky does of a managed job, in a folder: each start has new homes, and a lost node or exit code 75 another start.
SKY = """#!{python} -IS
import json, os, pathlib, shutil, signal, subprocess, sys
here, (verb, *words) = pathlib.Path({here!r}), [word for word in sys.argv[1:] if word != "jobs"]
job = here / (words[words.index("--name") + 1] if "--name" in words else "")
write = lambda **told: (job / "told.json").write_text(json.dumps(dict(read(), **told)))
read = lambda: json.loads((job / "told.json").read_text())

def start(task, number):
    nodes, homes = [], [job / f"{{number}}-{{rank}}" for rank in range(task["num_nodes"])]
    for rank, home in enumerate(homes):
        shutil.copytree(job / "code", home / "sky_workdir")
        script = home / "script"
        script.write_text(task["setup"] + task["run"])
        given = {{"HOME": str(home), "SKYPILOT_NODE_IPS": "\\n".join(["127.0.0.1"] * len(homes))}}
        given |= {{"SKYPILOT_NODE_RANK": str(rank), "SKYPILOT_TASK_ID": f"sky-{{job.name}}-0"}}
        how = {{"cwd": home / "sky_workdir", "env": {{**os.environ, **given}}, "stdin": subprocess.DEVNULL}}
        how |= {{"stdout": (job / "log").open("ab"), "stderr": subprocess.STDOUT, "start_new_session": True}}
        nodes.append(subprocess.Popen(["bash", "-i", str(script)], **how))
    write(status="RUNNING", recovery_count=number, pids=[node.pid for node in nodes], head=str(homes[0]))
    codes = [node.wait() for node in nodes]
    if read()["status"] == "CANCELLING":
        return
    if 75 in codes or -9 in codes:
        write(status="RECOVERING")
        return start(task, number + 1)
    write(status="FAILED" if any(codes) else "SUCCEEDED", failure_reason=f"codes {{codes}}" * any(codes))

if (here / "refused").exists():
    sys.exit((here / "refused").read_text())
if verb == "launch" and "--dryrun" not in words:
    task = json.loads(pathlib.Path(next(word for word in words if word.endswith(".yaml"))).read_text())
    job = here / task["name"]
    shutil.copytree(words[words.index("--workdir") + 1], job / "code")
    (job / "told.json").write_text(json.dumps({{"job_name": job.name, "status": "PENDING", "task": task}}))
    if os.fork() == 0:
        os.setsid()
        for stream in range(3):
            os.dup2(os.open(os.devnull, os.O_RDWR), stream)
        start(task, 0)
elif verb == "queue":
    print("Fetching...", json.dumps([json.loads(one.read_text()) for one in here.glob("*/told.json")]))
elif verb == "logs" and (job / "log").exists():
    print(*("\\x1b[36m(head, pid=1)\\x1b[0m " + line for line in (job / "log").read_text().splitlines()), sep="\\n")
elif verb == "cancel":
    write(status="CANCELLING")
    (hook,) = read()["task"]["config"]["hooks"]
    subprocess.run(["bash", "-c", hook["run"]], env={{**os.environ, "HOME": read()["head"]}}, timeout=hook["timeout"])
    write(status="CANCELLED")
"""


class Sky:
    """The jobs of the stand-in."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def told(self, job: str) -> dict[str, Any]:
        return json.loads((self.folder / job / "told.json").read_text())

    def lose(self, job: str, node: int) -> None:
        """As when a spot machine is taken back."""
        process = psutil.Process(self.told(job)["pids"][node])
        for one in [process, *process.children(recursive=True)]:
            one.kill()


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Sky]:
    program, here = tmp_path / "bin" / "sky", tmp_path / "sky"
    program.parent.mkdir()
    here.mkdir()
    program.write_text(SKY.format(python=sys.executable, here=str(here)))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    yield Sky(here)
    for job in here.iterdir():
        for pid in Sky(here).told(job.name).get("pids", []) if job.is_dir() else []:
            if psutil.pid_exists(pid):
                os.killpg(pid, signal.SIGKILL)
    await_none_left(tmp_path)


def sent(folder: Path, plan: str = "dp=2", **options: Any) -> tuple[SkyTarget, Submission, dict[str, Any]]:
    """Submit the job, with a secret beside it."""
    (folder / "job").mkdir()
    job = write_job(folder / "job", pause=options.pop("pause", 0.0), steps=STEPS)
    says = 'def job():\n    import os\n    if "RANK" in os.environ:\n        print("I am", os.environ["RANK"])\n'
    job.write_text(job.read_text().replace("def job():\n", says))
    (folder / "job" / ".env").write_text("WANDB_API_KEY=hunter2\n")
    run = {"job": str(job), "forecast": "none", **options.pop("run", {})}
    given = submission("sky", folder, plan, run=run, **options)
    target = SkyTarget("")
    return target, given, dict(target.submit(target.prepare(given)))


def await_state(target: SkyTarget, ticket: dict[str, Any], state: str, sky: Sky) -> Standing:
    def there() -> bool:
        return target.standing(ticket, Path()).state == state

    log = sky.folder / ticket["job"] / "log"
    until(there, 120, f"it is {state}, with {sky.told(ticket['job'])} and {log.read_text() if log.exists() else ''}")
    return target.standing(ticket, Path())


def test_two_nodes_train_what_one_device_does(cluster: Sky, tmp_path: Path) -> None:
    target, given, ticket = sent(tmp_path)
    await_state(target, ticket, "ended", cluster)
    assert px.load(tmp_path / "shared").losses == pytest.approx(by_hand(STEPS), rel=1e-4)
    assert [path.name for path in (cluster.folder / ticket["job"] / "code").iterdir()] == ["train.py"]
    everything = target.log(ticket, given.run.folder, None).read_text()
    for rank in range(2):
        assert target.log(ticket, given.run.folder, rank).read_text() == f"I am {rank}\n"
        assert f"[rank {rank}] I am {rank}\n" in everything
    assert "Traceback" not in everything


def test_a_machine_that_is_taken_back_costs_the_steps_since_the_newest_checkpoint(cluster: Sky, tmp_path: Path) -> None:
    """On one node the run folder goes with the machine, and the next fetches the checkpoint from the mirror."""
    mirror = {"mirror": f"file://{tmp_path}/mirror", "checkpoint_every": 2}
    target, _, ticket = sent(tmp_path, run=mirror, nodes="", shared="", pause=0.1)
    until(lambda: len([*(tmp_path / "mirror").glob("step-*/manifest.json")]) > 1, 90, "it has saved elsewhere")
    cluster.lose(ticket["job"], 0)
    assert await_state(target, ticket, "ended", cluster).detail == "SUCCEEDED, recovered 1 times"
    run = px.load(Path(cluster.told(ticket["job"])["head"]) / "phalanx-run")
    (resumed,) = run.events("resume")
    assert [event["step"] for event in run.events("step")] == list(range(resumed["step"], STEPS))
    assert run.losses == pytest.approx(by_hand(STEPS)[resumed["step"] :], rel=1e-4)


def test_a_run_that_is_asked_to_stop_saves(cluster: Sky, tmp_path: Path) -> None:
    target, given, ticket = sent(tmp_path, pause=0.3)
    await_steps(tmp_path / "shared", 3)
    target.stop(ticket, given.run.folder)
    assert target.standing(ticket, given.run.folder).state == "stopped"
    (stopped,) = px.load(tmp_path / "shared").events("stopped")
    assert newest_step(tmp_path / "shared") == stopped["step"] == steps_in(tmp_path / "shared") < STEPS


def test_what_is_refused_is_said_in_its_words_and_nothing_is_left(cluster: Sky, tmp_path: Path) -> None:
    (cluster.folder / "refused").write_text("\x1b[31mNo cloud is enabled")
    write_job(tmp_path)
    target, given = SkyTarget(""), submission("sky", tmp_path)
    assert "No cloud is enabled" in str(target.why_not(target.prepare(given)))
    with pytest.raises(RunError, match="SkyPilot refuses it: No cloud is enabled"):
        target.submit(target.prepare(given))
    assert not given.run.folder.exists()
