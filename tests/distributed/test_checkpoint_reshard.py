"""Law: whatever the plan that saved, any other plan loads the same bits."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from checkpoint_ranks import FORKS_BESIDE_THREADS, local, ranks
from split_layouts import SHAPES, laid_out, own, value
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor

from law_rows import longer
from phalanx import checkpoint
from phalanx.checkpoint import PartTensor, TensorPart
from phalanx.checkpoint.format import Manifest
from phalanx.config import Plan
from phalanx.errors import CheckpointError
from phalanx.parallel import RankHoldings
from phalanx.train.state import model_tensors, parts

LOADED = ("single", "pp=2 tp=2")
LOADED_IN_LONG = ("fsdp=2 tp=2 zero=1", "fsdp=4", "dp=2 fsdp=2", "fsdp=3 zero=1", "tp=3", "dp=2 tp=2", "ep=2 tp=2")
SAVED = (*LOADED, "fsdp=2 tp=2 zero=1", "fsdp=4", "dp=2 tp=2", "tp=3")
MOMENTS = ("exp_avg", "exp_avg_sq")

pytestmark = FORKS_BESIDE_THREADS


@pytest.fixture(scope="module", autouse=True)
def no_waiting_for_the_disk():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("os.fsync", lambda handle: None)
        yield


def on_every_rank(plan: str, target: Callable[[int], None]) -> None:
    """Run ``target(rank)`` on every rank of the plan; one rank runs in this process, without a group."""
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


def odd_tensors() -> dict[str, Tensor]:
    """Dtypes and shapes that are easy to lose; sharded where there is more than one rank."""
    tensors = {
        "odd.half": value("half", [5, 2]).bfloat16(),
        "odd.long": torch.arange(3) + 2**60,
        "odd.empty": torch.zeros(0, 3),
        "odd.columns": torch.arange(12.0).view(3, 4),
        "odd.scalar": torch.tensor(0.1, dtype=torch.float64),
    }
    if dist.is_initialized():
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for name in ("odd.half", "odd.long", "odd.empty", "odd.columns"):
            along = Shard(1 if name == "odd.columns" else 0)
            tensors[name] = distribute_tensor(tensors[name], mesh, [along], src_data_rank=None)
    return tensors


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
    tensors = {**model_tensors(layout), **tensors, **odd_tensors()}
    checkpoint.save(folder, step=1, tensors=tensors, state={"optimizer": state})


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A checkpoint under every plan, all of the same values."""
    found = {}
    for plan in SAVED:
        folder = tmp_path_factory.mktemp("saved")
        on_every_rank(plan, lambda rank, plan=plan, folder=folder: save(folder, plan, rank))
        found[plan] = folder / "step-00000001"
    return found


@pytest.mark.parametrize("plan", [*LOADED, *longer(*LOADED_IN_LONG)])
def test_loads_what_any_plan_saved(plan: str, saved: dict[str, Path]) -> None:
    def target(rank: int) -> None:
        layout, expected = laid_out(plan, rank), odd_tensors()
        held = layout.holdings
        tensors = {**model_tensors(layout), **odd_tensors()}
        for path in saved.values():
            for tensor in tensors.values():
                local(tensor.local if isinstance(tensor, PartTensor) else tensor).zero_()
            checkpoint.load(path, tensors)
            for name, tensor in layout.module.named_parameters():
                there = held.parameters.get(name, tensor)
                assert torch.equal(local(there), local(own(value(name, SHAPES[name]), name, there, held))), name
            for name, tensor in expected.items():
                assert torch.equal(local(tensors[name]), local(tensor)), name
            assert layout.module.count == 3
            optimizer = adamw(held, lr=1.0)
            checkpoint.restore_optimizer(optimizer, held.parameters, path, parts(held))
            assert next(group["lr"] for group in optimizer.param_groups if group["params"]) == 0.25
            for name, parameter in held.parameters.items():
                state = optimizer.state[parameter]
                assert (type(state["step"]), float(state["step"])) == (Tensor, 2.0)
                for key in MOMENTS:
                    due = own(value(f"{key} {name}", SHAPES[name]), name, parameter, held)
                    assert type(state[key]) is type(due)
                    assert not isinstance(due, DTensor) or state[key].placements == due.placements
                    assert torch.equal(local(state[key]), local(due)), f"{key} {name}"

    on_every_rank(plan, target)


def test_every_element_is_written_once(saved: dict[str, Path]) -> None:
    stepped = sum(prod(shape) for name, shape in SHAPES.items() if name != "frozen")
    numbers = 3 * stepped + prod(SHAPES["frozen"]) + 2 + len(SHAPES) - 1  # the count is an int64, as two
    for plan, path in saved.items():
        assert checkpoint.verify(path) == [], plan
        manifest = Manifest.read(path)
        of_model = {f"model.{name}": shape for name, shape in SHAPES.items()}
        assert {n: t.shape for n, t in manifest.tensors.items() if n in of_model} == of_model, plan
        for tensor in manifest.tensors.values():
            counted = torch.zeros(tensor.shape)
            for chunk in tensor.chunks:
                counted[tuple(slice(at, at + size) for at, size in zip(chunk.offsets, chunk.sizes, strict=True))] += 1
            assert counted.eq(1).all(), plan
        files = [name for name in manifest.files if name.endswith("safetensors")]
        written = sum(manifest.files[name].size - _header(path / name) for name in files)
        odd = sum(one.numel() * one.element_size() for one in odd_tensors().values())
        assert written == 4 * numbers + odd, plan


