"""Trained models, in Python and as files that others read, whole or trained in part: the same whatever the plan."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file
from small import Net, fit, table
from small import job as small_job
from test_pretrained import Tokens, gpt2
from test_pretrained import job as gpt2_job
from torch import Tensor, nn

import phalanx as px
from law_rows import longer
from phalanx.checkpoint import ExportForm, export, save
from phalanx.cli import main
from phalanx.errors import CheckpointError, SpecError


class Tied(nn.Module):
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


@pytest.mark.parametrize("plan", ["dp=2 server=1", *longer("fsdp=2", "single", "dp=2 micro=8")])
def test_a_run_is_evaluated_afterwards_on_its_data_and_on_others(plan: str, tmp_path: Path) -> None:
    how: dict[str, Any] = {"model": Tied, "evaluate": lambda: table(40, seed=1), "metrics": accuracy}
    trained = fit(plan, tmp_path / "run", **how)
    run = px.load(tmp_path / "run", small_job(**how, data=lambda: pytest.fail("the training data are not asked for")))
    before = torch.random.get_rng_state()
    found = run.evaluate(micro=16)
    assert torch.equal(before, torch.random.get_rng_state())
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
    assert run.evaluate()["loss"] == pytest.approx(run.evaluation["loss"], rel=1e-5)
    assert loss_of(run.model()) != pytest.approx(run.evaluation["loss"], rel=1e-5)


def test_what_cannot_be_evaluated_is_refused(tmp_path: Path) -> None:
    run = fit("single", tmp_path / "run", steps=2, epochs=None)
    with pytest.raises(SpecError, match="data: given None"):
        run.evaluate()
    with pytest.raises(SpecError, match="job: given none"):
        px.load(tmp_path / "run").evaluate()
    with pytest.raises(SpecError, match="step: given 77"):
        run.evaluate(table(8), step=77)


@pytest.mark.parametrize(
    ("model", "plan"), [(Tied, "fsdp=2"), (Net, "dp=2 sync=local every=3"), *longer((Tied, "dp=2 server=1"))]
)
def test_the_model_is_the_one_that_was_evaluated(model: type[nn.Module], plan: str, tmp_path: Path) -> None:
    run = fit(plan, tmp_path / "run", model=model, evaluate=lambda: table(40, seed=1))
    before = torch.random.get_rng_state()
    trained = run.model()
    assert torch.equal(torch.random.get_rng_state(), before)
    assert not trained.training
    assert loss_of(trained) == pytest.approx(run.evaluation["loss"], rel=1e-5)
    again = px.load(tmp_path / "run", small_job(model=model)).model()
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
    with pytest.raises(SpecError, match=r"step: given 3(.|\n)*8, 7"):
        run.state_dict(3)
    with pytest.raises(SpecError, match=r"px\.Best"):
        run.model(step="best")


def test_what_does_not_fit_is_named(tmp_path: Path) -> None:
    run = fit("single", tmp_path / "run")
    with pytest.raises(SpecError, match="job"):
        px.load(run.folder).model()
    with pytest.raises(SpecError, match="missing there"):
        run.model(small_job(model=Tied))
    with pytest.raises(SpecError, match=r"head\.weight \[4, 9\] here, \[5, 9\] there"):
        run.model(small_job(model=lambda: _narrower()))
    with pytest.raises(SpecError, match=r"holds no run"):
        px.load(tmp_path)
    with pytest.raises(SpecError, match=r"no folder"):
        px.load(tmp_path / "nothing")


def _narrower() -> nn.Module:
    net = Net()
    net.head = nn.Linear(9, 4)
    net.head.bias = nn.Parameter(torch.zeros(5))
    return net


class TestExport:
    def test_writes_what_plain_torch_loads(self, tmp_path: Path) -> None:
        how: dict[str, Any] = {"evaluate": lambda: table(40, seed=1), "evaluate_every": 3, "best": px.Best()}
        run = fit("single", tmp_path / "run", **how)
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


def adapted_job(**how: Any) -> px.Job:
    given: dict[str, Any] = {"model": Adapted, "data": rows, "batch": BATCH, "steps": STEPS, "shuffle": False, **how}
    return px.Job(
        loss=lambda output, batch: px.mse(output, batch["y"]),
        optimizer=lambda params: torch.optim.Adam(params, lr=1e-2),
        **given,
    )


def fit_adapted(given: px.Job, plan: str, folder: Path, **how: Any) -> px.Run:
    how = {"job": "adapted", "checkpoint": "trainable", **how}
    return px.fit(given, run=px.RunSpec(plan=px.Plan.parse(plan), folder=folder, forecast="none", **how))


def by_hand(initial: dict[str, Tensor] | None = None) -> tuple[list[float], dict[str, Tensor]]:
    from phalanx.train.build_model import build_model

    net, data, losses = build_model(adapted_job()), rows(), list[float]()
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


@pytest.mark.parametrize("plans", [("fsdp=2 zero=2", "single"), *longer((("dp=2", "pp=2"),), (("single", "fsdp=2"),))])
def test_a_run_goes_on_under_another_plan(plans: tuple[str, str], tmp_path: Path) -> None:
    before, after = plans
    fit_adapted(adapted_job(), before, tmp_path / "run", steps=3)
    run = fit_adapted(adapted_job(), after, tmp_path / "run", resume=True)
    losses, values = by_hand()
    assert [event["loss"] for event in run.events("step")] == pytest.approx(losses, rel=1e-5)
    trained = run.state_dict()
    assert trained.keys() == values.keys()
    for name, value in values.items():
        torch.testing.assert_close(trained[name], value, rtol=1e-4, atol=1e-5)
    model = run.model()
    assert all(torch.equal(one, trained[name]) for name, one in model.state_dict().items())


def bytes_in(run: px.Run) -> int:
    return sum(file.stat().st_size for file in run.checkpoint().glob("*.safetensors"))


def test_it_holds_what_is_trained_and_no_more(tmp_path: Path) -> None:
    small, whole = (
        fit_adapted(adapted_job(), "single", tmp_path / kind, checkpoint=kind) for kind in ("trainable", "all")
    )
    net = Adapted()
    frozen = sum(one.nbytes for one in net.parameters() if not one.requires_grad)
    trained = sum(one.nbytes for one in net.parameters() if one.requires_grad)
    assert bytes_in(whole) - bytes_in(small) == pytest.approx(frozen, abs=600)  # names in headers
    assert bytes_in(small) == pytest.approx(3 * trained, abs=1500)  # with Adam's two moments


@pytest.mark.parametrize("plan", ["dp=2", *longer("fsdp=2")])
def test_over_another_base_it_is_refused(plan: str, tmp_path: Path) -> None:
    class Other(Adapted):
        def __init__(self) -> None:
            super().__init__()
            with torch.no_grad():
                weight = self.base[2].weight
                weight[0, 0], weight[0, 1] = weight[0, 1].item(), weight[0, 0].item()

    fit_adapted(adapted_job(), "single", tmp_path / "run", steps=3)
    with pytest.raises(px.PhalanxError, match=r"base\.2\.weight"):
        fit_adapted(adapted_job(model=Other), plan, tmp_path / "run", resume=True)
    with pytest.raises(CheckpointError, match=r"base\.2\.weight"):
        px.load(tmp_path / "run", adapted_job(model=Other)).model()


def test_the_base_comes_from_initial(tmp_path: Path) -> None:
    begun = {name: torch.rand_like(one) for name, one in Adapted().state_dict().items() if name != "steps"}
    save_file({**begun, "steps": torch.zeros(())}, str(tmp_path / "base.safetensors"))
    given = adapted_job(initial=tmp_path / "base.safetensors")
    fit_adapted(given, "dp=2", tmp_path / "run", steps=3)
    run = fit_adapted(given, "single", tmp_path / "run", resume=True)
    losses, _ = by_hand(begun)
    assert [event["loss"] for event in run.events("step")] == pytest.approx(losses, rel=1e-5)
    with pytest.raises(px.PhalanxError, match="checkpoint='trainable'"):
        fit_adapted(given, "single", tmp_path / "run", resume=True, checkpoint="all", steps=STEPS + 1)


class Following(Adapted):
    """Its frozen base follows its adapter, as a teacher does its student."""

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.base[0].weight.data.add_(1e-3 * self.up.weight.mean())
        return super().forward(x)


@pytest.mark.parametrize("plan", ["dp=2", *longer("single")])
def test_frozen_values_that_change_are_not_left_out(plan: str, tmp_path: Path) -> None:
    with pytest.raises(px.PhalanxError, match=r"base\.0\.weight"):
        fit_adapted(adapted_job(model=Following), plan, tmp_path / "run", checkpoint_every=2)


def test_what_cannot_be(tmp_path: Path) -> None:
    for plan in ("dp=2 server=1", "dp=2 sync=local every=2"):
        with pytest.raises(SpecError, match=r"run\.checkpoint"):
            fit_adapted(adapted_job(), plan, tmp_path / "run")
    with pytest.raises(SpecError, match="all, trainable"):
        fit_adapted(adapted_job(), "single", tmp_path / "run", checkpoint="some")
    fit_adapted(adapted_job(), "single", tmp_path / "run", steps=1)
    run = px.load(tmp_path / "run")
    code, said = exported(run.folder, tmp_path / "out")
    assert (code, said.rstrip().endswith("try: --job train.py")) == (2, True)
    for asked in (run.state_dict, lambda: run.save_pretrained(tmp_path / "out")):
        with pytest.raises(SpecError, match=r"checkpoint='trainable'(?s:.*)try: px\.load") as refused:
            asked()
        assert "--" not in str(refused.value)
    assert not (tmp_path / "out").exists()


def exported(*argv: object) -> tuple[int, str]:
    answered = CliRunner().invoke(main, ["export", *map(str, argv)])
    return answered.exit_code, answered.output


@pytest.mark.parametrize("plan", ["single", *longer("fsdp=2")])
def test_an_export_has_the_frozen_values_of_the_job(plan: str, tmp_path: Path) -> None:
    file = tmp_path / "adapted.py"
    file.write_text("import phalanx as px\nfrom test_trained_model import adapted_job as made\n")
    file.write_text(file.read_text() + "\n\ndef job() -> px.Job:\n    return made()\n")
    run = fit_adapted(adapted_job(), plan, tmp_path / "run", job=str(file))
    _, values = by_hand()
    for given in ([run.folder, tmp_path / "1.safetensors"], [run.checkpoint(), tmp_path / "2.safetensors"]):
        code, said = exported(*given)
        assert code == 0, said
    assert exported(run.folder, tmp_path / "folder", "--job", file)[0] == 0
    run.save_pretrained(tmp_path / "3.safetensors")
    px.load(run.folder, adapted_job()).save_pretrained(tmp_path / "4.safetensors")
    written = [tmp_path / f"{number}.safetensors" for number in range(1, 5)] + [tmp_path / "folder/model.safetensors"]
    for one in written:
        found = load_file(one)
        assert found.keys() == values.keys()
        for name, value in values.items():
            assert found[name].dtype == value.dtype
            torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-5)
        Adapted().load_state_dict(found)
    assert exported(run.folder, tmp_path / "half.safetensors", "--dtype", "float16")[0] == 0
    assert {one.dtype for one in load_file(tmp_path / "half.safetensors").values()} == {torch.float16}


PLANS = ("tp=2", *longer("server=1 dp=2", "single", "fsdp=2", "pp=2"))


def trained_gpt2(plan: str, folder: Path, **how: Any) -> px.Run:
    return px.fit(gpt2_job(**how), run=px.RunSpec(job="gpt2", plan=px.Plan.parse(plan), folder=folder, forecast="none"))


@pytest.mark.parametrize("plan", PLANS)
def test_transformers_reads_what_any_plan_saved(plan: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    run = trained_gpt2(plan, tmp_path / "run", evaluate=Tokens)
    done = export(run.folder / "checkpoints" / "step-00000003", tmp_path / "hf", ExportForm(shard=200_000))
    assert done.configured
    assert len(done.files) > 4
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    assert type(model) is type(gpt2())
    ids = torch.stack([Tokens()[index]["input_ids"] for index in range(64)])
    with torch.no_grad():
        loss = px.next_token_loss(model(ids), ids)
    assert float(loss.sum / loss.count) == pytest.approx(run.evaluation["loss"], rel=1e-6)


def verbs(run: Path | str, *argv: str) -> tuple[int, Any]:
    answered = CliRunner().invoke(main, ["checkpoint", *argv[:1], str(run), *argv[1:], "--json"], standalone_mode=False)
    if answered.exception:
        raise answered.exception
    return answered.return_value or 0, json.loads(answered.stdout)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Of checkpoints 2, 4, 6 and 8."""
    tensors = {"model.head.weight": torch.arange(45.0).reshape(5, 9), "optimizer.head.weight": torch.ones(9)}
    for step in (2, 4, 6, 8):
        state = {"job": "small", "step": step, "samples": 26 * step}
        save(tmp_path / "run" / "checkpoints", step=step, tensors=tensors, state=state, keep=9)
    return tmp_path / "run"


