"""Ray without a cluster: what is sent to a stand-in of its dashboard, what that says, and the driver's parts."""

from __future__ import annotations

import io
import json
import os
import signal
import socket
import threading
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

import pytest
from launched import submission, until, write_job

from phalanx.config import Plan, RunSpec
from phalanx.errors import RunError, SpecError
from phalanx.launch.reaper import SAVED
from phalanx.launch.targets.ray import RayTarget
from phalanx.launch.targets.ray_driver import LOST, RayDriver, RayNode, main
from phalanx.launch.targets.target import Prepared

if find_spec("ray"):  # before any test: it sets variables of its own
    import ray.job_submission

needs_ray = pytest.mark.skipif(find_spec("ray") is None, reason="not installed: ray")


def prepared(folder: Path, address: str = "", plan: str = "dp=2 device=cpu", **options: str) -> Prepared:
    folder.mkdir(exist_ok=True)
    write_job(folder)
    return RayTarget(address).prepare(submission("ray", folder, plan, **options))


def test_a_dry_run_shows_what_is_left_out_and_no_other_run(tmp_path: Path) -> None:
    (tmp_path / "runs" / "1").mkdir(parents=True)
    (tmp_path / "runs" / "1" / "events.jsonl").write_text("")
    (tmp_path / ".phalanxignore").write_text("/data/\n")
    found = prepared(tmp_path, nodes="2")
    ((*words,),) = found.commands
    environment = json.loads(words[words.index("--runtime-env-json") + 1])
    assert environment["working_dir"] == str(tmp_path)
    assert {".git", ".env", "*.pem", "/run", "/runs/1", "/data/"} <= {*environment["excludes"]}
    assert int(environment["env_vars"]["RAY_JOB_STOP_WAIT_TIME_S"]) > found.submission.run.grace + 15
    assert words[words.index("--") + 3 :][:4] == ["-m", "phalanx.launch.targets.ray_driver", *words[-6:-4]]
    assert words[-5] == "train.py"
    wider = prepared(tmp_path / "lib", code=str(tmp_path))
    assert wider.commands[0][-5] == "lib/train.py"


def test_each_node_has_what_its_workers_need(tmp_path: Path) -> None:
    for plan, options, layout in [
        ("dp=4", {}, "1 4 4"),
        ("dp=4", {"nodes": "2", "gpus_per_node": "0"}, "2 2 0"),
        ("dp=2", {"nodes": "2", "cpus_per_worker": "3"}, "2 3 1"),
        ("threads=4 device=cpu", {}, "1 4 0"),
        ("dp=2 server=1", {}, "1 3 2"),
        ("dp=3 server=1", {"nodes": "2"}, "2 2 2"),
    ]:
        assert " ".join(prepared(tmp_path, plan=plan, **options).commands[0][-3:]) == layout, plan


def test_ray_alone_is_the_cluster_of_rays_own_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RAY_ADDRESS", "RAY_API_SERVER_ADDRESS"):
        monkeypatch.delenv(name, raising=False)
    assert RayTarget("").address == "http://127.0.0.1:8265"
    monkeypatch.setenv("RAY_ADDRESS", "http://a:1/")
    assert RayTarget("").address == "http://a:1"
    assert RayTarget("https://b:2").address == "https://b:2"
    monkeypatch.setenv("RAY_ADDRESS", "ray://a:10001")  # whose server answers with code
    with pytest.raises(SpecError, match="RAY_ADDRESS=ray://a:10001"):
        RayTarget("")


class Dashboard(BaseHTTPRequestHandler):
    """A stand-in of Ray's: keeps what it is sent, and answers what a test sets."""

    asked: ClassVar[list[tuple[str, str, bytes]]] = []
    answers: ClassVar[dict[str, tuple[int, Any]]] = {}

    def _answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.asked.append((self.command, self.path, body))
        usual: dict[str, Any] = {
            "GET /api": {"ray_version": "2.60.0"},
            "POST /api/jobs": {"submission_id": "x", "job_id": "x"},
        }
        asked = f"{self.command} {self.path.rpartition('/')[0]}"
        code, told = self.answers.get(asked, (200, usual.get(asked, {"stopped": True})))
        if self.command == "GET" and "/packages/" in self.path:
            code = 404
        text = json.dumps(told).encode()
        self.send_response(code)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    do_GET = do_PUT = do_POST = _answer  # noqa: N815

    def log_message(self, format: str, *args: Any) -> None: ...


