"""Losses that compare the samples of the whole global batch: equal to plain PyTorch on one device under every plan."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.nn.functional as F
import transformers
from test_inputs_of_train import Net
from test_inputs_of_train import job as of_sequences
from torch import Tensor, nn

import phalanx as px
from law_rows import longer
from phalanx.config import Plan
from phalanx.errors import PhalanxError, RefusedError
from phalanx.parallel import check
from phalanx.train.look_ahead import refusals
from phalanx.witness import samples
from phalanx.witness.initial import initial_model

LENGTH, BATCH, STEPS = 26, 10, 4  # the third batch has 6 samples


@dataclass
class Pairs:
    """What the two towers give."""

    image: Tensor
    text: Tensor
    scale: Tensor


@dataclass
class Outputs(transformers.utils.ModelOutput):
    image: Any = None
    text: Any = None
    scale: Any = None
    similarity: Any = None


class Towers(nn.Module):
    form = "dataclass"
    dropout = 0.0

    def __init__(self) -> None:
        super().__init__()
        self.image, self.text = (
            nn.Sequential(nn.Linear(size, 12), nn.ReLU(), nn.Dropout(self.dropout), nn.Linear(12, 6)) for size in (7, 5)
        )
        self.scale = nn.Parameter(torch.tensor([1.5]))

    def forward(self, image: Tensor, text: Tensor) -> Any:
        towers = F.normalize(self.image(image), dim=-1), F.normalize(self.text(text), dim=-1)
        found = Pairs(*towers, self.scale.exp())
        if self.form == "model output":
            return Outputs(**vars(found), similarity=towers[0] @ towers[1].T)
        return {"dataclass": found, "dict": vars(found), "tuple": (*towers, found.scale)}[self.form]


class ModelOutputTowers(Towers):
    """Gives similarities, too, which cannot be put together and need not be where the loss does not read them."""

    form = "model output"


class DictTowers(Towers):
    form = "dict"


class TupleTowers(Towers):
    form = "tuple"


class Dropping(Towers):
    dropout = 0.3


def table(length: int = LENGTH) -> px.Table:
    generator = torch.Generator().manual_seed(1)
    return px.Table(
        image=torch.randn(length, 7, generator=generator),
        text=torch.randn(length, 5, generator=generator),
        group=torch.arange(length) // 2,
    )


def info_nce(output: Any, batch: Any) -> Tensor:
    """CLIP's, where pairs of the same group count as alike."""
    if isinstance(output, dict):
        output = Pairs(**{name: output[name] for name in ("image", "text", "scale")})
    image, text, scale = output if isinstance(output, tuple) else (output.image, output.text, output.scale)
    alike = (batch["group"][:, None] == batch["group"]).float()
    target = alike / alike.sum(1, keepdim=True)
    logits = scale * image @ text.T
    return (F.cross_entropy(logits, target) + F.cross_entropy(logits.T, target)) / 2


def batch_hard(output: Any, batch: Any) -> px.Loss:
    """Triplets of the hardest positive and negative of each anchor that has both."""
    distance = torch.cdist(output.image, output.text)
    same = batch["group"][:, None] == batch["group"]
    worst = distance.masked_fill(~same, -1.0).amax(1)
    nearest = distance.masked_fill(same, 1e3).amin(1)
    each = F.relu(worst - nearest + 0.5) * output.scale
    return px.Loss(each.sum(), (each > 0).sum())


def job(**how: Any) -> px.Job:
    given: dict[str, Any] = {
        "model": Towers,
        "data": table,
        "loss": info_nce,
        "loss_over": "batch",
        "optimizer": lambda params: torch.optim.SGD(params, lr=0.2, momentum=0.9),
        "batch": BATCH,
        "steps": STEPS,
        **how,
    }
    return px.Job(**given)


def plain(given: px.Job) -> tuple[list[float], dict[str, Tensor]]:
    """The losses and the trained values of a loop over whole batches, written by hand."""
    samples.seed_everything(samples.stream_seed(given.seed, 0))
    model, data = initial_model(given).train(), given.data()
    optimizer, losses = given.optimizer(model.parameters()), []
    for ids in samples.numbers(data, given, STEPS):
        batch = {name: torch.stack([data[one][name] for one in ids]) for name in ("image", "text", "group")}
        found = given.loss(model(batch["image"], batch["text"]), batch)
        loss = found[0] / found[1] if isinstance(found, tuple) else found
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, {name: one.detach().clone() for name, one in model.named_parameters()}


