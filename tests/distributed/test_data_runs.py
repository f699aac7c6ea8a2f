"""Data of every kind under several plans, beside a plain loop: archives, Parquet, sets of ``datasets``, mixtures."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from small import batches_of, fit, job, plain_losses, table

import phalanx as px
from chaos.run_equality import read_ledger
from law_rows import longer
from phalanx.data import GlobalBatchSampler
from phalanx.errors import PhalanxError, SpecError
from phalanx.report.samples_seen import samples_seen

SAMPLES, BATCH, EPOCHS = 41, 16, 2  # of 16, 16 and 9
ROWS = table(SAMPLES).columns
LISTS = {name: column.tolist() for name, column in ROWS.items()}
FLIP = torch.tensor([1.0, -1.0])


def tar_files(folder: Path, sign: float = 1.0) -> Callable[[], px.TarFiles]:
    """Three archives: of 20, 13 and 8 samples, each times ``sign``."""
    for number, (start, stop) in enumerate(((0, 20), (20, 33), (33, SAMPLES))):
        with tarfile.open(folder / f"s-{number}.tar", "w") as archive:
            for index in range(start, stop):
                row, label = io.BytesIO(), str(int(ROWS["y"][index])).encode()
                np.save(row, sign * ROWS["x"][index].numpy())
                for name, content in ((f"{index:03}.npy", row.getvalue()), (f"{index:03}.cls", label)):
                    member = tarfile.TarInfo(name)
                    member.size = len(content)
                    archive.addfile(member, io.BytesIO(content))
    return lambda: px.TarFiles(folder / "s-*.tar")


def parquet_files(folder: Path, sign: float = 1.0, **options: Any) -> Callable[[], px.ParquetFiles]:
    """Two files in row groups of 6, each row times ``sign``."""
    for number, (start, stop) in enumerate(((0, 25), (25, SAMPLES))):
        columns = {"x": (sign * ROWS["x"][start:stop]).tolist(), "y": ROWS["y"][start:stop].numpy()}
        typed = pa.table(columns, schema=pa.schema({"x": pa.list_(pa.float32()), "y": pa.int64()}))
        pq.write_table(typed, folder / f"p-{number}.parquet", row_group_size=6)
    return lambda: px.ParquetFiles(folder / "p-*.parquet", **options)


@dataclass(frozen=True)
class Case:
    """What a job is given, the rows of each step, and where those are found."""

    how: dict[str, Any]
    steps: list[list[int]]
    columns: Any = None
    in_ledger: bool = True

    def losses(self, signs: Callable[[int, int], float] = lambda epoch, index: 1.0) -> list[float]:
        """Plain PyTorch on one device, over the rows as they were before they were written."""

        def batches() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
            for number, (x, y) in enumerate(batches_of(self.columns or ROWS, self.steps)):
                yield x * torch.tensor([signs(number // 3, index) for index in self.steps[number]])[:, None], y

        return plain_losses(batches(), **self.how)


COMMON: dict[str, Any] = {"batch": BATCH, "epochs": EPOCHS, "optimizer": lambda params: torch.optim.SGD(params, lr=0.1)}


def batched(orders: Iterable[Any]) -> list[list[int]]:
    return [list(map(int, order[start : start + BATCH])) for order in orders for start in range(0, len(order), BATCH)]


def permuted(**how: Any) -> Case:
    sampler = GlobalBatchSampler(length=SAMPLES, batch=BATCH, seed=0)
    return Case(COMMON | how, [sampler.ids(step).tolist() for step in range(6)])


def of_tar(folder: Path) -> Case:
    return permuted(
        data=tar_files(folder),
        inputs=lambda batch: batch["npy"],
        loss=lambda output, batch: px.cross_entropy(output, batch["cls"]),
    )


def of_parquet(folder: Path) -> Case:
    return permuted(data=parquet_files(folder))


def of_groups(folder: Path, **options: Any) -> Case:
    data = parquet_files(folder, shuffle_within=2, **options)
    how = COMMON | {"data": data, "sampler": data().sampler}
    return Case(how, batched(how["sampler"].indices(0, epoch, BATCH) for epoch in range(EPOCHS)))


SOURCES = {"many": table(60, seed=1), "few": table(9, seed=2)}
MIXTURE = px.Mixture(SOURCES, {"many": 0.75, "few": 0.25}, samples=40)
ORDERS = [MIXTURE.sampler.indices(0, epoch, BATCH) for epoch in range(3)]


def of_mixture(folder: Path) -> Case:
    how = COMMON | {"data": lambda: MIXTURE, "sampler": MIXTURE.sampler, "epochs": 3}
    columns = {name: torch.cat([SOURCES[source].columns[name] for source in SOURCES]) for name in "xy"}
    return Case(how, batched(ORDERS), columns)


def rows() -> datasets.Dataset:
    return datasets.Dataset.from_dict(LISTS)


def rows_of_table() -> px.Table:
    return table(SAMPLES)


def in_order() -> datasets.IterableDataset:
    return rows().to_iterable_dataset(num_shards=3).with_format("torch")


def as_rows(samples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    return {name: torch.tensor([sample[name] for sample in samples]) for name in ("x", "y")}


def of_collated(folder: Path) -> Case:
    return permuted(data=rows, collate=as_rows)


def streamed(stream: Callable[[], datasets.IterableDataset], **how: Any) -> Case:
    """The rows of a stream's global batches, found by their values."""
    places = {tuple(np.float32(row)): place for place, row in enumerate(LISTS["x"])}
    orders = []
    for epoch in range(EPOCHS):
        passed = stream()
        passed.set_epoch(epoch)
        orders.append([places[tuple(sample["x"].numpy())] for sample in passed])
    return Case(COMMON | {"data": stream} | how, batched(orders), in_ledger=False)


