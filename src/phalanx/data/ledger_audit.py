"""Findings of a sample ledger's audit, in words."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby, islice, zip_longest
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from phalanx.data.ledger import LedgerRecord, records
from phalanx.units import show_counted

_NAMED = 5  # how many samples of a kind are named before "and N more"


def audit(
    folder: Path,
    *,
    length: int | None,
    batch: int,
    drop_last: bool,
    epoch_samples: int | None = None,
    repeats: bool = False,
) -> list[str]:
    """Return a sentence for each error in a run's ledger; empty if each sample was seen exactly once an epoch.

    Args:
        folder: of the ledger.
        length: samples in the data; ``None`` for a stream, which is checked for double samples and gaps only.
        batch: samples in a global batch.
        drop_last: whether the partial last batch of each epoch was dropped.
        epoch_samples: samples in an epoch, if that is not ``length``.
        repeats: whether a sampler may give a sample more than once in an epoch.

    Raises:
        DataError: if a file is no ledger.
    """
    steps = records(folder)
    found = list(_missing(folder, list(steps)))
    last = max(steps, default=-1)
    for epoch, group in groupby(steps.values(), key=lambda those: those[0].epoch):
        those = [record for step in group for record in step]
        found += [] if repeats else _twice(epoch, those)
        if length is not None:
            found += _unknown(epoch, those, length)
            size = length if epoch_samples is None else epoch_samples
            per_epoch = max(1, size // batch if drop_last else -(-size // batch))
            found += _short(epoch, those, size, batch, per_epoch)
            if last >= (epoch + 1) * per_epoch - 1 and not repeats:
                found += _unseen(epoch, those, length, min(size, per_epoch * batch))
    return found


def audit_run(folder: Path, start: Mapping[str, Any]) -> list[str]:
    """Audit the run whose log has the event ``start``, like ``audit``."""
    if stretches := start.get("stretches"):
        return _audit_stretches(folder, stretches, drop_last=start["drop_last"], repeats=bool(start.get("repeats")))
    if start.get("batch_tokens"):
        return _audit_tokens(folder, start)
    return audit(
        folder,
        length=start["samples"],
        batch=start["batch"],
        drop_last=start["drop_last"],
        epoch_samples=start.get("epoch_samples"),
        repeats=bool(start.get("repeats")),
    )


class _Due(NamedTuple):
    """The samples a step must hold: pass over the data, number of samples, and the candidates."""

    epoch: int
    samples: int
    among: range


def due(stretches: Sequence[Sequence[int]], *, drop_last: bool) -> Iterator[_Due]:
    """Yield the required samples of each step, for a run whose batch or data change with the step.

    A stretch is its first step, its batch, the first sample and the size of its part of the data, and the samples in a
    pass.
    """
    step = epoch = taken = 0
    part = stretches[0][2]
    for (_, batch, begin, size, each), after in zip_longest(stretches, stretches[1:]):
        if begin != part:
            epoch, taken, part = epoch + 1, 0, begin
        while after is None or step < after[0]:
            if taken == each or (drop_last and each - taken < batch):
                epoch, taken = epoch + 1, 0
            samples = min(batch, each - taken)
            yield _Due(epoch, samples, range(begin, begin + size))
            step, taken = step + 1, taken + samples


def _audit_stretches(folder: Path, stretches: Sequence[Sequence[int]], *, drop_last: bool, repeats: bool) -> list[str]:
    steps = records(folder)
    found = list(_missing(folder, list(steps)))
    wanted = list(islice(due(stretches, drop_last=drop_last), max(steps, default=-1) + 1))
    for step, those in steps.items():
        ids, must = np.concatenate([record.ids for record in those]), wanted[step]
        if len(ids) != must.samples:
            found.append(f"step {step} holds {len(ids)} samples instead of {must.samples}")
        if those[0].epoch != must.epoch:
            found.append(f"step {step} is recorded in epoch {those[0].epoch}, but belongs to epoch {must.epoch}")
        if len(beyond := ids[(ids < must.among.start) | (ids >= must.among.stop)]):
            names = _more([str(sample) for sample in beyond[:_NAMED].tolist()], len(beyond))
            data = f"samples {must.among.start} to {must.among.stop - 1}"
            found.append(f"step {step}: {show_counted(len(beyond), 'id')} beyond {data}, whose turn it is: {names}")
    # with as many as are due in each step, and none twice in a pass, none is left out
    for epoch, group in groupby(steps.values(), key=lambda those: those[0].epoch):
        found += [] if repeats else _twice(epoch, [record for step in group for record in step])
    return found


def _audit_tokens(folder: Path, start: Mapping[str, Any]) -> list[str]:
    """Audit steps sized by tokens: at most ``batch`` samples a step, and each sample once an epoch."""
    steps = records(folder)
    found, last = list(_missing(folder, list(steps))), 0
    whole = bool(start.get("whole_epochs")) and max(steps, default=-1) + 1 == start["total_steps"]
    for step, those in steps.items():
        count = sum(len(record.ids) for record in those)
        if not 1 <= count <= start["batch"]:
            found.append(f"step {step} holds {count} samples instead of 1 to {start['batch']}")
        if not last <= those[0].epoch <= last + 1:
            found.append(f"step {step} is recorded in epoch {those[0].epoch}, after one of epoch {last}")
        last = those[0].epoch
    for epoch, group in groupby(steps.values(), key=lambda those: those[0].epoch):
        those = [record for step in group for record in step]
        found += _unknown(epoch, those, start["samples"])
        found += [] if start.get("repeats") else _twice(epoch, those)
        if (epoch < last or whole) and not start.get("repeats"):
            found += _unseen(epoch, those, start["samples"], start["epoch_samples"])
    return found


def finished_epochs(folder: Path, epoch_samples: int) -> int:
    """Return the number of epochs with so many samples that have ended in the ledger."""
    seen: dict[int, int] = {}
    for those in records(folder).values():
        seen[those[0].epoch] = seen.get(those[0].epoch, 0) + sum(len(record.ids) for record in those)
    return sum(count >= epoch_samples for count in seen.values())


def _missing(folder: Path, steps: list[int]) -> Iterator[str]:
    if not steps:
        yield f"the ledger {folder} is empty: no step was recorded"
    for before, after in zip([-1, *steps], steps, strict=False):
        if after == before + 2:
            yield f"step {before + 1} is missing"
        elif after > before + 1:
            yield f"steps {before + 1} to {after - 1} are missing"


def _twice(epoch: int, those: list[LedgerRecord]) -> Iterator[str]:
    ids = np.concatenate([record.ids for record in those])
    ordered = np.sort(ids)
    repeated = np.unique(ordered[1:][ordered[1:] == ordered[:-1]])
    if not len(repeated):
        return
    samples = []
    for sample in repeated[:_NAMED].tolist():
        places = [
            f"rank {record.rank} in step {record.step}"
            for record in those
            for _ in range(np.count_nonzero(record.ids == sample))
        ]
        samples.append(f"{sample} (by {_listed(places)})")
    several = show_counted(len(repeated), "sample")
    yield f"epoch {epoch}: {several} seen more than once: " + _more(samples, len(repeated))


def _unknown(epoch: int, those: list[LedgerRecord], length: int) -> Iterator[str]:
    ids = np.unique(np.concatenate([record.ids for record in those]))
    beyond = ids[ids >= length]
    if len(beyond):
        names = _more([str(sample) for sample in beyond[:_NAMED].tolist()], len(beyond))
        yield f"epoch {epoch}: {show_counted(len(beyond), 'id')} beyond the {length} samples of the data: {names}"


def _short(epoch: int, those: list[LedgerRecord], length: int, batch: int, per_epoch: int) -> Iterator[str]:
    for step, group in groupby(those, key=lambda record: record.step):
        members = list(group)
        count = sum(len(record.ids) for record in members)
        wanted = min(batch, length - step % per_epoch * batch)
        if count != wanted:
            ranks = _listed([str(record.rank) for record in members])
            yield f"epoch {epoch}: step {step} holds {count} samples instead of {wanted} (recorded by ranks {ranks})"
        if step // per_epoch != epoch:
            yield f"step {step} is recorded in epoch {epoch}, but belongs to epoch {step // per_epoch}"


def _unseen(epoch: int, those: list[LedgerRecord], length: int, whole: int) -> Iterator[str]:
    """Return samples never seen in a finished epoch, beyond the ``length - whole`` left out on purpose."""
    ids = np.concatenate([record.ids for record in those]).astype(np.uint64)
    seen = np.unique(ids[ids < length])
    unseen = length - len(seen)
    if unseen > max(0, length - whole):
        # all numbers below this are seen or among the first so many that are not
        most = min(length, len(seen) + _NAMED)
        first = np.setdiff1d(np.arange(most, dtype=np.uint64), seen)[:_NAMED]
        names = _more([str(sample) for sample in first.tolist()], unseen)
        allowed = f" ({length - whole} are left out on purpose)" if whole < length else ""
        yield f"epoch {epoch}: {show_counted(unseen, 'sample')} never seen{allowed}: {names}"


def _listed(words: list[str]) -> str:
    return words[0] if len(words) == 1 else ", ".join(words[:-1]) + " and " + words[-1]


def _more(named: Iterable[str], count: int) -> str:
    names = list(named)
    rest = f" and {count - len(names)} more" if count > len(names) else ""
    return ", ".join(names) + rest
