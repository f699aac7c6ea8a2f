"""Checkpoints that hold what is trained alone: small, gone on with under any plan, and never over another base."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import phalanx as px
from phalanx.cli import main
from phalanx.errors import CheckpointError, PhalanxError, SpecError

WIDTH, SAMPLES, BATCH, STEPS = 16, 40, 8, 6


class Adapted(nn.Module):
    """A frozen base, in fp32 and bf16, with an adapter of rank 2 between."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Sequential(nn.Linear(WIDTH, 64), nn.ReLU(), nn.Linear(64, WIDTH))
        self.scale = nn.Parameter(torch.rand(WIDTH).to(torch.bfloat16))
        self.down, self.up = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, WIDTH, bias=False)
        self.register_buffer("steps", torch.zeros(()))
        for one in (*self.base.parameters(), self.scale):
            one.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) * self.scale.to(x.dtype) + self.up(self.down(x))


def rows() -> px.Table:
    drawn = torch.randn(2, SAMPLES, WIDTH, generator=torch.Generator().manual_seed(0))
    return px.Table(x=drawn[0], y=drawn[1])


def job(**how: Any) -> px.Job:
    given: dict[str, Any] = {"model": Adapted, "data": rows, "batch": BATCH, "steps": STEPS, "shuffle": False, **how}
    return px.Job(
        loss=lambda output, batch: px.mse(output, batch["y"]),
        optimizer=lambda params: torch.optim.Adam(params, lr=1e-2),
        **given,
    )


def fit(given: px.Job, plan: str, folder: Path, **how: Any) -> px.Run:
    how = {"job": "adapted", "checkpoint": "trainable", **how}
    return px.fit(given, run=px.RunSpec(plan=px.Plan.parse(plan), folder=folder, forecast="none", **how))