def of_stream(folder: Path) -> Case:
    return streamed(in_order)


def of_shuffled(folder: Path) -> Case:
    return streamed(lambda: in_order().shuffle(seed=3, buffer_size=20), workers=2)


KINDS: dict[Callable[[Path], Case], str] = {
    of_tar: "dp=2 server=1",
    of_parquet: "dp=2 micro=2",
    of_groups: "single micro=5",
    of_mixture: "threads=2",
    of_collated: "dp=2 micro=5",
    of_stream: "fsdp=2",
    of_shuffled: "dp=2 micro=5",
}
"""Each kind, and the plan under which every run of the tests has it."""
PLANS = ("single", "dp=2 micro=5", "fsdp=2 micro=2", "pp=2 micro=4")
TRANSFORMED = [(rows_of_table, "dp=2 micro=5"), (in_order, "fsdp=2"), *longer((rows_of_table, "dp=2 server=1"))]
RESUMED = ((of_groups, "dp=2", "single micro=2"), (of_shuffled, "single", "dp=2"), (of_mixture, "dp=2", "single"))


@pytest.mark.parametrize(
    ("kind", "plan"),
    [*KINDS.items(), *longer(*((kind, plan) for kind, its in KINDS.items() for plan in PLANS if plan != its))],
)
def test_a_run_takes_each_sample_once(kind: Callable[[Path], Case], plan: str, tmp_path: Path) -> None:
    case = kind(tmp_path)
    run = fit(plan, tmp_path / "run", **case.how)
    ledger = [sorted(ids.tolist()) for _, ids in read_ledger(run.folder / "ledger").values()]
    assert len(ledger) == len(case.steps)
    seen = samples_seen(run.folder)
    assert seen.once, seen.answer
    if case.in_ledger:
        assert ledger == [sorted(ids) for ids in case.steps]
        assert (seen.epochs, seen.epoch_samples) == (case.how["epochs"], sum(map(len, case.steps[:3])))
    assert run.losses == pytest.approx(case.losses(), abs=2e-6)


@pytest.mark.parametrize(
    ("kind", "before", "after"), [*RESUMED, *longer(*((kind, "fsdp=2 micro=2", "single") for kind in KINDS))]
)
def test_a_resume_in_mid_epoch_under_another_plan(
    kind: Callable[[Path], Case], before: str, after: str, tmp_path: Path
) -> None:
    case = kind(tmp_path)
    fit(before, tmp_path / "run", **case.how | {"epochs": None, "steps": 4})
    run = fit(after, tmp_path / "run", resume=True, **case.how)
    left = len(case.steps) - 4
    assert run.losses[-left:] == pytest.approx(case.losses()[-left:], abs=2e-6)
    assert samples_seen(tmp_path / "run").once


