"""Law: whatever the plan that saved, any other plan loads the same bits."""

from __future__ import annotations

import zlib
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from checkpoint_ranks import FORKS_BESIDE_THREADS, laid_out, local, model, placed, ranks, whole
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from phalanx import checkpoint
from phalanx.checkpoint.format import Manifest
from phalanx.errors import CheckpointError

torch.set_num_threads(1)

LAYOUTS = {
    "one process": ("plain", 1),
    "replicas x 2": ("plain", 2),
    "replicated DTensors x 2": ("replicated", 2),
    "FSDP x 2": ("fsdp", 2),
    "FSDP x 3": ("fsdp", 3),
    "FSDP x 4": ("fsdp", 4),
    "HSDP 2 x 2": ("hsdp", 4),
    "row views x 3": ("zero", 3),
}

pytestmark = FORKS_BESIDE_THREADS


@pytest.fixture(scope="module", autouse=True)
def no_waiting_for_the_disk():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("os.fsync", lambda handle: None)
        yield


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A checkpoint under every layout, all of the same values."""
    paths = {}
    for name, (layout, world_size) in LAYOUTS.items():
        folder = tmp_path_factory.mktemp("saved")
        paths[name] = folder / "step-00000001"

        def target(rank: int, layout: str = layout, folder: Path = folder) -> None:
            module, parameters = laid_out(layout)
            optimizer = torch.optim.AdamW(parameters.values(), lr=0.25)
            for name, parameter in parameters.items():
                optimizer.state[parameter] = {
                    "step": torch.tensor(2.0),
                    "exp_avg": placed(value(f"exp_avg {name}", parameter.shape), parameter),
                    "exp_avg_sq": placed(value(f"exp_avg_sq {name}", parameter.shape), parameter),
                }
            tensors, state = checkpoint.optimizer_tensors(optimizer, parameters)
            tensors |= model_tensors(module, parameters) | odd_tensors()
            checkpoint.save(folder, step=1, tensors=tensors, state={"optimizer": state})

        ranks(world_size, target)
    return paths


def value(name: str, shape: torch.Size) -> Tensor:
    """Numbers that depend on nothing but the name."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(zlib.crc32(name.encode())))


def model_tensors(module: nn.Module, parameters: dict[str, Tensor]) -> dict[str, Tensor]:
    buffers = dict(module.named_buffers())
    return {f"model.{name}": tensor.detach() for name, tensor in (parameters | buffers).items()}


def odd_tensors() -> dict[str, Tensor]:
    """Dtypes and shapes that are easy to lose; sharded where there is more than one rank."""
    tensors = {
        "odd.half": value("half", torch.Size([5, 2])).bfloat16(),
        "odd.long": torch.arange(3) + 2**60,
        "odd.empty": torch.zeros(0, 3),
        "odd.columns": torch.arange(12.0).view(3, 4),
        "odd.scalar": torch.tensor(0.1, dtype=torch.float64),
    }
    if dist.is_initialized():
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for name in ("odd.half", "odd.long", "odd.empty"):
            tensors[name] = distribute_tensor(tensors[name], mesh, [Shard(0)], src_data_rank=None)
        tensors["odd.columns"] = distribute_tensor(tensors["odd.columns"], mesh, [Shard(1)], src_data_rank=None)
    return tensors


@pytest.mark.parametrize("name", LAYOUTS)
def test_loads_what_any_layout_saved(name: str, saved: dict[str, Path]) -> None:
    layout, world_size = LAYOUTS[name]

    def target(rank: int) -> None:
        expected = dict(model().state_dict(prefix="model.")) | odd_tensors()
        for path in saved.values():
            module, parameters = laid_out(layout)
            optimizer = torch.optim.AdamW(parameters.values())
            tensors = model_tensors(module, parameters) | odd_tensors()
            for tensor in tensors.values():
                local(tensor).zero_()
            checkpoint.load(path, tensors)
            assert tensors.keys() == expected.keys()
            for key, tensor in tensors.items():
                assert_same(tensor, expected[key], key)
            checkpoint.restore_optimizer(optimizer, parameters, path)
            assert optimizer.param_groups[0]["lr"] == 0.25
            for key, parameter in parameters.items():
                step, first, second = optimizer.state[parameter].values()
                assert type(step) is Tensor
                assert step == 2.0
                for name, moment in (("exp_avg", first), ("exp_avg_sq", second)):
                    assert_same(moment, value(f"{name} {key}", parameter.shape), f"{name} {key}")
                    assert type(moment) is (DTensor if isinstance(parameter, DTensor) else Tensor)
                    assert not isinstance(moment, DTensor) or moment.placements == parameter.placements

    ranks(world_size, target)


def assert_same(tensor: Tensor, there: Tensor, name: str) -> None:
    assert tensor.dtype == there.dtype, name
    there = there if isinstance(there, DTensor) else placed(there, tensor)
    assert torch.equal(local(tensor), local(there)), name


def test_every_rank_writes_its_own_shards(saved: dict[str, Path]) -> None:
    manifest = Manifest.read(saved["FSDP x 4"])
    assert [chunk.sizes for chunk in manifest.tensors["model.0.weight"].chunks if 0 not in chunk.sizes] == [
        (2, 6),
        (2, 6),
        (1, 6),
    ]
    assert {chunk.file for chunk in manifest.tensors["model.0.weight"].chunks[:3]} == {
        f"rank-{rank:05d}.safetensors" for rank in range(3)
    }
    assert len(manifest.tensors["optimizer.0.weight.step"].chunks) == 1
    assert checkpoint.verify(saved["FSDP x 4"]) == []


