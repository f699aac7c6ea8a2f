"""Kinds of devices: each is one file, and no other file of the product names one."""

from __future__ import annotations

import ast
import importlib
import importlib.metadata
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from phalanx.config import Device, Job, Plan
from phalanx.device_kinds import (
    DeviceKind,
    accelerator,
    accelerator_count,
    hardware_names,
    host,
    kind_named,
    kind_names,
    kind_of,
    kind_of_hardware,
    register,
    registered,
)
from phalanx.device_kinds import registry as kinds_registry
from phalanx.device_kinds.registry import automatic_kind
from phalanx.errors import SpecError
from phalanx.parallel import check, device_kind
from phalanx.parallel.context.flash_block import kernel_for
from phalanx.train.uneven_shares import MemoryRoom
from stand_in_kind import KIND

pytestmark = pytest.mark.quick
SOURCE = Path(__file__).resolve().parents[2] / "src" / "phalanx"
OWN = SOURCE / "device_kinds" / "kinds"
BUILT_IN = ("cpu", "cuda", "mps", "tpu", "xpu")
LATER = {"cuda": ("cuda", "nccl", "rocm", "hip"), "mps": ("mps",), "tpu": ("tpu",), "xpu": ("xpu", "xccl")}
"""What an accelerator, its collectives and its makers are called; the host's cores are no kind among others."""