@pytest.fixture
def address(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setattr(Dashboard, "asked", [])
    monkeypatch.setattr(Dashboard, "answers", {})
    monkeypatch.setenv("RAY_ADDRESS", "http://127.0.0.1:1")  # which Ray itself would take before any other
    server = ThreadingHTTPServer(("127.0.0.1", 0), Dashboard)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join()


def sent(method: str, part: str) -> list[bytes]:
    return [body for verb, path, body in Dashboard.asked if verb == method and part in path]


@needs_ray
class TestDashboard:
    def test_code_and_job_are_sent_and_no_secret_is_written(self, tmp_path: Path, address: str) -> None:
        for name in ("lib/net.py", "data/big.bin", ".env", "runs/1/events.jsonl", ".git/config"):
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text("x")
        (tmp_path / ".phalanxignore").write_text("/data/\nenv.json\n")
        (tmp_path / "env.json").write_text('{"env_vars": {"KEY": "hunter2"}, "excludes": ["*.md"]}')
        given = prepared(tmp_path, address, **{"runtime-env": str(tmp_path / "env.json")})
        ticket = RayTarget(address).submit(given)
        with zipfile.ZipFile(io.BytesIO(sent("PUT", "/packages/")[0])) as pack:
            assert sorted(name for name in pack.namelist() if not name.endswith("/")) == [
                *(".phalanxignore", "lib/net.py", "train.py")
            ]
        (job,) = map(json.loads, sent("POST", "/api/jobs/"))
        assert job["entrypoint"].split()[-3:] == ["1", "2", "0"]
        assert job["submission_id"] == ticket["job"]
        assert job["runtime_env"]["env_vars"] == {"KEY": "hunter2", "RAY_JOB_STOP_WAIT_TIME_S": "55"}
        folder = tmp_path / "run" / "launch"
        assert [path.name for path in folder.iterdir()] == ["run.toml"]
        assert "hunter2" not in (folder / "run.toml").read_text() + given.shown() + json.dumps(ticket)

    def test_a_job_that_is_refused_leaves_nothing(self, tmp_path: Path, address: str) -> None:
        Dashboard.answers["POST /api/jobs"] = (500, "No room\nat all")
        with pytest.raises(RunError, match=f"Ray at {address} refuses: Request failed with status code 500") as caught:
            RayTarget(address).submit(prepared(tmp_path, address))
        assert len(str(caught.value).splitlines()) == 2
        assert sent("POST", "/stop"), "it may have been taken all the same"
        assert not (tmp_path / "run").exists()

    def test_how_a_run_stands_is_by_the_job_and_the_drivers_last_line(self, tmp_path: Path, address: str) -> None:
        target, ticket = RayTarget(address), {"job": "x", "address": address}
        for status, more, logs, state, detail in [
            ("PENDING", {"message": "no worker yet"}, "", "waiting", "no worker yet"),
            ("RUNNING", {}, "x\nphalanx: waiting for 2\nx", "waiting", "for 2"),
            ("RUNNING", {}, "phalanx: waiting\nphalanx: running on n0\nphalanx: other", "running", "on n0"),
            ("SUCCEEDED", {"message": "done"}, "", "ended", ""),
            ("STOPPED", {"message": "Job was intentionally stopped."}, "", "stopped", ""),
            ("FAILED", {"driver_exit_code": SAVED, "message": "m"}, "", "stopped", ""),
            ("FAILED", {"driver_exit_code": 2, "message": "tail:\nphalanx: no"}, "", "failed", "phalanx: no"),
        ]:
            Dashboard.answers["GET /api/jobs"] = (
                200,
                {"type": "SUBMISSION", "status": status, "entrypoint": "", **more},
            )
            Dashboard.answers["GET /api/jobs/x"] = (200, {"logs": logs})
            found = target.standing(ticket, tmp_path)
            assert (found.state, found.detail) == (state, detail)
        Dashboard.answers["GET /api/jobs"] = (404, "Job x does not exist")
        assert target.standing(ticket, tmp_path).detail == "Ray has no such job"

    def test_what_is_no_dashboard_is_named_in_one_line(self, tmp_path: Path, address: str) -> None:
        with socket.create_server(("127.0.0.1", 0)) as closed:
            nowhere = f"http://127.0.0.1:{closed.getsockname()[1]}"
        with pytest.raises(RunError, match=f"no Ray dashboard answers at {nowhere}"):
            RayTarget(nowhere).submit(prepared(tmp_path, nowhere))
        assert f"no Ray dashboard answers at {nowhere}" in (
            RayTarget(nowhere).why_not(prepared(tmp_path, nowhere)) or ""
        )
        assert RayTarget(address).why_not(prepared(tmp_path, address)) == ""
        Dashboard.answers["GET /api"] = (200, {})
        with pytest.raises(RunError, match=f"Ray at {address} refuses: 'ray_version'"):
            RayTarget(address).stop({"job": "x", "address": address}, tmp_path)
        assert not (tmp_path / "run").exists()


class TestNode:
    def node(self, folder: Path, script: str) -> RayNode:
        (folder / "agent").write_text(f"{script}\n")
        return RayNode(["bash", str(folder / "agent")], 2)

    def test_the_agents_output_and_exit_code_are_passed_on(self, tmp_path: Path) -> None:
        script = 'for n in $(seq 2000); do echo "line $n"; done; echo "$1" >&2; exit 3'
        *printed, code = self.node(tmp_path, script).train({"rank": 1})
        *lines, place = b"".join(part for part in printed if isinstance(part, bytes)).decode().splitlines()
        assert (code, len(lines)) == (3, 2000)
        assert {"rank": 1, "cores": 2}.items() <= json.loads(place).items()
        assert list(self.node(tmp_path, "kill -KILL $$").train({})) == [-9]

    @pytest.mark.parametrize("early", [False, True])
    def test_a_stop_is_passed_on_to_the_agent(self, tmp_path: Path, early: bool) -> None:
        node = self.node(tmp_path, f"trap 'exit {SAVED}' TERM; touch {tmp_path}/up; while true; do sleep 0.05; done")
        if early:
            node.stop()
            assert list(node.train({})) in ([SAVED], [-signal.SIGTERM])
            return
        said: list[bytes | int] = []
        trains = threading.Thread(target=lambda: said.extend(node.train({})))
        trains.start()
        until((tmp_path / "up").exists, 60, "the agent is up")
        node.stop()
        trains.join(60)
        assert said == [SAVED]


class Standby(RayDriver):
    """A driver whose starts give what a test says: ``codes`` of one start after the other."""

    def __init__(self, folder: Path, codes: Sequence[Mapping[str, int]], **more: Any) -> None:
        spec = RunSpec(job="digits", folder=folder, plan=Plan.parse("dp=2"), resume="auto", **more)
        (folder / "launch").mkdir(parents=True)
        super().__init__(spec, folder / "launch" / "run.toml", ["2", "1", "0"])
        self.codes, self.starts = list(codes), 0

    def _start(self, starts: int) -> dict[str, int]:
        assert starts == self.starts
        self.starts += 1
        return dict(self.codes.pop(0))


@needs_ray
class TestDriver:
    @pytest.fixture(autouse=True)
    def _no_cluster(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(ray, "init", lambda **how: None)

    @pytest.mark.parametrize(
        ("codes", "code", "said"),
        [
            ([{"n0": 0, "n1": 0}], 0, ""),
            ([{"n0": SAVED, "n1": 1}], SAVED, ""),
            ([{"n0": 0, "n1": 3}], 1, "n1: 3"),
            ([{"n0": 0, "n1": LOST}, {"n0": 0, "n1": 0}], 0, "lost the actor on n1, 1 of 3 times"),
            ([{"n0": LOST}] * 9, 1, "lost the actor on n0, 3 of 3 times"),
        ],
    )
    def test_the_exit_code_is_by_those_of_agents(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str], codes: Any, code: int, said: str
    ) -> None:
        one = Standby(tmp_path / "run", codes, restarts=2)
        assert one.train() == code
        assert one.starts == min(len(codes), 3)
        assert said in capsys.readouterr().out

    def test_once_asked_to_stop_it_starts_nothing_again(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        one = Standby(tmp_path / "run", [])
        monkeypatch.setattr(
            one, "_start", lambda starts: (os.kill(os.getpid(), signal.SIGTERM), {"n0": LOST, "n1": 1})[1]
        )
        assert one.train() == SAVED
        assert one.train() == SAVED


def test_another_version_and_a_folder_that_is_not_shared_are_refused_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import phalanx

    for version, said in (("0.0", "the same version"), (phalanx.__version__, "at the same path on all nodes")):
        assert main([str(tmp_path / "run.toml"), "train.py", version, "1", "1", "0"]) == 2
        (line,) = capsys.readouterr().out.splitlines()
        assert line.startswith("phalanx: ")
        assert said in line
