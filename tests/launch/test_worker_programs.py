"""Workers that are programs of their own: torchrun's agents, the run's secret, and what a process loads."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.run
from launched import by_hand, free_ports, write_job
from torch.distributed.elastic.multiprocessing.api import _terminate_process_handler
from torch.distributed.elastic.rendezvous.api import RendezvousConnectionError

import phalanx as px
from longer import longer
from phalanx.comm import Place
from phalanx.comm.handshake import SECRET
from phalanx.config import Plan, RunSpec
from phalanx.errors import RunError
from phalanx.events import EventLog
from phalanx.launch import load_job, run_secret
from phalanx.launch.local import launch
from phalanx.launch.reaper import SAVED, fork
from phalanx.launch.run_secret import share_secret
from phalanx.launch.targets.node_agent import NodePlace, be_agent
from phalanx.report.samples_seen import samples_seen

STEPS = 8
STRIKE = '''
import os
import signal
from pathlib import Path

CALLS = []


def strike():
    """In the fourth step rank 0 is killed while rank 1 is away from where it would notice, until its agent ends it."""
    import os, signal
    from pathlib import Path
    if not torch.distributed.is_initialized():  # the look at the job before the run
        return
    here, rank = Path(__file__).parent, os.environ["RANK"]
    if (here / "struck").exists() and not CALLS:
        (here / f"again-{rank}-{os.environ['TORCHELASTIC_RESTART_COUNT']}").touch()
    CALLS.append(1)
    if len(CALLS) == 4 and not (here / "struck").exists():
        if rank == "1":
            asked, before = [], signal.getsignal(signal.SIGTERM)
            signal.signal(signal.SIGTERM, lambda *given: (asked.append(1), before(*given)))
            (here / "away").touch()
            until = time.monotonic() + 60
            while not asked and time.monotonic() < until:
                time.sleep(0.05)
        else:
            while not (here / "away").exists():
                time.sleep(0.05)
            (here / "struck").touch()
            os.kill(os.getpid(), signal.SIGKILL)


def loss('''
RUN = """
job = "train.py"
plan = "dp=2"
folder = "run"
resume = "auto"
forecast = "none"
checkpoint_every = 1
grace = 5.0
"""


@pytest.mark.timeout(240)
@pytest.mark.usefixtures("_nothing_left")
def test_workers_meet_whose_agents_have_counted_differently(tmp_path: Path) -> None:
    job = write_job(tmp_path, steps=STEPS)
    job.write_text(job.read_text().replace("\ndef loss(", STRIKE).replace("time.sleep(PAUSE)", "strike()"))
    (tmp_path / "run.toml").write_text(RUN)
    (port,) = free_ports(1)
    agents = [_agent(tmp_path, number, port) for number in range(2)]
    try:
        codes = [agent.wait(timeout=200) for agent in agents]
    finally:
        for agent in agents:
            agent.kill()
            agent.wait()
    said = "\n".join(file.read_text() for file in sorted(tmp_path.glob("agent-*.txt")))
    assert codes == [0, 0], said
    again = sorted(file.name.split("-")[1:] for file in tmp_path.glob("again-*"))
    assert [rank for rank, _ in again] == ["0", "1"], said
    assert sorted(count for _, count in again) == ["0", "1"], "the agents have counted alike: nothing was tried"
    run = px.load(tmp_path / "run")
    assert run.losses == pytest.approx(by_hand(STEPS), rel=1e-5)
    assert samples_seen(run.folder).once


def _agent(folder: Path, number: int, port: int) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1"]
    command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", "counts"]
    command += ["--rdzv-conf", f"is_host={int(number == 0)}", "--local-addr", "127.0.0.1"]
    command += ["--max-restarts", "3", "--no-python", sys.executable, "-m", "phalanx", "worker", "run.toml"]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    env.pop("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", None)
    with (folder / f"agent-{number}.txt").open("ab") as said:
        return subprocess.Popen(command, cwd=folder, env=env, stdout=said, stderr=said)


RAISED = 9


def exit_code(folder: Path, run: Callable[[object], None]) -> int:
    """Of a process that is the agent, asked to stop once more when ``run`` has come to its end in place of torchrun."""
    spec = RunSpec(job="train.py", plan=Plan.parse("dp=2"), folder=folder)
    pid = fork()
    if pid == 0:
        code = RAISED
        try:
            torch.distributed.run.run = run
            code = be_agent(spec, NodePlace(name="n1", nodes=2, cores=1, options={}), ["true"])
            os.kill(os.getpid(), signal.SIGTERM)
        except BaseException:
            code = RAISED
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_a_signal_that_comes_when_the_run_has_ended_changes_nothing(tmp_path: Path) -> None:
    """Nodes are asked to stop one after the other, and the last as the others have saved and it has with them."""

    def run(asked: object) -> None:
        signal.signal(signal.SIGTERM, _terminate_process_handler)  # as torch has it from the first worker on

    assert exit_code(tmp_path, run) == 0


@pytest.mark.parametrize(
    ("before", "since", "code"),
    [([], ["stopped"], SAVED), (["stopped"], [], RAISED), ([], ["stopped", "resume"], RAISED), ([], [], RAISED)],
)
def test_agents_whose_place_to_meet_is_gone_have_saved_where_the_run_has(
    tmp_path: Path, before: list[str], since: list[str], code: int
) -> None:
    """The agent that serves it has been asked to stop and has ended; this one would start its worker again."""
    fields: dict[str, dict[str, Any]] = {
        "stopped": {"step": 3, "signal": "SIGTERM"},
        "resume": {"step": 3, "path": "checkpoints/step-3"},
    }

    def note(words: list[str]) -> None:
        with EventLog(tmp_path / "events.jsonl") as log:
            for word in words:
                log.write(word, **fields[word])

    def run(asked: object) -> None:
        note(since)
        raise RendezvousConnectionError("the connection to the C10d store has failed")

    note(before)
    assert exit_code(tmp_path, run) == code


def test_a_job_is_looked_at_once(tmp_path: Path) -> None:
    path = write_job(tmp_path)
    text = path.read_text().replace(
        "def model():\n", 'def model():\n    open(f"{__file__}.{os.getpid()}", "w").close()\n'
    )
    path.write_text(f"import os\n{text}")
    spec = px.RunSpec(job=str(path), plan=px.Plan(dp=2), folder=tmp_path / "run", forecast="none")
    run = px.fit(load_job(str(path)), run=spec, launcher="torchrun", watch=False)
    assert run.losses == pytest.approx(by_hand(6), rel=1e-5)
    built = list(tmp_path.glob("train.py.*"))
    assert len(built) == 3, "the process that looks, and two workers"


def test_every_rank_has_it_and_the_file_is_gone(tmp_path: Path) -> None:
    (tmp_path / ".secret").write_bytes(b"of a run that was killed")

    def work(place: Place, report: Callable[[int], None]) -> list[object]:
        secret = share_secret(place, tmp_path)
        return [len(secret), hashlib.sha256(secret).hexdigest()]

    first, *others = launch(work, 3)
    assert first[0] == SECRET
    assert others == [first, first]
    assert list(tmp_path.iterdir()) == []


def test_each_run_of_the_same_workers_has_its_own(tmp_path: Path) -> None:
    def work(place: Place, report: Callable[[int], None]) -> list[str]:
        runs = (replace(place, number=number) for number in range(3))
        return [hashlib.sha256(share_secret(run, tmp_path)).hexdigest() for run in runs]

    first, *others = launch(work, 2)
    assert others == [first]
    assert len(set(first)) == 3


def test_only_this_user_reads_it(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        run_secret._write(tmp_path / "s", b"x")
    finally:
        os.umask(before)
    assert (tmp_path / "s").stat().st_mode & 0o777 == 0o600


def test_neither_a_link_in_its_place_nor_another_file_is_believed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere").write_bytes(b"mine")
    (tmp_path / "s").symlink_to(tmp_path / "elsewhere")
    run_secret._write(tmp_path / "s", b"x")
    assert (tmp_path / "elsewhere").read_bytes() == b"mine"
    (tmp_path / "s").unlink()
    (tmp_path / "s").symlink_to(tmp_path / "elsewhere")
    monkeypatch.setattr(run_secret, "_SEEN_AFTER", 0.0)
    with pytest.raises(RunError, match="storage that all machines share"):
        run_secret._read(tmp_path / "s", hashlib.sha256(b"mine").hexdigest())
    (tmp_path / "s").unlink()
    (tmp_path / "s").write_bytes(b"a stranger's")
    with pytest.raises(RunError, match="does not see"):
        run_secret._read(tmp_path / "s", hashlib.sha256(b"ours").hexdigest())


def test_a_file_system_without_permissions_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.fstat
    open_to_all = lambda descriptor: os.stat_result([0o100777, *list(real(descriptor))[1:]])  # noqa: E731
    monkeypatch.setattr(os, "fstat", open_to_all)
    with pytest.raises(RunError, match=r"keeps no permissions(?s:.*)try: a run folder on another"):
        run_secret._write(tmp_path / "s", b"x")


TRAIN = """
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

