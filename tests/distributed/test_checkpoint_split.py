"""Law: parameters split by name save under any cutting and load, bit for bit, under any other."""

from __future__ import annotations

from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from checkpoint_ranks import FORKS_BESIDE_THREADS, local, ranks
from split_layouts import SHAPES, Net, laid_out, own, value
from torch import Tensor, nn

from longer import longer
from phalanx import checkpoint
from phalanx.checkpoint import PartTensor, TensorPart
from phalanx.checkpoint.format import Manifest
from phalanx.config import Plan
from phalanx.errors import CheckpointError
from phalanx.parallel import RankHoldings
from phalanx.train.state import model_tensors, parts

torch.set_num_threads(1)

PLANS = [
    "single",
    "fsdp=2",
    "tp=2",
    "tp=3",
    "tp=4",
    "dp=2 tp=2",
    "fsdp=2 tp=2",
    "fsdp=2 tp=2 zero=1",
    "pp=2",
    "pp=2 tp=2",
    "ep=2 tp=2",
]

pytestmark = FORKS_BESIDE_THREADS


@pytest.fixture(scope="module", autouse=True)
def no_waiting_for_the_disk():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("os.fsync", lambda handle: None)
        yield


def everywhere(plan: str, target: Any) -> None:
    """``target(rank)`` on every rank of the plan; in this process, without a group, where there is one."""
    count = Plan.parse(plan).world_size
    if count == 1:
        target(0)
    else:
        ranks(count, target)


def adamw(held: RankHoldings, lr: float = 0.25) -> torch.optim.AdamW:
    """Two groups; the second stage of a pipeline has none of the second."""
    matrices = [tensor for tensor in held.parameters.values() if tensor.ndim > 1]
    vectors = [tensor for tensor in held.parameters.values() if tensor.ndim == 1]
    return torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.5}, {"params": vectors, "weight_decay": 0.0}], lr=lr
    )


def save(folder: Path, plan: str, rank: int) -> None:
    layout = laid_out(plan, rank)
    held = layout.holdings
    optimizer = adamw(held)
    for name, parameter in held.parameters.items():
        optimizer.state[parameter] = {
            "step": torch.tensor(2.0),
            **{key: own(value(f"{key} {name}", SHAPES[name]), name, parameter, held) for key in MOMENTS},
        }
    tensors, state = checkpoint.optimizer_tensors(optimizer, held.parameters, parts(held))
    checkpoint.save(folder, step=1, tensors={**model_tensors(layout), **tensors}, state={"optimizer": state})


