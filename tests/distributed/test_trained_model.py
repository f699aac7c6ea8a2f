"""The model that a run has trained, in Python and as files: whole, by its names, whatever the plan."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file
from small import Net, fit, job, table
from torch import nn

import phalanx as px
from phalanx.cli import main
from phalanx.errors import SpecError


class Tied(nn.Module):
    """Its head is its first layer, which comes first by name."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(9, 9, bias=False)
        self.norm = nn.BatchNorm1d(9)
        self.head = nn.Linear(9, 9, bias=False)
        self.head.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.relu(self.norm(self.first(x))))


def loss_of(model: nn.Module) -> float:
    """Of the evaluation data, by plain PyTorch."""
    samples = [table(40, seed=1)[index] for index in range(40)]
    x, y = (torch.stack([torch.as_tensor(sample[name]) for sample in samples]) for name in ("x", "y"))
    with torch.no_grad():
        return nn.functional.cross_entropy(model(x), y).item()


def accuracy(output: Any, batch: Any) -> dict[str, Any]:
    return {"accuracy": px.accuracy(output, batch["y"])}


@pytest.mark.parametrize("plan", ["single", "dp=2 micro=8", "fsdp=2", "dp=2 server=1"])
def test_a_run_is_evaluated_afterwards_on_its_data_and_on_others(plan: str, tmp_path: Path) -> None:
    how: dict[str, Any] = {"model": Tied, "evaluate": lambda: table(40, seed=1), "metrics": accuracy}
    trained = fit(plan, tmp_path / "run", **how)
    run = px.load(tmp_path / "run", job(**how, data=lambda: pytest.fail("the training data are not asked for")))
    before = torch.random.get_rng_state()
    found = run.evaluate(micro=16)
    assert torch.equal(before, torch.random.get_rng_state())
    assert trained.evaluation is not None
    assert (found["samples"], found["step"]) == (40, trained.evaluations()[-1]["step"])
    assert found["loss"] == pytest.approx(trained.evaluation["loss"], rel=1e-5)
    assert found["metrics"] == pytest.approx(trained.evaluation["metrics"])

    others = table(23, seed=5)
    samples = [others[index] for index in range(23)]
    x, y = (torch.stack([torch.as_tensor(sample[name]) for sample in samples]) for name in ("x", "y"))
    with torch.no_grad():
        output = run.model()(x)

    class Others(torch.utils.data.Dataset[Any]):  # a class is a function that gives a dataset
        def __len__(self) -> int:
            return 23

        def __getitem__(self, index: int) -> Any:
            return others[index]

    for data in (others, lambda: others, Others):
        found = run.evaluate(data)
        assert found["samples"] == 23
        assert found["loss"] == pytest.approx(nn.functional.cross_entropy(output, y).item(), rel=1e-5)
        assert found["metrics"]["accuracy"] == pytest.approx((output.argmax(1) == y).double().mean().item())
    assert len(list(run.events("evaluate"))) == len(list(trained.events("evaluate"))), "nothing is written"


def test_the_average_is_what_is_evaluated(tmp_path: Path) -> None:
    how: dict[str, Any] = {"evaluate": lambda: table(40, seed=1), "average": px.Average(decay=0.9)}
    run = fit("dp=2", tmp_path / "run", **how)
    assert run.evaluation is not None
    assert run.evaluate()["loss"] == pytest.approx(run.evaluation["loss"], rel=1e-5)
    assert loss_of(run.model()) != pytest.approx(run.evaluation["loss"], rel=1e-5)


def test_data_with_an_order_of_their_own_are_evaluated_each_once(tmp_path: Path) -> None:
    def mixed() -> px.Mixture:
        return px.Mixture({"a": table(30, seed=1), "b": table(10, seed=2)}, {"a": 1.0, "b": 3.0})

    run = fit("dp=2", tmp_path / "run", evaluate=mixed)
    assert run.evaluation is not None
    found = run.evaluate()
    assert found["samples"] == 40
    assert found["loss"] == pytest.approx(run.evaluation["loss"], rel=1e-5)


def test_what_cannot_be_evaluated_is_refused(tmp_path: Path) -> None:
    run = fit("single", tmp_path / "run", steps=2, epochs=None)
    with pytest.raises(SpecError, match=r"data: given None.*\n.*run.evaluate\("):
        run.evaluate()
    with pytest.raises(SpecError, match="job: given none"):
        px.load(tmp_path / "run").evaluate()
    with pytest.raises(SpecError, match="step: given 77"):
        run.evaluate(table(8), step=77)