@pytest.mark.parametrize(
    ("kind", "write", "plan"), [(of_tar, tar_files, "dp=2 server=1"), *longer((of_parquet, parquet_files, "fsdp=2"))]
)
def test_files_that_others_have_taken_the_place_of(kind: Any, write: Any, plan: str, tmp_path: Path) -> None:
    """Others of the same names, sizes and layout; those that are the same, written anew, are gone on with."""
    case = kind(tmp_path)
    fit(plan, tmp_path / "run", **case.how | {"epochs": None, "steps": 2})
    before = {file: file.stat().st_size for file in tmp_path.iterdir() if file.is_file()}
    write(tmp_path, sign=-1.0)
    assert before == {file: file.stat().st_size for file in tmp_path.iterdir() if file.is_file()}
    with pytest.raises(PhalanxError, match="files of the data"):
        fit(plan, tmp_path / "run", resume=True, **case.how)
    write(tmp_path)
    run = fit(plan, tmp_path / "run", resume=True, **case.how)
    assert run.losses == pytest.approx(case.losses(), abs=2e-6)


def test_ranks_that_read_other_files_are_told_apart(tmp_path: Path) -> None:
    how = of_tar(tmp_path).how
    (tmp_path / "other").mkdir()
    other = tar_files(tmp_path / "other", -1.0)

    def data() -> px.TarFiles:
        ranked = torch.distributed.is_initialized() and torch.distributed.get_rank()
        return other() if ranked else how["data"]()

    with pytest.raises(PhalanxError, match=r"job\.data reads files that are others on each rank"):
        fit("dp=2", tmp_path / "run", **how | {"data": data})


@pytest.mark.parametrize("kind", [of_tar, *longer(of_parquet, of_groups)])
def test_worker_processes_change_nothing(kind: Callable[[Path], Case], tmp_path: Path) -> None:
    case = kind(tmp_path)
    run = fit("dp=2", tmp_path / "run", **case.how, workers=2)
    assert run.losses == pytest.approx(case.losses(), abs=2e-6)


@pytest.mark.parametrize("plan", ["single", *longer("dp=2 micro=3")])
def test_what_a_decode_draws_is_the_same_under_every_plan(plan: str, tmp_path: Path) -> None:
    """A sign by the sample's own seed, here worked out for each sample by itself."""
    from phalanx.data.sampler import EpochSeeds

    def flipped(values: np.ndarray) -> np.ndarray:
        return values * FLIP[torch.randint(2, ())].numpy()

    def sign(epoch: int, index: int) -> float:
        EpochSeeds.of(0, epoch).plant(index)
        return float(FLIP[torch.randint(2, ())])

    case = of_groups(tmp_path, decode={"x": flipped})
    run = fit(plan, tmp_path / "run", **case.how)
    assert run.losses == pytest.approx(case.losses(sign), abs=2e-6)


@pytest.mark.parametrize(("data", "plan"), TRANSFORMED)
def test_a_transform_sees_the_global_batch_under_every_plan(data: Any, plan: str, tmp_path: Path) -> None:
    from phalanx.data.sampler import EpochSeeds

    def mixed(batch: dict[str, torch.Tensor], keys: torch.Tensor) -> dict[str, torch.Tensor]:
        share = torch.rand(()) * (keys % 2)
        return {"x": torch.lerp(batch["x"], batch["x"].flip(0), share[:, None]), "y": batch["y"]}

    case = permuted(data=data) if data is rows_of_table else Case(COMMON | {"data": data}, batched([range(41)] * 2))
    steps = [({"x": x, "y": y}, ids) for (x, y), ids in zip(batches_of(ROWS, case.steps), case.steps, strict=True)]
    expected = []
    for number, (batch, ids) in enumerate(steps):
        EpochSeeds.of(0, number // 3).plant(ids[0])
        expected.append(tuple(mixed(batch, torch.tensor(ids)).values()))
    run = fit(plan, tmp_path / "run", **case.how, transform=mixed, workers=2 * ("dp" in plan))
    assert run.losses == pytest.approx(plain_losses(expected, **COMMON), abs=2e-6)
    assert px.prove(job(**case.how, transform=mixed), "dp=2 micro=3", steps=4).equal


@pytest.mark.parametrize(
    "kind", [of_mixture, *longer(*(kind for kind in KINDS if kind not in (of_mixture, of_stream, of_shuffled)))]
)
def test_it_is_proven(kind: Callable[[Path], Case], tmp_path: Path) -> None:
    assert px.prove(job(**kind(tmp_path).how), "dp=2", steps=4).equal


@pytest.mark.parametrize("data", [rows, lambda: rows().to_iterable_dataset()])
def test_lists_that_torch_would_turn_on_their_side_are_refused(data: Callable[[], Any], tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"(?s)columns of lists \(x\).*with_format"):
        fit("dp=2", tmp_path / "run", data=data)
    with pytest.raises(SpecError, match=r"(?s)job\.evaluate: .*evaluate=lambda"):
        fit("dp=2", tmp_path / "run", evaluate=data)
