"""A model's own loss, a mean over unlike numbers of tokens: every plan gives that of the whole global batch."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import phalanx as px
from law_rows import longer
from phalanx.errors import LossError, RefusedError, SpecError

BATCH, STEPS, LENGTH, VOCABULARY = 8, 3, 12, 32
NONE = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 0, "eos_token_id": 0}


def causal() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=VOCABULARY, n_positions=16, n_embd=16, n_layer=2, n_head=2, **NONE)
    return GPT2LMHeadModel(config)


def bert(head: str, **how: Any) -> nn.Module:
    import transformers

    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    none = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config = transformers.BertConfig(vocab_size=VOCABULARY, max_position_embeddings=16, **sizes, **none, **how)
    return getattr(transformers, f"BertFor{head}")(config)


class Own(nn.Module):
    """Gives a dict with its loss, a mean over the targets above 0."""

    def __init__(self, extra: float = 0.0) -> None:
        super().__init__()
        self.embed, self.up, self.down = nn.Embedding(VOCABULARY, 16), nn.Linear(16, 32), nn.Linear(32, 16)
        self.head, self.extra = nn.Linear(16, VOCABULARY), extra

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.head(self.down(self.up(self.embed(input_ids)).tanh()))
        mean = nn.functional.cross_entropy(logits.flatten(0, 1), labels.clamp(min=0).flatten(), ignore_index=0)
        return {"loss": mean + self.extra * logits.softmax(-1).mean((0, 1)).square().sum(), "logits": logits}


class Rows:
    """Samples with 1 to 12 labels that count, and one of which no label does."""

    def __init__(self, of: str) -> None:
        self.of = of

    def __len__(self) -> int:
        return BATCH * STEPS

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        draw = torch.Generator().manual_seed(index)
        ids = torch.randint(1, VOCABULARY, (LENGTH,), generator=draw)
        if self.of == "sequence":
            return {"input_ids": ids, "labels": ids[0] % 3 if index % 5 else torch.tensor(-100)}
        counts = torch.arange(LENGTH) >= (index * 5) % LENGTH if index != 3 else torch.zeros(LENGTH, dtype=torch.bool)
        return {
            "input_ids": ids,
            "labels": ids.where(counts, -100) if self.of != "tokens" else (ids % 3).where(counts, -100),
        }


KINDS: dict[str, tuple[Callable[[], nn.Module], str, Any]] = {
    "causal": (causal, "ids", px.model_loss()),
    "masked": (lambda: bert("MaskedLM"), "ids", px.model_loss()),
    "tokens": (lambda: bert("TokenClassification", num_labels=3), "tokens", px.model_loss()),
    "sequence": (lambda: bert("SequenceClassification", num_labels=3), "sequence", px.model_loss()),
    "own": (Own, "ids", px.model_loss(count=lambda batch: (batch["labels"] > 0).sum())),
}


def job_of(kind: str, **how: Any) -> px.Job:
    model, rows, loss = KINDS[kind]

    def build() -> nn.Module:
        torch.manual_seed(5)
        return model()

    given: dict[str, Any] = {
        "model": build,
        "data": lambda: Rows(rows),
        "loss": loss,
        "optimizer": lambda params: torch.optim.SGD(params, lr=0.5),
        "batch": BATCH,
        "steps": STEPS,
        "shuffle": False,
        "unused": "allow",
        **how,
    }
    return px.Job(**given)


@cache
def plain_loop(kind: str) -> tuple[list[float], dict[str, Tensor]]:
    """A loop as one writes it: the model's own loss of each whole batch, in one forward."""
    model, rows, _ = KINDS[kind]
    torch.manual_seed(5)
    module = model().train()
    optimizer, losses, data = torch.optim.SGD(module.parameters(), lr=0.5), list[float](), Rows(rows)
    for step in range(STEPS):
        samples = [data[step * BATCH + row] for row in range(BATCH)]
        output = module(**{name: torch.stack([one[name] for one in samples]) for name in samples[0]})
        optimizer.zero_grad()
        output["loss"].backward()
        optimizer.step()
        losses.append(output["loss"].item())
    return losses, {name: value.detach().clone() for name, value in module.named_parameters()}


PLANS = ["single", "single micro=1", "dp=2", "dp=2 micro=1", "fsdp=2 zero=3", "tp=2", "pp=2 micro=2"]