def fit(given: px.Job, plan: str, folder: Path) -> px.Run:
    return px.fit(given, run=px.RunSpec(job="coupled", plan=Plan.parse(plan), folder=folder, forecast="none"))


def losses_of(run: px.Run) -> list[float]:
    return [event["loss"] for event in run.events() if event["event"] == "step"]


def same(given: px.Job, plan: str, folder: Path, tolerance: float = 1e-5) -> px.Run:
    """Trained under ``plan`` as the loop by hand trains."""
    losses, values = plain(given)
    run = fit(given, plan, folder)
    assert losses_of(run) == pytest.approx(losses, rel=tolerance)
    trained = run.state_dict()
    for name, value in values.items():
        assert float((trained[name] - value).norm()) <= tolerance * float(value.norm()), name
    return run


@pytest.mark.parametrize(
    "plan", ["dp=3 micro=3", "fsdp=2 zero=1 micro=2", *longer("threads=3", "dp=2 fsdp=2 micro=2", "tp=2 dp=2 micro=2")]
)
def test_contrastive_loss_is_that_of_one_device(plan: str, tmp_path: Path) -> None:
    same(job(), plan, tmp_path / "run")


@pytest.mark.parametrize("plan", ["dp=2", *longer("fsdp=2 micro=4")])
def test_a_last_batch_that_is_shorter_on_one_rank_alone(plan: str, tmp_path: Path) -> None:
    same(job(data=lambda: table(29)), plan, tmp_path / "run")


@pytest.mark.parametrize(
    ("changed", "plan"),
    [
        ({"model": DictTowers}, "micro=3"),
        ({"model": ModelOutputTowers}, "dp=2 micro=2"),
        ({"model": TupleTowers}, "threads=2"),
        ({"loss": batch_hard}, "micro=2"),
        *longer(({"loss": batch_hard}, "threads=2")),
    ],
)
def test_outputs_of_any_form_and_counted_losses(changed: dict[str, Any], plan: str, tmp_path: Path) -> None:
    same(job(**changed), plan, tmp_path / "run")


