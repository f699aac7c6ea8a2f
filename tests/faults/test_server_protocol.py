"""What servers, workers and the coordinator say is what the others' tables take; a server that balks ends the run."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from test_server_faults import QUICK, job, run_of

import phalanx as px
import phalanx.checkpoint.store  # once, here: what is forked has it then
from phalanx.comm import Place
from phalanx.comm.frames import Connection, FrameForm, FrameForms
from phalanx.config import Job, RunSpec
from phalanx.errors import RunError
from phalanx.launch.local import launch
from phalanx.parallel.parameter_server import FrameKind, RunProgress
from phalanx.parallel.parameter_server.protocol import (
    FROM_COORDINATOR,
    FROM_WORKER,
    TO_COORDINATOR,
    TO_SERVER,
    TO_WORKER,
)
from phalanx.train.launcher_link import LauncherLink
from phalanx.train.observer import Observer, Scene
from phalanx.train.parameter_server import take_part

# what one end takes → what it may send: the table of the other end
ANSWERED: list[tuple[FrameForms, FrameForms]] = [
    (FROM_WORKER, TO_WORKER),
    (TO_WORKER, FROM_WORKER),
    (FROM_COORDINATOR, TO_COORDINATOR),
    (TO_COORDINATOR, FROM_COORDINATOR),
]
NAMES = {"to a worker": TO_WORKER, "from a worker": FROM_WORKER}
NAMES |= {"to the coordinator": TO_COORDINATOR, "from the coordinator": FROM_COORDINATOR}


def judged(monkeypatch: pytest.MonkeyPatch, said: Path) -> None:
    """From now on, in processes forked from here as well, a frame that the other end would refuse fails its sender.

    What was sent is written to ``said``.
    """
    send = Connection.send

    def judging(self: Connection, kind: int, meta: dict[str, Any] | None = None, payload: Sequence[memoryview] = ()):
        forms = next(table for takes, table in ANSWERED if takes is self._forms)
        direction = next(name for name, table in NAMES.items() if table is forms)
        form: FrameForm | None = forms.get(kind)
        assert form is not None, f"a {FrameKind(kind).name} {direction}, which its table has not"
        came = json.loads(json.dumps(meta or {}))
        assert not (fault := form.fault(came)), f"a {FrameKind(kind).name} {direction} with {fault}"
        assert form.tensors or not payload, f"a {FrameKind(kind).name} {direction} with tensors"
        with said.open("a") as file:
            file.write(f"{direction}: {FrameKind(kind).name}\n")
        send(self, kind, meta, payload)

    monkeypatch.setattr(Connection, "send", judging)


class Onlooker(Observer):
    """Looks at the gradients that updates were made with, which servers are then asked for."""

    listens = True

    def built(self, scene: Scene) -> None:
        self._scene = scene

    def steps(self, batch: object) -> None:
        self._scene.gradients()


def served(
    plan: str = "dp=2 server=2",
    *,
    change: Callable[[Job, RunSpec], tuple[Job, RunSpec]] = lambda job, run: (job, run),
    strike: Callable[[Place, int], None] = lambda place, step: None,
    reserves: int = 0,
) -> None:
    small, run = change(job(), run_of(plan))

    def work(place: Place, report: Callable[[int], None]) -> dict[str, Any]:
        if place.rank == 3 and place.generation == 0:
            Path("pid").write_text(str(os.getpid()))

        def reported(step: int) -> None:
            report(step)
            strike(place, step)

        observer = Onlooker() if place.rank == 2 else Observer()
        return take_part(small, run, place, LauncherLink(report=reported), patience=QUICK, observer=observer)

    launch(work, run.plan.processes, reserves=reserves)


def test_every_frame_is_one_that_the_other_end_takes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A run with all that servers do: saves, snapshots, an evaluation, a server that is killed and comes back."""
    said = tmp_path / "said"
    judged(monkeypatch, said)

    def strike(place: Place, step: int) -> None:
        # whoever comes first: one that is held up may come to none of these steps
        if place.rank < 2 and step >= 8 and not Path("struck").exists():
            with suppress(ProcessLookupError):
                os.kill(int(Path("pid").read_text()), signal.SIGKILL)
            Path("struck").touch()

    def change(job: Job, run: RunSpec) -> tuple[Job, RunSpec]:
        return replace(job, evaluate=job.data), replace(run, checkpoint_every=10)

    served(change=change, strike=strike, reserves=1)
    assert list(px.Run(folder=Path("run")).events())[-1]["event"] == "end"
    sent = set(said.read_text().splitlines())
    unsaid = {f"{name}: {FrameKind(kind).name}" for name, table in NAMES.items() for kind in table} - sent
    # what the coordinator's first word is answered with is a WELCOME
    assert unsaid == set()
    assert TO_SERVER.keys() == {FrameKind.WELCOME}