MOMENTS = ("exp_avg", "exp_avg_sq")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A checkpoint under every plan, all of the same values."""
    found = {}
    for plan in PLANS:
        folder = tmp_path_factory.mktemp("saved")
        everywhere(plan, lambda rank, plan=plan, folder=folder: save(folder, plan, rank))
        found[plan] = folder / "step-00000001"
    return found


MORE = ("tp=4", "dp=2 tp=2", "fsdp=2 tp=2 zero=1")  # as loaders; what each saved is always loaded by the others


@pytest.mark.parametrize("plan", [*(plan for plan in PLANS if plan not in MORE), *longer(*MORE)])
def test_loads_what_any_plan_saved(plan: str, saved: dict[str, Path]) -> None:
    def target(rank: int) -> None:
        layout = laid_out(plan, rank)
        held = layout.holdings
        tensors = model_tensors(layout)
        for path in saved.values():
            for tensor in tensors.values():
                local(tensor.local if isinstance(tensor, PartTensor) else tensor).zero_()
            checkpoint.load(path, tensors)
            for name, tensor in layout.module.named_parameters():
                there = held.parameters.get(name, tensor)
                assert torch.equal(local(there), local(own(value(name, SHAPES[name]), name, there, held))), name
            assert layout.module.count == 3
            optimizer = adamw(held, lr=1.0)
            checkpoint.restore_optimizer(optimizer, held.parameters, path, parts(held))
            assert next(group["lr"] for group in optimizer.param_groups if group["params"]) == 0.25
            for name, parameter in held.parameters.items():
                state = optimizer.state[parameter]
                assert state["step"] == 2.0
                for key in MOMENTS:
                    expected = own(value(f"{key} {name}", SHAPES[name]), name, parameter, held)
                    assert type(state[key]) is type(expected)
                    assert torch.equal(local(state[key]), local(expected)), f"{key} {name}"

    everywhere(plan, target)


@pytest.mark.parametrize("plan", PLANS)
def test_every_element_is_written_once(plan: str, saved: dict[str, Path]) -> None:
    assert checkpoint.verify(saved[plan]) == []
    manifest = Manifest.read(saved[plan])
    of_model = {f"model.{name}": shape for name, shape in SHAPES.items()}
    assert {n: t.shape for n, t in manifest.tensors.items() if n in of_model} == of_model
    for tensor in manifest.tensors.values():
        counted = torch.zeros(tensor.shape)
        for chunk in tensor.chunks:
            counted[tuple(slice(at, at + size) for at, size in zip(chunk.offsets, chunk.sizes, strict=True))] += 1
        assert counted.eq(1).all()
    stepped = sum(prod(shape) for name, shape in SHAPES.items() if name != "frozen")
    numbers = 3 * stepped + prod(SHAPES["frozen"]) + 2 + len(SHAPES) - 1  # the count is an int64, as two
    written = sum(file.size for file in manifest.files.values() if file.name.endswith("safetensors"))
    headers = sum(_header(saved[plan] / name) for name in manifest.files if name.endswith("safetensors"))
    assert written - headers == 4 * numbers


def _header(path: Path) -> int:
    with path.open("rb") as file:
        return 8 + int.from_bytes(file.read(8), "little")


def test_state_is_of_all_stages(saved: dict[str, Path]) -> None:
    one, two = (checkpoint.read_state(saved[plan])["optimizer"] for plan in ("single", "pp=2 tp=2"))
    assert one["state"] == two["state"]
    assert [(set(group["parameters"]), group["options"]) for group in one["groups"]] == [
        (set(group["parameters"]), group["options"]) for group in two["groups"]
    ]


def test_training_goes_on_bit_for_bit_under_another_plan(tmp_path: Path) -> None:
    def train(held: RankHoldings, optimizer: torch.optim.Optimizer, first: int) -> None:
        for step in (first, first + 1):
            for name, parameter in held.parameters.items():
                parameter.grad = own(value(f"gradient {name} {step}", SHAPES[name]), name, parameter, held)
            optimizer.step()

    def before(rank: int) -> None:
        layout = laid_out("pp=2 tp=2", rank)
        optimizer = adamw(layout.holdings)
        train(layout.holdings, optimizer, 0)
        tensors, state = checkpoint.optimizer_tensors(optimizer, layout.parameters, parts(layout.holdings))
        checkpoint.save(tmp_path, step=2, tensors={**model_tensors(layout), **tensors}, state={"optimizer": state})

    def after(rank: int) -> None:
        layout, straight = laid_out("tp=3", rank), laid_out("single").holdings
        optimizer = adamw(layout.holdings, lr=1.0)
        with torch.no_grad():
            checkpoint.load(tmp_path / "step-00000002", model_tensors(layout))
        checkpoint.restore_optimizer(optimizer, layout.parameters, tmp_path / "step-00000002", parts(layout.holdings))
        train(layout.holdings, optimizer, 2)
        whole = adamw(straight)
        train(straight, whole, 0)
        train(straight, whole, 2)
        for name, parameter in layout.parameters.items():
            assert torch.equal(parameter, own(straight.parameters[name].detach(), name, parameter, layout.holdings)), (
                name
            )

    ranks(4, before)
    ranks(3, after)


def test_missing_and_extra_are_of_all_ranks_together(saved: dict[str, Path]) -> None:
    def target(rank: int) -> None:
        tensors = model_tensors(laid_out("pp=2", rank))
        tensors.pop("model.down", None)
        if rank == 1:
            tensors["model.new"] = torch.zeros(2)
        with pytest.raises(CheckpointError) as caught:
            checkpoint.load(saved["tp=2"], tensors)
        text = str(caught.value)
        assert "missing from the checkpoint (1): model.new\n" in text
        assert "only in the checkpoint (1): model.down" in text
        assert "rank 1" not in text

    ranks(2, target)


def test_another_whole_shape_is_refused(saved: dict[str, Path]) -> None:
    def target(rank: int) -> None:
        tensors = model_tensors(laid_out("tp=2", rank))
        tensors["model.norm"] = PartTensor(
            torch.zeros(6), TensorPart(shape=(12,), ranges={0: ((6 * rank, 6 * rank + 6),)})
        )
        with pytest.raises(CheckpointError, match=r"model.norm float32\[12\] here, float32\[6\] there"):
            checkpoint.load(saved["single"], tensors)

    ranks(2, target)


def test_copies_alone_are_refused(tmp_path: Path) -> None:
    def target(rank: int) -> None:
        copy = PartTensor(torch.zeros(2), TensorPart(shape=(2,), counts=False))
        with pytest.raises(CheckpointError, match=r"held as copies only.*: model.b"):
            checkpoint.save(tmp_path, step=1, tensors={"model.a": torch.ones(1), "model.b": copy}, state={})

    ranks(2, target)


def test_gaps_are_refused(tmp_path: Path) -> None:
    def target(rank: int) -> None:
        part = PartTensor(torch.zeros(2), TensorPart(shape=(5,), ranges={0: ((2 * rank, 2 * rank + 2),)}))
        with pytest.raises(CheckpointError, match="could not be written"):
            checkpoint.save(tmp_path, step=1, tensors={"model.a": part}, state={})

    ranks(2, target)


def test_a_slice_of_another_shape_is_refused() -> None:
    with pytest.raises(CheckpointError, match=r"a slice of shape \[3\] is said to be the part \[2\] of .* \[4\]"):
        PartTensor(torch.zeros(3), TensorPart(shape=(4,), ranges={0: ((0, 2),)}))


def test_state_that_cannot_be_split_is_refused(tmp_path: Path) -> None:
    def adafactor(parameters: Any) -> torch.optim.Optimizer:
        optimizer = torch.optim.Adafactor(parameters.values(), lr=0.1)
        for name, parameter in parameters.items():
            parameter.grad = torch.ones_like(parameter)
            assert name != "frozen"
        optimizer.step()
        return optimizer

    def split(rank: int) -> None:
        held = laid_out("tp=2", rank).holdings
        with pytest.raises(CheckpointError, match=r"optimizer.embed.row_var has the shape .*\n.*such as AdamW"):
            checkpoint.optimizer_tensors(adafactor(held.parameters), held.parameters, parts(held))
        optimizer = torch.optim.Adafactor(held.parameters.values())
        with pytest.raises(CheckpointError, match=r"optimizer.embed.row_var has the shape \[7, 1\]"):
            checkpoint.restore_optimizer(optimizer, held.parameters, tmp_path / "step-00000001", parts(held))
        assert not optimizer.state

    held = laid_out("single").holdings
    tensors, state = checkpoint.optimizer_tensors(adafactor(held.parameters), held.parameters)
    checkpoint.save(tmp_path, step=1, tensors=tensors, state={"optimizer": state})
    ranks(2, split)


def test_other_groups_are_refused_on_the_stage_that_has_them(saved: dict[str, Path]) -> None:
    def target(rank: int) -> None:
        held = laid_out("pp=2", rank).holdings
        optimizer: torch.optim.Optimizer = adamw(held)
        if rank == 0:
            optimizer = torch.optim.AdamW(held.parameters.values())
        for plan in ("single", "pp=2"):
            with pytest.raises(CheckpointError, match=r"rank 0: the optimizer groups .*\n.*a group of 4 here"):
                checkpoint.restore_optimizer(optimizer, held.parameters, saved[plan], parts(held))
        dist.barrier()

    ranks(2, target)


def test_groups_of_equal_options_are_one_over_stages(tmp_path: Path) -> None:
    """A group for each parameter: nobody can say which of one stage belongs to which of another, nor need to."""

    def each(held: RankHoldings) -> torch.optim.Optimizer:
        return torch.optim.SGD(
            [{"params": [tensor], "lr": 0.1 * tensor.ndim} for tensor in held.parameters.values()], momentum=0.9
        )

    def save(rank: int) -> None:
        held = laid_out("pp=2", rank).holdings
        tensors, state = checkpoint.optimizer_tensors(each(held), held.parameters, parts(held))
        assert tensors == {}
        assert [len(group["parameters"]) for group in state["groups"]] == [4, 2, 1]
        checkpoint.save(tmp_path, step=1, tensors=tensors, state={"optimizer": state})

    ranks(2, save)
    held = laid_out("single").holdings
    optimizer = each(held)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    checkpoint.restore_optimizer(optimizer, held.parameters, tmp_path / "step-00000001")
    assert all(group["lr"] == 0.1 * group["params"][0].ndim for group in optimizer.param_groups)
    mixed = torch.optim.SGD(held.parameters.values(), lr=0.0, momentum=0.9)
    with pytest.raises(CheckpointError, match="a group of 7 here, of no group there"):
        checkpoint.restore_optimizer(mixed, held.parameters, tmp_path / "step-00000001")


def test_what_is_no_piece_of_a_whole_stays_so() -> None:
    """A step is one number, whatever its shape; that of a copy is a copy."""
    parameters = {"slice": torch.zeros(1), "copy": torch.zeros(3)}
    optimizer = torch.optim.SGD(parameters.values(), lr=0.1)
    for parameter in parameters.values():
        optimizer.state[parameter]["step"] = torch.tensor([2.0])
    of = {"slice": TensorPart(shape=(2,), ranges={0: ((1, 2),)}), "copy": TensorPart(shape=(3,), counts=False)}
    tensors, _ = checkpoint.optimizer_tensors(optimizer, parameters, of)
    assert type(tensors["optimizer.slice.step"]) is Tensor
    copy = tensors["optimizer.copy.step"]
    assert isinstance(copy, PartTensor)
    assert copy.part == TensorPart(shape=(1,), counts=False)


def test_blocks_of_a_slice() -> None:
    """By hand: rows 1 and 2 and row 4 of five, columns 2 and 3 of four."""
    whole = torch.arange(20.0).view(5, 4)
    part = TensorPart(shape=(5, 4), ranges={0: ((1, 3), (4, 5)), 1: ((2, 4),)})
    pieces = PartTensor(torch.cat([whole[1:3, 2:4], whole[4:5, 2:4]]), part)
    assert {tuple(start): block.tolist() for start, block in pieces.blocks.items()} == {
        (1, 2): [[6, 7], [10, 11]],
        (4, 2): [[18, 19]],
    }
    assert PartTensor(torch.zeros(0, 4), TensorPart(shape=(5, 4), ranges={0: ()})).blocks == {}
    assert list(PartTensor(torch.zeros(0, 4), TensorPart(shape=(0, 4))).blocks) == [(0, 0)]


def test_the_model_is_what_it_was(saved: dict[str, Path]) -> None:
    """The harness itself: one process loads into a plain module by its own names."""
    module: nn.Module = Net()
    tensors: dict[str, Tensor] = {
        f"model.{name}": tensor.detach().zero_() for name, tensor in module.named_parameters()
    }
    tensors["model.count"] = torch.tensor(0)
    checkpoint.load(saved["fsdp=2 tp=2"], tensors)
    assert all(torch.equal(tensors[f"model.{name}"], value(name, shape)) for name, shape in SHAPES.items())