def by_hand(initial: dict[str, Tensor] | None = None) -> tuple[list[float], dict[str, Tensor]]:
    from phalanx.train.build_model import build_model

    net, data, losses = build_model(job()), rows(), list[float]()
    net.load_state_dict(initial or {}, strict=False)
    optimizer = torch.optim.Adam([*net.down.parameters(), *net.up.parameters()], lr=1e-2)
    for step in range(STEPS):
        ids = [(step * BATCH + index) % SAMPLES for index in range(BATCH)]
        x, y = (torch.stack([data[one][name] for one in ids]) for name in ("x", "y"))
        loss = nn.functional.mse_loss(net(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, net.state_dict()


def bytes_in(run: px.Run) -> int:
    return sum(file.stat().st_size for file in run.checkpoint().glob("*.safetensors"))


@pytest.mark.parametrize(
    "plans", [("single", "fsdp=2"), ("fsdp=2", "dp=2"), ("fsdp=2 zero=2", "single"), ("dp=2", "pp=2")]
)
def test_a_run_goes_on_under_another_plan(plans: tuple[str, str], tmp_path: Path) -> None:
    before, after = plans
    fit(job(), before, tmp_path / "run", steps=3)
    run = fit(job(), after, tmp_path / "run", resume=True)
    losses, values = by_hand()
    assert [event["loss"] for event in run.events("step")] == pytest.approx(losses, rel=1e-5)
    trained = run.state_dict()
    assert trained.keys() == values.keys()
    for name, value in values.items():
        torch.testing.assert_close(trained[name], value, rtol=1e-4, atol=1e-5)
    model = run.model()
    assert all(torch.equal(one, trained[name]) for name, one in model.state_dict().items())


def test_it_holds_what_is_trained_and_no_more(tmp_path: Path) -> None:
    small, whole = (fit(job(), "dp=2", tmp_path / kind, checkpoint=kind) for kind in ("trainable", "all"))
    net = Adapted()
    frozen = sum(one.nbytes for one in net.parameters() if not one.requires_grad)
    trained = sum(one.nbytes for one in net.parameters() if one.requires_grad)
    assert bytes_in(whole) - bytes_in(small) == pytest.approx(frozen, abs=600)  # names in headers
    assert bytes_in(small) == pytest.approx(3 * trained, abs=1500)  # with Adam's two moments


@pytest.mark.parametrize("plan", ["single", "fsdp=2"])
def test_over_another_base_it_is_refused(plan: str, tmp_path: Path) -> None:
    class Other(Adapted):
        def __init__(self) -> None:
            super().__init__()
            with torch.no_grad():
                weight = self.base[2].weight
                weight[0, 0], weight[0, 1] = weight[0, 1].item(), weight[0, 0].item()

    fit(job(), "single", tmp_path / "run", steps=3)
    with pytest.raises(px.PhalanxError, match=r"other values are here: base\.2\.weight"):
        fit(job(model=Other), plan, tmp_path / "run", resume=True)
    with pytest.raises(CheckpointError, match=r"base\.2\.weight"):
        px.load(tmp_path / "run", job(model=Other)).model()


def test_the_base_comes_from_initial(tmp_path: Path) -> None:
    begun = {name: torch.rand_like(one) for name, one in Adapted().state_dict().items() if name != "steps"}
    save_file({**begun, "steps": torch.zeros(())}, str(tmp_path / "base.safetensors"))
    given = job(initial=tmp_path / "base.safetensors")
    fit(given, "dp=2", tmp_path / "run", steps=3)
    run = fit(given, "fsdp=2", tmp_path / "run", resume=True)
    losses, _ = by_hand(begun)
    assert [event["loss"] for event in run.events("step")] == pytest.approx(losses, rel=1e-5)
    with pytest.raises(px.PhalanxError, match="checkpoint='trainable'"):
        fit(given, "single", tmp_path / "run", resume=True, checkpoint="all", steps=STEPS + 1)


def test_what_cannot_be(tmp_path: Path) -> None:
    for plan in ("dp=2 server=1", "dp=2 sync=local every=2"):
        with pytest.raises(SpecError, match=r"run\.checkpoint"):
            fit(job(), plan, tmp_path / "run")
    with pytest.raises(SpecError, match="all, trainable"):
        fit(job(), "single", tmp_path / "run", checkpoint="some")
    fit(job(), "single", tmp_path / "run", steps=1)
    run = px.load(tmp_path / "run")
    for asked in (run.state_dict, lambda: run.save_pretrained(tmp_path / "out")):
        with pytest.raises(
            SpecError, match=r"what is trained alone \(checkpoint='trainable'\)(?s:.*)try: px\.load"
        ) as refused:
            asked()
        assert "--" not in str(refused.value)
    assert not (tmp_path / "out").exists()


def export(*argv: object) -> tuple[int, str]:
    answered = CliRunner().invoke(main, ["export", *map(str, argv)])
    return answered.exit_code, answered.output


@pytest.mark.parametrize("plan", ["single", "fsdp=2"])
def test_an_export_has_the_frozen_values_of_the_job(plan: str, tmp_path: Path) -> None:
    file = tmp_path / "adapted.py"
    file.write_text("import phalanx as px\nfrom test_trainable_checkpoints import job as made\n")
    file.write_text(file.read_text() + "\n\ndef job() -> px.Job:\n    return made()\n")
    run = fit(job(), plan, tmp_path / "run", job=str(file))
    _, values = by_hand()
    for given in ([run.folder, tmp_path / "1.safetensors"], [run.checkpoint(), tmp_path / "2.safetensors"]):
        code, said = export(*given)
        assert code == 0, said
    assert export(run.folder, tmp_path / "folder", "--job", file)[0] == 0
    run.save_pretrained(tmp_path / "3.safetensors")
    px.load(run.folder, job()).save_pretrained(tmp_path / "4.safetensors")
    written = [tmp_path / f"{number}.safetensors" for number in range(1, 5)] + [tmp_path / "folder/model.safetensors"]
    for one in written:
        found = load_file(one)
        assert found.keys() == values.keys()
        for name, value in values.items():
            assert found[name].dtype == value.dtype
            torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-5)
        Adapted().load_state_dict(found)
    assert export(run.folder, tmp_path / "half.safetensors", "--dtype", "float16")[0] == 0
    assert {one.dtype for one in load_file(tmp_path / "half.safetensors").values()} == {torch.float16}


def test_an_export_takes_no_other_frozen_values(tmp_path: Path) -> None:
    run = fit(job(), "single", tmp_path / "run", steps=1)
    file = tmp_path / "other.py"
    file.write_text("import torch\nfrom test_trainable_checkpoints import Adapted, job as made\n")
    file.write_text(file.read_text() + "\n\ndef job():\n    torch.manual_seed(8)\n    net = Adapted()\n")
    file.write_text(file.read_text() + "    return made(model=lambda: net)\n")
    with pytest.raises(CheckpointError, match=r"other values are here: base\.0\.bias"):
        CliRunner().invoke(
            main,
            ["export", str(run.folder), str(tmp_path / "out"), "--job", str(file)],
            catch_exceptions=False,
            standalone_mode=False,
        )
    with pytest.raises(CheckpointError, match=r"other values are here: base\.0\.bias"):
        px.load(run.folder, job(seed=5)).save_pretrained(tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_an_export_says_in_options_what_it_needs(tmp_path: Path) -> None:
    alone, whole = (fit(job(), "single", tmp_path / kind, steps=1, checkpoint=kind) for kind in ("trainable", "all"))
    code, said = export(alone.folder, tmp_path / "out")
    assert (code, "of a run that does not say where its job is" in said) == (2, True)
    assert said.rstrip().endswith("try: --job train.py")
    code, said = export(whole.folder, tmp_path / "out", "--job", "train.py")
    assert (code, "error: --job: given train.py" in said) == (2, True)
    answered = CliRunner().invoke(main, ["checkpoint", "export", str(alone.folder), "--to", str(tmp_path / "out")])
    assert "(--checkpoint trainable)" in answered.output
    assert answered.output.rstrip().endswith("try: phalanx export RUN OUT")
    assert not (tmp_path / "out").exists()


class Following(Adapted):
    """Its frozen base follows its adapter, as a teacher does its student."""

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.base[0].weight.data.add_(1e-3 * self.up.weight.mean())
        return super().forward(x)


@pytest.mark.parametrize("plan", ["single", "dp=2"])
def test_frozen_values_that_change_are_not_left_out(plan: str, tmp_path: Path) -> None:
    with pytest.raises(PhalanxError, match=r"no optimizer steps have changed since the run began: base\.0\.weight"):
        fit(job(model=Following), plan, tmp_path / "run", checkpoint_every=2)