def flip(path: Path) -> None:
    """Change one bit, which leaves the file in full length."""
    (file,) = path.glob("*.safetensors")
    content = bytearray(file.read_bytes())
    content[-5] ^= 1
    file.write_bytes(content)


def test_a_flipped_bit_is_neither_exported_nor_all_that_stays(run: Path, tmp_path: Path) -> None:
    flip(run / "checkpoints/step-00000008")
    (tmp_path / "there").mkdir()
    with pytest.raises(SpecError, match="which exists"):
        export(run / "checkpoints/step-00000008", tmp_path / "there")
    for target in ("folder", "file.safetensors"):
        with pytest.raises(CheckpointError, match="has changed"):
            export(run / "checkpoints/step-00000008", tmp_path / target)
    assert sorted(one.name for one in tmp_path.iterdir()) == ["run", "there"]
    target = str(tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"checkpoint export .* --from 6 --to"):
        verbs(run, "export", "--to", target)
    assert verbs(run, "export", "--from", "6", "--to", target)[0] == 0
    _, told = verbs(run, "prune", "--keep", "1")
    assert [one["step"] for one in told["checkpoints"]] == [8, 6]
    assert list(told["damaged"]) == ["step-00000008"]
    assert verbs(run, "verify", "--from", "6")[0] == 0


