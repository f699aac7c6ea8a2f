"""Losses and gradients that are not finite, and losses that jump: met before an update is made, under every plan."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from small import BATCH, LENGTH, Net, job, table
from torch import nn
from torch.utils.data import TensorDataset

import phalanx as px
from law_rows import longer
from phalanx import checkpoint
from phalanx.data import records
from phalanx.data.saved_batch import SavedBatch
from phalanx.demo.jobs.gpt import gpt_job
from phalanx.errors import DataError, SpecError, WorkerError
from phalanx.events.schema import faults
from phalanx.report.samples_seen import samples_seen
from phalanx.train.accidents import LossSpikes

BAD = 40  # the sample that is planted; in step 0 of the first epoch
MARK = 100.0


class Root(nn.Module):
    """Adds nothing: the root of 0 times its input. Where the mark is, its gradient is 0 / 0."""

    def forward(self, hidden: torch.Tensor, clean: torch.Tensor) -> torch.Tensor:
        return hidden + 0 * torch.sqrt(hidden * 0 + clean.unsqueeze(-1))


class Rooted(Net):
    """The loss is finite with any sample, the gradient is not with the marked one."""

    def __init__(self) -> None:
        super().__init__()
        self.root = Root()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = x.clamp(max=5.0)
        for index, layer in enumerate(self.layers):
            hidden = torch.relu(layer(hidden))
            if index == 1:
                hidden = self.root(hidden, (x[:, 0] < MARK).float())
        return self.head(hidden)


class Normed(Net):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(9)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(self.norm(x))


def planted(value: float) -> px.Table:
    data = table()
    columns = {"x": data[range(LENGTH)]["x"].clone(), "y": data[range(LENGTH)]["y"]}
    columns["x"][BAD, 0] = value
    return px.Table(**columns)


class Spoils(torch.optim.SGD):
    def step(self, closure: Any = None) -> None:
        super().step()
        with torch.no_grad():
            self.param_groups[0]["params"][0].view(-1)[0] = torch.inf


GRADIENT: dict[str, Any] = {"model": Rooted, "data": lambda: planted(MARK)}
LOSS: dict[str, Any] = {"data": lambda: planted(float("nan"))}


def run(plan: str, folder: str, how: dict[str, Any], **settings: Any) -> px.Run:
    """Six steps, of which the first has the planted sample; without it where ``how`` says so."""
    spec = px.RunSpec(job="small", plan=px.Plan.parse(plan), folder=Path(folder), forecast="none", **settings)
    return px.fit(how["job"] if "job" in how else job(**{"epochs": None, "steps": 6, **how}), run=spec)


def stopped(plan: str, folder: str, how: dict[str, Any], **settings: Any) -> WorkerError:
    with pytest.raises(WorkerError) as caught:
        run(plan, folder, how, **settings)
    return caught.value


def values(run: px.Run) -> dict[str, torch.Tensor]:
    path = checkpoint.latest(run.folder / "checkpoints")
    assert path is not None
    manifest = json.loads((path / "manifest.json").read_text())
    names = [name for name in manifest["tensors"] if name.startswith("model.")]
    kinds = {name: manifest["tensors"][name] for name in names}
    found = {name: torch.zeros(one["shape"], dtype=getattr(torch, one["dtype"])) for name, one in kinds.items()}
    checkpoint.load(path, found)
    return found


class TestStop:
    @pytest.mark.parametrize("plan", ["fsdp=2", *longer("single", "dp=2", "pp=2 micro=8", "threads=2")])
    def test_a_gradient_under_a_finite_loss(self, plan: str) -> None:
        error = stopped(plan, "run", GRADIENT)
        assert error.exit_code == 3
        assert (error.kind, error.step) == ("GradientError", 0)
        text = str(error)
        assert "the gradient of step 0 is not finite, and its loss is 1." in text
        assert "First not finite: the backward of root, in micro-batch" in text
        assert f"(samples {BAD})" in text
        assert 'on_nonfinite="skip"' in text
        (event,) = px.Run(folder=Path("run")).events("accident")
        assert faults(event) == []
        assert (event["kind"], event["action"], event["samples"]) == ("gradient", "stop", [BAD])
        assert checkpoint.latest(Path("run/checkpoints")) is None

    @pytest.mark.parametrize("plan", ["pp=2 micro=8", *longer("single", "dp=2")])
    def test_a_loss(self, plan: str) -> None:
        error = stopped(plan, "run", LOSS)
        assert error.kind == "LossError"
        told = f"the loss of step 0 is nan.\n    First not finite: x of the batch, sample {BAD}, on rank "
        assert str(error).startswith(told)  # of no rank: all have raised it together
        assert "try: leave these samples out of job.data" in str(error)
        assert "clip" not in str(error)

    def test_a_column_that_the_loss_alone_reads(self) -> None:
        """Which samples are to blame is not to be seen in a loss; it is in the batch."""
        rows = table()[range(LENGTH)]
        weights = torch.ones(LENGTH)
        weights[BAD] = float("nan")

        def loss(output: torch.Tensor, batch: Any) -> px.Loss:
            each = nn.functional.cross_entropy(output, batch[1], reduction="none")
            return px.Loss((each * batch[2]).sum(), len(each))

        error = stopped("single", "run", {"data": lambda: TensorDataset(rows["x"], rows["y"], weights), "loss": loss})
        assert f"First not finite: element 2 of the batch, sample {BAD}, on rank " in str(error)
        (event,) = px.Run(folder=Path("run")).events("accident")
        assert event["samples"] == [BAD]
        (saved,) = px.Run(folder=Path("run")).accidents
        assert BAD in saved.samples

    def test_what_is_missing_in_other_samples_is_not_blamed(self) -> None:
        rows = table()[range(LENGTH)]
        rows["x"][BAD, 0] = MARK
        missing = torch.full((LENGTH,), float("nan"))
        missing[BAD] = 0.0
        masks = torch.full((LENGTH, 3), float("-inf"))
        masks[BAD] = 0.0
        data = px.Table(x=rows["x"], y=rows["y"], missing=missing, mask=masks)
        error = stopped("single", "run", {**GRADIENT, "data": lambda: data})
        assert "First not finite: the backward of root, in micro-batch 0" in str(error)

    def test_in_the_last_step_the_checkpoint_stays_good(self) -> None:
        how = {**GRADIENT, "steps": 7}  # step 6 has the sample again
        run("single", "run", {**how, "steps": 6}, on_nonfinite="skip")
        before = values(px.Run(folder=Path("run")))
        error = stopped("single", "run", how, resume=True)
        assert error.step == 6
        after = values(px.Run(folder=Path("run")))
        assert all(torch.equal(before[name], after[name]) for name in before)
        assert all(tensor.isfinite().all() for tensor in after.values())
        resumed = run("single", "run", how, resume=True, on_nonfinite="skip")
        assert [event["step"] for event in resumed.events("step") if event["skipped"]] == [0, 6]

    def test_what_an_update_has_spoilt_is_not_saved(self) -> None:
        error = stopped("single", "run", {"optimizer": lambda params: Spoils(params, lr=0.1), "steps": 1})
        assert "the parameter layers.0.weight is not finite after step 0" in str(error)
        assert checkpoint.latest(Path("run/checkpoints")) is None

    def test_a_loop_of_ones_own(self) -> None:
        step, loader = px.build(job(**GRADIENT))
        before = [one.detach().clone() for one in step.layout.parameters.values()]
        with pytest.raises(px.PhalanxError, match="the backward of root"):
            step(next(iter(loader)))
        assert all(map(torch.equal, before, step.layout.parameters.values()))

    def test_large_gradients_are_finite(self) -> None:
        step, loader = px.build(job(loss=lambda output, batch: px.Loss(output.sum() * 1e25, 1)))
        assert not step(next(iter(loader))).skipped


def without_the_update(how: dict[str, Any]) -> px.Run:
    """One device, where an optimizer leaves out the update of step 0: what ``skip`` has to come to."""

    class Late(torch.optim.AdamW):
        calls = 0

        def step(self, closure: Any = None) -> None:
            self.calls += 1
            if self.calls > 1:
                super().step()

    def clean(output: torch.Tensor, batch: Any) -> px.Loss:
        return px.cross_entropy(output.nan_to_num(0.0), batch["y"])

    return run("single", "expected", {**how, "loss": clean, "optimizer": lambda params: Late(params, lr=1e-2)})


class TestSkip:
    @pytest.mark.parametrize(
        ("plan", "how"),
        [
            *(("fsdp=2 zero=2", LOSS), ("pp=2 micro=8", GRADIENT)),
            *longer(*((plan, how) for plan in ("single", "dp=2", "fsdp=2", "threads=2") for how in (GRADIENT, LOSS))),
        ],
    )
    def test_every_plan_leaves_out_the_same_update(self, plan: str, how: dict[str, Any]) -> None:
        data = {**how, "data": table}  # the update that is left out is of any batch
        expected = without_the_update(data)
        found = run(plan, "run", how, on_nonfinite="skip")
        assert [event["step"] for event in found.events("step") if event["skipped"]] == [0]
        assert [event["action"] for event in found.events("accident")] == ["skip"]
        assert found.losses[1:] == pytest.approx(expected.losses[1:], rel=1e-5)
        there = values(expected)
        for name, tensor in values(found).items():
            torch.testing.assert_close(tensor, there[name], rtol=1e-4, atol=1e-5)

    def test_servers(self) -> None:
        expected = without_the_update({**GRADIENT, "data": table})
        found = run("dp=2 server=2 staleness=0", "run", GRADIENT, on_nonfinite="skip")
        assert [event["step"] for event in found.events("step") if event["skipped"]] == [0]
        assert found.losses[1:] == pytest.approx(expected.losses[1:], rel=1e-4)

    def test_running_statistics_are_those_of_before(self) -> None:
        found = run("dp=2", "run", {**LOSS, "model": Normed}, on_nonfinite="skip")
        statistics = {name: tensor for name, tensor in values(found).items() if "running" in name}
        assert statistics
        assert all(tensor.isfinite().all() for tensor in statistics.values())
        assert values(found)["model.norm.num_batches_tracked"] == 5
        assert [event["step"] for event in found.events("step") if event["skipped"]] == [0]

    @pytest.mark.parametrize(
        ("answer", "says"), [("skip", "The updates of 10 steps in a row"), ("rollback", "gone back 3 times")]
    )
    def test_not_for_ever(self, answer: Any, says: str) -> None:
        def always(output: torch.Tensor, batch: Any) -> torch.Tensor:
            return px.cross_entropy(output, batch["y"]).sum * float("nan")

        assert says in str(stopped("single", "run", {"loss": always, "steps": 20}, on_nonfinite=answer))

    def test_the_ledger_says_which(self) -> None:
        found = run("dp=2", "run", GRADIENT, on_nonfinite="skip")
        assert [step for step, those in records(found.folder / "ledger").items() if those[0].left_out] == [0]
        assert "no update was made of step 0" in samples_seen(found.folder).answer


class TestRollback:
    @pytest.mark.parametrize("plan", ["fsdp=2", *longer("single", "dp=2", "pp=2 micro=8")])
    def test_the_run_goes_on_past_the_batch(self, plan: str) -> None:
        how = {**GRADIENT, "steps": 9}  # in step 6 the sample comes again
        plain = run("single", "plain", how, on_nonfinite="skip")
        found = run(plan, "run", how, on_nonfinite="rollback", checkpoint_every=4)
        assert [event["step"] for event in found.events("resume")] == [0, 4]
        assert {event["step"] for event in found.events("step") if event["skipped"]} == {0, 6}
        kept = [1, 2, 3, 4, 5, 7, 8]
        losses = {event["step"]: event["loss"] for event in found.events("step")}
        expected = {event["step"]: event["loss"] for event in plain.events("step")}
        assert [losses[step] for step in kept] == pytest.approx([expected[step] for step in kept], rel=1e-5)
        there = values(plain)
        for name, tensor in values(found).items():
            torch.testing.assert_close(tensor, there[name], rtol=1e-4, atol=1e-5)
        steps = records(found.folder / "ledger")
        assert [step for step, those in steps.items() if those[0].left_out] == [0, 6]
        assert sum(len(record.ids) for record in steps[4]) == BATCH

    @pytest.mark.parametrize("plan", ["dp=2", *longer("single")])
    def test_the_update_that_spoils_a_parameter_is_left_out(self, plan: str) -> None:
        marked = [False]

        def sees(output: torch.Tensor, batch: Any) -> px.Loss:
            marked[0] = bool((batch["x"][:, 0] >= MARK).any())
            return px.cross_entropy(output, batch["y"])

        class Marked(Spoils):
            def step(self, closure: Any = None) -> None:
                if marked[0]:
                    super().step()
                else:
                    torch.optim.SGD.step(self)

        how = {**GRADIENT, "model": Net, "loss": sees, "optimizer": lambda params: Marked(params, lr=0.1), "steps": 3}
        found = run(plan, "run", how, on_nonfinite="rollback")
        assert [(event["step"], event["kind"]) for event in found.events("accident")] == [(1, "parameter")]
        assert [event["step"] for event in found.events("step") if event["skipped"]] == [0]
        assert [step for step, those in records(found.folder / "ledger").items() if those[0].left_out] == [0]
        assert all(tensor.isfinite().all() for tensor in values(found).values())

    @pytest.mark.parametrize("plan", ["dp=2 server=1", "dp=2 sync=local", "dp=2 shares=3,1"])
    def test_is_refused_where_it_cannot_be(self, plan: str) -> None:
        with pytest.raises(SpecError, match=r"run\.on_nonfinite: .*allowed: stop or skip"):
            px.RunSpec(job="a", plan=px.Plan.parse(plan), folder=Path("run"), on_nonfinite="rollback")

    def test_is_refused_where_a_scheduler_would_not_go_back(self) -> None:
        def one_cycle(params: Any) -> torch.optim.Optimizer:
            optimizer = torch.optim.SGD(params, lr=0.1)
            scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.5, total_steps=20)
            optimizer.register_step_post_hook(lambda *_: scheduler.step())
            return optimizer

        with pytest.raises(px.PhalanxError, match="OneCycleLR on the optimizer of a run to resume"):
            run("single", "run", {"optimizer": one_cycle}, on_nonfinite="rollback")


class TestSpikes:
    def test_what_is_one(self) -> None:
        spikes = LossSpikes(10.0)
        assert [spikes.describe(2.0 + 0.01 * (step % 3)) for step in range(20)] == [""] * 20
        assert spikes.describe(2.1) == ""
        assert all("3, " in spikes.describe(3.0) for _ in range(50))  # none of them moves what is usual
        assert spikes.describe(1.0) == ""
        assert LossSpikes(None).describe(1e9) == ""

    def test_the_update_is_left_out(self) -> None:
        def spiky(output: torch.Tensor, batch: Any) -> px.Loss:
            loss = px.cross_entropy(output, batch["y"])
            return px.Loss(loss.sum * (1 + 1e4 * (batch["x"][:, 0] >= MARK).any()), loss.count)

        model = type("Clamped", (Net,), {"forward": lambda self, x: Net.forward(self, x.clamp(max=5.0))})
        how = {"data": lambda: planted(MARK), "loss": spiky, "model": model, "batch": 4, "steps": 60}
        found = run("dp=2", "run", how, spike=20.0, on_spike="skip")
        events = list(found.events("accident"))
        every = [record for those in records(found.folder / "ledger").values() for record in those]
        steps = {record.step for record in every if BAD in record.ids}
        assert [event["step"] for event in events] == sorted(step for step in steps if step >= 20)
        assert {event["kind"] for event in events} == {"spike"}
        assert all(BAD in event["samples"] for event in events)

    def test_an_answer_to_none_is_refused(self) -> None:
        with pytest.raises(SpecError, match=r"run\.on_spike"):
            px.RunSpec(job="a", plan=px.Plan(), folder=Path("run"), on_spike="skip")


class TestTheBatchThatIsKept:
    def test_it_comes_back_and_goes_wrong_again(self) -> None:
        stopped("dp=2", "run", LOSS)
        (saved,) = px.Run(folder=Path("run")).accidents
        assert (saved.step, saved.where, BAD in saved.samples) == (0, "x of the batch", True)
        batch = saved.batch
        assert batch["x"].isnan().sum() == 1
        torch.manual_seed(saved.seed)
        assert Net()(batch["x"]).isnan().any()

    def test_anything_in_a_batch(self, tmp_path: Path) -> None:
        saved = SavedBatch(folder=tmp_path, step=3, reason="r", where="w", samples=(1,), rank=0, micro=2, seed=5)
        tensors = [torch.arange(3), torch.ones(2, dtype=torch.bfloat16), torch.ones(4, 4).T]
        given = {"a": tensors, "b": ("text", None, 1.5, True, float("inf")), "c": {"d": object()}, "e": np.zeros(2)}
        saved.write(given)
        assert SavedBatch.read(tmp_path) == saved
        found = saved.batch
        assert all(map(torch.equal, found["a"], tensors))
        assert found["b"] == given["b"]
        assert (found["c"]["d"], found["e"]) == ("a object", "a ndarray")

    @pytest.mark.parametrize("text", ["{", "[]", '{"step": 1e999}', "[" * 100_000])
    def test_a_damaged_one(self, text: str, tmp_path: Path) -> None:
        (tmp_path / "accident.json").write_text(text)
        with pytest.raises(DataError, match="holds no batch that can be read"):
            SavedBatch.read(tmp_path)


def transformer(clean_only: bool) -> px.Job:
    """A GPT with the root of zero in its second block, for the tokens of one sample."""
    base = gpt_job(layers=2, width=16, heads=2, context=8, batch=8, steps=3)

    def model() -> nn.Module:
        made: Any = base.model()
        made.blocks[1].register_module("root", Root())
        block = made.blocks[1]
        inner = type(block).forward

        class Spoilt(type(block)):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                out = inner(self, x)
                return self.root(out, torch.full(out.shape[:1], float(clean_only), device=out.device).unsqueeze(-1))

        block.__class__ = Spoilt
        return made

    return replace(base, model=model)


@pytest.mark.parametrize("plan", ["tp=2 sequence=true", *longer("cp=2", "pp=2 tp=2 micro=2")])
def test_plans_that_split_the_model(plan: str) -> None:
    error = stopped(plan, "run", {"job": transformer(clean_only=False)})
    assert error.kind == "GradientError"
    assert "First not finite: the backward of blocks.1.root" in str(error)


class TestServers:
    @pytest.mark.parametrize(("how", "kind"), [(GRADIENT, "gradient"), *longer((LOSS, "loss"))])
    def test_the_piece_is_named(self, how: dict[str, Any], kind: str) -> None:
        error = stopped("dp=2 server=1 micro=8", "run", how)
        (event,) = px.Run(folder=Path("run")).events("accident")
        assert faults(event) == []
        assert (event["kind"], event["action"], event["path"]) == (kind, "stop", "")
        assert f"    {event['where']}\n    No update was made of it" in str(error)
        assert kind == "gradient" or BAD in event["samples"]

    @pytest.mark.parametrize(("steps", "answer"), [(1, "stop"), (3, "skip")])
    def test_a_parameter_is_named_before_it_is_saved(self, steps: int, answer: Any) -> None:
        how = {"optimizer": lambda params: Spoils(params, lr=0.1), "steps": steps}
        error = stopped("dp=2 server=1", "run", how, on_nonfinite=answer)
        assert f"the parameter layers.0.weight is not finite after step {steps - 1}" in str(error)
        *_, event = px.Run(folder=Path("run")).events("accident")
        assert (event["kind"], event["path"]) == ("parameter", "")