def words_in(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Every name and text of a file with its line; texts that stand for nothing, such as docstrings, are left out."""
    spoken = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if id(node) in spoken:
            continue
        line = getattr(node, "lineno", 0)
        for name in ("id", "attr", "name", "asname", "arg", "module"):
            if isinstance(value := getattr(node, name, None), str):
                yield line, value
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield line, node.value


def named_in(text: str, names: tuple[str, ...]) -> list[str]:
    """The lines of a program that name one of these kinds, as ``line: word``."""
    pattern = re.compile(rf"(?<![a-z])({'|'.join(names)})(?![a-z])", re.IGNORECASE)
    tree = ast.parse(text if pattern.search(text) else "")
    return [f"{line}: {word[:60]!r}" for line, word in words_in(tree) if pattern.search(word)]


class TestOneFileAKind:
    def test_no_other_file_names_one(self) -> None:
        names = tuple(name for names in LATER.values() for name in names)
        files = [path for path in sorted(SOURCE.rglob("*.py")) if OWN not in path.parents]
        found = {
            str(path.relative_to(SOURCE)): [line.partition(": ")[2] for line in lines]
            for path in files
            if (lines := named_in(path.read_text(), names))
        }
        assert found == {}

    def test_a_kinds_file_names_itself_alone(self) -> None:
        for kind in BUILT_IN:
            others = tuple(name for other, names in LATER.items() if other != kind for name in names)
            found = named_in((OWN / f"{kind}.py").read_text(), others)
            # torch keeps the switches of all devices under one kind's name
            assert [line for line in found if not (kind == "cpu" and line.endswith(" 'cuda'"))] == [], kind
        assert named_in("import torch\ntorch.cuda.synchronize()", ("cuda", "nccl"))

    def test_the_files_are_the_kinds(self) -> None:
        assert tuple(sorted(path.stem for path in OWN.glob("[a-z]*.py"))) == BUILT_IN == kind_names()

    @pytest.mark.parametrize("name", BUILT_IN)
    def test_each_is_called_as_its_file(self, name: str) -> None:
        kind = importlib.import_module(f"phalanx.device_kinds.kinds.{name}").KIND
        assert isinstance(kind, DeviceKind)
        assert (kind.name, kind.torch_type) == (name, name)
        assert name in kind.hardware
        assert kind is kind_named(name) is kind_of(name) is kind_of(f"{name}:0") is kind_of_hardware(name)
        assert not (kind.streams and kind.on_host)
        assert kind.lost_peer == "" or re.compile(kind.lost_peer)
        compile(kind.listing, name, "exec")
        assert {*kind.versions} <= {kind.name, kind.backend}


class TestThisMachine:
    """What holds where there is no accelerator."""

    @pytest.fixture(autouse=True)
    def _without(self) -> None:
        if torch.accelerator.device_count():
            pytest.skip("there is an accelerator")

    def test_the_first_with_enough_is_taken(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
        kind = kind_named("cuda")
        assert (accelerator(), accelerator_count()) == (kind, 4)
        assert [automatic_kind(devices) for devices in (1, 4, 5)] == [kind, kind, host()]


class TestOpen:
    """A program brings a kind of its own."""

    def test_a_plan_takes_it_by_its_name(self) -> None:
        with registered(KIND):
            plan = Plan.parse("dp=2 device=standin")
            assert str(plan) == "dp=2 device=standin"
            assert device_kind(plan) == "standin"
            assert kind_named("standin") is KIND
            assert "standin" in hardware_names()
            assert Device(name="x", kind="standin", peak={"fp32": 1.0}, memory=1, bandwidth=1.0).kind == "standin"
        assert "standin" not in kind_names()

    def test_a_name_that_nobody_knows_is_refused_with_those_there_are(self) -> None:
        with pytest.raises(SpecError) as caught:
            Plan.parse("dp=2 device=standin")
        (problem,) = caught.value.problems
        assert (problem.where, problem.given) == ("plan.device", "device=standin")
        assert problem.allowed == "auto, cpu, cuda, mps, tpu, xpu"
        assert problem.fix == "device=auto"

    def test_names_are_taken_once(self) -> None:
        for name in ("cuda", "auto"):
            with pytest.raises(ValueError, match=name):
                register(type("Other", (type(KIND),), {"name": name})())
        with registered(KIND):
            register(KIND)  # the same again
            with pytest.raises(ValueError, match="standin"):
                register(type(KIND)())

    def test_an_installed_package_brings_one(self, monkeypatch: pytest.MonkeyPatch) -> None:
        asked: list[str] = []

        def entry_points(*, group: str, name: str) -> list[Any]:
            asked.append(name)
            return [SimpleNamespace(load=lambda: KIND)] if (group, name) == ("phalanx.device_kinds", "standin") else []

        monkeypatch.setattr(importlib.metadata, "entry_points", entry_points)
        monkeypatch.setattr(kinds_registry, "_added", {})
        assert Plan.parse("device=standin").device == "standin"
        assert kind_named("standin") is KIND
        assert Plan.parse("device=cpu").device == "cpu"
        assert asked == ["standin"]  # only for a name that is not here


class TestRefused:
    """Before a process starts."""

    @pytest.fixture
    def job(self) -> Job:
        unused: Any = print
        return Job(model=unused, data=unused, loss=unused, optimizer=unused, batch=64, steps=1)

    def test_a_package_that_is_missing_is_named(self, job: Job) -> None:
        (problem,) = check(job, Plan.parse("dp=2 device=tpu"))
        assert problem.where == "plan.device"
        assert "pip install torch_tpu libtpu" in problem.given
        assert problem.fix == "dp=2 device=cpu"

    def test_a_kind_of_which_there_is_one(self, job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(type(kind_named("mps")), "count", lambda self: 1)
        for plan in ("dp=2", "fsdp=2 zero=1", "tp=2", "pp=2", "threads=2"):
            problem = next(one for one in check(job, Plan.parse(f"{plan} device=mps")) if one.where == "plan.device")
            assert "device=mps for 2 replicas" in problem.given
        assert check(job, Plan.parse("device=mps")) == []

    def test_too_few_are_counted(self, job: Job) -> None:
        (problem,) = check(job, Plan.parse("dp=2 device=xpu"))
        assert problem.given == "device=xpu for 2 replicas on this machine; XPU devices here: 0"


class TestFacts:
    def test_a_plans_word_decides_between_kinds_of_one_type(self) -> None:
        with registered(KIND):
            assert kind_of(torch.device("cpu"), "standin") is KIND
            assert kind_of(torch.device("cpu"), "auto") is host()
            assert kind_of(torch.device("cpu"), "cuda") is host()


class TestCuda:
    """What is asked of torch.cuda, on a machine without: each answer is torch's own."""

    @pytest.fixture
    def asked(self, monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
        asked: list[tuple[Any, ...]] = []

        def answers(name: str, answer: Any) -> None:
            monkeypatch.setattr(torch.cuda, name, lambda *args, **how: (asked.append((name, *args, how)), answer)[1])

        for name in ("device_count", "current_device", "max_memory_allocated", "memory_allocated", "memory_reserved"):
            answers(name, len(name))
        for name in ("is_initialized", "_is_in_bad_fork", "set_device", "synchronize"):
            answers(name, True)
        for name in ("Event", "Stream", "stream", "current_stream"):
            answers(name, name)
        answers("mem_get_info", (5, 80))
        monkeypatch.setattr(torch.cuda, "default_generators", ("first", "second"))
        return asked

    def test_room_for_samples(self, asked: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch) -> None:
        room = MemoryRoom(kind_named("cuda"), workers_here=2, bounded=False)
        room.took(2)
        assert room.most() == 2  # 5 free and 15 reserved hold no more than the peak of 20
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (25, 80))
        assert room.most() == 2 + int(0.9 * 20 / 2)  # a sample takes 2: 4 beyond what is there between steps

    @pytest.mark.parametrize(
        ("dtype", "mask", "features", "kernel"),
        [
            (torch.bfloat16, False, 16, "Flash"),
            (torch.bfloat16, True, 16, "Efficient"),
            (torch.float32, False, 16, "Efficient"),
            (torch.float64, False, 16, "UnfusedAttention"),
            (torch.bfloat16, False, 12, "UnfusedAttention"),
            (torch.bfloat16, False, 264, "UnfusedAttention"),
        ],
    )
    def test_kernels_of_attention(
        self, dtype: torch.dtype, mask: bool, features: int, kernel: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: True)
        with FakeTensorMode(allow_non_fake_inputs=True):
            q = torch.empty(1, 2, 4, features, dtype=dtype, device="cuda")
        given = torch.zeros(4, 4) if mask else None
        assert type(kernel_for(q, q, q, given, scale=None, dropout=0.0)).__name__ == kernel
