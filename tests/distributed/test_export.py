"""A checkpoint's model as others read it: ``from_pretrained``, ``load_state_dict`` and a job's initial values."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file
from small import job as small_job
from test_pretrained import Tokens, gpt2, job

import phalanx as px
from longer import longer
from phalanx.checkpoint import ExportForm, export, save
from phalanx.cli.app import main
from phalanx.errors import CheckpointError, SpecError

PLANS = ("tp=2", "server=1 dp=2", *longer("single", "fsdp=2", "pp=2"))


def trained(plan: str, folder: Path, **how: Any) -> px.Run:
    return px.fit(job(**how), run=px.RunSpec(job="gpt2", plan=px.Plan.parse(plan), folder=folder))


@pytest.mark.parametrize("plan", PLANS)
def test_transformers_reads_what_any_plan_saved(plan: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    run = trained(plan, tmp_path / "run", evaluate=Tokens)
    done = export(run.folder / "checkpoints" / "step-00000003", tmp_path / "hf", ExportForm(shard=200_000))
    assert done.configured
    assert len(done.files) > 4
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    assert type(model) is type(gpt2())
    ids = torch.stack([Tokens()[index]["input_ids"] for index in range(64)])
    with torch.no_grad():
        loss = px.next_token_loss(model(ids), ids)
    assert run.evaluation is not None
    assert float(loss.sum / loss.count) == pytest.approx(run.evaluation["loss"], rel=1e-6)


def test_one_file_loads_into_a_plain_model(tmp_path: Path) -> None:
    spec = px.RunSpec(job="small", plan=px.Plan.parse("fsdp=3"), folder=tmp_path / "run")
    run = px.fit(small_job(epochs=1), run=spec)
    answered = CliRunner().invoke(main, ["checkpoint", "export", str(run.folder), "--to", "m.safetensors", "--json"])
    told = json.loads(answered.stdout)
    assert told["tensors"] == 8
    model = small_job().model()
    model.load_state_dict(load_file("m.safetensors"))
    half = export(Path(told["from"]), tmp_path / "half.safetensors", ExportForm(dtype=torch.bfloat16))
    assert 2 * half.nbytes == told["bytes"]
    for name, value in load_file(tmp_path / "half.safetensors").items():
        assert torch.equal(value, model.state_dict()[name].bfloat16())


def test_the_index_says_where_each_tensor_is_and_how_many_bytes_all_have(tmp_path: Path) -> None:
    tensors = {"model.a": torch.ones(5, 3), "model.b": torch.ones(7).bfloat16(), "optimizer.a": torch.ones(9)}
    path = save(tmp_path / "checkpoints", step=1, tensors=tensors, state={})
    export(path, tmp_path / "out", ExportForm(shard=60))
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["metadata"] == {"total_size": 4 * 15 + 2 * 7}
    assert len(set(index["weight_map"].values())) == 2
    for name, file in index["weight_map"].items():
        assert torch.equal(load_file(tmp_path / "out" / file)[name], tensors[f"model.{name}"])


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


def test_the_way_on_from_a_damaged_checkpoint_is_the_same_export(run: Path, tmp_path: Path) -> None:
    (file,) = (run / "checkpoints/step-00000008").glob("*.safetensors")
    file.write_bytes(file.read_bytes()[:-5])
    with pytest.raises(CheckpointError, match=r"try: phalanx export \S+ --from 6 \S+ --dtype bfloat16 --merged$"):
        CliRunner().invoke(
            main,
            ["export", str(run), str(tmp_path / "out"), "--merged", "--dtype", "bfloat16"],
            standalone_mode=False,
            catch_exceptions=False,
        )


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


@pytest.mark.parametrize("damage", ["manifest", "missing", "cut"])
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


def test_where_the_target_of_an_export_is_to_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = save(Path("run/checkpoints"), step=1, tensors={"model.a": torch.ones(5)}, state={})
    assert verbs(Path("run"), "export", "--to", "new/one/a.safetensors")[0] == 0
    assert load_file("new/one/a.safetensors")["a"].tolist() == [1.0] * 5
    Path("train.py").touch()
    Path("folder-1").mkdir()
    Path("folder").mkdir()
    for target, free in {
        "train.py": "train.safetensors",
        "folder": "folder-2",
        "new/one/a.safetensors": "new/one/a-1.safetensors",
        "train.py/a": "train/a",
    }.items():
        with pytest.raises(SpecError) as refused:
            verbs(Path("run"), "export", "--to", target)
        assert refused.value.problems[0].fix == free
    (file,) = path.glob("*.safetensors")
    file.write_bytes(file.read_bytes()[:-4] + b"\0\0\0\0")
    with pytest.raises(CheckpointError, match="has changed"):
        verbs(Path("run"), "export", "--to", "other/one/b.safetensors")
    assert not Path("other").exists()


def test_a_url_is_no_folder() -> None:
    with pytest.raises(SpecError, match=r"s3://bk/mir, which is a URL(?s:.*)--resume auto --mirror s3://bk/mir"):
        verbs("s3://bk/mir", "list")
