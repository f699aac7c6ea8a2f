"""The law on CUDA devices: plans for one, and for as many as there are."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from models import MODELS

from phalanx.config import Plan
from phalanx.verify import OneDevice, ReferenceRun

pytestmark = pytest.mark.gpu

ONE = ("micro=3", "micro=5 recompute=full", "micro=3 recompute=selective", "offload=optimizer")
TWO = (
    "dp=2",
    "dp=2 micro=3",
    "threads=2",
    "fsdp=2",
    "fsdp=2 zero=1",
    "fsdp=2 zero=2 micro=3",
    "fsdp=2 offload=parameters",
    "fsdp=2 zero=2 offload=optimizer",
)


@cache
def one_device(model: str, precision: str = "fp32") -> OneDevice:
    return OneDevice.run(MODELS[model](), 10, ReferenceRun(precision=precision, device="cuda"))


@pytest.mark.parametrize("plan", ONE)
@pytest.mark.parametrize("model", ["MLP", "own GPT", "HF GPT-2"])
def test_plans_for_one_device(model: str, plan: str) -> None:
    proof = one_device(model).prove(Plan.parse(f"{plan} device=cuda"))
    assert proof.equal, f"{proof.first}\n{proof.cause}"


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precision(precision: str) -> None:
    proof = one_device("own GPT", precision).prove(Plan.parse(f"micro=3 precision={precision} device=cuda"))
    assert proof.equal, f"{proof.first}\n{proof.cause}"


@pytest.mark.parametrize("plan", TWO)
@pytest.mark.parametrize("model", ["MLP", "own GPT"])
def test_plans_for_two_devices(model: str, plan: str) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    proof = one_device(model).prove(Plan.parse(f"{plan} device=cuda"))
    assert proof.equal, f"{proof.first}\n{proof.cause}"
