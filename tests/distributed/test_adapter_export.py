"""Adapters that any plan has trained, as peft and transformers read them: alone, and merged into their base."""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import torch.nn.functional as F
from click.testing import CliRunner
from safetensors.torch import load_file
from small import job as small_job
from test_lora import BATCH, adapted, base, tokens, trained
from torch import Tensor, nn

import phalanx as px
from longer import longer
from phalanx.cli.app import main
from phalanx.errors import SpecError

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")
STEPS = 2


@cache
def plain_loop() -> dict[str, Tensor]:
    """The adapters as peft has them after a loop as one writes it."""
    model = adapted().train()
    optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=1e-2)
    for rows in tokens().split(BATCH)[:STEPS]:
        logits = model(input_ids=rows).logits[:, :-1]
        optimizer.zero_grad()
        F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten()).backward()
        optimizer.step()
    return {name: value.detach().clone() for name, value in peft.get_peft_model_state_dict(model).items()}


def exported(run: px.Run, target: Path, *options: str) -> dict[str, Any]:
    answered = CliRunner().invoke(main, ["export", str(run.folder), str(target), "--json", *options])
    assert answered.exit_code == 0, answered.output
    return json.loads(answered.stdout)


def logits(model: nn.Module) -> Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=tokens()).logits


@pytest.mark.parametrize(
    "plan", ["fsdp=2 zero=3", "tp=2", *longer("dp=2 server=1", "fsdp=2 pp=2 micro=2", "threads=2")]
)
def test_peft_and_transformers_read_what_a_plan_has_trained(plan: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    run = trained(plan, tmp_path, steps=STEPS)
    expected = logits(run.model())
    told = exported(run, tmp_path / "adapter", "--adapter")
    found, wanted = load_file(tmp_path / "adapter" / "adapter_model.safetensors"), plain_loop()
    assert found.keys() == wanted.keys()
    assert (told["tensors"], told["bytes"]) == (len(wanted), sum(4 * one.numel() for one in wanted.values()))
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=2e-5)  # of steps of 1e-2 each
    loaded = peft.PeftModel.from_pretrained(base(), tmp_path / "adapter")
    assert torch.equal(logits(loaded), expected)
    assert not torch.equal(logits(base()), expected)

    exported(run, tmp_path / "merged", "--merged")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    own: Any = run.model()
    assert type(merged) is type(base())
    for name, value in own.merge_and_unload().state_dict().items():
        assert torch.equal(merged.state_dict()[name], value)

    for how, folder in ({"adapter": True}, "adapter"), ({"merged": True}, "merged"):  # by the job that is known
        run.save_pretrained(tmp_path / "again" / folder, **how)
        for file in (tmp_path / folder).glob("*.safetensors"):
            assert file.read_bytes() == (tmp_path / "again" / folder / file.name).read_bytes()


def test_a_merged_model_is_merged_before_it_is_converted(tmp_path: Path) -> None:
    run = trained("single", tmp_path, steps=STEPS)
    exported(run, tmp_path / "half", "--merged", "--dtype", "bfloat16")
    own: Any = run.model()
    wanted = own.merge_and_unload().bfloat16().state_dict()
    for name, value in load_file(tmp_path / "half" / "model.safetensors").items():
        assert torch.equal(value, wanted[name])
    assert json.loads((tmp_path / "half" / "config.json").read_text())["dtype"] == "bfloat16"
    exported(run, tmp_path / "small", "--adapter", "--dtype", "bfloat16")
    assert {one.dtype for one in load_file(tmp_path / "small" / "adapter_model.safetensors").values()} == {
        torch.bfloat16
    }


def said_in_options(run: px.Run, folder: Path, *options: str, out: str = "refused") -> str:
    """What the command says where it refuses."""
    answered = CliRunner().invoke(main, ["export", str(run.folder), str(folder / out), *options])
    assert answered.exit_code == 2
    assert not re.search(r"\b(?:adapter|merged)=True|save_pretrained|px\.load", answered.output)
    return answered.output


