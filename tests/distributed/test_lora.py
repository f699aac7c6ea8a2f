"""Adapters by peft over a frozen model: every plan gives what a plain PyTorch loop gives."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import phalanx as px
from longer import longer
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


@pytest.mark.parametrize(
    "plan",
    [
        "fsdp=2 zero=3 micro=2",
        "tp=2",
        "pp=2 micro=2",
        *longer(
            "single",
            "dp=2 server=1",
            "dp=2",
            "fsdp=2 zero=1 micro=2",
            "fsdp=2 zero=2 micro=2",
            "dp=2 tp=2",
            "threads=2",
            "single recompute=full",
            "fsdp=2 offload=optimizer",
            "fsdp=2 pp=2 micro=2",
        ),
    ],
)
def test_every_plan_gives_what_a_plain_loop_gives(plan: str, tmp_path: Path) -> None:
    losses, values = plain_loop()
    run = trained(plan, tmp_path)
    assert run.losses == pytest.approx(losses, rel=2e-6)
    found = run.state_dict()
    begun = dict(adapted().named_parameters())
    for name, value in values.items():
        if begun[name].requires_grad:
            assert not torch.equal(value, begun[name])
            torch.testing.assert_close(found[name], value, rtol=0, atol=2e-5)  # of steps of 1e-2 each
        else:
            assert torch.equal(found[name], begun[name])


@pytest.mark.parametrize(("plan", "share"), [("fsdp=2 zero=1", 2), *longer(("single", 1), ("dp=2", 1), ("fsdp=2", 2))])
def test_a_rank_holds_optimizer_state_of_adapters_alone(plan: str, share: int, tmp_path: Path) -> None:
    learning = [one for one in adapted().parameters() if one.requires_grad]
    moments = 2 * 4 * sum(one.numel() for one in learning) / share
    ranks = summarise(trained(plan, tmp_path).folder).memory
    for parts in ranks:  # AdamW counts its steps for each tensor, too
        assert 0 <= parts["optimizer"] - moments <= 4 * len(learning)
    rows = tokens()[:2]
    profile = ModelCall(
        module=adapted(), args=(), kwargs={"input_ids": rows}, batch=rows, loss=lambda output, _: output.logits.mean()
    ).profile()
    layouts = Layouts.of([px.Plan.parse(plan)], BATCH, LENGTH)
    assert float(memory(profile, layouts, PHALANX, px.Plan.parse(plan).precision, 8.0).optimizer[0]) == moments


@pytest.mark.parametrize("plan", ["fsdp=2 micro=2", *longer("single")])
def test_peft_and_transformers_read_what_was_trained(plan: str, tmp_path: Path) -> None:
    from transformers import GPT2LMHeadModel

    run = trained(plan, tmp_path)
    model, rows = run.model(), tokens()
    with torch.no_grad():
        expected = model(rows).logits
        model.save_pretrained(tmp_path / "adapter")
        loaded = peft.PeftModel.from_pretrained(base(), tmp_path / "adapter").eval()
        assert torch.equal(loaded(rows).logits, expected)
        assert not torch.equal(base().eval()(rows).logits, expected)
        together = model.merge_and_unload()
        together.save_pretrained(tmp_path / "merged")
        merged = GPT2LMHeadModel.from_pretrained(tmp_path / "merged").eval()
        torch.testing.assert_close(merged(rows).logits, expected, rtol=1e-4, atol=1e-5)
    for name, value in together.state_dict().items():
        assert torch.equal(merged.state_dict()[name], value)
    # Of a model with adapters from_pretrained would find no name, so a folder does not say that it could
    assert not run.save_pretrained(tmp_path / "whole").configured
