"""Averaged weights: under every plan those of torch's ``AveragedModel`` in a plain loop, also after a resume."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file
from small import BATCH, LENGTH, fit, job, table
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, get_swa_multi_avg_fn

import phalanx as px
from law_rows import longer
from phalanx.cli import main
from phalanx.errors import RefusedError, SpecError
from phalanx.train.weight_average import WeightAverage
from phalanx.witness import samples
from phalanx.witness.initial import initial_model

STEPS = 8
EMA = px.Average(decay=0.7)
MEAN = px.Average(kind="mean", start=2, every=2)


class Net(nn.Module):
    """Layers that pair up under ``tp``, one that does not learn, and running statistics."""

    def __init__(self, norm: Any = nn.BatchNorm1d) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(9, 12), nn.ReLU(), nn.Linear(12, 9)) for _ in range(2)))
        self.norm = norm(9)
        self.head = nn.Linear(9, 5)
        self.get_parameter("blocks.0.0.bias").requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(x)))


def other(length: int = 40) -> px.Table:
    return table(length, seed=1)


def averaging(how: px.Average, **more: Any) -> dict[str, Any]:
    return {
        "model": Net,
        "average": how,
        "epochs": None,
        "steps": STEPS,
        "evaluate": other,
        "evaluate_every": 2,
        "batch_statistics": "global",
        "shuffle": False,
        "drop_last": True,
        "optimizer": lambda params: torch.optim.SGD(params, lr=0.3),
        **more,
    }


@cache
def plain(how: px.Average, skipped: frozenset[int] = frozenset()) -> tuple[dict[str, Tensor], dict[int, float]]:
    """The averaged weights and buffers after a handwritten loop, and losses of evaluations by steps taken."""
    model, data = _initial(), table()
    function = get_ema_multi_avg_fn(how.factor) if how.kind == "ema" else get_swa_multi_avg_fn()
    averaged = AveragedModel(model, multi_avg_fn=function)
    optimizer = torch.optim.SGD([one for one in model.parameters() if one.requires_grad], lr=0.3)
    x, y = (torch.stack([data[at][name] for at in range(len(data))]) for name in ("x", "y"))
    losses: dict[int, float] = {}
    for step in range(STEPS):
        if step in skipped:
            continue
        at = step % (len(data) // BATCH) * BATCH
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x[at : at + BATCH]), y[at : at + BATCH]).backward()
        optimizer.step()
        taken = step + 1
        if taken >= how.start and (taken - how.start) % how.every == 0:
            averaged.update_parameters(model)
        losses[taken] = _loss(averaged.module if averaged.n_averaged else model)
    return dict(averaged.module.state_dict()), losses


def _initial() -> nn.Module:
    """With the values that a run begins with."""
    with torch.random.fork_rng():
        samples.seed_everything(samples.stream_seed(0, 0))
        return initial_model(job(**averaging(EMA)))


@torch.no_grad()
def _loss(model: nn.Module) -> float:
    data = other()
    x, y = (torch.stack([data[at][name] for at in range(len(data))]) for name in ("x", "y"))
    model.eval()
    loss = nn.functional.cross_entropy(model(x), y).item()
    model.train()
    return loss


def assert_averaged(run: px.Run, how: px.Average) -> None:
    expected, losses = plain(how)
    found = run.state_dict(averaged=True)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        # The gradient of a bias before BatchNorm is rounding alone.
        assert torch.allclose(found[name], tensor, rtol=1e-4, atol=1e-5), name
    told = {one["step"]: one["loss"] for one in run.evaluations()}
    assert told == pytest.approx({step: losses[step] for step in told}, rel=1e-5)


@pytest.mark.parametrize(
    ("plan", "how"), [("dp=2", MEAN), ("fsdp=2 zero=1", EMA), ("pp=2", EMA), *longer(("fsdp=2", EMA), ("tp=2", MEAN))]
)
def test_is_that_of_one_device(plan: str, how: px.Average, tmp_path: Path) -> None:
    run = fit(plan, tmp_path / "run", **averaging(how))
    assert_averaged(run, how)
    assert len(run.evaluations()) == STEPS // 2


@pytest.mark.parametrize(("first", "then", "how"), [("tp=2", "dp=2", MEAN), *longer(("fsdp=2 zero=1", "pp=2", EMA))])
def test_goes_on_under_another_plan(first: str, then: str, how: px.Average, tmp_path: Path) -> None:
    fit(first, tmp_path / "run", **averaging(how, steps=5))
    assert_averaged(fit(then, tmp_path / "run", resume=True, **averaging(how)), how)


def test_in_a_loop_of_ones_own() -> None:
    given = job(**averaging(EMA))
    step, loader = px.build(given, "threads=2")
    for batch in loader:
        step(batch)
    module, (expected, losses) = step.layout.module, plain(EMA)
    average = step.average
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    with average.applied():
        assert _loss(module) == pytest.approx(losses[STEPS], rel=1e-5)
        for name, tensor in expected.items():
            assert torch.allclose(module.state_dict()[name], tensor, rtol=1e-4, atol=1e-5), name
    assert all(torch.equal(tensor, before[name]) for name, tensor in module.state_dict().items())
    with pytest.raises(ZeroDivisionError), average.applied():
        raise ZeroDivisionError
    assert all(torch.equal(tensor, before[name]) for name, tensor in module.state_dict().items())


@pytest.mark.parametrize("plan", ["threads=2", *longer("single", "fsdp=2 zero=1", "fsdp=2")])
def test_changes_nothing_of_the_training(plan: str, tmp_path: Path) -> None:
    without = fit(plan, tmp_path / "without", **averaging(EMA, average=None))
    beside = fit(plan, tmp_path / "beside", **averaging(px.Average(decay=0.7, evaluate=False)))
    used = fit(plan, tmp_path / "used", **averaging(EMA))
    for run in (beside, used):
        assert run.losses == without.losses
        assert all(torch.equal(tensor, run.state_dict()[name]) for name, tensor in without.state_dict().items())
    losses = [[one["loss"] for one in run.evaluations()] for run in (without, beside, used)]
    assert losses[0] == losses[1] != losses[2]
    assert_averaged(used, EMA)


@pytest.mark.parametrize("plan", ["dp=2", *longer("single")])
def test_a_step_that_is_skipped_is_not_averaged(plan: str, tmp_path: Path) -> None:
    spoilt = px.Table(**table().columns, bad=torch.arange(LENGTH) == 40)  # in each second of three steps

    def loss(output: Tensor, batch: dict[str, Tensor]) -> px.Loss:
        total, count = px.cross_entropy(output, batch["y"])
        return px.Loss(total * torch.where(batch["bad"].any(), torch.nan, 1.0), count)

    how: dict[str, Any] = {"data": lambda: spoilt, "loss": loss, "inputs": lambda batch: batch["x"]}
    settings: dict[str, Any] = {"folder": tmp_path / "run", "forecast": "none", "on_nonfinite": "skip"}
    given = job(**averaging(EMA, evaluate=None, evaluate_every=0, **how))
    run = px.fit(given, run=px.RunSpec(job="skips", plan=px.Plan.parse(plan), **settings))
    assert [event["step"] for event in run.events("step") if event["skipped"]] == [1, 4, 7]
    expected, _ = plain(EMA, frozenset({1, 4, 7}))
    found = run.state_dict(averaged=True)
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-4, atol=1e-5)


class TestResult:
    def test_is_what_plain_torch_loads(self, tmp_path: Path) -> None:
        run = fit("single", tmp_path / "run", **averaging(EMA))
        expected, _ = plain(EMA)
        for name, argv in {"one": ["export"], "two": ["checkpoint", "export", "--to"]}.items():
            target = str(tmp_path / f"{name}.safetensors")
            words = [*argv[:2], str(run.folder), *argv[2:], target, "--averaged"]
            done = CliRunner().invoke(main, words)
            assert done.exit_code == 0, done.output
        run.save_pretrained(tmp_path / "folder", averaged=True)
        files = [tmp_path / "one.safetensors", tmp_path / "two.safetensors", tmp_path / "folder" / "model.safetensors"]
        trained, model = run.state_dict(), run.model(averaged=True)
        for found in [*map(load_file, files), model.state_dict()]:
            fresh = Net()
            fresh.load_state_dict(found)
            for name, tensor in fresh.state_dict().items():
                torch.testing.assert_close(tensor, expected[name], rtol=1e-4, atol=1e-5)
        assert not torch.equal(trained["head.weight"], model.get_parameter("head.weight"))
        assert torch.equal(trained["blocks.0.0.bias"], model.get_parameter("blocks.0.0.bias"))

    @pytest.mark.parametrize("how", [None, px.Average(start=100)], ids=["none", "not-yet"])
    def test_there_is_none(self, how: px.Average | None, tmp_path: Path) -> None:
        run = fit("single", tmp_path / "run", **averaging(EMA, average=how))
        for ask in (
            run.state_dict,
            run.model,
            lambda averaged: run.save_pretrained(tmp_path / "no", averaged=averaged),
        ):
            with pytest.raises(SpecError, match=r"averaged: given"):
                ask(averaged=True)
        done = CliRunner().invoke(main, ["export", str(run.folder), str(tmp_path / "out"), "--averaged"])
        assert done.exit_code == 2
        assert "--averaged" in done.stderr
        assert not list(tmp_path.glob("*out*"))
        said = [event["message"] for event in run.events("warning")]
        assert [one.startswith("average: none ") for one in said] == ([] if how is None else [True, True])


class TestRefused:
    @pytest.mark.parametrize("plan", ["dp=2 server=1", "dp=2 sync=local every=2"])
    def test_plans_without_weights_of_a_step(self, plan: str, tmp_path: Path) -> None:
        with pytest.raises(RefusedError, match=r"plan\.(server|sync): given .*average=px\.Average"):
            fit(plan, tmp_path / "run", **averaging(EMA, batch_statistics="micro"))
        assert not (tmp_path / "run").exists()

    @pytest.mark.parametrize(
        ("given", "field"),
        [
            ({"decay": 0.0}, "decay"),
            ({"decay": 1}, "decay"),
            ({"decay": "0.9"}, "decay"),
            ({"kind": "mean", "decay": 0.9}, "decay"),
            ({"kind": "swa"}, "kind"),
            ({"start": -1}, "start"),
            ({"every": 0}, "every"),
            ({"every": True}, "every"),
            ({"evaluate": "yes"}, "evaluate"),
        ],
    )
    def test_values(self, given: dict[str, Any], field: str) -> None:
        with pytest.raises(SpecError, match=rf"average\.{field}: given"):
            px.Average(**given)


def test_a_proof_compares_it(monkeypatch: pytest.MonkeyPatch) -> None:
    # Behind BatchNorm a gradient of a bias is a difference of large numbers.
    given = job(**averaging(MEAN, model=lambda: Net(nn.LayerNorm), evaluate=None, evaluate_every=0))
    proof = px.prove(given, "dp=2", steps=STEPS)
    assert proof.equal, proof
    trained = sum(one.requires_grad for one in Net().parameters())
    assert [check.many for check in proof.checks if check.kind == "average"] == [trained] * 2, "and after a resume"
    right = WeightAverage.stepped

    def twice(self: WeightAverage, step: int) -> None:
        right(self, step)
        if self.updates == 2:
            right(self, step)

    monkeypatch.setattr(WeightAverage, "stepped", twice)
    proof = px.prove(given, "dp=2", steps=STEPS)
    assert not proof.equal
    assert "in the average" in proof.first


def test_memory_of_it_is_measured_and_forecast(tmp_path: Path) -> None:
    run = fit("fsdp=2 zero=1", tmp_path / "run", **averaging(EMA))
    model = Net()
    shards = sum(-(-len(one) // 2) * one[0].numel() for one in model.parameters() if one.requires_grad)
    buffers = sum(one.numel() * one.element_size() for one in model.buffers())
    assert next(run.events("memory"))["optimizer"] == 4 * shards + buffers  # and nothing of SGD
    forecasts = [px.forecast(job(**averaging(EMA, average=one)), "fsdp=2 zero=1", "2xH100") for one in (None, EMA)]
    elements = sum(one.numel() for one in model.parameters() if one.requires_grad)
    more = forecasts[1].memory["optimizer"] - forecasts[0].memory["optimizer"]
    assert more == pytest.approx(4 * elements / 2)
    assert any("average" in note for note in forecasts[1].notes)
