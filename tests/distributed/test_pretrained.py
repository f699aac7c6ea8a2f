"""Initial values from safetensors, and the memory of ranks that begin: no rank holds the whole model."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.utils.data import Dataset

import phalanx as px
from law_rows import longer
from phalanx.errors import SpecError
from phalanx.preflight import forecast_here
from phalanx.train.build_model import begun, build_model

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))

from start_memory import MIB, Peaks, Stack, peaks
from start_memory import job as stack_job

PLANS = ("tp=2", "server=1 dp=2", *longer("pp=2", "dp=2", "fsdp=2 zero=1 micro=2", "threads=2"))
RANKS, WIDTH, BLOCKS = 4, 1024, 6
BLOCK = 4 * (WIDTH + 1) * WIDTH


class Tokens(Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": torch.randint(96, (12,), generator=torch.Generator().manual_seed(index))}


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    none = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 0, "eos_token_id": 0}
    return GPT2LMHeadModel(GPT2Config(vocab_size=96, n_positions=12, n_embd=96, n_layer=2, n_head=2, **none))


def job(**how: Any) -> px.Job:
    given: dict[str, Any] = {
        "model": gpt2,
        "data": Tokens,
        "loss": lambda output, batch: px.next_token_loss(output, batch["input_ids"]),
        "optimizer": lambda params: torch.optim.SGD(params, lr=0.1),
        "batch": 8,
        "steps": 3,
        **how,
    }
    return px.Job(**given)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Written by transformers: shards with an index, other values than the job's seed draws."""
    torch.manual_seed(77)
    path = tmp_path_factory.mktemp("pretrained")
    gpt2().save_pretrained(path, max_shard_size="200KB")
    return path


