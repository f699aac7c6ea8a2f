"""Copies of checkpoints in an object store: a server that speaks S3, started here, and what goes wrong on the way."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from small import job

import phalanx as px
from law_rows import longer
from phalanx import checkpoint
from phalanx.checkpoint.mirror import Mirror, ObjectStore, fetch_newest, fetch_step
from phalanx.errors import CheckpointError, RunError, SpecError, WorkerError
from phalanx.files import release, take

pytest.importorskip("s3fs")
moto = pytest.importorskip("moto.server")
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """Of the server."""
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture
def bucket(address: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    for name, value in {
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": address,
    }.items():
        monkeypatch.setenv(name, value)
    import boto3

    client = boto3.client("s3")
    client.create_bucket(Bucket="bucket")
    yield "s3://bucket/runs/a"
    for entry in client.list_objects_v2(Bucket="bucket").get("Contents", []):
        client.delete_object(Bucket="bucket", Key=entry["Key"])


def saved(folder: Path, step: int) -> Path:
    tensors = {"model.weight": torch.full((300, 40), float(step)), "model.bias": torch.arange(40.0)}
    return checkpoint.save(folder / "checkpoints", step=step, tensors=tensors, state={"step": step}, keep=9)


def test_what_was_copied_comes_back_bit_for_bit(bucket: str, tmp_path: Path) -> None:
    for step in (2, 4):
        ObjectStore(bucket).put(saved(tmp_path, step))
    path = fetch_newest(bucket, tmp_path / "new")
    assert path == tmp_path / "new" / "step-00000004"
    assert checkpoint.verify(path) == []
    for file in path.iterdir():
        assert file.read_bytes() == (tmp_path / "checkpoints" / path.name / file.name).read_bytes()
    assert fetch_newest(bucket, tmp_path / "new") is None  # it is there now
    saved(tmp_path, 6)
    assert fetch_newest(bucket, tmp_path / "checkpoints") is None  # what is here is newer


def test_what_is_damaged_here_and_whole_there_is_fetched(bucket: str, tmp_path: Path) -> None:
    here = tmp_path / "checkpoints"
    for step in (2, 4):
        ObjectStore(bucket).put(saved(tmp_path, step))
    for step in (2, 4):
        file = here / f"step-0000000{step}" / "rank-00000.safetensors"
        file.write_bytes(file.read_bytes()[:-1] + b"x")
    assert fetch_newest(bucket, here) == here / "step-00000004"
    fetch_step(bucket, here, 2)
    for step in (2, 4):
        assert checkpoint.verify(here / f"step-0000000{step}") == []


def test_a_copy_over_another_one_is_none_until_it_is_whole(
    bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = ObjectStore(bucket)
    assert store.put(path := saved(tmp_path, 4))
    assert store.put(path) == 0  # it is there
    tensors = {"model.weight": torch.zeros(300, 40), "model.bias": torch.arange(40.0)}
    path = checkpoint.save(tmp_path / "checkpoints", step=4, tensors=tensors, state={"step": 4, "other": True})

    put, copied = store._files.put_file, list[str]()

    def cut(source: str, target: str) -> None:
        if copied:
            raise TimeoutError("gone")
        put(source, target)
        copied.append(target)

    with monkeypatch.context() as patched:
        patched.setattr(store._files, "put_file", cut)
        with pytest.raises(CheckpointError, match="could not be written to: TimeoutError"):
            store.put(path)
    assert store.steps() == []
    store.put(saved(tmp_path, 6))
    assert store.prune(1) == []
    assert not store._files.exists("bucket/runs/a/step-00000004")  # what was cut short is removed
    assert store.steps() == [6]


def test_who_goes_on_from_an_earlier_step_gives_later_ones_up_there_too(bucket: str, tmp_path: Path) -> None:
    store = ObjectStore(bucket)
    for step in (0, 2, 4, 6):
        store.put(saved(tmp_path, step))
    mirror = Mirror(bucket, keep=9)
    mirror.add(tmp_path / "checkpoints" / "step-00000002")  # as a run does that goes on from there
    mirror.close()
    assert store.steps() == [2, 0]
    assert ObjectStore(f"{bucket}/set-aside-1").steps() == [6, 4]
    assert ObjectStore(f"{bucket}/set-aside-1").fetch(6, tmp_path / "again").name == "step-00000006"
    assert checkpoint.verify(tmp_path / "again" / "step-00000006") == []


def test_the_thread_copies_prunes_and_tells(bucket: str, tmp_path: Path) -> None:
    mirror = Mirror(bucket, keep=2, keep_every=4)
    for step in (2, 4, 6, 8):
        mirror.add(saved(tmp_path, step))
    mirror.close()
    assert ObjectStore(bucket).steps() == [8, 6, 4]
    told = list(mirror.news())
    assert [Path(one["path"]).name[-1] for one in told] == ["2", "4", "6", "8"]
    assert all(one["bytes"] > 48_000 for one in told)


def test_nothing_is_copied_or_pruned_for_a_run_whose_folder_was_taken(bucket: str, tmp_path: Path) -> None:
    token = take(tmp_path)
    try:
        path = saved(tmp_path / "checkpoints", 2)
        (tmp_path / "writer.json").write_text('{"identity": "another"}')
        mirror = Mirror(bucket, keep=2)
        mirror.add(path)
        with pytest.raises(RunError, match="taken over"):
            mirror.close()
        assert ObjectStore(bucket).steps() == []
    finally:
        release(token)


def test_a_run_goes_on_elsewhere_from_its_mirror(bucket: str, tmp_path: Path) -> None:
    def spec(folder: str, **how: Any) -> px.RunSpec:
        plan = px.Plan.parse("dp=2")
        given = {"checkpoint_every": 2, "mirror": bucket, "forecast": "none", **how}
        return px.RunSpec(job="small", plan=plan, folder=tmp_path / folder, **given)

    whole = px.fit(job(epochs=2), "single", folder=tmp_path / "whole", forecast="none").losses
    first = px.fit(job(epochs=1), run=spec("here"))
    assert [event["path"][-1] for event in first.events("copied")] == ["2", "4"]
    second = px.fit(job(epochs=2), run=spec("there", resume="auto"))
    assert [event["step"] for event in second.events("resume")] == [4]
    assert first.losses + second.losses == pytest.approx(whole, rel=1e-5)
    third = px.fit(job(epochs=2), run=spec("third", resume=True, from_step=6))
    assert [event["step"] for event in third.events("resume")] == [6]
    with pytest.raises(SpecError, match="which does not exist"):
        px.fit(job(epochs=2), run=replace(spec("other", resume=True), mirror=f"{bucket}-empty"))


def test_what_was_not_copied_is_copied_by_who_goes_on(bucket: str, tmp_path: Path) -> None:
    """Such as one that a run ended before it was copied."""

    def spec(**how: Any) -> px.RunSpec:
        return px.RunSpec(job="small", plan=px.Plan(), folder=tmp_path / "run", forecast="none", **how)

    px.fit(job(epochs=1), run=spec())
    assert ObjectStore(bucket).steps() == []
    second = px.fit(job(epochs=2), run=spec(resume=True, mirror=bucket))
    assert [event["path"][-1] for event in second.events("copied")] == ["4", "8"]


@pytest.mark.parametrize(
    ("url", "resume"), [("s3://no-such-bucket/runs/a", "auto"), *longer(("nosuch://bucket/runs", False))]
)
def test_a_store_that_cannot_be_written_to_is_refused_before_anything_begins(
    url: str, resume: Any, bucket: str, tmp_path: Path
) -> None:
    """Else a mistyped one would be heard of with the first checkpoint, and a run that goes on elsewhere begin anew."""
    run = px.RunSpec(job="small", plan=px.Plan(), folder=tmp_path / "run", mirror=url, resume=resume)
    with pytest.raises(SpecError, match=r"run\.mirror: given"):
        px.fit(job(epochs=1), run=run)
    assert not (tmp_path / "run").exists()


def test_a_run_whose_last_checkpoint_could_not_be_copied_says_so(
    bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gone(self: ObjectStore, path: Path) -> int:
        raise CheckpointError(f"{self.url} could not be written to: gone")

    monkeypatch.setattr(ObjectStore, "put", gone)  # after it could be written to as the run began
    run = px.RunSpec(job="small", plan=px.Plan(), folder=tmp_path / "run", mirror=bucket)
    with pytest.raises(WorkerError, match="s3://bucket/runs/a could not be written to"):
        px.fit(job(epochs=1), run=run)
    assert checkpoint.verify(tmp_path / "run" / "checkpoints" / "step-00000004") == []