def test_replicas_share_the_writing(saved: dict[str, Path]) -> None:
    manifest = Manifest.read(saved["replicas x 2"])
    sizes = [file.size for file in manifest.files.values() if file.name.endswith(".safetensors")]
    assert len(sizes) == 2
    assert max(sizes) < 0.7 * sum(sizes)
    assert all(len(tensor.chunks) == 1 for name, tensor in manifest.tensors.items() if not name.startswith("odd."))


def trained(parameters: dict[str, Tensor], optimizer: torch.optim.Optimizer) -> None:
    """Two steps on gradients that depend on nothing but the step."""
    for step in range(2):
        for name, parameter in parameters.items():
            parameter.grad = placed(value(f"gradient {name} {step}", parameter.shape), parameter)
        optimizer.step()


@pytest.mark.parametrize("layout", ["fsdp", "zero"])
def test_training_goes_on_bit_for_bit(layout: str, tmp_path: Path) -> None:
    def target(rank: int) -> None:
        module, straight = laid_out(layout)
        optimizer = torch.optim.AdamW(straight.values(), lr=1e-2)
        trained(straight, optimizer)
        tensors, state = checkpoint.optimizer_tensors(optimizer, straight)
        tensors |= model_tensors(module, straight)
        path = checkpoint.save(tmp_path, step=2, tensors=tensors, state={"optimizer": state})
        trained(straight, optimizer)
        module, again = laid_out(layout)
        optimizer = torch.optim.AdamW(again.values(), lr=1.0)
        checkpoint.load(path, model_tensors(module, again))
        checkpoint.restore_optimizer(optimizer, again, path)
        trained(again, optimizer)
        assert all(torch.equal(whole(straight[name]), whole(again[name])) for name in straight)

    ranks(2, target)


def test_shards_along_two_dimensions_of_a_mesh(tmp_path: Path) -> None:
    """FSDP over tensor parallelism: rows cut twice, columns and rows, and uneven."""
    placements = ([Shard(0), Shard(1)], [Shard(1), Shard(0)], [Shard(0), Shard(0)], [Replicate(), Shard(1)])

    def split(mesh: DeviceMesh) -> nn.Module:
        layers = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 6))
        for index, parameter in enumerate(layers.parameters()):
            parameter.data.copy_(value(f"layer {index}", parameter.shape))
        parallelize_module(layers, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
        return fully_shard(layers, mesh=mesh["fsdp"])

    def save(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "tp"))
        tensors: dict[str, Tensor] = {
            f"model.{index}": distribute_tensor(value(str(index), torch.Size([7, 5])), mesh, each, src_data_rank=None)
            for index, each in enumerate(placements)
        }
        tensors |= {f"layers.{name}": one.detach() for name, one in split(mesh).named_parameters()}
        path = checkpoint.save(tmp_path, step=1, tensors=tensors, state={})
        assert checkpoint.verify(path) == []
        again = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
        checkpoint.load(path, again)
        assert all(torch.equal(local(again[name]), local(tensor)) for name, tensor in tensors.items())

    ranks(4, save)
    plain = {f"model.{index}": torch.zeros(7, 5) for index in range(len(placements))}
    shapes = {"0.weight": (8, 6), "0.bias": (8,), "1.weight": (6, 8), "1.bias": (6,)}
    layers = {f"layers.{name}": torch.zeros(shape) for name, shape in shapes.items()}
    checkpoint.load(tmp_path / "step-00000001", plain | layers)
    assert all(torch.equal(one, value(str(index), one.shape)) for index, one in enumerate(plain.values()))
    assert all(torch.equal(one, value(f"layer {index}", one.shape)) for index, one in enumerate(layers.values()))


def test_factored_state_of_sharded_parameters(tmp_path: Path) -> None:
    """A second moment kept by row and column is whole on every rank, whatever the shards of the parameter."""

    def save(rank: int) -> None:
        _, parameters = laid_out("plain")
        optimizer = torch.optim.SGD(parameters.values(), lr=0.1)
        for parameter in parameters.values():
            optimizer.state[parameter] = {"rows": torch.arange(float(len(parameter))).add(0.5).view(-1, *[1] * 2)}
        tensors, state = checkpoint.optimizer_tensors(optimizer, parameters)
        checkpoint.save(tmp_path, step=1, tensors=tensors, state={"optimizer": state})

    def load(rank: int) -> None:
        _, parameters = laid_out("fsdp")
        optimizer = torch.optim.SGD(parameters.values(), lr=0.1)
        checkpoint.restore_optimizer(optimizer, parameters, tmp_path / "step-00000001")
        for parameter in parameters.values():
            rows = optimizer.state[parameter]["rows"]
            assert torch.equal(whole(rows).flatten(), torch.arange(float(len(parameter))).add(0.5))
            scaled = whole(parameter) * whole(rows).view(-1, *[1] * (parameter.ndim - 1))
            assert torch.equal(whole(parameter * rows.view(-1, *[1] * (parameter.ndim - 1))), scaled)

    ranks(1, save)
    ranks(3, load)


def test_partial_sums_are_refused(tmp_path: Path) -> None:
    def target(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,))
        tensor = DTensor.from_local(torch.ones(2), mesh, [Partial()], run_check=False)
        with pytest.raises(CheckpointError, match=r"wait for a reduction \(Partial\): model.x"):
            checkpoint.save(tmp_path, step=1, tensors={"model.x": tensor}, state={})

    ranks(2, target)