@pytest.fixture(scope="module")
def expected(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The losses of a run whose model transformers has loaded."""
    from transformers import GPT2LMHeadModel

    loaded = job(model=lambda: GPT2LMHeadModel.from_pretrained(folder))
    return px.fit(loaded, "single", folder=tmp_path_factory.mktemp("runs") / "run", forecast="none").losses


@pytest.mark.parametrize("plan", PLANS)
def test_a_run_begins_where_from_pretrained_does(plan: str, folder: Path, expected: list[float]) -> None:
    assert px.fit(job(initial=folder), plan, forecast="none").losses == pytest.approx(expected, rel=2e-6)


def test_a_proof_reads_the_values_by_itself(folder: Path) -> None:
    assert px.prove(job(initial=folder), "dp=2", steps=1).equal


def test_a_model_that_is_made_without_values_gets_them(folder: Path, expected: list[float]) -> None:
    def bare() -> nn.Module:
        with torch.device("meta"):
            return gpt2()

    for build in (build_model, lambda job: begun(job)[0]):
        module = build(job(model=bare, initial=folder))
        assert module.get_parameter("transformer.wte.weight") is module.get_parameter("lm_head.weight")
    run = px.fit(job(model=bare, initial=folder), "fsdp=2 zero=3", forecast="none")
    assert run.losses == pytest.approx(expected, rel=2e-6)


class WithHead(nn.Module):
    """A body under another name, as transformers nests one, and a head that was not trained before."""

    base_model_prefix = "body"

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
        self.head = nn.Linear(3, 2)


def with_head(tmp_path: Path) -> tuple[Callable[[], nn.Module], Path]:
    body = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    body[1].running_mean.fill_(0.5)
    save_file({**body.state_dict(), "pooler.weight": torch.ones(2)}, tmp_path / "model.safetensors")
    return WithHead, tmp_path / "model.safetensors"


def test_what_may_be_missing_or_left_over_is_said_by_name(tmp_path: Path) -> None:
    model, file = with_head(tmp_path)
    drawn = build_model(job(model=model))
    given = px.Pretrained(tmp_path, missing=("head.*",), unused=("pooler.*",))
    found, stored = build_model(job(model=model, initial=given)), load_file(file)
    assert torch.equal(found.get_parameter("body.0.weight"), stored["0.weight"])
    assert torch.equal(found.get_buffer("body.1.running_mean"), torch.full((3,), 0.5))
    assert torch.equal(found.get_parameter("head.weight"), drawn.get_parameter("head.weight"))
    with pytest.raises(SpecError, match=r"head\.bias, head\.weight.*pooler\.weight"):
        build_model(job(model=model, initial=tmp_path))


@pytest.mark.parametrize("name", ["first.weight", "again.weight"])
def test_of_tied_weights_any_name_will_do(name: str, tmp_path: Path) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.again = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
            self.again.weight = self.first.weight

    value = torch.arange(16.0).reshape(4, 4)
    save_file({name: value}, tmp_path / "model.safetensors")
    found = build_model(job(model=Tied, initial=tmp_path))
    assert torch.equal(found.get_parameter("first.weight"), value)
    assert found.get_parameter("again.weight") is found.get_parameter("first.weight")


def damaged(tmp_path: Path) -> dict[str, tuple[Path, str]]:
    """What is there → the path given, and what the error names."""
    torch.save(nn.Linear(4, 3).state_dict(), tmp_path / "pytorch_model.bin")
    (tmp_path / "cut.safetensors").write_bytes(b"\x10\x00\x00\x00\x00\x00\x00\x00{")
    save_file({"weight": torch.ones(3, 5), "bias": torch.ones(3)}, tmp_path / "other.safetensors")
    save_file({"weight": torch.ones(3, 4).int(), "bias": torch.ones(3)}, tmp_path / "whole.safetensors")
    save_file({"module.weight": torch.ones(3, 4), "module.bias": torch.ones(3)}, tmp_path / "wrapped.safetensors")
    (tmp_path / "sharded").mkdir()
    (tmp_path / "sharded" / ".metadata").touch()
    indices = {
        "outside": '{"weight_map": {"weight": "../other.safetensors"}}',
        "deep": "[" * 100_000,
        "list": '{"weight_map": [1]}',
        "lacking": json.dumps({"weight_map": {"weight": "a.safetensors", "more": "a.safetensors"}}),
        "gone": '{"weight_map": {"weight": "gone.safetensors"}}',
    }
    for name, text in indices.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors.index.json").write_text(text)
    save_file({"weight": torch.ones(3, 4)}, tmp_path / "lacking" / "a.safetensors")
    return {
        "nowhere": (tmp_path / "nowhere", "does not exist"),
        "a pickle": (tmp_path, r"to be unpickled(.|\n)*torch\.load\(.*pytorch_model\.bin"),
        "wrapped": (tmp_path / "wrapped.safetensors", r'removeprefix\("module\."\)'),
        "sharded": (tmp_path / "sharded", "dcp_to_torch_save"),
        "cut": (tmp_path / "cut.safetensors", "cut.safetensors"),
        "shape": (tmp_path / "other.safetensors", r"weight \[3, 4\] here, \[3, 5\] there"),
        "kind": (tmp_path / "whole.safetensors", "other shape or kind"),
        "outside": (tmp_path / "outside", "names '../other.safetensors'"),
        "deep": (tmp_path / "deep", "index"),
        "list": (tmp_path / "list", "index"),
        "lacking": (tmp_path / "lacking", "lacks more"),
        "gone": (tmp_path / "gone", "gone.safetensors"),
    }


def test_what_does_not_fit_is_refused_before_a_worker_starts(tmp_path: Path) -> None:
    for what, (path, says) in damaged(tmp_path).items():
        with pytest.raises(SpecError, match=says):
            px.fit(job(model=lambda: nn.Linear(4, 3), initial=path), "dp=2", folder=tmp_path / "run")
        assert not os.path.exists(tmp_path / "run"), what
    for given in (5, ""):
        with pytest.raises(SpecError, match=r"job\.initial"):
            job(initial=given)
    with pytest.raises(SpecError, match=r"px\.Pretrained\.missing"):
        px.Pretrained("x", missing="head")


SMALL = 3 * MIB  # what is no parameter: records of blocks, holes in the heap


@cache
def base(plan: str) -> Peaks:
    """The least that the plan needs on a rank with next to no model."""
    found = peaks(stack_job(16, 2), plan)
    return Peaks(start=min(one.start for one in found), whole=min(one.whole for one in found), private=0)


@pytest.mark.parametrize("zero", longer(3, 1, 2))
def test_a_rank_needs_what_was_forecast_from_its_first_line_on(zero: int) -> None:
    plan, blocks = f"fsdp={RANKS} zero={zero}", 12  # 48 MiB, 4 a block
    forecast = forecast_here(stack_job(WIDTH, blocks), px.Plan.parse(f"{plan} device=cpu"))["forecast"]
    held = blocks * BLOCK / (RANKS if zero == 3 else 1)
    assert forecast["parts"]["parameters"] == held
    assert forecast["start"] == held + (BLOCK if zero == 3 else 0)
    found = peaks(stack_job(WIDTH, blocks), plan)
    start, whole = (
        max(one.start for one in found) - base(plan).start,
        max(one.whole for one in found) - base(plan).whole,
    )
    assert held - SMALL <= start <= forecast["start"] + SMALL
    assert 0.8 * forecast["allocated"] <= whole <= 1.1 * forecast["allocated"] + SMALL


def test_no_rank_reads_more_than_it_keeps(tmp_path: Path) -> None:
    file, plan = tmp_path / "model.safetensors", f"fsdp={RANKS} zero=3"
    save_file(Stack(WIDTH, BLOCKS).state_dict(), file)
    found = peaks(replace(stack_job(WIDTH, BLOCKS), initial=file), plan)
    most = max(one.start for one in found) - base(plan).start
    assert BLOCKS * BLOCK / RANKS <= most <= BLOCKS * BLOCK / RANKS + 2 * BLOCK + SMALL
