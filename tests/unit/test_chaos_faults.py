"""Faults in words and from a seed; and that whatever is lost between two run folders is seen."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from chaos import Chaos, Fault, draw
from chaos.faults import KINDS
from chaos.outcome import Outcome, damage, missed
from chaos.run_equality import Repeats, compare_samples, compare_weights
from chaos.verdict import Verdict
from phalanx.config import Plan
from phalanx.data import Ledger, MicroBatch, StepBatch
from phalanx.errors import SpecError
from phalanx.events import EventLog

pytestmark = pytest.mark.quick
SHAPE = {"ranks": 4, "steps": 60, "checkpoint_every": 5}
BITS = Repeats.of(Plan(dp=2))


class TestWords:
    def test_a_fault_reads_back_as_it_was_said(self) -> None:
        texts = ["SIGKILL rank 1 step 7", "SIGKILL everything save 2", "SIGTERM launcher step 3"]
        texts += ["SIGSTOP rank 0 step 4 for ever", "SIGSTOP ranks save 1 for 2.5s", "flip manifest step 12"]
        for text in texts:
            assert str(Fault.parse(text)) == text
            assert Fault.parse(f"  {text.replace(' ', '  ')} ") == Fault.parse(text)

    def test_what_cannot_be_is_refused_with_a_fault_that_can(self) -> None:
        rows = {
            "": "KIND [TARGET]",
            "SIGKILL rank 1": "KIND [TARGET]",
            "SIGHUP rank 1 step 2": "one of SIGKILL, SIGTERM",
            "SIGKILL tensors step 2": "SIGKILL of rank N",
            "flip tensors save 2": "step N",
            "SIGKILL rank 1 save 0": "save N, counted from 1",
            "SIGKILL rank 1 step 2 for 3s": "has no length",
        }
        for text, says in rows.items():
            with pytest.raises(SpecError) as refused:
                Fault.parse(text)
            assert says in str(refused.value)
            assert Fault.parse(refused.value.problems[0].fix.removeprefix("--at '").removesuffix("'"))


class TestDrawn:
    def test_the_same_seed_gives_the_same_faults(self) -> None:
        kinds = list(KINDS)
        assert draw(30, seed=1, kinds=kinds, **SHAPE) == draw(30, seed=1, kinds=kinds, **SHAPE)
        assert draw(30, seed=1, kinds=kinds, **SHAPE) != draw(30, seed=2, kinds=kinds, **SHAPE)

    @pytest.mark.parametrize("seed", range(2))
    def test_each_can_strike_and_they_are_in_order(self, seed: int) -> None:
        drawn = draw(100, seed=seed, kinds=list(KINDS), **SHAPE)
        moments = [fault.step(5) for fault in drawn]
        assert moments == sorted(moments)
        assert max(moments) <= 60
        assert [str(Fault.parse(str(fault))) for fault in drawn] == [str(fault) for fault in drawn]
        damages = [fault for fault in drawn if fault.kind in ("tear", "flip")]
        assert min(fault.number for fault in damages) > 2 * 5  # there is one to fall back to


def refused(**how: Any) -> str:
    with pytest.raises(SpecError) as error:
        Chaos("job.py", "dp=2", folder=Path("chaos"), **how)
    return str(error.value)


def test_what_a_run_cannot_have_is_refused() -> None:
    assert "--checkpoint-every 5" in refused(checkpoint_every=0)
    assert "--steps 60" in refused(steps=0)
    for fault, says in (("SIGKILL rank 2 step 1", "rank 0 to 1"), ("SIGKILL rank 1 save 13", "60 steps")):
        with pytest.raises(SpecError, match=says):
            Chaos("job.py", "dp=2", folder=Path("chaos")).run([fault])
        assert not Path("chaos").exists()


def a_run(folder: Path, change: Callable[[dict[str, torch.Tensor]], None] | None = None, **entry: Any) -> Path:
    """A run folder with two samples in each of three steps and a final checkpoint of one tensor in two chunks."""
    checkpoint = folder / "checkpoints" / "step-00000003"
    checkpoint.mkdir(parents=True)
    tensors = {"w@0": torch.arange(4.0).view(2, 2), "w@2": torch.arange(6.0).view(3, 2)}
    if change:
        change(tensors)
    save_file(tensors, checkpoint / "rank-00000.safetensors")
    chunks = [
        {"offsets": [0, 0], "sizes": [2, 2], "file": "rank-00000.safetensors", "key": "w@0"},
        {"offsets": [2, 0], "sizes": [3, 2], "file": "rank-00000.safetensors", "key": "w@2"},
    ]
    whole = {"shape": [5, 2], "dtype": "float32", "chunks": chunks, **entry}
    (checkpoint / "manifest.json").write_text(json.dumps({"tensors": {"model.w": whole}}))
    return folder


def ledger(
    folder: Path, steps: Sequence[Sequence[int]], epoch_of: Callable[[int], int] = lambda step: step // 3
) -> Path:
    with Ledger(folder / "ledger", rank=0, first_step=0, world_size=1) as written:
        for step, ids in enumerate(steps):
            part = (MicroBatch(batch=None, ids=tuple(ids), samples=len(ids)),)
            written.record(StepBatch(step=step, epoch=epoch_of(step), samples=len(ids), parts=(part,)))
    with EventLog(folder / "events.jsonl") as log:
        facts = {"schema": "1.6", "job": "j", "plan": "single", "exact": "yes", "world_size": 1, "device": "cpu"}
        facts |= {"total_steps": 3, "first_step": 0, "parameters": 1, "notes": []}
        log.write("start", samples=6, batch=2, drop_last=False, **facts)
    return folder


class TestWeights:
    def test_equal(self, tmp_path: Path) -> None:
        found = compare_weights(a_run(tmp_path / "1"), a_run(tmp_path / "2"), BITS)
        assert (found.tensors, found.differing, found.first) == (1, 0, "")

    def test_one_bit(self, tmp_path: Path) -> None:
        def change(tensors: dict[str, torch.Tensor]) -> None:
            tensors["w@2"].view(torch.int32)[2, 1] ^= 1

        one, other = a_run(tmp_path / "1"), a_run(tmp_path / "2", change)
        found = compare_weights(one, other, BITS)
        assert (found.differing, found.first) == (1, "model.w")
        assert 0 < found.largest < 1e-6
        rounded = compare_weights(one, other, Repeats.of(Plan.parse("dp=2 server=1")))
        assert (rounded.differing, rounded.first) == (1, "")  # servers add up in the order in which gradients come

    @pytest.mark.parametrize("plan", ["dp=2", "dp=2 server=1", "dp=2 server=1 staleness=2"])
    def test_what_is_not_finite_is_lost_under_every_plan(self, plan: str, tmp_path: Path) -> None:
        def change(tensors: dict[str, torch.Tensor]) -> None:
            tensors["w@0"][0, 0] = float("nan")

        for one in (a_run(tmp_path / "1"), a_run(tmp_path / "2", change)):
            found = compare_weights(one, tmp_path / "2", Repeats.of(Plan.parse(plan)))
            assert (found.largest, found.first) == (float("inf"), "model.w")


class TestSamples:
    ONCE = ([0, 1], [2, 3], [4, 5])

    @pytest.mark.parametrize(
        ("seen", "lost", "doubled"),
        [
            (ONCE, 0, 0),
            (([1, 0], [3, 2], [4, 5]), 0, 0),
            (([0, 1], [2, 3]), 2, 0),
            (([0, 1], [2, 2], [4, 5]), 1, 1),
            (([2, 3], [0, 1], [4, 5]), 4, 4),
            ((*ONCE, [0, 1]), 0, 2),
        ],
    )
    def test_are_counted_step_by_step(self, seen: Any, lost: int, doubled: int, tmp_path: Path) -> None:
        found = compare_samples(ledger(tmp_path / "1", self.ONCE), ledger(tmp_path / "2", seen))
        assert (found.lost, found.doubled) == (lost, doubled)


OUTCOME = Outcome(
    fault="SIGKILL rank 1 step 7",
    seconds=1.0,
    step=7,
    saving=None,
    next_step=2.5,
    again=2,
    what="exit code 3, begun again from step 5",
    damaged="",
    believed=False,
    hung=False,
)


def verdict(**how: Any) -> Verdict:
    given: dict[str, Any] = {"job": "job.py", "plan": "dp=2", "steps": 60, "checkpoint_every": 5}
    given |= {"outcomes": (OUTCOME,), "ended": True, "failure": "", "starts": 2, "lives": 2, "weights": None}
    given |= {"samples": None, "repeats": "", "left": (), "seconds": 1.0, "undisturbed_seconds": 1.0}
    return Verdict(**given | how)


class TestVerdict:
    def test_what_is_lost(self) -> None:
        assert verdict().nothing_lost
        assert "did not come to its end: exit code 3" in verdict(ended=False, failure="exit code 3").lost[0]
        assert "left over: process python (77)" in verdict(left=("process python (77)",)).lost[0]

    def test_a_damaged_checkpoint_that_was_believed(self) -> None:
        told = {**OUTCOME.to_dict(), "fault": "flip state step 7", "damaged": "step-00000005/state.json"}
        assert verdict(outcomes=(Outcome(**told),)).nothing_lost
        assert verdict(outcomes=(Outcome(**{**told, "believed": True}),)).lost

    def test_a_hang_counts_unless_it_was_asked_for(self) -> None:
        told = {**OUTCOME.to_dict(), "hung": True}
        assert verdict(outcomes=(Outcome(**told),)).lost
        assert verdict(outcomes=(Outcome(**{**told, "fault": "SIGSTOP rank 1 step 7 for ever"}),)).nothing_lost

    def test_what_was_asked_for_and_did_not_strike_is_no_pass(self) -> None:
        late = missed(Fault.parse("SIGKILL rank 1 save 9"), "the run was over before")
        assert verdict(outcomes=(OUTCOME, late)).passed  # drawn: how many struck is said
        found = verdict(outcomes=(OUTCOME, late), asked=(OUTCOME.fault, late.fault))
        assert (found.nothing_lost, found.passed) == (True, False)
        assert found.to_dict()["missed"] == list(found.missed)
        nothing = Outcome(**{**OUTCOME.to_dict(), "fault": "flip tensors step 1"})
        assert verdict(outcomes=(nothing,), asked=(nothing.fault,)).missed, "there was no checkpoint to damage"


class TestDamage:
    @pytest.mark.parametrize("text", ["tear tensors step 9", "flip manifest step 9"])
    def test_of_the_newest_checkpoint(self, text: str, tmp_path: Path) -> None:
        checkpoints = a_run(tmp_path / "1") / "checkpoints"
        older = checkpoints / "step-00000001"
        older.mkdir()
        (older / "manifest.json").write_text("{}")
        before = {path.name: path.read_bytes() for path in (checkpoints / "step-00000003").iterdir()}
        where = damage(checkpoints, Fault.parse(text), random.Random(1))
        changed = [name for name in before if (checkpoints / "step-00000003" / name).read_bytes() != before[name]]
        assert where == f"step-00000003/{changed[0]}"
        assert len(changed) == 1
        after = (checkpoints / where).read_bytes()
        if text.startswith("tear"):
            assert before[changed[0]].startswith(after)
        else:
            differing = [one ^ other for one, other in zip(before[changed[0]], after, strict=True) if one != other]
            assert [each.bit_count() for each in differing] == [1]
