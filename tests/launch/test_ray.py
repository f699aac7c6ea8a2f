"""A launch on a real Ray of two nodes: trained as on one device, through lost actors and a stop, and the head away."""

from __future__ import annotations

import ast
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from launched import await_steps, by_hand, commands_end, phalanx, steps_in, write_job  # noqa: F401
from ray_cluster import CPUS, RayCluster, lacking_for_ray, ray_cluster, until

import phalanx as px
from phalanx.config import Plan, RunSpec
from phalanx.errors import MissingExtraError, RefusedError, RunError, SpecError
from phalanx.launch.runfile import newest_step
from phalanx.launch.targets import Prepared, Submission, find_target, ray_ask, write_ticket
from phalanx.launch.targets import ray as ray_target
from phalanx.launch.targets.code_pack import file_digest
from phalanx.launch.targets.ray import RayTarget
from phalanx.launch.targets.ray_request import NodeOffer, RayRequest
from phalanx.report.run_standing import run_standing, stop_run
from phalanx.report.samples_seen import samples_seen

pytestmark = pytest.mark.timeout(300)
PAGE = Path(__file__).resolve().parents[2] / "docs" / "how-to" / "ray.md"
PLANS = {"fsdp=4": {"nodes": "2"}, "pp=2 tp=2 micro=4": {}, "dp=2 server=1": {}}  # dp=2: those that are disturbed


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    if why := lacking_for_ray():
        pytest.skip(f"no Ray here: {why}")
    with ray_cluster() as up:
        yield up


def answer(*words: str, cwd: Path, code: int = 0) -> str:
    """What a command prints, on either stream."""
    process = phalanx(*words, cwd=cwd, stderr=subprocess.STDOUT)
    said, _ = process.communicate(timeout=120)
    assert process.returncode == code, said
    return said


def launched(cluster: RayCluster, folder: Path, *options: str, plan: str = "dp=2", **job: Any) -> Any:
    """``phalanx launch`` of the job in a folder of its own, begun."""
    folder.mkdir(exist_ok=True)
    write_job(folder, **job)
    words = ("launch", "train.py", "--to", cluster.node_address, "--plan", plan, "--run", "run", "--no-check", *options)
    return phalanx(*words, cwd=folder, stderr=subprocess.STDOUT)


def launch(cluster: RayCluster, folder: Path, *options: str, plan: str = "dp=2", **job: Any) -> Path:
    """The job in a folder of its own, handed over. Returns its run folder."""
    assert "handed to ray: actor " in launched(cluster, folder, *options, plan=plan, **job).communicate(timeout=120)[0]
    return folder / "run"


def said(run: Path) -> str:
    output = run / "launch" / "output.log"
    return output.read_text() if output.exists() else ""


def await_state(run: Path, state: str, seconds: float = 200) -> None:
    """By the supervisor's word in the run folder, which asks nothing of Ray."""
    path = run / "launch" / "ray-standing.json"
    until(
        lambda: path.exists() and json.loads(path.read_text())["state"] in (state, "ended", "failed", "stopped"),
        seconds,
        f"it is {state}, with {said(run)}",
    )
    assert json.loads(path.read_text())["state"] == state, (path.read_text(), said(run))


def await_saved(run: Path) -> None:
    """Wait until there is a checkpoint to go on from."""
    until(lambda: newest_step(run) is not None, 120, f"it has saved: {said(run)}")