@pytest.mark.parametrize("plan", ["single", "dp=2", "fsdp=2", "dp=2 sync=local every=3", "dp=2 server=1"])
@pytest.mark.parametrize("model", [Net, Tied])
def test_the_model_is_the_one_that_was_evaluated(model: type[nn.Module], plan: str, tmp_path: Path) -> None:
    run = fit(plan, tmp_path / "run", model=model, evaluate=lambda: table(40, seed=1))
    trained = run.model()
    assert not trained.training
    assert run.evaluation is not None
    assert loss_of(trained) == pytest.approx(run.evaluation["loss"], rel=1e-5)
    again = px.load(tmp_path / "run", job(model=model)).model()
    run.save_pretrained(tmp_path / "out.safetensors")
    plain = model()
    plain.load_state_dict(load_file(tmp_path / "out.safetensors"), strict=model is Net)
    stored = run.state_dict()
    for name, tensor in trained.state_dict().items():
        assert torch.equal(tensor, again.state_dict()[name])
        assert torch.equal(tensor, plain.state_dict()[name])
        assert name not in stored or torch.equal(tensor, stored[name])
    if isinstance(trained, Tied):
        assert trained.head.weight is trained.first.weight


def test_which_checkpoint(tmp_path: Path) -> None:
    run = fit("dp=2", tmp_path / "run", checkpoint_every=7)
    states = {step: run.state_dict(step) for step in (7, 8)}
    assert run.checkpoint().name == "step-00000008"
    assert not torch.equal(states[7]["head.weight"], states[8]["head.weight"])
    with pytest.raises(SpecError, match=r"step: given 3, of which (.|\n)*one of 8, 7"):
        run.state_dict(3)
    with pytest.raises(SpecError, match=r"px\.Best"):
        run.model(step="best")


def test_what_does_not_fit_is_named(tmp_path: Path) -> None:
    run = fit("single", tmp_path / "run")
    with pytest.raises(SpecError, match=r"holds values, and no code"):
        px.load(run.folder).model()
    with pytest.raises(SpecError, match=r"missing there \(1\): (.|\n)*norm\.weight|missing there"):
        run.model(job(model=Tied))
    with pytest.raises(SpecError, match=r"other shape \(1\): head\.weight \[4, 9\] here, \[5, 9\] there"):
        run.model(job(model=lambda: _narrower()))
    with pytest.raises(SpecError, match=r"holds no run"):
        px.load(tmp_path)
    with pytest.raises(SpecError, match=r"no folder"):
        px.load(tmp_path / "nothing")


def _narrower() -> nn.Module:
    net = Net()
    net.head = nn.Linear(9, 4)
    net.head.bias = nn.Parameter(torch.zeros(5))
    return net


def test_random_numbers_of_the_caller_stay(tmp_path: Path) -> None:
    run = fit("single", tmp_path / "run")
    before = torch.random.get_rng_state()
    run.model()
    assert torch.equal(torch.random.get_rng_state(), before)


class TestExport:
    """``phalanx export``."""

    def test_writes_what_plain_torch_loads(self, tmp_path: Path) -> None:
        how: dict[str, Any] = {"evaluate": lambda: table(40, seed=1), "evaluate_every": 3, "best": px.Best()}
        run = fit("fsdp=2", tmp_path / "run", **how)
        for name, step in (("newest", None), ("best", "best")):
            target = tmp_path / f"{name}.safetensors"
            argv = ["export", str(run.folder), str(target), *(["--from", "best"] if step else [])]
            done = CliRunner().invoke(main, argv)
            assert done.exit_code == 0, done.output
            plain = Net()
            plain.load_state_dict(load_file(target))
            assert all(
                torch.equal(tensor, plain.state_dict()[at])
                for at, tensor in run.state_dict("best" if step else None).items()
            )

    @pytest.mark.parametrize(
        ("argv", "said"),
        [
            (["--from", "first"], "neither a step nor best"),
            (["--from", "best"], "does not compare evaluations"),
            (["--from", "3"], "has no checkpoint"),
        ],
    )
    def test_says_what_it_cannot(self, argv: list[str], said: str, tmp_path: Path) -> None:
        run = fit("single", tmp_path / "run")
        done = CliRunner().invoke(main, ["export", str(run.folder), str(tmp_path / "out"), *argv])
        assert done.exit_code == 2
        assert said in done.stderr