def several() -> nn.Module:
    """DoRA, a norm that is trained beside the adapters, and a second set of adapters that is not active."""
    torch.manual_seed(3)
    given: dict[str, Any] = {"target_modules": ["c_attn"], "fan_in_fan_out": True, "init_lora_weights": False}
    model: Any = peft.get_peft_model(base(), peft.LoraConfig(use_dora=True, modules_to_save=["ln_f"], **given))
    model.add_adapter("second", peft.LoraConfig(r=2, **given))
    return model


def test_every_set_of_adapters_and_what_is_trained_beside_them_is_written(tmp_path: Path) -> None:
    run = trained("dp=2", tmp_path, model=several, steps=STEPS)
    exported(run, tmp_path / "adapter", "--adapter")
    loaded = peft.PeftModel.from_pretrained(base(), tmp_path / "adapter")
    assert torch.equal(logits(loaded), logits(run.model()))
    loaded.load_adapter(str(tmp_path / "adapter" / "second"), "second")
    loaded.set_adapter("second")
    own: Any = run.model()
    own.set_adapter("second")
    assert torch.equal(logits(loaded), logits(own))


def trained_beside() -> nn.Module:
    model = adapted()
    model.get_submodule("base_model.model.transformer.ln_f").requires_grad_(True)
    return model


def test_what_an_adapter_alone_would_lose_is_refused(tmp_path: Path) -> None:
    run = trained("single", tmp_path, model=trained_beside, steps=1)
    for place in (run, px.load(run.folder)):  # by the job, and by what the checkpoint says
        with pytest.raises(SpecError, match=r"^adapter: .* merged=True.*\n.*modules_to_save=\['ln_f'\]"):
            place.save_pretrained(tmp_path / "adapter", adapter=True)
    said = said_in_options(run, tmp_path, "--adapter")
    assert "--adapter: given" in said
    assert "--merged" in said
    assert not (tmp_path / "adapter").exists()
    run.save_pretrained(tmp_path / "merged", merged=True)


def test_what_has_no_adapters_says_so(tmp_path: Path) -> None:
    run = px.fit(small_job(epochs=1), run=px.RunSpec(job="small", plan=px.Plan(), folder=tmp_path / "run"))
    for place in (run, px.load(run.folder)):
        with pytest.raises(SpecError, match=r"^run: .*without adapters(.|\n)*try: run\.save_pretrained\(target\)"):
            place.save_pretrained(tmp_path / "out", merged=True)
        with pytest.raises(SpecError, match=r"^target: given .*\.safetensors"):
            place.save_pretrained(tmp_path / "out.safetensors", merged=True)
    said = said_in_options(run, tmp_path, "--merged")
    assert "error: RUN: given" in said
    assert said.rstrip().endswith("try: phalanx export RUN OUT")
    assert "error: OUT: given" in said_in_options(run, tmp_path, "--merged", out="out.safetensors")
    with pytest.raises(SpecError, match="one of the two"):
        run.save_pretrained(tmp_path / "out", merged=True, adapter=True)
    assert "one of the two" in said_in_options(run, tmp_path, "--adapter", "--merged")


def plain_base() -> nn.Module:
    torch.manual_seed(2)
    model = nn.Sequential(nn.Embedding(32, 8), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 32))
    return peft.get_peft_model(model, peft.LoraConfig(target_modules=["1"]))  # pyright: ignore[reportArgumentType]


def test_a_base_that_only_a_job_can_build_needs_the_job(tmp_path: Path) -> None:
    how: dict[str, Any] = {"inputs": lambda batch: batch["input_ids"], "model": plain_base, "steps": 1}
    run = trained("single", tmp_path, **how)
    with pytest.raises(SpecError, match=r"px\.load\(folder, job\(\)\)\.save_pretrained\(target, adapter=True\)"):
        px.load(run.folder).save_pretrained(tmp_path / "out", adapter=True)
    assert said_in_options(run, tmp_path, "--adapter").rstrip().endswith("try: --job train.py")
    run.save_pretrained(tmp_path / "out", adapter=True)
    assert (tmp_path / "out" / "adapter_config.json").exists()
    with pytest.raises(SpecError, match=r"^merged: given"):
        run.save_pretrained(tmp_path / "merged", merged=True)