def _header(path: Path) -> int:
    with path.open("rb") as file:
        return 8 + int.from_bytes(file.read(8), "little")


def test_ranks_write_their_shards_and_replicas_share_the_writing(saved: dict[str, Path]) -> None:
    chunks = Manifest.read(saved["fsdp=4"]).tensors["model.norm"].chunks
    assert [(chunk.file, chunk.sizes) for chunk in chunks if 0 not in chunk.sizes] == [
        (f"rank-{rank:05d}.safetensors", (2,)) for rank in range(3)
    ]
    files = Manifest.read(saved["dp=2 tp=2"]).files.values()
    sizes = [file.size for file in files if file.name.endswith(".safetensors")]
    assert len(sizes) == 4
    assert max(sizes) < 0.4 * sum(sizes)


def test_state_is_of_all_stages(saved: dict[str, Path]) -> None:
    one, two = (checkpoint.read_state(saved[plan])["optimizer"] for plan in ("single", "pp=2 tp=2"))
    assert one["state"] == two["state"]
    assert [(set(group["parameters"]), group["options"]) for group in one["groups"]] == [
        (set(group["parameters"]), group["options"]) for group in two["groups"]
    ]


class TestRefusals:
    def test_what_cannot_be_written_or_loaded(self, saved: dict[str, Path], tmp_path: Path) -> None:
        def written(tensor: Any, words: str) -> None:
            with pytest.raises(CheckpointError, match=words):
                checkpoint.save(tmp_path, step=1, tensors={"model.a": torch.ones(1), "model.b": tensor}, state={})

        def target(rank: int) -> None:
            mesh = init_device_mesh("cpu", (2,))
            written(DTensor.from_local(torch.ones(2), mesh, [Partial()], run_check=False), r"Partial.*: model\.b")
            written(PartTensor(torch.zeros(2), TensorPart(shape=(2,), counts=False)), r"copies only.*: model\.b")
            gap = TensorPart(shape=(5,), ranges={0: ((2 * rank, 2 * rank + 2),)})
            written(PartTensor(torch.zeros(2), gap), "could not be written")
            tensors = model_tensors(laid_out("tp=2", rank))
            other = TensorPart(shape=(12,), ranges={0: ((6 * rank, 6 * rank + 6),)})
            tensors["model.norm"] = PartTensor(torch.zeros(6), other)
            with pytest.raises(CheckpointError, match=r"model\.norm float32\[12\] here, float32\[6\] there"):
                checkpoint.load(saved["single"], tensors)

        ranks(2, target)
        with pytest.raises(CheckpointError, match=r"\[3\] is said to be the part \[2\] of .* \[4\]"):
            PartTensor(torch.zeros(3), TensorPart(shape=(4,), ranges={0: ((0, 2),)}))

    def test_names_and_groups_are_compared_over_all_ranks(self, saved: dict[str, Path]) -> None:
        def target(rank: int) -> None:
            layout = laid_out("pp=2", rank)
            tensors = {**model_tensors(layout), **odd_tensors()}
            tensors.pop("model.down", None)
            if rank == 1:
                tensors["model.new"] = torch.zeros(2)
            with pytest.raises(CheckpointError) as caught:
                checkpoint.load(saved["tp=3"], tensors)
            text = str(caught.value)
            assert "missing from the checkpoint (1): model.new\n" in text
            assert "only in the checkpoint (1): model.down" in text
            assert "rank 1" not in text
            held = layout.holdings
            optimizer = adamw(held) if rank else torch.optim.AdamW(held.parameters.values())
            for plan in ("single", "pp=2 tp=2"):
                with pytest.raises(CheckpointError, match=r"rank 0: the optimizer groups .*\n.*a group of 4 here"):
                    checkpoint.restore_optimizer(optimizer, held.parameters, saved[plan], parts(held))
            dist.barrier()

        ranks(2, target)

    def test_state_that_cannot_be_split(self, tmp_path: Path) -> None:
        def adafactor(parameters: Any) -> torch.optim.Optimizer:
            optimizer = torch.optim.Adafactor(parameters.values(), lr=0.1)
            for parameter in parameters.values():
                parameter.grad = torch.ones_like(parameter)
            optimizer.step()
            return optimizer

        def split(rank: int) -> None:
            held = laid_out("tp=2", rank).holdings
            with pytest.raises(CheckpointError, match=r"optimizer\.embed\.row_var"):
                checkpoint.optimizer_tensors(adafactor(held.parameters), held.parameters, parts(held))
            optimizer = torch.optim.Adafactor(held.parameters.values())
            with pytest.raises(CheckpointError, match=r"optimizer\.embed\.row_var has the shape \[7, 1\]"):
                checkpoint.restore_optimizer(optimizer, held.parameters, tmp_path / "step-00000001", parts(held))
            assert not optimizer.state

        held = laid_out("single").holdings
        tensors, state = checkpoint.optimizer_tensors(adafactor(held.parameters), held.parameters)
        checkpoint.save(tmp_path, step=1, tensors=tensors, state={"optimizer": state})
        ranks(2, split)


def test_groups_of_equal_options_are_one_over_stages(tmp_path: Path) -> None:
    """A group for each parameter: groups of two stages cannot be matched, and need not be."""

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
