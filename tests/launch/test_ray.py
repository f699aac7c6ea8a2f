"""Ray without a cluster: what is sent and asked for, what Ray says, and the actors of a run, each by itself."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from clusters import free_ports, lacking_for_ray
from launched import await_steps, by_hand, commands_end, phalanx, steps_in, submission, until, write_job  # noqa: F401

from law_rows import longer
from phalanx.config import Plan, RunSpec
from phalanx.errors import RefusedError, RunError
from phalanx.launch.code_files import digest_of
from phalanx.launch.reaper import SAVED
from phalanx.launch.targets import Prepared, Submission
from phalanx.launch.targets import ray as ray_target
from phalanx.launch.targets.code_pack import CodePack
from phalanx.launch.targets.ray import RayTarget
from phalanx.launch.targets.ray_actors import LOST, STANDING, NodeActor, Supervisor
from phalanx.launch.targets.ray_code import ARCHIVE, RequestCode
from phalanx.launch.targets.ray_request import NodeOffer, RayLayout, RayRequest


def handed(folder: Path, plan: str = "dp=2", **options: str) -> Submission:
    write_job(folder)
    return submission("ray", folder, plan, **options)


@pytest.mark.skipif(find_spec("ray") is None, reason="not installed: ray")
class TestUnreachable:
    def test_a_closed_port_is_named(self, tmp_path: Path) -> None:
        with socket.create_server(("127.0.0.1", 0)) as closed:
            port = closed.getsockname()[1]
        target = RayTarget(f"//127.0.0.1:{port}")
        with pytest.raises(RunError, match=f"127.0.0.1:{port}: connection refused"):
            target.submit(target.prepare(handed(tmp_path)))
        assert not (tmp_path / "run").exists()


def test_what_would_be_sent_is_shown(tmp_path: Path) -> None:
    for name in ("lib/net.py", "data/big.bin", ".env", "runs/1/events.jsonl"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x")
    (tmp_path / ".phalanxignore").write_text("/data/\n")
    given = handed(tmp_path)
    prepared = RayTarget("").prepare(given)
    listed = [line.split()[-1] for line in prepared.files[given.folder / "code.txt"].splitlines()[3:]]
    assert listed == [".phalanxignore", "lib/net.py", "train.py"]
    asked = json.loads(prepared.files[given.folder / "ray.json"])
    assert (asked["code"], asked["reference"]) == (str(tmp_path), "train.py")
    assert f"sha256 {asked['sha256']}" in prepared.shown()
    for number in range(20):
        (tmp_path / f"{number}.bin").write_text("x" * number)
    wider = RayTarget("").prepare(handed(tmp_path / "lib", code=str(tmp_path)))
    assert "and 14 smaller ones: all of them will stand in code.txt" in wider.shown()
    assert json.loads(wider.files[tmp_path / "lib" / "run" / "launch" / "ray.json"])["reference"] == "lib/train.py"


def request_of(folder: Path, plan: str, **options: str) -> RayRequest:
    return RayRequest.of(handed(folder, plan, **options))


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


def test_what_ray_says_is_passed_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers of the process that asks Ray, and what becomes of them."""

    def submitted(text: str) -> Any:
        prepared = RayTarget("").prepare(handed(tmp_path))
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
    assert digest_of(tmp_path / "run" / "launch" / "code.tar.gz") == sent
    assert sorted(path.name for path in (tmp_path / "run" / "launch").iterdir()) == [
        *("code.tar.gz", "code.txt", "ray.json", "run.toml")
    ]
    with pytest.raises(RunError, match="could not be asked"):
        submitted("no JSON")
    assert digest_of(tmp_path / "run" / "launch" / "code.tar.gz") == sent, "that of the launch before stays"


pytestmark = [pytest.mark.timeout(300), pytest.mark.skipif(bool(lacking_for_ray()), reason=lacking_for_ray() or "ray")]
if not lacking_for_ray():  # before any test: it sets variables of its own
    import ray
    import ray.util.client
    import ray.util.placement_group

    groups = sys.modules["ray.util.placement_group"]  # whose name in ray.util is a function's