def train(name):
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    ddp = DistributedDataParallel(net)
    optimizer = getattr(torch.optim, name)(ddp.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        ddp(torch.ones(3, 4) * step).square().sum().backward()
        optimizer.step()
    assert torch.is_grad_enabled()
    optimizer.load_state_dict(optimizer.state_dict())
    del ddp, optimizer  # as its group's last owner DDP may wait for ever for the interpreter's lock
    dist.destroy_process_group()
    return [parameter.detach().sum().item() for parameter in net.parameters()]
"""
FRESH = """
import sys
import torch
from torch._subclasses import FakeTensorMode
from phalanx.launch.torch_warmup import leave_compiler_out, make_ready
from phalanx.config import Plan

REAL = torch.ones(2, 4)
make_ready(PLAN)
assert "_dynamo" not in vars(torch)
leave_compiler_out()
print([train(name) for name in NAMES])
assert torch._dynamo.utils.get_optimize_ddp_mode() == "ddp_optimizer"
with FakeTensorMode(allow_non_fake_inputs=True):
    assert torch.nn.functional.linear(torch.ones(3, 4), REAL).shape == (3, 2)
    assert torch.nn.functional.linear(torch.ones(3, 3), REAL[:, 1:]).shape == (3, 2)
assert isinstance(torch._dynamo.config.optimize_ddp, bool)
assert "torch._dynamo.eval_frame" not in sys.modules
ASK
assert "torch._dynamo.eval_frame" in sys.modules
assert torch._dynamo is sys.modules["torch._dynamo"]
assert torch._dynamo.source is sys.modules["torch._dynamo.source"]
assert torch._dynamo.utils.get_optimize_ddp_mode() == "ddp_optimizer"
assert torch.compile(lambda x: x + 1, backend="eager")(torch.ones(1)).item() == 2
print([train(name) for name in NAMES])
"""
NAMES = ["SGD", "AdamW", "Adagrad", "RMSprop"]


@pytest.fixture(scope="module")
def as_torch_does() -> list[list[float]]:
    scope: dict[str, object] = {}
    exec(TRAIN, scope)
    torch.set_num_threads(1)
    return [scope["train"](name) for name in NAMES]  # pyright: ignore[reportCallIssue]


ASKED = {  # what more than a worker needs is asked by: an attribute, a module, a name of a module held ready
    "dp=2": "torch._dynamo.reset",
    "tp=2": "import torch._dynamo.convert_frame",
    "pp=2": "from torch._dynamo.source import GlobalSource",
    "fsdp=2": "import torch._dynamo.guards",
}


@pytest.mark.parametrize("plan", ["fsdp=2", *longer("dp=2", "tp=2", "pp=2")])
def test_no_compiler_until_asked_for(as_torch_does: list[list[float]], plan: str) -> None:
    fresh = FRESH.replace("PLAN", f"Plan.parse({plan!r})").replace("ASK", ASKED[plan])
    code = f"NAMES = {NAMES!r}\n{TRAIN}\ntorch.set_num_threads(1)\n{fresh}"
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [repr(as_torch_does)] * 2


def test_workers_have_what_their_plan_needs_and_the_launcher_keeps_torch_as_it_is() -> None:
    code = """
import sys
import torch
import phalanx as px
from phalanx.launch import launch, make_ready
from phalanx.launch.torch_warmup import leave_compiler_out

known, torch.__version__ = torch.__version__, "2.14.0"
leave_compiler_out()
assert "_dynamo" not in vars(torch), "torch of an unknown version is left alone"
torch.__version__ = known
make_ready(px.Plan(dp=2))
changed = launch(lambda place, report: "_dynamo" in vars(torch), 2)
assert changed == [True, True], changed
assert "_dynamo" not in vars(torch)
assert "torch._dynamo" not in sys.modules
make_ready(px.Plan.parse("dp=2 compile=true"))
assert "torch._dynamo" in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=100)


TRAINS = """
import sys
from dataclasses import replace
import phalanx as px
from phalanx.demo.jobs.gpt import gpt_job

job = gpt_job(layers=2, width=16, heads=2, context=8, batch=4, steps=2)

def loss(output, batch):
    assert "torch._dynamo.eval_frame" not in sys.modules, "the compiler is loaded"
    return job.loss(output, batch)

px.fit(replace(job, loss=loss), sys.argv[1])
"""


@pytest.mark.parametrize("plan", ["pp=2 fsdp=2 tp=2", *longer("dp=2", "cp=2")])
def test_no_rank_of_a_run_loads_the_compiler(tmp_path: Path, plan: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", TRAINS, plan], cwd=tmp_path, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
