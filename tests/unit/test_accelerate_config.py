"""The page on Accelerate's config leaves no key of it out, and every plan on it is one."""

from __future__ import annotations

import importlib
import inspect
import re
from dataclasses import fields
from pathlib import Path

import pytest

from phalanx.config import Plan

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "how-to" / "from-accelerate-config.md").read_text()
NEEDS = {"attention": "cp=2", "offload": "fsdp=2"}  # key → what it goes with alone


def test_every_key_that_accelerate_asks_for_is_on_the_page() -> None:
    pytest.importorskip("accelerate")
    args = importlib.import_module("accelerate.commands.config.config_args")
    asked = inspect.getsource(importlib.import_module("accelerate.commands.config.cluster"))
    keys = {one.name for kind in (args.ClusterConfig, args.SageMakerConfig) for one in fields(kind)}
    keys |= set(re.findall(r'(?:fsdp|deepspeed|mpirun)_config\["(\w+)"\]', asked))
    keys |= {f"dynamo_{name}" for name in re.findall(r'dynamo_config\[prefix \+ "(\w+)"\]', asked)}
    keys |= {f"megatron_lm_{name}" for name in re.findall(r'megatron_lm_config\[prefix \+ "(\w+)"\]', asked)}
    keys |= set(re.findall(r'parallelism_config\[prefix \+ "(\w+)"\]', asked))  # whose prefix is said once
    assert len(keys) > 70
    assert [key for key in sorted(keys) if not re.search(rf"(?<!\w){key}(?!\w)", PAGE)] == []


def test_every_plan_on_the_page_is_one() -> None:
    names = "|".join(one.name for one in fields(Plan))
    plans = set(re.findall(rf"[`\"]((?:(?:{names})=\S+? ?)+)[`\"]", PAGE))
    assert len(plans) > 20
    for plan in plans:
        Plan.parse(f"{NEEDS.get(plan.partition('=')[0], '')} {plan}".strip())


def test_the_config_on_the_page_is_one(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    found = re.search(r'title="default_config.yaml"\n(.*?)```', PAGE, re.DOTALL)
    assert found
    (tmp_path / "default_config.yaml").write_text(found[1])
    args = importlib.import_module("accelerate.commands.config.config_args")
    config = args.load_config_from_file(str(tmp_path / "default_config.yaml"))
    assert (config.num_processes, config.distributed_type, config.mixed_precision) == (2, "FSDP", "bf16")