def test_a_runs_checkpoints_are_listed_shown_verified_and_pruned(run: Path, tmp_path: Path) -> None:
    steps = [one["step"] for one in verbs(run, "list")[1]["checkpoints"]]
    assert steps == [8, 6, 4, 2]
    _, shown = verbs(run, "show", "--from", "4")
    assert (shown["step"], shown["samples"]) == (4, 104)
    assert shown["tensors"]["model.head.weight"] == {"dtype": "float32", "shape": [5, 9], "bytes": 180, "chunks": 1}
    assert verbs(run, "verify")[0] == 0
    newest = run / "checkpoints" / "step-00000008"
    (newest / "state.json").write_text("{}")
    code, told = verbs(run, "verify")
    assert code == 1
    assert [name for name, wrong in told["problems"].items() if wrong] == ["step-00000008"]
    _, told = verbs(run, "prune", "--keep", "1", "--keep-every", "4")
    assert [one["step"] for one in told["checkpoints"]] == [8, 6, 4]  # 8 is not whole: the newest whole one stays, too
    assert told["deleted"] == ["step-00000002"]
    for argv, says in ((("show", "--from", "5"), "--from: given 5"), (("list",), "which holds no checkpoint")):
        with pytest.raises(SpecError, match=says):
            verbs(run if argv[0] == "show" else tmp_path, *argv)


