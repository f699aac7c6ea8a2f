"""Expert parallelism: experts dealt out over ranks compute what all of them compute on one device."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import phalanx as px
from law_rows import longer
from phalanx.comm import Mesh, Place, default_process_group
from phalanx.config import Plan
from phalanx.demo.jobs.gpt import Size
from phalanx.errors import RefusedError
from phalanx.launch.local import launch
from phalanx.parallel import Example
from phalanx.parallel.expert import by_rows, deal_out, find
from phalanx.parallel.local_shards import Axis
from phalanx.verify import OneDevice, ReferenceRun

_SPEC = importlib.util.spec_from_file_location("moe", Path(__file__).parents[2] / "examples" / "moe.py")
assert _SPEC is not None
assert _SPEC.loader is not None
moe: Any = sys.modules.setdefault("moe", importlib.util.module_from_spec(_SPEC))
_SPEC.loader.exec_module(moe)

SIZE = Size(layers=2, width=16, heads=2, context=12)


def tiny() -> px.Job:
    """The example, tiny: 8 experts a layer, samples that do not divide over three ranks."""
    table = px.Table(tokens=torch.randint(0, 256, (40, 13), generator=torch.Generator().manual_seed(0)))
    short = replace(moe.job(), model=lambda: moe.MoE(SIZE), data=lambda: table, batch=8, steps=10)
    return replace(short, evaluate=None, metrics=None)


@pytest.fixture(scope="module")
def one_device() -> OneDevice:
    return OneDevice.run(tiny(), 3, ReferenceRun(device="cpu"))


@pytest.mark.parametrize(
    "plan",
    ["ep=3 recompute=full", *longer("ep=2 tp=2 sequence=true", "ep=2 fsdp=2 zero=1", "ep=2 cp=2 fsdp=2", "tp=2")],
)
def test_a_mixture_of_experts_equals_one_device(one_device: OneDevice, plan: str) -> None:
    proof = one_device.prove(Plan.parse(f"{plan} device=cpu"))
    assert proof.equal, proof.first
    assert max(proof.largest["loss"], proof.largest["gradient"]) < 1e-5
    assert proof.notes == []


def test_ranks_and_experts_without_tokens() -> None:
    """All tokens choose experts 0 and 1, of which rank 0 holds both; the others get gradients of zero."""

    def work(place: Place, report: Any) -> dict[str, Any]:
        torch.manual_seed(0)
        experts = moe.Experts(4, 6)
        x, weight = torch.randn(6, 4), torch.rand(6, 2)
        chosen = torch.tensor([[0, 1]]).expand(6, 2)
        outcome: dict[str, Any] = {}
        whole_x = x.clone().requires_grad_()
        whole = experts(whole_x, chosen, weight)
        whole.square().sum().backward()
        expected = experts.up.grad
        with default_process_group(place, torch.device("cpu")):
            plan = Plan(ep=3)
            found = find(experts, Example(args=(x, chosen, weight), kwargs={}, batch=None, loss=lambda *_: 0), plan)
            experts.zero_grad()
            deal_out(experts, found, plan, Mesh(plan, place.rank), Axis("tp", size=1, rank=0, group=None))
            mine = slice(2 * place.rank, 2 * place.rank + 2)
            here = x[mine].clone().requires_grad_()
            result = experts(here, chosen[mine], weight[mine])
            result.square().sum().backward()
            start, stop = ((0, 3), (3, 6), (6, 8))[place.rank]
            assert here.grad is not None
            outcome["value"] = float((result - whole[mine]).detach().abs().max())
            outcome["input"] = float((here.grad - whole_x.grad[mine]).abs().max())
            outcome["weights"] = float((experts.up.grad - expected[start:stop]).abs().max())
            outcome["count"] = [len(experts.up), len(experts.down)]
        return outcome

    outcomes = launch(work, 3)
    assert [one.pop("count") for one in outcomes] == [[3, 3], [3, 3], [2, 2]]
    assert all(value < 1e-5 for one in outcomes for value in one.values()), outcomes


class Counted(nn.Module):
    """Experts that count themselves by attributes, two of which mean something else."""

    def __init__(self, count: int = 4) -> None:
        super().__init__()
        self.num, self.width, self.limit = count, count, count
        self.table = nn.Parameter(torch.randn(count, count, count))
        self.scale = nn.Parameter(torch.rand(count))

    def forward(self, x: Tensor, weight: Tensor, index: Tensor) -> Tensor:
        assert self.table.shape[0] == self.num
        assert x.shape[-1] == self.width
        one_hot = nn.functional.one_hot(index, self.num).to(x.dtype) * weight.unsqueeze(-1)
        made = torch.einsum("nd,eod->neo", x, self.table) * self.scale[:, None]
        return torch.einsum("nke,neo->no", one_hot, made)


def found_in(experts: nn.Module, *args: Tensor, ep: int = 2) -> Any:
    return find(experts, Example(args=args, kwargs={}, batch=None, loss=lambda *_: 0), Plan(ep=ep))


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_which_numbers_count_experts_is_found_by_trying(device: str) -> None:
    args = (torch.randn(5, 4), torch.rand(5, 2), torch.randint(0, 4, (5, 2)))
    with torch.device(device):
        module = Counted()
    before = dict(module.named_parameters())
    (experts,) = found_in(module, *args)
    assert {name: id(one) for name, one in module.named_parameters()} == {name: id(one) for name, one in before.items()}
    assert module.training
    assert experts.leaves == (0, 2, 1)
    assert experts.parameters == ("table", "scale")
    assert "num" in experts.numbers
    assert "width" not in experts.numbers


FAMILIES = {
    "Mixtral": {"num_local_experts": 4, "intermediate_size": 24},
    "Qwen3Moe": {"num_experts": 4, "moe_intermediate_size": 24, "decoder_sparse_step": 1},
    "GptOss": {"num_local_experts": 4, "intermediate_size": 24},
}


@pytest.mark.parametrize(
    ("family", "way"),
    [("Mixtral", "eager"), ("Qwen3Moe", "grouped_mm"), ("GptOss", "batched_mm"), *longer(("GptOss", "eager"))],
)
def test_experts_of_transformers(family: str, way: str) -> None:
    transformers = pytest.importorskip("transformers")
    common = {"hidden_size": 16, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8}
    config = getattr(transformers, f"{family}Config")(
        num_hidden_layers=2, vocab_size=32, num_experts_per_tok=2, **common, **FAMILIES[family]
    )
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    model.set_experts_implementation(way)
    ids = torch.randint(0, 32, (2, 6))
    example = Example(args=(ids,), kwargs={}, batch=ids, loss=px.next_token_loss)
    found = find(model, example, Plan(ep=2))
    assert [one.name for one in found] == [f"model.layers.{layer}.mlp.experts" for layer in range(2)]
    assert {"gate_up_proj", "down_proj"} <= set(found[0].parameters)
    before = model(ids).logits
    by_rows(model, found)
    torch.testing.assert_close(model(ids).logits, before)


class Averaged(Counted):
    def forward(self, x: Tensor, weight: Tensor, index: Tensor) -> Tensor:
        return super().forward(x, weight / weight.sum(-1, keepdim=True), index)


X = torch.randn(5, 4)
ROUTED = (X, torch.rand(5, 2), torch.tensor([[0, 1]]).expand(5, 2))


@pytest.mark.parametrize(
    ("experts", "args", "ep", "said", "fix"),
    [
        (lambda: nn.Linear(4, 4), (X,), 2, "without experts", "dp=2"),
        (Averaged, ROUTED, 2, "add up", "dp=2"),
        (lambda: Averaged().to("meta"), ROUTED, 2, "add up", "dp=2"),
        (Counted, ROUTED, 6, "4 experts", "dp=6"),
        (Counted, ROUTED, 8, "4 experts", "dp=2 ep=4"),
    ],
)
def test_what_cannot_be_dealt_out_is_named(
    experts: Callable[[], nn.Module], args: tuple[Tensor, ...], ep: int, said: str, fix: str
) -> None:
    with pytest.raises(RefusedError) as caught:
        found_in(experts(), *args, ep=ep)
    (problem,) = caught.value.problems
    assert said in problem.given
    assert problem.fix == fix