@pytest.mark.parametrize(
    ("kind", "plan"),
    [
        *(("causal", "tp=2"), ("masked", "single micro=1"), ("sequence", "dp=2 micro=1"), ("own", "dp=2 micro=2")),
        *longer(
            *(
                (kind, plan)
                for kind in ("causal", "own")
                for plan in PLANS
                if (kind, plan) not in (("causal", "tp=2"), ("own", "tp=2"))
            )
        ),
        *longer(*((kind, plan) for kind in ("masked", "tokens", "sequence") for plan in ("single", "dp=2"))),
    ],
)
def test_every_plan_gives_the_loss_of_the_whole_batch(kind: str, plan: str, tmp_path: Path) -> None:
    losses, values = plain_loop(kind)
    spec = px.RunSpec(job=kind, plan=px.Plan.parse(plan), folder=tmp_path / "run", forecast="none")
    run = px.fit(job_of(kind), run=spec)
    assert run.losses == pytest.approx(losses, rel=3e-6)
    found = run.state_dict()
    for name, value in values.items():
        if name in found:  # of tied ones the first
            torch.testing.assert_close(found[name], value, rtol=1e-4, atol=3e-6)


def refused(tmp_path: Path, plan: str = "dp=2", **how: Any) -> str:
    spec = px.RunSpec(job="refused", plan=px.Plan.parse(plan), folder=tmp_path / "run", forecast="none")
    with pytest.raises((RefusedError, LossError)) as raised:
        px.fit(job_of("own", **how), run=spec)
    assert not (tmp_path / "run").exists()
    return str(raised.value)


def moe() -> nn.Module:
    from transformers import MixtralConfig, MixtralForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = MixtralConfig(vocab_size=VOCABULARY, num_key_value_heads=2, output_router_logits=True, **sizes)
    return MixtralForCausalLM(config)


@pytest.mark.parametrize(
    ("model", "loss", "why"),
    [
        (Own, px.model_loss(), "not known of a Own"),
        (moe, px.model_loss(), "a loss of its router"),
        (moe, px.model_loss(count=lambda batch: batch["labels"].numel()), "a loss of its router"),
        (lambda: Own(extra=10.0), KINDS["own"][2], "added up by counts"),
        (causal, px.model_loss(count=lambda batch: (batch["labels"] != -100).sum()), "added up by counts"),
    ],
)
def test_what_does_not_add_up_is_refused_before_a_process_starts(
    model: Any, loss: Any, why: str, tmp_path: Path
) -> None:
    text = refused(tmp_path, model=model, loss=loss)
    assert why in text
    assert "try: " in text


def test_a_loop_of_ones_own_refuses_a_loss_that_does_not_add_up() -> None:
    with pytest.raises(RefusedError, match=r"px\.model_loss"):
        px.build(job_of("own", loss=px.model_loss(count=lambda batch: len(batch["labels"]))), "single micro=4")
    px.build(job_of("own"), "single micro=4")


def test_a_model_that_is_given_no_labels_says_so(tmp_path: Path) -> None:
    text = refused(tmp_path, model=causal, loss=px.model_loss(), inputs=lambda batch: batch["input_ids"])
    assert (
        "the model's own loss is None in its CausalLMOutputWithCrossAttentions; the batch has input_ids, labels" in text
    )


def test_a_job_says_how_the_models_own_loss_is_asked_for() -> None:
    for wrong in ("model", px.model_loss):
        with pytest.raises(SpecError, match=r"try: loss=px.model_loss\(\)"):
            job_of("causal", loss=wrong)
    with pytest.raises(SpecError, match="loss_over"):
        job_of("causal", loss_over="batch")
    with pytest.raises(SpecError, match="a function of the batch"):
        px.model_loss(count=3)


def test_the_loss_is_found_in_every_form_of_output() -> None:
    mean, loss = torch.tensor(2.5), px.model_loss(count=lambda batch: 4)
    for output in ({"loss": mean}, (mean, None), mean):
        assert loss(output, {}).sum == 10
    with pytest.raises(LossError, match="a Tensor of shape \\(3,\\)"):
        loss({"loss": torch.zeros(3)}, {})
    nothing = px.model_loss(count=lambda batch: torch.tensor(0))(torch.tensor(float("nan")), {})
    assert nothing.sum == nothing.count == 0