@pytest.mark.parametrize("damage", ["missing", *longer("manifest", "cut")])
def test_an_older_checkpoint_is_offered_and_never_taken_in_silence(damage: str, run: Path, tmp_path: Path) -> None:
    newest = run / "checkpoints" / "step-00000008"
    (file,) = newest.glob("*.safetensors")
    if damage == "manifest":
        (newest / "manifest.json").write_text("{}")
    elif damage == "missing":
        file.unlink()
    else:
        file.write_bytes(file.read_bytes()[:-1])
    (run / "checkpoints" / "step-00000006" / "state.json").unlink()  # not offered either
    target = str(tmp_path / "a.safetensors")
    for verb, more in (("export", ["--to", target]), ("show", [])):
        says = rf"step-00000008(?s:.*)try: phalanx checkpoint {verb} {run} --from 4{' --to ' + target if more else ''}$"
        with pytest.raises(CheckpointError, match=says):
            verbs(run, verb, *more)
        assert verbs(run, verb, "--from", "4", *more)[0] == 0
    listed = CliRunner().invoke(main, ["checkpoint", "list", str(run)], env={"COLUMNS": "300"})
    assert f"phalanx checkpoint verify {run} reads them, too" in listed.stdout
    pruned = CliRunner().invoke(main, ["checkpoint", "prune", str(run), "--keep", "1"], env={"COLUMNS": "300"})
    assert "step-00000008 is damaged: " in pruned.stdout
    assert "step-00000004 stays as the newest whole one" in pruned.stdout
