"""Tar archives and Parquet files under several plans, beside a plain loop over what was written into them."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from small import fit, job, plain_losses, table

import phalanx as px
from phalanx.data import GlobalBatchSampler, read_ledger
from phalanx.data.dataset_facts import files_digest
from phalanx.errors import PhalanxError
from phalanx.report.samples_seen import samples_seen

SAMPLES, BATCH, EPOCHS = 41, 16, 2  # of 16, 16 and 9
ROWS = table(SAMPLES).columns
FLIP = torch.tensor([1.0, -1.0])
PLANS = ["single", "dp=2", "fsdp=2 micro=2", "pp=2 micro=4", "dp=2 server=1"]


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


def of_tar(folder: Path) -> dict[str, Any]:
    return {
        "data": tar_files(folder),
        "inputs": lambda batch: batch["npy"],
        "loss": lambda output, batch: px.cross_entropy(output, batch["cls"]),
    }


def of_parquet(folder: Path) -> dict[str, Any]:
    return {"data": parquet_files(folder)}


def of_groups(folder: Path) -> dict[str, Any]:
    data = parquet_files(folder, shuffle_within=2)
    return {"data": data, "sampler": data().sampler}


KINDS = [of_tar, of_parquet, of_groups]
COMMON: dict[str, Any] = {
    "batch": BATCH,
    "epochs": EPOCHS,
    "optimizer": lambda params: torch.optim.SGD(params, lr=0.1),
}


def steps(how: dict[str, Any]) -> list[list[int]]:
    """The rows of each step."""
    if "sampler" not in how:
        sampler = GlobalBatchSampler(length=SAMPLES, batch=BATCH, seed=0)
        return [sampler.ids(step).tolist() for step in range(6)]
    orders = [how["sampler"].indices(0, epoch, BATCH) for epoch in range(EPOCHS)]
    return [order[start : start + BATCH].tolist() for order in orders for start in range(0, SAMPLES, BATCH)]


def losses_of(how: dict[str, Any], signs: Callable[[int, int], float] = lambda epoch, index: 1.0) -> list[float]:
    """Plain PyTorch on one device, over the rows as they were before they were written."""

    def batches() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for number, ids in enumerate(steps(how)):
            sign = torch.tensor([signs(number // 3, index) for index in ids])[:, None]
            yield ROWS["x"][ids] * sign, ROWS["y"][ids]

    return plain_losses(batches(), **COMMON)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("plan", PLANS)
def test_a_run_takes_each_sample_once(kind: Callable[[Path], dict[str, Any]], plan: str, tmp_path: Path) -> None:
    how = kind(tmp_path)
    run = fit(plan, tmp_path / "run", **COMMON, **how)
    ledger = [sorted(ids.tolist()) for _, ids in read_ledger(run.folder / "ledger").values()]
    assert ledger == [sorted(ids) for ids in steps(how)]
    seen = samples_seen(run.folder)
    assert (seen.once, seen.epochs, seen.epoch_samples) == (True, EPOCHS, SAMPLES), seen.answer
    assert run.losses == pytest.approx(losses_of(how), abs=2e-6)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("before", "after"), [("dp=2", "fsdp=2 micro=2"), ("fsdp=2 micro=2", "single")])
def test_a_resume_in_mid_epoch_under_another_plan(
    kind: Callable[[Path], dict[str, Any]], before: str, after: str, tmp_path: Path
) -> None:
    how = kind(tmp_path)
    fit(before, tmp_path / "run", **{**COMMON, **how, "epochs": None, "steps": 4})
    run = fit(after, tmp_path / "run", resume=True, **COMMON, **how)
    assert run.losses[-2:] == pytest.approx(losses_of(how)[-2:], abs=2e-6)
    assert samples_seen(tmp_path / "run").once


@pytest.mark.parametrize("plan", ["single", "fsdp=2", "dp=2 server=1"])
@pytest.mark.parametrize(("kind", "write"), [(of_tar, tar_files), (of_parquet, parquet_files)])
def test_files_that_others_have_taken_the_place_of(kind: Any, write: Any, plan: str, tmp_path: Path) -> None:
    """Others of the same names, sizes and layout; those that are the same, written anew, are gone on with."""
    how = kind(tmp_path)
    fit(plan, tmp_path / "run", **{**COMMON, **how, "epochs": None, "steps": 2})
    before = {file: file.stat().st_size for file in tmp_path.iterdir() if file.is_file()}
    write(tmp_path, sign=-1.0)
    assert before == {file: file.stat().st_size for file in tmp_path.iterdir() if file.is_file()}
    with pytest.raises(PhalanxError, match=r"belongs to another job \(files of the data: \w+ there, \w+ now\)"):
        fit(plan, tmp_path / "run", resume=True, **COMMON, **how)
    write(tmp_path)
    run = fit(plan, tmp_path / "run", resume=True, **COMMON, **how)
    assert run.losses == pytest.approx(losses_of(how), abs=2e-6)


def test_files_within_other_data_and_files_elsewhere(tmp_path: Path) -> None:
    digests: list[str] = []
    for name, sign in (("one", 1.0), ("same", 1.0), ("other", -1.0)):
        (tmp_path / name).mkdir()
        data = tar_files(tmp_path / name, sign)()
        whole = (data, px.Curriculum({0: data, 4: data}), torch.utils.data.Subset(data, range(8)))
        digests += [files_digest(one) for one in whole]
        keyed = px.TarFiles(tmp_path / name / "s-*.tar", keys=("npy",))
        assert files_digest(keyed) == files_digest(data) != ""
    assert digests[:3] == digests[3:6]
    assert not set(digests[:3]) & set(digests[6:])


def test_ranks_that_read_other_files_are_told_apart(tmp_path: Path) -> None:
    how = of_tar(tmp_path)
    (tmp_path / "other").mkdir()
    other = tar_files(tmp_path / "other", -1.0)

    def data() -> px.TarFiles:
        ranked = torch.distributed.is_initialized() and torch.distributed.get_rank()
        return other() if ranked else how["data"]()

    with pytest.raises(
        PhalanxError, match=r"job\.data reads files that are others on each rank \(digests: rank 0: \w+"
    ):
        fit("dp=2", tmp_path / "run", **COMMON, **how | {"data": data})


@pytest.mark.parametrize("kind", KINDS)
def test_worker_processes_change_nothing(kind: Callable[[Path], dict[str, Any]], tmp_path: Path) -> None:
    how = kind(tmp_path)
    run = fit("dp=2", tmp_path / "run", **COMMON, **how, workers=2)
    assert run.losses == pytest.approx(losses_of(how), abs=2e-6)


@pytest.mark.parametrize("plan", ["single", "dp=2 micro=3"])
def test_what_a_decode_draws_is_the_same_under_every_plan(plan: str, tmp_path: Path) -> None:
    """A sign by the sample's own seed, here worked out for each sample by itself."""
    from phalanx.data.sampler import EpochSeeds

    def flipped(values: np.ndarray) -> np.ndarray:
        return values * FLIP[torch.randint(2, ())].numpy()

    def sign(epoch: int, index: int) -> float:
        EpochSeeds.of(0, epoch).plant(index)
        return float(FLIP[torch.randint(2, ())])

    how = of_groups(tmp_path) | {"data": parquet_files(tmp_path, shuffle_within=2, decode={"x": flipped})}
    run = fit(plan, tmp_path / "run", **COMMON, **how)
    assert run.losses == pytest.approx(losses_of(how, sign), abs=2e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_it_is_proven(kind: Callable[[Path], dict[str, Any]], tmp_path: Path) -> None:
    assert px.prove(job(**COMMON, **kind(tmp_path)), "dp=2", steps=4).equal