class Counting(Towers):
    """Standardises by a running mean, which each forward moves."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(7))

    def forward(self, image: Tensor, text: Tensor) -> Any:
        if self.training:
            self.mean.lerp_(image.mean(0).detach(), 0.1)
        return super().forward(image - self.mean, text)


def test_a_second_forward_changes_buffers_no_second_time(tmp_path: Path) -> None:
    given = job(model=Counting)
    run = fit(given, "micro=2", tmp_path / "run")
    mean, data = torch.zeros(7), table()
    for ids in samples.numbers(data, given, STEPS):
        for start in range(0, len(ids), 2):
            mean.lerp_(torch.stack([data[one]["image"] for one in ids[start : start + 2]]).mean(0), 0.1)
    assert torch.allclose(run.state_dict()["mean"], mean, atol=1e-6)


@pytest.mark.parametrize("plan", ["dp=2 micro=2", *longer("fsdp=2 micro=4")])
def test_both_forwards_drop_alike(plan: str, tmp_path: Path) -> None:
    fit(job(model=Dropping, steps=2), plan, tmp_path / "run")  # else it says that the second gave another output


class Foreign(Towers):
    def forward(self, image: Tensor, text: Tensor) -> Any:
        noise = torch.from_numpy(numpy.random.randn(*image.shape)).float()
        return super().forward(image + noise, text)


def test_another_second_output_is_told(tmp_path: Path) -> None:
    with pytest.raises(PhalanxError, match="the second gave another output than the first"):
        fit(job(model=Foreign), "micro=3", tmp_path / "run")


class Averaging(Towers):
    """Gives a mean over the micro-batch, in training, which no look before the run sees."""

    def forward(self, image: Tensor, text: Tensor) -> Any:
        found = super().forward(image, text)
        return Pairs(found.image, found.text, found.scale * (1 + found.image.mean() * self.training))


def of_logits(logits: Tensor, batch: Any) -> Tensor:
    target = torch.arange(len(logits))
    return (F.cross_entropy(logits, target) + F.cross_entropy(logits.T, target)) / 2


def test_a_proof_holds_for_it_and_tells_a_job_that_needs_it() -> None:
    assert px.prove(job(), "dp=2 micro=2", steps=2).equal
    proof = px.prove(job(loss_over="samples"), "micro=2", steps=2)
    assert not proof.equal
    assert 'loss_over="batch"' in proof.cause


@pytest.mark.parametrize("plan", ["dp=2", *longer("micro=5", "threads=2")])
def test_what_cannot_be_put_together_is_told(plan: str, tmp_path: Path) -> None:
    with pytest.raises(PhalanxError, match="has no row for each sample"):
        fit(job(model=Averaging), plan, tmp_path / "run")


REFUSED = {
    "pp=2": "pipeline",
    "dp=2 server=1": "servers",
    "dp=2 sync=local every=2": "sync=local",
    "dp=2 sync=diloco every=2": "sync=diloco",
    "threads=2 micro=2": "threads",
}


def test_refused_before_a_process_starts_everywhere_alike(tmp_path: Path) -> None:
    given = job()
    for text, words in REFUSED.items():
        (problem,) = refusals(given, Plan.parse(text))
        assert words in problem.given
        assert not check(given, Plan.parse(problem.fix) if "=" in problem.fix else Plan())
    for ask in (lambda: fit(given, "pp=2", tmp_path / "run"), lambda: px.prove(given, "pp=2")):
        with pytest.raises(RefusedError) as told:
            ask()
        assert told.value.problems == tuple(refusals(given, Plan.parse("pp=2")))
    assert not list(tmp_path.glob("run/ledger/*"))


def test_evaluation_compares_whole_batches_under_every_plan(tmp_path: Path) -> None:
    def metrics(output: Any, batch: Any) -> dict[str, px.Loss]:
        right = (output.image @ output.text.T).argmax(1) == torch.arange(len(output.image))
        return {"recall": px.Loss(right.sum(), len(right))}

    given = job(evaluate=table, metrics=metrics, steps=2)
    runs, found = [], []
    for index, plan in enumerate(("single", "dp=2 micro=2", "threads=2")):
        runs.append(fit(given, plan, tmp_path / str(index)))
        found.append(next(event for event in runs[-1].events() if event["event"] == "evaluate"))
    one = found[0]
    model, data = Towers(), table()
    model.load_state_dict(runs[0].state_dict())
    total = 0.0
    for start in range(0, LENGTH, BATCH):
        rows = range(start, min(start + BATCH, LENGTH))
        batch = {name: torch.stack([data[at][name] for at in rows]) for name in ("image", "text", "group")}
        total += info_nce(model(batch["image"], batch["text"]), batch).item() * len(batch["image"])
    assert one["loss"] == pytest.approx(total / LENGTH, rel=1e-5)
    for other in found[1:]:
        assert other["loss"] == pytest.approx(one["loss"], rel=1e-5)
        assert other["metrics"] == pytest.approx(one["metrics"])
        assert other["samples"] == LENGTH


def test_a_loss_that_reads_similarities_of_a_micro_batch_is_refused(tmp_path: Path) -> None:
    given = job(model=ModelOutputTowers, loss=lambda output, batch: of_logits(output.scale * output.similarity, batch))
    with pytest.raises(RefusedError, match=r"compares samples in its forward|differs in its shape"):
        fit(given, "dp=2", tmp_path / "run")


def of_tokens(output: Tensor, batch: Any) -> Tensor:
    pooled = F.normalize(output.mean(1), dim=-1)
    return F.cross_entropy(5 * pooled @ pooled.flip(1).T, torch.arange(len(pooled)))


@pytest.mark.parametrize("plan", ["cp=2 micro=4", *longer("tp=2 sequence=true")])
def test_models_that_are_split_over_ranks(plan: str, tmp_path: Path) -> None:
    given = of_sequences(model=Net, loss=of_tokens, loss_over="batch", optimizer=job().optimizer)
    one, other = fit(given, "single", tmp_path / "one"), fit(given, plan, tmp_path / "other")
    assert losses_of(other) == pytest.approx(losses_of(one), rel=1e-5)
    trained = other.state_dict()
    for name, value in one.state_dict().items():
        assert float((trained[name] - value).norm()) <= 1e-5 * float(value.norm()), name


@pytest.mark.parametrize("plan", ["dp=2", *longer("micro=3", "threads=2")])
def test_a_sample_that_is_not_finite_is_named(plan: str, tmp_path: Path) -> None:
    rows = [*table()]
    rows[11]["image"][2] = torch.nan
    with pytest.raises(PhalanxError, match=r"sample.* 11\b"):
        fit(job(data=lambda: rows, steps=None, epochs=1), plan, tmp_path / "run")
