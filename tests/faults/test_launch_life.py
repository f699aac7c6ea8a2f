"""A launch that goes well: results, output, threads, start-up; and the launcher's own end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist
from inject import LIMIT, alive, noted, wait_until

from phalanx.comm import Place, default_process_group
from phalanx.launch import worker_process
from phalanx.launch.local import launch

SLEEPERS = """
import sys
from pathlib import Path
sys.path.insert(0, {here!r})
from inject import hang_on, note, start_child
from phalanx.launch.local import launch
import os

folder = Path({folder!r})

def target(place, report):
    note(folder, os.getpid())
    start_child(folder)
    (folder / f"ready-{{place.rank}}").touch()
    hang_on()

try:
    launch(target, 2)
except KeyboardInterrupt:
    print("interrupted")
    sys.exit(130)
"""


@pytest.fixture(autouse=True)
def _no_child_left() -> object:
    yield
    assert psutil.Process().children(recursive=True) == []


def test_launcher_is_ended(tmp_path: Path) -> None:
    """By each signal: three launchers that start side by side, and are ended one after the other."""
    codes = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGKILL: -9}
    launchers: dict[int, subprocess.Popen[str]] = {}
    with ExitStack() as up:
        for number in codes:
            (folder := tmp_path / f"{number}").mkdir()
            argv = [sys.executable, "-c", SLEEPERS.format(here=str(Path(__file__).parent), folder=str(folder))]
            launchers[number] = up.enter_context(subprocess.Popen(argv, stdout=subprocess.PIPE, text=True))
            up.callback(launchers[number].kill)
        assert wait_until(lambda: len(list(tmp_path.glob("*/ready-*"))) == 2 * len(codes), 60)
        for number, code in codes.items():
            output = ended(launchers[number], number, tmp_path / f"{number}")
            assert (launchers[number].returncode, number) == (code, number)
            assert output == ("interrupted\n" if number == signal.SIGINT else "")


def ended(launcher: subprocess.Popen[str], number: int, folder: Path) -> str:
    """Its output; that it ends soon after the signal, with everyone it started."""
    processes = psutil.Process(launcher.pid).children(recursive=True)
    began = time.monotonic()
    launcher.send_signal(number)
    output, _ = launcher.communicate(timeout=LIMIT)
    everyone = [*noted(folder), *(process.pid for process in processes)]
    assert len(noted(folder)) == 4
    assert wait_until(lambda: alive(everyone) == [], LIMIT)
    assert time.monotonic() - began < LIMIT
    return output


def test_results_come_in_rank_order_and_workers_meet() -> None:
    def target(place: Place, report: Callable[[int], None]) -> dict[str, float]:
        with default_process_group(place, torch.device("cpu")):
            total = torch.tensor(float(place.rank))
            dist.all_reduce(total)
        where = {"rank": place.rank, "local": place.local_rank, "here": place.local_world_size}
        return {**where, "total": float(total)}

    assert launch(target, 3) == [{"rank": rank, "local": rank, "here": 3, "total": 3.0} for rank in range(3)]


def test_large_result_and_nothing() -> None:
    assert launch(lambda place, report: "x" * 1_000_000 * place.rank, 2) == ["", "x" * 1_000_000]
    assert launch(lambda place, report: None, 1) == [None]


def test_output_of_other_ranks_is_marked(capsys: pytest.CaptureFixture[str]) -> None:
    def target(place: Place, report: Callable[[int], None]) -> None:
        print(f"one {place.rank}\ntwo", end="")
        print("trouble", file=sys.stderr)
        os.write(1, "näm\n".encode())

    launch(target, 1)
    assert capsys.readouterr() == ("one 0\ntwonäm\n", "trouble\n")
    launch(target, 2)
    output, errors = capsys.readouterr()
    assert "[rank 1] one 1\n[rank 1] twonäm\n" in output
    assert "[rank 1] trouble\n" in errors


def test_standard_input_is_empty() -> None:
    assert launch(lambda place, report: sys.stdin.read(), 1) == [""]


def test_watch_is_called_while_workers_run_and_once_more() -> None:
    calls, enough = list[float](), Path("enough")

    def watch() -> None:
        calls.append(time.monotonic())
        if len(calls) == 2:
            enough.touch()

    began = time.monotonic()
    launch(lambda place, report: wait_until(enough.exists, LIMIT), 1, watch=watch)
    assert 3 <= len(calls) <= 3 + (time.monotonic() - began) / 0.1


def test_workers_compute_on_threads_after_the_launcher_did() -> None:
    # GNU OpenMP hangs here where a worker is forked from the thread that computed
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        torch.nn.Linear(400, 400)(torch.randn(400, 400)).sum().backward()

        def target(place: Place, report: Callable[[int], None]) -> list[object]:
            default = torch.get_num_threads()
            torch.set_num_threads(2)
            torch.nn.Linear(400, 400)(torch.randn(400, 400)).sum().backward()
            return [default, isinstance(threading.current_thread(), threading._MainThread)]  # pyright: ignore

        cores = len(os.sched_getaffinity(0))
        share = max(1, cores // 2) if "OMP_NUM_THREADS" not in os.environ else 2  # then as the launcher has it
        assert launch(target, 2) == [[share, True]] * 2
    finally:
        torch.set_num_threads(before)


def test_data_loading_processes_work_in_a_worker() -> None:
    def target(place: Place, report: Callable[[int], None]) -> float:
        data = torch.utils.data.TensorDataset(torch.arange(32.0))
        loader = torch.utils.data.DataLoader(data, batch_size=8, num_workers=2)
        return float(sum(batch[0].sum() for batch in loader))

    assert launch(target, 2) == [496.0, 496.0]


def test_leaving_a_group_never_hangs() -> None:
    # every fourth run hung where DistributedDataParallel's reducer was the last owner of the group
    def target(place: Place, report: Callable[[int], None]) -> None:
        def run() -> None:
            with default_process_group(place, torch.device("cpu")):
                ddp = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 2))
                ddp(torch.ones(2, 4)).sum().backward()
                dist.all_gather([torch.zeros(1), torch.zeros(1)], torch.ones(1))

        run()

    deadline = time.monotonic() + 40

    def watch() -> None:
        assert time.monotonic() < deadline

    for _ in range(8):
        launch(target, 2, watch=watch)


def test_signal_handlers_are_as_before() -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    launch(lambda place, report: None, 1)
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


def test_threads_of_a_forked_worker_may_use_autograd_at_once() -> None:
    """Without ``renew_autograd`` between one and five of these 150 are ended by SIGSEGV."""
    program = Path(__file__).with_name("two_threads_after_fork.py")
    done = subprocess.run([sys.executable, program], capture_output=True, text=True, timeout=120, check=True)
    assert int(done.stdout) == 0


def test_a_worker_has_its_own_engine_before_it_starts_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    monkeypatch.setattr(
        worker_process, "renew_autograd", lambda: order.append(f"renewed beside {threading.active_count() - 1}")
    )

    def target(place: Place, report: Callable[[int], None]) -> list[str]:
        return [*order, "target"]

    assert launch(target, 1) == [["renewed beside 0", "target"]]
