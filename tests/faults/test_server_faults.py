"""Servers and workers that die, fall silent or come twice: every run ends, in progress or in an error that says why."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import phalanx as px
import phalanx.checkpoint.store  # once, here: what is forked has it then
from chaos.run_equality import read_ledger
from law_rows import longer
from phalanx.comm import Place
from phalanx.comm.frames import Connection, Frame
from phalanx.comm.handshake import new_secret
from phalanx.errors import RunError
from phalanx.events import read
from phalanx.launch import worker_pool
from phalanx.launch.local import launch
from phalanx.launch.worker_pool import StoppedWorkers
from phalanx.train.interruptions import LauncherLink
from phalanx.train.parameter_server import coordinator, take_part
from phalanx.train.parameter_server.server import Server
from phalanx.train.parameter_server.server_group import Address, Directory, Patience
from phalanx.train.parameter_server.server_links import ServerLinks
from phalanx.train.parameter_server.shard_store import ShardStore

SAMPLES, EPOCHS = 64, 6  # 4 steps an epoch
QUICK = Patience(beat=0.05, silent=0.4, pieces=0.0, answer=5.0, back=5.0, parting=2.0)


def job() -> px.Job:
    generator = torch.Generator().manual_seed(0)
    data = px.Table(x=torch.randn(SAMPLES, 6, generator=generator), y=torch.randint(3, (SAMPLES,), generator=generator))
    return px.Job(
        model=lambda: torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3)),
        data=lambda: data,
        loss=lambda output, batch: px.cross_entropy(output, batch["y"]),
        optimizer=lambda params: torch.optim.AdamW(params, lr=1e-2),
        inputs=lambda batch: batch["x"],
        batch=16,
        epochs=EPOCHS,
    )


@pytest.fixture(autouse=True)
def _snapshots_are_made_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coordinator, "SNAPSHOT_EVERY", 3)


def run_of(plan: str, folder: str = "run") -> px.RunSpec:
    return px.RunSpec(job="small", plan=px.Plan.parse(plan), folder=Path(folder), forecast="none")


def served(
    plan: str,
    strike: Callable[[Place, int], None],
    *,
    begin: Callable[[Place], None] = lambda place: None,
    trained: px.Job | None = None,
    patience: Callable[[Place], Patience] = lambda place: QUICK,
    reserves: int = 1,
    **given: Any,
) -> list[dict[str, Any]]:
    """Run ``plan``; ``strike`` is called with each process's place and the step it begins. Returns the events."""
    run = run_of(plan)

    def work(place: Place, report: Callable[[int], None]) -> dict[str, Any]:
        begin(place)

        def reported(step: int) -> None:
            report(step)
            strike(place, step)

        return take_part(trained or job(), run, place, LauncherLink(report=reported), patience=patience(place))

    launch(work, run.plan.processes, reserves=reserves, **given)
    ids = np.concatenate([ids for _, ids in read_ledger(run.folder / "ledger").values()])
    assert (np.bincount(ids, minlength=SAMPLES) == EPOCHS).all(), "each sample counts once an epoch, whatever happens"
    events = list(px.Run(folder=run.folder).events())
    assert events[-1]["event"] == "end"
    assert events[-1]["step"] == 24
    return events


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def of(events: list[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    return [event for event in events if event["event"] == name]


def states_of(rank: int, events: list[dict[str, Any]] | None = None) -> list[str]:
    """What has become of the worker ``rank``, by default by now, as the log of the run that goes on has it."""
    those = list(read(Path("run/events.jsonl"))) if events is None else events
    return [event["state"] for event in of(those, "worker") if event["rank"] == rank]


def await_state(rank: int, state: str) -> None:
    """Wait, in another worker, until the worker ``rank`` has once been in this state.

    A worker that goes on alone is through with the run in less time than one may be held up for: what is to become of
    the other would come too late.
    """
    while state not in states_of(rank):
        time.sleep(0.02)


def await_file(name: str) -> None:
    while not Path(name).exists():
        time.sleep(0.02)


@pytest.mark.parametrize("plan", ["dp=3 server=2 staleness=2", *longer("dp=2 server=1")])
def test_a_killed_workers_pieces_go_to_others_and_another_is_let_in(plan: str) -> None:
    workers = px.Plan.parse(plan).dp

    def strike(place: Place, step: int) -> None:
        if (place.rank, place.generation) == (1, 0) and step >= 5:
            kill()
        if place.rank < workers and place.rank != 1 and step >= 20:
            await_state(1, "lost")

    events = served(plan, strike)
    assert states_of(1, events)[0] == "joined"
    assert "lost" in states_of(1, events)
    assert of(events, "server") == []


@pytest.mark.parametrize(
    ("plan", "index"),
    [*(("dp=2 server=1", 0), ("dp=2 server=2 staleness=unbounded", 1)), *longer(("dp=2 server=2 staleness=2", 0))],
)
def test_a_killed_server_comes_back_and_no_more_is_lost_than_stated(plan: str, index: int) -> None:
    servers = px.Plan.parse(plan).dp

    def begin(place: Place) -> None:
        if place.rank == servers + index and place.generation == 0:
            Path("pid").write_text(str(os.getpid()))

    def strike(place: Place, step: int) -> None:
        # Only the coordinator begins steps; another server is killed by the first workers that begin this one.
        if index == 0 and (place.rank, place.generation) == (servers, 0) and step == 8:
            kill()
        if index and place.rank < servers and step >= 8 and not Path("struck").exists():
            with suppress(ProcessLookupError):
                os.kill(int(Path("pid").read_text()), signal.SIGKILL)
            Path("struck").touch()

    (told,) = of(served(plan, strike, begin=begin), "server")
    assert (told["index"], told["restarted"]) == (index, True)
    assert 0 <= told["lost_updates"] <= 3


def test_a_run_in_which_a_server_was_lost_comes_to_the_same_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without staleness, though workers ask for more once one server has gone back and before the other has."""
    pull, go_back, ask = Server._pull, ShardStore.go_back, ServerLinks.ask

    def dies(self: Server, *of: Any) -> None:
        here = self._store.index == 1 and self._store.shard.version == 8  # and pieces of step 8 are to be computed
        if here and Path("lose").exists() and not Path("lost").exists():
            Path("lost").touch()
            kill()
        pull(self, *of)

    def slowly(self: ShardStore, *where: Any) -> None:
        if self.index == 1:
            time.sleep(0.3)
        go_back(self, *where)
        if self.index == 0:
            Path("one-is-back").touch()

    def late(self: ServerLinks, *of: Any) -> Frame:
        if Path("lost").exists():
            await_file("one-is-back")
        return ask(self, *of)

    def values() -> bytes:
        return Path("run/checkpoints/step-00000024/rank-00000.safetensors").read_bytes()

    monkeypatch.setattr(Server, "_pull", dies)
    monkeypatch.setattr(ShardStore, "go_back", slowly)
    monkeypatch.setattr(ServerLinks, "ask", late)
    served("dp=2 server=2", lambda *_: None)
    undisturbed = values()
    Path("run").rename("before")
    Path("lose").touch()
    assert len(of(served("dp=2 server=2", lambda *_: None), "server")) == 1
    assert values() == undisturbed


@pytest.fixture
def place() -> Iterator[Place]:
    """The place of the only server of ``dp=1 server=1``, with a store to meet at."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    yield Place(rank=1, world_size=2, store=f"tcp://127.0.0.1:{store.port}", secret=new_secret())
    del store  # it serves until here


def test_a_run_after_another_knows_nothing_of_it(place: Place) -> None:
    before = Directory(place)
    before.publish(0, Address("127.0.0.1", 1, 0))
    before.ask_to_stop(signal.SIGTERM)
    before.finish()
    after = Directory(replace(place, number=1))
    assert (after.find(0), after.asked_to_stop(), after.over) == (None, 0, False)


def test_a_server_without_its_coordinator_gives_up(place: Place) -> None:
    run = run_of("dp=1 server=2")
    quick = replace(QUICK, back=0.2, parting=0.1)
    with pytest.raises(RunError, match="server 0, which coordinates the others, has not been there for 0"):
        take_part(job(), run, replace(place, rank=2, world_size=3), patience=quick)


@pytest.fixture
def always_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    heard = property(lambda self: time.monotonic(), lambda self, when: None)
    monkeypatch.setattr(Connection, "heard", heard, raising=False)


def await_return(after: str) -> None:
    """Wait, in the last step of the other worker, until rank 1 is back since it first was ``after``."""
    while not ((states := states_of(1)) and after in states and "returned" in states[states.index(after) :]):
        time.sleep(0.02)


class Sleeper(torch.nn.Sequential):
    rank, generation, steps = -1, 0, 0
    asleep: Callable[[], bool] = staticmethod(lambda: False)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        Sleeper.steps += 1
        if (Sleeper.rank, Sleeper.generation, Sleeper.steps) == (1, 0, 4):
            Path("asleep").touch()
            while Sleeper.asleep():
                time.sleep(0.02)
        return super().forward(input)


def slept(asleep: Callable[[], bool], after: str, patience: Patience, *, reserves: int) -> list[dict[str, Any]]:
    """What becomes of rank 1, which sleeps in its fourth forward and is ``after`` that by what others see."""
    small = lambda: Sleeper(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))  # noqa: E731

    def begin(place: Place) -> None:
        Sleeper.rank, Sleeper.generation, Sleeper.asleep = place.rank, place.generation, staticmethod(asleep)

    def strike(place: Place, step: int) -> None:
        if place.rank == 0 and step >= 4:
            await_file("asleep")  # one alone would be through before the other comes so far
        if place.rank == 0 and step == 23:
            await_return(after)  # the run is over only once the other is back

    def waits(place: Place) -> Patience:  # who waits here is not to end itself
        return patience if place.rank else replace(patience, stuck=60.0)

    trained = replace(job(), model=small)
    events = served("dp=2 server=1", strike, begin=begin, trained=trained, patience=waits, reserves=reserves)
    return [event for event in of(events, "worker") if event["rank"] == 1]


@pytest.mark.usefixtures("always_heard")
def test_a_worker_that_stands_still_for_too_long_is_lost_and_replaced(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ends = ServerLinks._end_process

    def ends_later(self: ServerLinks, still: float) -> None:
        while "lost" not in states_of(1):
            time.sleep(0.02)
        ends(self, still)

    monkeypatch.setattr(ServerLinks, "_end_process", ends_later)
    told = slept(lambda: True, "lost", replace(QUICK, stuck=1.0), reserves=1)
    states = [event["state"] for event in told]
    assert states[0] == "joined"
    assert "returned" in states[states.index("lost") :]
    assert "no progress for" in told[states.index("lost")]["reason"]
    said = capfd.readouterr().err
    assert re.search(r"worker 1 has made no progress for \d+ s and ends", said)
    assert "in forward" in said, "the stack says where it stood"


def stopped(strike: Callable[[Place, int], None], **given: Any) -> list[str]:
    """What becomes of rank 1 in a run that goes beyond step 10 only once it is about to stop.

    Only the launcher ends anybody here: a rank that waits for the other to be back would be taken for stuck.
    """

    def strikes(place: Place, step: int) -> None:
        strike(place, step)
        if place.rank == 0 and step >= 10:
            await_file("pid")

    events = served("dp=2 server=1", strikes, patience=lambda place: replace(QUICK, stuck=60.0), reserves=1, **given)
    assert not Path(f"/proc/{Path('pid').read_text()}").exists()
    return states_of(1, events)


def freeze(place: Place) -> None:
    if (place.rank, place.generation) == (1, 0):
        Path("pid.new").write_text(str(os.getpid()))
        Path("pid.new").rename("pid")
        os.kill(os.getpid(), signal.SIGSTOP)


def test_a_worker_that_is_stopped_does_not_outlive_the_run(capfd: pytest.CaptureFixture[str]) -> None:
    states = stopped(lambda place, step: freeze(place) if step >= 4 else None, timeout=600.0)
    assert states[:2] == ["joined", "silent"]
    assert "worker 1 has been stopped for" in capfd.readouterr().err


def test_who_is_stopped_is_ended_where_others_wait_or_have_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """After the timeout if it can be replaced, soon if it is the last, and never else; a gap of looks counts anew."""
    now, ended = [0.0], list[int]()
    monkeypatch.setattr(worker_pool, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(worker_pool, "state_of", lambda pid: "T" if pid == 1 else "S")
    monkeypatch.setattr(worker_pool, "kill_group", lambda pid, number: ended.append(pid))
    those: Any = [SimpleNamespace(pid=pid, rank=pid, ended=False) for pid in (0, 1)]

    def ends(*seconds: float, replaceable: bool) -> bool:
        looks = StoppedWorkers(10.0)
        ended.clear()
        for pause in (100.0, *seconds):
            now[0] += pause
            looks.look(those, replaceable=replaceable)
        assert 0 not in ended
        return bool(ended)

    assert ends(*[1.0] * 11, replaceable=True)
    assert not ends(*[1.0] * 9, replaceable=True)
    assert not ends(*[1.0] * 8, 6.0, 1.0, replaceable=True), "the launcher was stopped itself"
    assert not ends(*[1.0] * 99, replaceable=False)
    those[0].ended = True
    assert ends(1.0, 1.0, replaceable=False)