class Calls:
    """A method of an actor: ``remote`` calls it at once, and gives what it returned in place of a future."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.remote = function


@pytest.fixture(autouse=True)
def ray_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "get", lambda future, **how: future)
    monkeypatch.setattr(ray, "wait", lambda futures, **how: (futures[:1], futures[1:]))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # pipes end with an actor's process
class TestNodeActor:
    def actor(self, tmp_path: Path, script: str) -> tuple[NodeActor, list[bytes]]:
        python = tmp_path / "python"
        python.write_text(f"#!/bin/bash\n{script}\n")
        python.chmod(0o755)
        printed: list[bytes] = []
        supervisor = SimpleNamespace(take=Calls(printed.append))
        request = {"python": str(python), "runfile": str(tmp_path / "run.toml"), "folder": str(tmp_path)}
        return NodeActor(supervisor, {**request, "code": "", "sha256": "", "reference": ""}, 2), printed

    def test_the_agents_exit_code_and_all_that_it_prints_are_passed_on(self, tmp_path: Path) -> None:
        script = 'for n in $(seq 2000); do echo "line $n of rank 0"; done; echo the last >&2; exit 3'
        actor, printed = self.actor(tmp_path, script)
        assert actor.train({"meet": "host:1"}) == 3
        lines = b"".join(printed).decode().splitlines()
        assert (len(lines), lines[-1]) == (2001, "the last")
        actor, _ = self.actor(tmp_path, "kill -KILL $$")
        assert actor.train({}) == -9

    def test_a_stop_is_passed_on_to_the_agent(self, tmp_path: Path) -> None:
        script = f"trap 'echo asked; exit {SAVED}' TERM; touch {tmp_path}/up; while true; do sleep 0.05; done"
        actor, printed = self.actor(tmp_path, script)
        codes: list[int] = []
        trains = threading.Thread(target=lambda: codes.append(actor.train({})))
        trains.start()
        until((tmp_path / "up").exists, 60, "the agent is up")
        actor.stop()
        trains.join(60)
        assert codes == [SAVED]
        assert b"".join(printed) == b"asked\n"

    def test_after_a_stop_no_agent_is_started(self, tmp_path: Path) -> None:
        actor, _ = self.actor(tmp_path, f"touch {tmp_path}/up")
        actor.stop()
        assert actor.train({}) == SAVED
        assert not (tmp_path / "up").exists()

    def test_the_agent_is_told_its_place_and_its_folder_is_gone_with_it(self, tmp_path: Path) -> None:
        actor, printed = self.actor(tmp_path, 'shift 3; echo "$1"')
        assert actor.train({"meet": "host:1", "start": "a-1", "nodes": 2, "rank": 0}) == 0
        told = json.loads(b"".join(printed))
        place = {"meet": "host:1", "start": "a-1", "nodes": 2, "rank": 0, "cores": 2}
        assert {name: told[name] for name in place} == place
        assert told["code"]["works"] == str(tmp_path)
        assert not Path(told["scratch"]).exists()


def spec(folder: Path, **more: Any) -> RunSpec:
    return RunSpec(job="digits", folder=folder, plan=Plan.parse("dp=2"), resume="auto", **more)


class Standby(Supervisor):
    """A supervisor whose placement groups and nodes are a test's: ``codes`` of one start after the other."""

    def __init__(self, folder: Path, codes: Sequence[Mapping[str, int]], **more: Any) -> None:
        self._actor, self._runfile, self._asked = "digits-1", folder / "launch" / "run.toml", threading.Event()
        self._folder = self._runfile.parent
        self._folder.mkdir(parents=True)
        self._runfile.write_text(spec(folder, **more).to_toml())
        self._me = "me"
        settings = {"request": {"patience": 0.3}, "layout": RayLayout(nodes=2, workers=1, cpus=1, gpus=0)}
        self._settings: Any = SimpleNamespace(**settings, asked=self._asked)
        self._standing = {"actor": "digits-1", "state": "waiting", "detail": ""}
        self.codes, self.starts, self.open = list(codes), list[str](), 0
        self.saves = 0

    def _place(self, again: str) -> Any:
        self.open += 1
        return self

    def _train_in(self, group: Any, spec: RunSpec, start: str) -> dict[str, int]:
        assert self.open == 1, "the group before has been given back"
        self.starts.append(start)
        for number in range(self.saves):
            (spec.folder / "checkpoints" / f"step-{len(self.starts)}{number}").mkdir(parents=True)
        return dict(self.codes.pop(0))

    def printed(self) -> str:
        output = self._folder / "output.log"
        return output.read_text() if output.exists() else ""

    def word(self) -> dict[str, str]:
        path = self._folder / STANDING
        return json.loads(path.read_text()) if path.exists() else {}