def test_what_a_worker_tells_of_a_number_that_is_not_finite_is_taken(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    judged(monkeypatch, tmp_path / "said")

    def change(job: Job, run: RunSpec) -> tuple[Job, RunSpec]:
        rows = job.data()[range(64)]
        rows["x"][5, 0] = float("nan")
        return replace(job, data=lambda: px.Table(**rows), epochs=1), replace(run, on_nonfinite="skip")

    served(change=change)
    (event,) = px.Run(folder=Path("run")).events("accident")
    assert event["samples"] == [5]
    assert event["where"].startswith("First not finite: x of the batch, sample 5, on rank ")


DONE = {"step": 0, "part": 0, "term": 0, "ticket": "0" * 64, "what": "train", "version": 0}
DONE |= {"sums": {"loss": [1.0, 8.0]}, "samples": 8, "seconds": 1.0}
GATHERED: dict[str, Any] = {"held": [["weight", 0, 2, True]], "states": {"weight": {"step": 1}}, "tensors": []}


@pytest.mark.parametrize(
    ("table", "kind", "meta", "wrong"),
    [
        (FROM_WORKER, FrameKind.ASK, {}, {"done": DONE | {"ticket": "é" * 64}}),
        (FROM_WORKER, FrameKind.ASK, {"done": DONE}, {"done": DONE | {"sums": {}}}),
        (FROM_WORKER, FrameKind.ASK, {"done": DONE}, {"done": DONE | {"sums": {"loss": [10**400, 1]}}}),
        (TO_COORDINATOR, FrameKind.GATHER, GATHERED, {"states": 1}),
        (TO_COORDINATOR, FrameKind.GATHER, GATHERED, {"states": {"weight": 1}}),
        (TO_COORDINATOR, FrameKind.GATHER, GATHERED, {"states": ["weight"]}),
    ],
)
@pytest.mark.quick
def test_a_table_takes_what_can_be_handled_alone(
    table: FrameForms, kind: FrameKind, meta: dict[str, Any], wrong: dict[str, Any]
) -> None:
    assert not table[kind].fault(meta)
    assert table[kind].fault(meta | wrong)


def without(name: str) -> FrameForms:
    """What servers take from the coordinator, but for one field of an order to update."""
    form = FROM_COORDINATOR[FrameKind.APPLY]
    fields: Mapping[str, Any] = {one: allows for one, allows in form.fields.items() if one != name}
    return {**FROM_COORDINATOR, FrameKind.APPLY: replace(form, fields=fields)}


def test_a_server_that_its_coordinator_breaks_the_protocol_with_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("phalanx.train.parameter_server.server.FROM_COORDINATOR", without("left_out"))
    began = time.monotonic()
    with pytest.raises(RunError) as raised:
        served()
    told = str(raised.value)
    assert "rank 3" in told
    assert "server 1 cannot follow its coordinator" in told
    assert "the peer does not keep to this protocol: a frame of kind 12 with a field 'left_out' came" in told
    assert time.monotonic() - began < 20


def test_a_server_that_is_lost_again_and_again_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that hangs up on every order to update, and says nothing of it."""
    from phalanx.comm.frames import LostError
    from phalanx.train.parameter_server.server import Server

    obey = Server.obey

    def unwilling(self: Server, kind: FrameKind, meta: dict[str, Any]) -> dict[str, Any]:
        if kind == FrameKind.APPLY and self._store.index == 1:
            raise LostError("it hangs up")
        return obey(self, kind, meta)

    monkeypatch.setattr(Server, "obey", unwilling)
    with pytest.raises(RunError, match=r"server 1 was lost 3 times with no update between: it has ended") as raised:
        served()
    assert "rank 2" in str(raised.value)


@pytest.mark.quick
def test_progress_travels_in_the_fields_that_its_class_has() -> None:
    progress = RunProgress(floor=7, done=[9, 11], samples=144, begun=16)
    came = json.loads(json.dumps(progress.to_dict()))
    assert not FROM_COORDINATOR[FrameKind.SNAPSHOT].fault({"progress": came})
    assert RunProgress.from_dict(came) == progress
