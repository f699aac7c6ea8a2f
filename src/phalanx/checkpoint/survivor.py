"""A whole checkpoint by one process whose peers are lost: no rank is asked, none is waited for.

Several survivors may come at once, and one may be a step ahead of another. They take turns; who finds one of its own
step or a later one leaves it at that. Each writes under a name of its own, so that on hosts that see no locks of each
other the rename decides, and so that nothing of a save that lost its peers half-way is in the way.
"""

from __future__ import annotations

from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

from phalanx.checkpoint.all_ranks import alone
from phalanx.checkpoint.folder import is_complete, newest_first, prune, publish, temporary_of, turn
from phalanx.checkpoint.format import step_of
from phalanx.checkpoint.safe_files import remove
from phalanx.checkpoint.store import SaveRequest, prepared
from phalanx.checkpoint.writing import file_of
from phalanx.files import check_writer


def save_as_survivor(asked: SaveRequest, *, rank: int, known: Collection[str] = ()) -> Path | None:
    """Write the checkpoint that ``asked`` describes, all of which this process holds, and return its path.

    Args:
        asked: made while this process acted ``alone``.
        rank: of this process.
        known: names of checkpoints that are no result of this run's steps so far, and do not count as newer.

    Returns:
        ``None`` where there is one of the same step or a later one already.

    Raises:
        CheckpointError: it cannot be written, or a value is not finite. What was there stands.
        RunError: another run has taken the folder.
        OSError: it cannot be written.
    """
    folder, step = asked.folder, asked.step

    def needless() -> bool:
        new = (path for path in newest_first(folder) if path.name not in known and (step_of(path) or 0) >= step)
        return any(map(is_complete, new))

    with alone(), turn(folder):
        if needless():
            return None
        check_writer(folder)
        ready, written = prepared(asked), temporary_of(folder, step, rank)
        with suppress(FileNotFoundError):
            remove(written)
        written.mkdir()
        try:
            file = ready.content.write(written / file_of(0))
            ready.complete(written, [file] if file else [])
            if needless():  # by a process of another host
                return None
            path = publish(folder, step, written)
        finally:
            with suppress(OSError):
                remove(written)
        prune(folder, keep=asked.keep, keep_every=asked.keep_every, upto=step)
    return path
