"""Adapters by peft over a frozen model: what a plain loop gives under every plan, alone or merged into their base."""

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
from torch import Tensor, nn

import phalanx as px
from law_rows import longer
from phalanx.cli.app import main
from phalanx.errors import SpecError
from phalanx.forecast.layouts import Layouts
from phalanx.forecast.memory import memory
from phalanx.forecast.presets import PHALANX
from phalanx.report.summary import summarise
from phalanx.trace import ModelCall

# peft asks transformers under a name that transformers is about to rename
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")
BATCH, STEPS, VOCABULARY, LENGTH = 8, 3, 32, 12


def base() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    none = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 0, "eos_token_id": 0}
    torch.manual_seed(5)
    return GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, n_positions=16, n_embd=16, n_layer=2, n_head=2, **none))


def adapted(**how: Any) -> nn.Module:
    """A small GPT-2 with adapters, none of which begins with zeros."""
    targets = ["c_attn", "c_proj", "c_fc"]
    given = {"r": 4, "lora_alpha": 8, "target_modules": targets, "fan_in_fan_out": True, "task_type": "CAUSAL_LM"}
    return peft.get_peft_model(base(), peft.LoraConfig(init_lora_weights=False, **given, **how))


def tokens() -> Tensor:
    return torch.randint(VOCABULARY, (BATCH * STEPS, LENGTH), generator=torch.Generator().manual_seed(1))


def lora_job(**how: Any) -> px.Job:
    given: dict[str, Any] = {
        "model": adapted,
        "data": lambda: [{"input_ids": row} for row in tokens()],
        "loss": lambda output, batch: px.next_token_loss(output, batch["input_ids"]),
        "optimizer": lambda params: torch.optim.AdamW(params, lr=1e-2),
        "batch": BATCH,
        "steps": STEPS,
        "shuffle": False,
        **how,
    }
    return px.Job(**given)


@cache
def plain_loop() -> tuple[list[float], dict[str, Tensor]]:
    """Losses and values of a training loop as one writes it."""
    model = adapted().train()
    learning = [one for one in model.parameters() if one.requires_grad]
    optimizer, losses = torch.optim.AdamW(learning, lr=1e-2), list[float]()
    for rows in tokens().split(BATCH):
        logits = model(input_ids=rows).logits[:, :-1]
        loss = F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, {name: value.detach().clone() for name, value in model.named_parameters()}


def trained(plan: str, folder: Path, **how: Any) -> px.Run:
    spec = px.RunSpec(job="lora", plan=px.Plan.parse(plan), folder=folder / "run", forecast="none")
    return px.fit(lora_job(**how), run=spec)


def exported(run: px.Run, target: Path, *options: str) -> dict[str, Any]:
    answered = CliRunner().invoke(main, ["export", str(run.folder), str(target), "--json", *options])
    assert answered.exit_code == 0, answered.output
    return json.loads(answered.stdout)


def logits(model: nn.Module) -> Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=tokens()).logits


@pytest.mark.parametrize(
    "plan",
    ["tp=2", *longer("fsdp=2 zero=3 micro=2", "pp=2 micro=2", "dp=2 server=1", "threads=2", "fsdp=2 pp=2 micro=2")],
)
def test_every_plan_gives_what_a_plain_loop_gives(plan: str, tmp_path: Path) -> None:
    assert_trained(trained(plan, tmp_path))


def assert_trained(run: px.Run) -> None:
    losses, values = plain_loop()
    assert run.losses == pytest.approx(losses, rel=2e-6)
    found = run.state_dict()
    begun = dict(adapted().named_parameters())
    for name, value in values.items():
        if begun[name].requires_grad:
            assert not torch.equal(value, begun[name])
            torch.testing.assert_close(found[name], value, rtol=0, atol=2e-5)  # of steps of 1e-2 each
        else:
            assert torch.equal(found[name], begun[name])


@pytest.mark.parametrize(("plan", "share"), [("dp=2", 1), *longer(("single", 1), ("fsdp=2 zero=1", 2), ("fsdp=2", 2))])
def test_a_rank_holds_optimizer_state_of_adapters_alone(plan: str, share: int, tmp_path: Path) -> None:
    """And what peft and transformers read of it: adapters alone, and merged into their base."""
    run = trained(plan, tmp_path)
    assert_trained(run)
    learning = [one for one in adapted().parameters() if one.requires_grad]
    moments = 2 * 4 * sum(one.numel() for one in learning) / share
    for parts in summarise(run.folder).memory:  # AdamW counts its steps for each tensor, too
        assert 0 <= parts["optimizer"] - moments <= 4 * len(learning)
    rows = tokens()[:2]
    profile = ModelCall(
        module=adapted(), args=(), kwargs={"input_ids": rows}, batch=rows, loss=lambda output, _: output.logits.mean()
    ).profile()
    layouts = Layouts.of([px.Plan.parse(plan)], BATCH, LENGTH)
    assert float(memory(profile, layouts, PHALANX, px.Plan.parse(plan).precision, 8.0).optimizer[0]) == moments
    assert_exports(run, tmp_path)


def assert_exports(run: px.Run, folder: Path) -> None:
    from transformers import AutoModelForCausalLM

    expected = logits(run.model())
    told = exported(run, folder / "adapter", "--adapter")
    found = load_file(folder / "adapter" / "adapter_model.safetensors")
    assert (told["tensors"], told["bytes"]) == (len(found), sum(4 * one.numel() for one in found.values()))
    loaded = peft.PeftModel.from_pretrained(base(), folder / "adapter")
    assert torch.equal(logits(loaded), expected)
    assert not torch.equal(logits(base()), expected)

    exported(run, folder / "merged", "--merged")
    merged = AutoModelForCausalLM.from_pretrained(folder / "merged")
    own: Any = run.model()
    assert type(merged) is type(base())
    for name, value in own.merge_and_unload().state_dict().items():
        assert torch.equal(merged.state_dict()[name], value)

    for how, there in ({"adapter": True}, "adapter"), ({"merged": True}, "merged"):  # by the job that is known
        run.save_pretrained(folder / "again" / there, **how)
        for file in (folder / there).glob("*.safetensors"):
            assert file.read_bytes() == (folder / "again" / there / file.name).read_bytes()
    # Of a model with adapters from_pretrained would find no name, so a folder does not say that it could
    assert not run.save_pretrained(folder / "whole").configured


def test_a_merged_model_is_merged_before_it_is_converted(tmp_path: Path) -> None:
    run = trained("single", tmp_path, steps=2)
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
    run = trained("dp=2", tmp_path, model=several, steps=2)
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
    said_in_options(run, tmp_path, "--adapter", "--merged")
