"""Saving and loading, whole or not at all and on all ranks or none, under any plan."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from phalanx.checkpoint.agreement import Agreement, agree
from phalanx.checkpoint.all_ranks import (
    GroupRendezvous,
    RankOutcome,
    Rendezvous,
    anywhere,
    digest_of,
    distinct,
    failed_of,
    from_first,
    grouped,
    is_first,
    on_all_ranks,
    some,
)
from phalanx.checkpoint.folder import begin, give_up, name_of, newest_first, prune, publish, temporary, to_json
from phalanx.checkpoint.format import DTYPES, MANIFEST, STATE, Manifest, StoredFile, StoredTensor, dtype_name
from phalanx.checkpoint.reading import fill, verify_first
from phalanx.checkpoint.safe_files import is_folder
from phalanx.checkpoint.shard_file import write_file
from phalanx.checkpoint.tensor_part import PartTensor
from phalanx.checkpoint.writing import FileContent, Tensors, describe, file_of
from phalanx.comm.process_group import is_dtensor
from phalanx.errors import CheckpointError, DamagedError, NoneWholeError

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class SaveRequest:
    """The arguments of ``save``."""

    folder: Path
    step: int
    tensors: Tensors
    state: Mapping[str, Any]
    keep: int = 2
    keep_every: int = 0
    infinite: Collection[str] = ()


def save(
    folder: Path,
    *,
    step: int,
    tensors: Tensors,
    state: Mapping[str, Any],
    keep: int = 2,
    keep_every: int = 0,
    infinite: Collection[str] = (),
) -> Path:
    """Write a checkpoint of optimizer step ``step`` and return its path, ``folder/step-00000100``.

    Every rank of the default process group must call it; without a group this process saves alone. It is written under
    a temporary name, synced to disk and renamed once all ranks are done, so what has the final name is whole. Then all
    but the ``keep`` newest up to this step are deleted: for a moment there are ``keep`` + 1 on the disk.

    Args:
        folder: ``checkpoints`` of the run; on storage that all ranks share. Made if missing.
        step: optimizer steps done.
        tensors: by full name. A DTensor is written in the shards it has, and ``PartTensor`` as the part they are; a
            plain tensor is the same on all ranks that have it and is written by one of them. Ranks may have other
            names.
        state: JSON; rank 0's is written.
        keep: checkpoints to keep, at least 1.
        keep_every: those whose step is a multiple of it are kept as well, for ever; 0: none.
        infinite: names of tensors that may hold infinities (attention masks). NaN is refused in all, an infinity in all
            others.

    Raises:
        CheckpointError: on all ranks, if it cannot be written on any. The previous checkpoint stands.
    """
    asked = SaveRequest(Path(folder), step, tensors, state, keep, keep_every, infinite)
    return prepared(asked).write(GroupRendezvous())


@dataclass(frozen=True, kw_only=True, slots=True)
class PreparedSave:
    """A save agreed between all ranks and not yet written."""

    asked: SaveRequest
    state: bytes
    content: FileContent
    agreement: Agreement

    @property
    def path(self) -> Path:
        """Return the path of the checkpoint after it is written."""
        return self.asked.folder / name_of(self.asked.step)

    def write(self, rendezvous: Rendezvous) -> Path:
        """Write and publish it, and return the path. Every rank calls it.

        Raises:
            CheckpointError: on all ranks, if it cannot be written on any. The previous checkpoint stays.
        """
        folder, step = self.asked.folder, self.asked.step

        def begun(_: Sequence[Any]) -> Any:
            return failed_of([RankOutcome.of(lambda: begin(folder, step)).failure])

        def written() -> dict[str, Any] | None:
            path = temporary(folder, step)
            if not is_folder(path):
                raise CheckpointError(f"{folder} is not on storage that all ranks share")
            file = self.content.write(path / file_of(rendezvous.rank))
            return {"name": file.name, "size": file.size, "checksums": file.checksums} if file else None

        def published(reports: Sequence[Any]) -> Any:
            failures = [failure for failure, _ in reports]
            if not any(failures):
                files = [StoredFile(**{**file, "checksums": tuple(file["checksums"])}) for _, file in reports if file]  # pyrefly: ignore[bad-argument-type]
                failures[0] = RankOutcome.of(lambda: self._publish(files)).failure
            if any(failures):
                give_up(folder, step)
            return failed_of(failures)

        outcome = RankOutcome(None, None)
        failed = rendezvous.decide(None, begun)
        if not failed:
            outcome = RankOutcome.of(written)
            failed = rendezvous.decide([outcome.failure, outcome.result], published)
        try:
            outcome.settle(failed)
        except CheckpointError as error:
            raise _unwritten(self.asked, error) from None
        return self.path

    def _publish(self, files: Sequence[StoredFile]) -> None:
        folder, step = self.asked.folder, self.asked.step
        self.complete(temporary(folder, step), files)
        publish(folder, step)
        prune(folder, keep=self.asked.keep, keep_every=self.asked.keep_every, upto=step)

    def complete(self, path: Path, files: Sequence[StoredFile]) -> None:
        """Write state and manifest into the folder ``path``, with the ``files`` written by ranks.

        Raises:
            CheckpointError: a file is missing.
        """
        folder, step = self.asked.folder, self.asked.step
        listed = {file.name: file for file in (*files, write_file(path / STATE, [self.state]))}
        manifest = Manifest(step=step, tensors=self.agreement.stored, files=listed)
        if misfits := manifest.misfits(path):
            raise CheckpointError(f"{'; '.join(misfits)}: {folder} is not on storage that all ranks share")
        write_file(path / MANIFEST, [manifest.to_bytes()])


def prepared(asked: SaveRequest, before: Agreement | None = None) -> PreparedSave:
    """Agree on the writers of a checkpoint. Collective.

    ``before``, the agreement of the last save on all ranks, is used again if all ranks hold the same tensors.

    Raises:
        CheckpointError: on all ranks, if any rank holds values that cannot be saved.
    """

    def described() -> tuple[Any, Any, bytes]:
        text = _checked(asked)
        return *describe(asked.tensors), text

    said, memory, text = on_all_ranks(described)
    if before is None or anywhere(before.digest != digest_of(said)):
        try:  # the same on every rank
            before = agree(said)
        except CheckpointError as error:
            raise _unwritten(asked, error) from None
    rank = dist.get_rank() if grouped() else 0
    content = FileContent.of(rank, before.stored, before.writers, memory, asked.infinite)
    return PreparedSave(asked=asked, state=text, content=content, agreement=before)


def _unwritten(asked: SaveRequest, error: CheckpointError) -> CheckpointError:
    said = f"the checkpoint of step {asked.step} could not be written to {asked.folder}; those before it stand"
    return CheckpointError(f"{said}\n{error}")


def load(path: Path, tensors: Tensors) -> None:
    """Fill ``tensors`` in place from the checkpoint in folder ``path``, for any sharding in the checkpoint.

    Every rank of the default process group must call it; without a group this process loads alone. Tensors change only
    if every name, global shape and dtype agrees. A tensor found only in the checkpoint is an error if ``tensors`` holds
    others with the same prefix (the part of the name before the first dot), so model and optimizer can be loaded by one
    call, by two, or one alone. Ranks may ask for different names. Each rank reads the rows it needs and compares them
    with their checksums.

    Raises:
        DamagedError: on all ranks; the bytes differ from the written ones. ``tensors`` may be filled in part.
        CheckpointError: on all ranks; names all missing and extra tensors and those of another shape or dtype.
    """
    path = Path(path)
    names = _anywhere(tensors)
    manifest = on_all_ranks(lambda: _complete(path))
    on_all_ranks(lambda: _refuse_misfit(path, tensors, names, manifest))
    on_all_ranks(lambda: _verify_share(path, manifest))
    on_all_ranks(lambda: fill(path, manifest, tensors, verified=True))


def resume_newest(folder: Path, attempt: Callable[[Path], T]) -> tuple[Path, T, list[str]]:
    """Resume from the newest whole checkpoint in ``folder``. Collective.

    Args:
        folder: ``checkpoints`` of the run.
        attempt: loads a checkpoint; raises the same error on all ranks. Called for the newest, and after damage for the
            one before it, and so on.

    Returns:
        The checkpoint, the result of ``attempt``, and the damage in each newer checkpoint.

    Raises:
        CheckpointError: on all ranks: there is none.
        NoneWholeError: on all ranks: none is whole; names each with its damage. Other errors of ``attempt`` (another
            model, another job) are raised at once.
    """
    names = from_first(on_all_ranks(lambda: [path.name for path in newest_first(folder)] if is_first() else []))
    skipped = list[str]()
    for name in names:
        try:
            return folder / name, attempt(folder / name), skipped
        except DamagedError as error:
            skipped.append(f"{name} is damaged: {error}")
    if not skipped:
        what = f"{folder} holds no complete checkpoint to resume from"
        raise CheckpointError(f"{what}\n    try: a new run, in a folder of its own")
    raise NoneWholeError("\n    ".join([f"none of the checkpoints in {folder} is whole:", *skipped]))


def _anywhere(tensors: Tensors) -> set[str]:
    return set().union(*distinct(sorted(tensors)))


def _checked(asked: SaveRequest) -> bytes:
    tensors = asked.tensors
    if asked.step < 0 or asked.keep < 1 or asked.keep_every < 0:
        given = f"given step={asked.step}, keep={asked.keep}, keep_every={asked.keep_every}"
        raise CheckpointError(f"{given}; allowed: step and keep_every of at least 0, keep of at least 1")

    for said, wrong in {
        "not tensors, so they would have to be pickled; put them in state": lambda t: not isinstance(t, Tensor),
        "on the meta device, so they have no values": lambda t: t.device.type == "meta",
        "DTensors that wait for a reduction (Partial)": lambda t: (
            is_dtensor(t) and any(one.is_partial() for one in t.placements)
        ),
        f"of a dtype that a checkpoint cannot hold ({', '.join(DTYPES)})": lambda t: dtype_name(t.dtype) not in DTYPES,
        "not dense": lambda t: t.layout != torch.strided,
    }.items():
        if names := [name for name, held in tensors.items() if wrong(_local(held))]:
            raise CheckpointError(f"{said}: {some(names)}")
    return to_json(asked.state, "the state of a checkpoint")


def _complete(path: Path) -> Manifest:
    """Return the manifest; each rank checks a share of the files for all ranks."""
    if not path.exists():
        raise CheckpointError(f"there is no checkpoint {path}")
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if grouped() else (0, 1)
    manifest = Manifest.read(path)
    return manifest.checked(path, [*manifest.files.values()][rank::world_size])


def _refuse_misfit(path: Path, tensors: Tensors, names: set[str], manifest: Manifest) -> None:
    if meta := [name for name, held in tensors.items() if _local(held).device.type == "meta"]:
        raise CheckpointError(f"on the meta device, so there is nothing to load into: {some(meta)}")
    if different := _different(tensors, names, manifest.tensors):
        raise CheckpointError("\n    ".join([f"{path} does not fit: checkpoint of another model?", *different]))


def _verify_share(path: Path, manifest: Manifest) -> None:
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if grouped() else (0, 1)
    verify_first(path, manifest, [*manifest.files][rank::world_size])


def _different(tensors: Tensors, names: set[str], stored: Mapping[str, StoredTensor]) -> list[str]:
    prefixes = {_prefix(name) for name in names}
    missing = [name for name in names if name not in stored]
    extra = [name for name in stored if name not in names and _prefix(name) in prefixes]
    other = [
        f"{name} {_kind(tensor)} here, {_kind(stored[name])} there"
        for name, tensor in tensors.items()
        if name in stored and _kind(tensor) != _kind(stored[name])
    ]
    found = {"missing from the checkpoint": missing, "only in the checkpoint": extra, "other shape or dtype": other}
    return [f"{said} ({len(names)}): {some(names)}" for said, names in found.items() if names]


def _local(held: Tensor | PartTensor) -> Tensor:
    return held.local if isinstance(held, PartTensor) else held


def _kind(tensor: Tensor | PartTensor | StoredTensor) -> str:
    return f"{dtype_name(tensor.dtype)}{list(tensor.shape)}"


def _prefix(name: str) -> str:
    return name.partition(".")[0] if "." in name else ""