@pytest.fixture(scope="module")
def trained(cluster: RayCluster, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Plan → run folder of a run that was handed over: they wait for each other, as there is no room for all."""
    target, folders = find_target(cluster.node_address), dict[str, Path]()
    assert isinstance(target, RayTarget)
    for plan, options in PLANS.items():
        given = submission(tmp_path_factory.mktemp("plan"), plan, **options)
        write_ticket(given, cluster.node_address, target.submit(target.prepare(given)))
        folders[plan] = given.run.folder
    return folders


@pytest.mark.parametrize("plan", PLANS)
def test_a_run_on_two_nodes_is_that_of_one_device(trained: dict[str, Path], plan: str) -> None:
    run = trained[plan]
    await_state(run, "ended")
    assert px.load(run).losses == pytest.approx(by_hand(6), rel=1e-5)
    assert samples_seen(run).once
    assert "Traceback" not in said(run)


def test_a_run_goes_on_after_an_actor_is_killed(cluster: RayCluster, tmp_path: Path) -> None:
    """That of the node which does not have the job's folder; so a copy of it is made there anew."""
    project = cluster.head_only / "project"
    project.mkdir()
    write_job(project, pause=0.1, steps=40).rename(project / "digits_job.py")
    (project / "train.py").write_text("from digits_job import job\n")
    words = ("launch", "train.py", "--to", cluster.node_address, "--plan", "dp=2", "--run", str(tmp_path / "run"))
    more = ("--no-check", "--nodes", "2", "--cpus-per-worker", "2", "--checkpoint-every", "3")
    assert "handed to ray: actor " in answer(*words, *more, cwd=project)
    run = tmp_path / "run"
    await_steps(run, 1)
    (actor,) = cluster.processes(1, "ray::NodeActor")
    await_saved(run)
    actor.kill()
    await_state(run, "ended")
    assert said(run).count(f"works in a copy of the job's folder: {project} is not there") == 2 * cluster.covers
    assert px.load(run).losses == pytest.approx(by_hand(40), rel=1e-4)
    assert list(px.load(run).events("resume"))
    assert "phalanx: lost the actor on" in said(run)
    assert samples_seen(run).once
    until(lambda: not cluster.processes(word="ray::NodeActor"), 60, "no actor is left")
    until(lambda: not cluster.processes(word=str(run)), 60, "no agent and no worker is left")
    until(lambda: not [*cluster.scratch.glob("phalanx-code-*")], 60, "no copy of the code is left")
    assert RunSpec.from_toml((run / "run.toml").read_text()).job == str(project / "train.py")


def test_a_run_goes_on_after_a_worker_and_then_the_supervisor_is_killed(cluster: RayCluster, tmp_path: Path) -> None:
    """torchrun's agents start the workers anew; Ray the supervisor, which then starts all of them."""
    run = launch(cluster, tmp_path, "--nodes", "2", "--checkpoint-every", "3", pause=0.1, steps=80)
    await_steps(run, 1)
    (supervisor,) = cluster.processes(word="ray::Supervisor")
    workers = cluster.processes(word=f"phalanx worker {run}")
    assert len(workers) == 2
    await_saved(run)
    workers[0].kill()
    until(lambda: bool(list(px.load(run).events("resume"))), 120, f"it goes on: {said(run)}")
    before = len(list(px.load(run).events("resume")))
    await_steps(run, steps_in(run) + 4)
    supervisor.kill()
    await_state(run, "ended")
    assert len(list(px.load(run).events("resume"))) > before
    assert px.load(run).losses == pytest.approx(by_hand(80), rel=2e-3)  # one device, too, by its order of sums
    assert samples_seen(run).once
    assert "lost the actor" not in said(run)
    until(lambda: not cluster.processes(word="ray::Supervisor"), 60, "no actor is left")
    until(lambda: not cluster.processes(word=str(run)), 60, "no agent and no worker is left")


def test_by_the_commands_of_the_page_a_run_is_found_stopped_and_goes_on(cluster: RayCluster, tmp_path: Path) -> None:
    write_job(tmp_path, pause=0.3, steps=300)
    (tmp_path / "examples").mkdir()
    (tmp_path / "train.py").rename(tmp_path / "examples" / "digits.py")
    shown = re.search(
        r"<!-- not run: needs Ray.*?-->\n```console\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL
    )
    assert shown
    commands = [shlex.split(line.removeprefix("$ phalanx ")) for line in shown[1].splitlines()]
    begin, status, logs, stop = (
        [cluster.address if word == "ray://head:10001" else word for word in words] for words in commands
    )
    assert "handed to ray: actor digits-" in answer(*begin, cwd=tmp_path)
    run = tmp_path / "runs" / "ray"
    await_steps(run, 3)
    assert "running: on " in answer(*status, cwd=tmp_path)
    assert answer(*stop, cwd=tmp_path) == "runs/ray: stopped\n"
    (stopped,) = px.load(run).events("stopped")
    assert 3 <= stopped["step"] == len(px.load(run).losses) < 300
    assert (run / "launch" / "rank-1.log").exists()
    answer(*logs, cwd=tmp_path)
    until(lambda: not cluster.processes(word="ray::Supervisor"), 60, "no actor is left")
    assert not cluster.processes(word=str(run))


def submission(folder: Path, plan: str = "dp=2", **options: str) -> Submission:
    write_job(folder)
    spec = RunSpec(job=str(folder / "train.py"), folder=folder / "run", plan=Plan.parse(plan), resume="auto")
    return Submission(run=spec, name="digits", python="", options=options)


def test_what_a_launcher_begins_that_dies_leaves_nothing(cluster: RayCluster, tmp_path: Path) -> None:
    """It has started the supervisor, and not come to write the ticket that finds it again."""
    given = submission(tmp_path)
    target = find_target(cluster.node_address)
    assert isinstance(target, RayTarget)
    prepared = target.prepare(given)
    file = given.folder / "ray.json"
    files = {**prepared.files, file: json.dumps({**json.loads(prepared.files[file]), "patience": 3.0})}
    ticket = target.submit(replace(prepared, files=files))
    until(lambda: not cluster.processes(word="ray::Supervisor"), 60, "no actor is left")
    assert target.standing(ticket, given.run.folder).state == "unknown"
    target.stop(ticket, given.run.folder)
    assert not (given.run.folder / "events.jsonl").exists()


_ENDS_MEANWHILE = """
import json, sys, time
from pathlib import Path
from ray._private.function_manager import FunctionActorManager, make_function_table_key
from ray._private.ray_constants import KV_NAMESPACE_FUNCTION_TABLE
from phalanx.launch.targets.ray_ask import main

load, address, runfile, name = FunctionActorManager._load_actor_class_from_gcs, *sys.argv[1:]


def end_and_load(manager, job_id, descriptor):
    key = make_function_table_key(b"ActorClass", job_id, descriptor.function_id.binary())
    found = lambda: manager._worker.gcs_client.internal_kv_get(key, KV_NAMESPACE_FUNCTION_TABLE)
    assert found()
    Path(runfile).unlink()  # the launch is taken back
    until = time.monotonic() + 120
    while found():
        assert time.monotonic() < until, "the class is still there"
        time.sleep(0.05)
    try:
        return load(manager, job_id, descriptor)
    except AssertionError as error:
        print(error)
        raise


FunctionActorManager._load_actor_class_from_gcs = end_and_load
print(json.dumps(main(address, "stop", name)))
"""


def test_a_supervisor_that_ends_while_ray_looks_it_up_is_one_that_has_ended(
    cluster: RayCluster, tmp_path: Path
) -> None:
    """Ray has found its name, and no more its class, which it drops with the last actor of a job."""
    given, target = submission(tmp_path), RayTarget(cluster.node_address.removeprefix("ray:"))
    ticket = target.submit(target.prepare(given))
    assert target.standing(ticket, given.run.folder).state == "waiting"
    words = [sys.executable, "-c", _ENDS_MEANWHILE, target.address, str(given.runfile), ticket["actor"]]
    done = subprocess.run(words, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.stdout.splitlines()[-2:] == ["Expected str or bytes, got <class 'NoneType'>", "{}"], done.stderr


def test_ctrl_c_leaves_nothing(cluster: RayCluster, tmp_path: Path) -> None:
    write_job(tmp_path)
    process = phalanx(
        *("launch", "train.py", "--to", cluster.node_address, "--plan", "dp=2", "--run", "run", "--no-check"),
        cwd=tmp_path,
        start_new_session=True,
    )
    until(lambda: (tmp_path / "run" / "launch" / "ray.json").exists(), 60, "it hands the run over")
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode == 130
    assert not (tmp_path / "run").exists()
    until(lambda: not cluster.processes(word="ray::Supervisor"), 60, "no actor is left")


def test_a_plan_that_the_cluster_has_no_devices_for_is_refused_before_anything_is_started(
    cluster: RayCluster, tmp_path: Path
) -> None:
    given = submission(tmp_path, "dp=16")
    target = RayTarget(cluster.node_address.removeprefix("ray:"))
    with pytest.raises(RefusedError, match=r"16 processes with 1 CPU each; allowed: what the cluster has: .* 4 CPUs;"):
        target.submit(target.prepare(given))
    assert not given.run.folder.exists()
    why = target.why_not(target.prepare(given))
    assert "16 processes" in why
    assert target.why_not(target.prepare(submission(tmp_path))) == ""


def test_without_a_plan_the_planner_chooses_for_what_the_cluster_has(cluster: RayCluster, tmp_path: Path) -> None:
    write_job(tmp_path)
    words = ("launch", "train.py", "--to", cluster.node_address, "--run", "run", "--dry-run")
    text = answer(*words, cwd=tmp_path)
    assert f"on 2x{CPUS}xcpu" in text
    assert f'plan = "dp={2 * CPUS}"' in text
    offer = RayTarget(cluster.address.removeprefix("ray:")).offer({"cpus-per-worker": "2"})
    assert offer
    assert (offer.nodes, offer.devices, offer.device, offer.cores) == (2, CPUS // 2, "", CPUS)
    assert offer.memory > 0


def test_inside_ray_train_a_loop_of_ones_own_reports_the_loss_of_the_global_batch(
    cluster: RayCluster, tmp_path: Path
) -> None:
    write_job(tmp_path).rename(tmp_path / "digits.py")
    shown = re.search(r'```python title="ray_train.py"\n(.*?)^```', PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert shown
    told = tmp_path / "told"
    keeps = f"print(metrics, file=open({str(told)!r}, 'a'))"
    (tmp_path / "ray_train.py").write_text(shown[1].replace("print(metrics[0])", keeps))
    done = subprocess.run(
        [sys.executable, "ray_train.py"],
        env={**os.environ, "RAY_ADDRESS": cluster.node_address.removeprefix("ray:"), "HOME": str(tmp_path)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert not done.returncode, done.stderr
    reports = [ast.literal_eval(line) for line in told.read_text().splitlines()]
    assert all(one == other for one, other in reports), "both ranks report the same"
    assert [one["loss"] for one, _ in reports] == pytest.approx(by_hand(6), rel=1e-5)
    assert [(one["step"], one["samples"], one["lr"]) for one, _ in reports] == [(n, 16, 0.1) for n in range(6)]


@pytest.mark.long
def test_a_lost_node_waits_for_another(cluster: RayCluster, tmp_path: Path) -> None:
    run = launch(cluster, tmp_path, "--nodes", "2", "--checkpoint-every", "3", pause=0.1, steps=60)
    await_steps(run, 8)
    cluster.lose(1)
    await_state(run, "waiting")
    cluster.start_node()
    await_state(run, "ended")
    assert px.load(run).losses == pytest.approx(by_hand(60), rel=1e-4)


def test_when_the_head_is_away_status_says_so_at_once(cluster: RayCluster, tmp_path: Path) -> None:
    """The last: the cluster is gone after it."""
    run = launch(cluster, tmp_path, "--nodes", "2", pause=0.3, steps=400)
    await_steps(run, 2)
    cluster.lose(0)
    until(lambda: not cluster.processes(0), 60, "it is gone")
    began = time.monotonic()
    standing = run_standing(run)
    assert time.monotonic() - began < 30  # Ray's own client tries for longer
    assert f"no Ray cluster to be had at 127.0.0.1:{cluster.port}: connection refused" in standing.detail
    with suppress(RunError):  # its refusal, unless the supervisor was elsewhere, and has seen it and ended
        stop_run(run)
        assert run_standing(run).state == "failed"
    cluster.lose(None)
    until(lambda: not cluster.processes(word=str(run)), 60, "what it started is gone")
    assert run_standing(run).state in ("unknown", "failed")  # by the log: whether a worker came to say so


@pytest.mark.skipif(find_spec("ray") is None, reason="not installed: ray")
class TestUnreachable:
    def test_a_closed_port_is_named_at_once(self, tmp_path: Path) -> None:
        with socket.create_server(("127.0.0.1", 0)) as closed:
            port = closed.getsockname()[1]
        write_job(tmp_path)
        began = time.monotonic()
        words = (
            "launch",
            "train.py",
            "--to",
            f"ray://127.0.0.1:{port}",
            "--plan",
            "dp=2",
            "--run",
            "run",
            "--no-check",
        )
        text = answer(*words, cwd=tmp_path, code=3)
        assert f"no Ray cluster to be had at ray://127.0.0.1:{port}: connection refused" in text
        assert time.monotonic() - began < 60
        assert not (tmp_path / "run").exists()

    def test_a_host_that_is_none_is_named(self, tmp_path: Path) -> None:
        target = RayTarget("//nowhere.invalid:10001")
        with pytest.raises(RunError, match=r"at ray://nowhere.invalid:10001: "):
            target.submit(target.prepare(submission(tmp_path)))


def test_what_would_be_sent_is_shown(tmp_path: Path) -> None:
    for name in ("lib/net.py", "data/big.bin", ".env", "runs/1/events.jsonl"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x")
    (tmp_path / ".phalanxignore").write_text("/data/\n")
    given = submission(tmp_path)
    prepared = RayTarget("").prepare(given)
    listed = [line.split()[-1] for line in prepared.files[given.folder / "code.txt"].splitlines()[3:]]
    assert listed == [".phalanxignore", "lib/net.py", "train.py"]
    asked = json.loads(prepared.files[given.folder / "ray.json"])
    assert (asked["code"], asked["reference"]) == (str(tmp_path), "train.py")
    assert f"sha256 {asked['sha256']}" in prepared.shown()
    wider = RayTarget("").prepare(submission(tmp_path / "lib", code=str(tmp_path)))
    assert json.loads(wider.files[tmp_path / "lib" / "run" / "launch" / "ray.json"])["reference"] == "lib/train.py"


def test_code_that_changes_while_it_is_handed_over_is_not_sent(tmp_path: Path) -> None:
    given = submission(tmp_path)
    prepared = RayTarget("").prepare(given)
    (tmp_path / "train.py").write_text("def job(): ...\n")
    with pytest.raises(RunError, match="changed while it was handed over"):
        RayTarget("").submit(prepared)
    assert not (tmp_path / "run").exists()


def test_ray_has_to_be_installed_and_a_dry_run_needs_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_target, "find_spec", lambda name: None)
    target = RayTarget("")
    prepared = target.prepare(submission(tmp_path))
    assert "ray_ask auto submit" in prepared.shown()
    with pytest.raises(MissingExtraError, match=r"phalanx\[ray\]"):
        target.submit(prepared)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "address", ["//head", "head", "//:10001", "http://head:1", "//head:port", "//head:10001/x", "a b"]
)
def test_an_address_is_of_one_form(address: str) -> None:
    with pytest.raises(SpecError, match="ray://head:10001"):
        find_target(f"ray:{address}")


def test_addresses() -> None:
    for text, address in {
        "ray": "auto",
        "ray:auto": "auto",
        "ray://head:10001": "ray://head:10001",
        "ray:10.0.0.1:6379": "10.0.0.1:6379",
    }.items():
        target = find_target(text)
        assert isinstance(target, RayTarget)
        assert target.address == address


@pytest.mark.parametrize(
    ("options", "where", "given"),
    [
        ({"nodes": "3"}, "--nodes", "2 processes"),
        ({"nodes": "0"}, "--nodes", "'0'"),
        ({"cpus-per-worker": "two"}, "--cpus-per-worker", "'two'"),
        ({"runtime-env": "nowhere.json"}, "--runtime-env", "no such file"),
        ({"runtime-env": "train.py"}, "--runtime-env", "no JSON"),
        ({"code": "nowhere"}, "--code", "no folder"),
    ],
)
def test_what_cannot_be_is_refused(tmp_path: Path, options: dict[str, str], where: str, given: str) -> None:
    with pytest.raises(SpecError) as caught:
        RayTarget("").prepare(submission(tmp_path, **options))
    (problem,) = caught.value.problems
    assert problem.where == where
    assert given in problem.given
    assert not (tmp_path / "run").exists()


def request_of(folder: Path, plan: str, **options: str) -> RayRequest:
    return RayRequest.of(submission(folder, plan, **options))


def test_a_run_is_laid_on_as_few_nodes_as_do(tmp_path: Path) -> None:
    cpus = [NodeOffer(name=f"n{number}", cpus=4, gpus=0) for number in range(3)]
    gpus = [NodeOffer(name="head", cpus=2, gpus=0), *(NodeOffer(name=f"g{n}", cpus=64, gpus=8) for n in range(2))]

    def laid(plan: str, there: list[NodeOffer], **options: str) -> tuple[int, dict[str, float]]:
        layout = request_of(tmp_path, plan, **options).laid_on(there)
        return layout.nodes, layout.bundle()

    assert laid("dp=4", cpus) == (1, {"CPU": 4})
    assert laid("dp=6", cpus) == (2, {"CPU": 3})
    assert laid("dp=2", cpus, nodes="2") == (2, {"CPU": 1})
    assert laid("dp=2", cpus, **{"cpus-per-worker": "3"}) == (2, {"CPU": 3})
    assert laid("threads=4", cpus) == (1, {"CPU": 4})
    assert laid("fsdp=8", gpus) == (1, {"CPU": 8, "GPU": 8})
    assert laid("dp=2 fsdp=8", gpus) == (2, {"CPU": 8, "GPU": 8})
    assert laid("dp=2 server=1", gpus) == (1, {"CPU": 3, "GPU": 2})
    assert laid("fsdp=8 device=cpu", gpus) == (1, {"CPU": 8})
    for plan, there, fix in [
        ("dp=16", cpus, "--plan dp=12"),
        ("dp=2 device=cuda", cpus, "ray status"),
        ("dp=17", gpus, "--plan dp=16"),
        ("dp=2", [], "ray status"),
    ]:
        with pytest.raises(RefusedError) as caught:
            laid(plan, there)
        assert caught.value.problems[0].fix.startswith(fix)


@pytest.mark.parametrize("extra", [{}, {"actor": 5}, {"actor": "a b"}, {"actor": "a", "cluster": "--x"}])
def test_a_damaged_ticket_is_one_error_that_says_how_to_get_rid_of_it(tmp_path: Path, extra: dict[str, Any]) -> None:
    (tmp_path / "launch").mkdir()
    ticket = tmp_path / "launch" / "ticket.json"
    ticket.write_text(json.dumps({"to": "ray", **extra}))
    for ask in (run_standing, stop_run):
        with pytest.raises(SpecError, match="which is damaged"):
            ask(tmp_path)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            "Version mismatch: The cluster was started with:\n    Ray: 2.9.0\n    Python: 3.10.1\n"
            "This process on Ray Client was started with:\n    Ray: 2.60.0\n    Python: 3.11.7\n",
            "Version mismatch: The cluster was started with: Ray: 2.9.0 Python: 3.10.1 "
            "This process on Ray Client was started with: Ray: 2.60.0 Python: 3.11.7",
        ),
        ("it died\n  File a, line 1\nModuleNotFoundError: No module named 'phalanx'\n", "No module named 'phalanx'"),
        ("one line", "one line"),
        ("", "RuntimeError"),
    ],
)
def test_of_what_ray_raises_the_cause_is_said(text: str, words: str) -> None:
    assert words in ray_ask.first_words(RuntimeError(text))


def test_what_ray_says_is_passed_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers of the process that asks Ray, and what becomes of them."""

    def submitted(text: str) -> Any:
        prepared = RayTarget("").prepare(submission(tmp_path))
        words = ("printf", "%s", text)
        monkeypatch.setattr(ray_target, "find_spec", lambda name: True)
        return RayTarget("").submit(Prepared(submission=prepared.submission, files=prepared.files, commands=(words,)))

    with pytest.raises(RunError, match="Ray at auto refuses it: Version mismatch"):
        submitted('{"error": "Version mismatch: Ray: 2.9.0"}')
    with pytest.raises(RunError, match="could not be asked"):
        submitted("no JSON")
    assert not (tmp_path / "run").exists()
    assert submitted('one line\n{"actor": "a"}') == {"actor": "a"}
    sent = json.loads((tmp_path / "run" / "launch" / "ray.json").read_text())["sha256"]
    assert file_digest(tmp_path / "run" / "launch" / "code.tar.gz") == sent
    assert sorted(path.name for path in (tmp_path / "run" / "launch").iterdir()) == [
        *("code.tar.gz", "code.txt", "ray.json", "run.toml")
    ]
    with pytest.raises(RunError, match="could not be asked"):
        submitted("no JSON")
    assert file_digest(tmp_path / "run" / "launch" / "code.tar.gz") == sent, "that of the launch before stays"