@pytest.fixture
def killed(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What Ray was asked to kill; groups that are given back count as closed."""
    found: list[Any] = []
    monkeypatch.setattr(ray, "kill", found.append)
    monkeypatch.setattr(groups, "remove_placement_group", lambda group: setattr(group, "open", group.open - 1))
    return found


class TestSupervisor:
    @pytest.fixture(autouse=True)
    def _killed(self, killed: list[Any]) -> None: ...

    def test_where_an_actor_is_lost_all_are_started_anew_in_another_group(self, tmp_path: Path) -> None:
        one = Standby(tmp_path / "run", [{"n0": 0, "n1": LOST}, {"n0": 0, "n1": 0}])
        assert one._train() == ("ended", "")
        assert (one.starts, one.open) == (["digits-1-0", "digits-1-1"], 0)
        assert one.printed() == "phalanx: lost the actor on n1; starting all anew\n"

    @pytest.mark.parametrize("restarts", [0, 2])
    def test_it_gives_up_where_actors_are_lost_too_often(self, tmp_path: Path, restarts: int) -> None:
        one = Standby(tmp_path / "run", [{"n0": LOST}] * 9, restarts=restarts)
        state, detail = one._train()
        assert (state, len(one.starts), one.open) == ("failed", restarts + 1, 0)
        assert "the actor on n0 was lost" in detail

    def test_what_was_saved_in_between_counts_for_it(self, tmp_path: Path) -> None:
        one = Standby(tmp_path / "run", [*[{"n0": LOST}] * 5, {"n0": 0}], restarts=1)
        one.saves = 1
        assert one._train()[0] == "ended"
        assert len(one.starts) == 6

    @pytest.mark.parametrize(
        ("codes", "state", "words"),
        [
            ({"n0": 0, "n1": 0}, "ended", ""),
            ({"n0": SAVED, "n1": 1}, "stopped", ""),
            ({"n0": 0, "n1": 3}, "failed", "n1: 3"),
            ({"n0": -9, "n1": 0}, "failed", "n0: -9"),
        ],
    )
    def test_how_it_ended_is_by_the_codes_of_agents(
        self, tmp_path: Path, codes: dict[str, int], state: str, words: str
    ) -> None:
        found = Standby(tmp_path / "run", [codes])._train()
        assert found[0] == state
        assert words in found[1]

    def test_one_that_is_asked_to_stop_starts_nothing_anew(self, tmp_path: Path) -> None:
        one: Any = Standby(tmp_path / "run", [{"n0": LOST, "n1": 1}])
        one._train_in = lambda *given: (one.stop(), {"n0": LOST, "n1": 1})[1]
        assert one._train() == ("stopped", "")

    def test_one_that_is_asked_to_stop_while_it_waits_for_room_leaves(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        one = Standby(tmp_path / "run", [])
        asked: list[tuple[Any, ...]] = []

        def place(bundles: list[dict[str, float]], strategy: str) -> Any:
            asked.append((bundles, strategy))
            return SimpleNamespace(open=1, wait=lambda seconds: one.stop())

        monkeypatch.setattr(groups, "placement_group", place)
        one._place = lambda again: Supervisor._place(one, again)
        assert one._train() == ("stopped", "before it began")
        assert asked == [([{"CPU": 1.0}] * 2, "STRICT_SPREAD")]
        assert one.word()["state"] == "waiting"
        assert one.word()["detail"] == "for 2 nodes with 1 CPU each"

    def test_it_begins_only_with_its_own_ticket_and_ends_itself(self, tmp_path: Path, killed: list[Any]) -> None:
        one = Standby(tmp_path / "run", [])
        (tmp_path / "run" / "launch" / "ticket.json").write_text('{"actor": "another"}')
        one._live()
        assert (one.starts, killed, one.word()) == ([], ["me"], {})

    def test_it_leaves_word_of_the_end(self, tmp_path: Path, killed: list[Any]) -> None:
        one = Standby(tmp_path / "run", [{"n0": 0}])
        (tmp_path / "run" / "launch" / "ticket.json").write_text('{"actor": "digits-1"}')
        one._live()
        assert one.word() == {"actor": "digits-1", "state": "ended", "detail": ""}
        assert killed == ["me"]

    def test_started_again_after_the_end_it_does_nothing_more(self, tmp_path: Path, killed: list[Any]) -> None:
        one = Standby(tmp_path / "run", [])
        for name, told in (("ticket.json", {"actor": "digits-1"}), (STANDING, {"actor": "digits-1", "state": "ended"})):
            (tmp_path / "run" / "launch" / name).write_text(json.dumps(told))
        one._live()
        assert (one.starts, killed) == ([], ["me"])

    def test_an_error_of_its_own_is_the_runs_end(self, tmp_path: Path, killed: list[Any]) -> None:
        one = Standby(tmp_path / "run", [])  # which has no codes to give
        (tmp_path / "run" / "launch" / "ticket.json").write_text('{"actor": "digits-1"}')
        with pytest.raises(IndexError):
            one._live()
        assert (one.word()["state"], one.word()["detail"]) == ("failed", "IndexError: pop from empty list")
        assert killed == ["me"]


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """The agent of one node, with two workers in a copy of the job's folder, which was taken away."""
    project = tmp_path / "project"
    project.mkdir()
    write_job(project, pause=0.2, steps=2000)
    run, scratch = tmp_path / "run", tmp_path / "scratch"
    (run / "launch").mkdir(parents=True)
    scratch.mkdir()
    given = RunSpec(job=str(project / "train.py"), folder=run, plan=Plan.parse("dp=2"), resume="auto", restarts=0)
    (run / "launch" / "run.toml").write_text(given.to_toml())
    digest = CodePack.of(project, without=run).write(run / "launch" / ARCHIVE)
    code = RequestCode(root=str(project), sha256=digest, reference="train.py", works=str(project))
    project.rename(tmp_path / "away")
    place = {"name": "n0", "nodes": 1, "rank": 0, "meet": f"127.0.0.1:{free_ports(1)[0]}", "start": "d-0", "cores": 2}
    told = json.dumps({**place, "scratch": str(scratch), "code": code.to_dict()})
    words = [sys.executable, "-m", "phalanx.launch.targets.ray_node", str(run / "launch" / "run.toml"), told]
    with (tmp_path / "agent.log").open("wb") as out:
        process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=out, stderr=out)
    yield process
    process.kill()
    process.communicate()


@pytest.mark.parametrize("by", ["Ray, by force", *longer("its actor's end")])
def test_with_its_actor_the_agent_ends_and_all_that_it_has_made(
    agent: subprocess.Popen[bytes], tmp_path: Path, by: str
) -> None:
    await_steps(tmp_path / "run", 2)
    there = psutil.Process(agent.pid).children(recursive=True)
    assert len([one for one in there if "worker" in one.cmdline()]) == 2
    assert (tmp_path / "scratch" / "train.py").exists()
    assert agent.stdin
    if by == "Ray, by force":
        agent.kill()
    agent.stdin.close()
    agent.wait(60)
    until(lambda: not (tmp_path / "scratch").exists(), 60, "no copy of the code")
    until(lambda: not any(one.is_running() and one.status() != psutil.STATUS_ZOMBIE for one in there), 60, "no worker")
    assert "n0 works in a copy of the job's folder" in (tmp_path / "agent.log").read_text()
