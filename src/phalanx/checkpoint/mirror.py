"""A copy of a run's checkpoints in an object store, or in any other place that fsspec reaches: S3, GCS, Azure, SSH.

A run writes checkpoints into its folder; a thread copies each complete one during training. The manifest is copied last
and marks a complete copy. A new machine without local checkpoints fetches the newest and verifies it like one on its
own disk.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from queue import SimpleQueue
from typing import Any, final
from urllib.parse import urlsplit

from phalanx.checkpoint.best import best_step
from phalanx.checkpoint.folder import begin, give_up, latest, name_of, publish, temporary
from phalanx.checkpoint.format import MANIFEST, Manifest, step_of
from phalanx.checkpoint.reading import verify
from phalanx.checkpoint.safe_files import create
from phalanx.errors import CheckpointError, DamagedError, MissingExtraError, PhalanxError, RunError, SpecError
from phalanx.files import check_writer

_PIECE = 8 << 20
# Elsewhere a folder is there with its first file, and to make one might make a bucket.
_WITH_FOLDERS = {"file", "local", "sftp", "ssh", "ftp", "smb", "hdfs", "webhdfs"}
_EXTRAS = {"s3": ("s3fs", "s3"), "s3a": ("s3fs", "s3"), "gs": ("gcsfs", "gcs"), "gcs": ("gcsfs", "gcs")}


@final
class ObjectStore:
    """The checkpoints of one run under a URL such as ``s3://bucket/runs/digits-1``."""

    def __init__(self, url: str) -> None:
        """Raise SpecError for a URL unknown to fsspec, MissingExtraError if the package for it is missing."""
        import fsspec

        self.url = url.rstrip("/")
        scheme = urlsplit(url).scheme
        try:
            if not scheme:
                raise ValueError("it has no scheme")
            self._files, root = fsspec.core.url_to_fs(self.url, skip_instance_cache=True)
        except ImportError:
            raise MissingExtraError(*_EXTRAS.get(scheme, (f"fsspec's for {scheme}://", scheme))) from None
        except ValueError as error:
            raise SpecError.of(
                where="run.mirror",
                given=f"{url}: {error}",
                allowed="a URL of a folder that fsspec reaches: s3://, gs://, abfs://, sftp://, file://",
                fix='mirror="s3://bucket/runs/digits-1"',
            ) from None
        self._root = str(root).rstrip("/")
        self._has_folders = scheme in _WITH_FOLDERS

    def refuse_unusable(self) -> None:
        """Refuse a store without write access; a small file is written and removed.

        Raises:
            SpecError: with the reason.
        """
        probe = f"{self._root}/.phalanx"
        try:
            with self._told("written to"):
                if self._has_folders:
                    self._files.makedirs(self._root, exist_ok=True)
                self._files.pipe_file(probe, b"")
                self._files.rm_file(probe)
        except CheckpointError as error:
            raise SpecError.of(
                where="run.mirror",
                given=str(error),
                allowed="a place that is there and may be written to, which a run needs with its first checkpoint",
                fix=f'mirror="{self.url}", once that is there; or none',
            ) from None

    def steps(self) -> list[int]:
        """Return the steps of the complete checkpoints, the newest first.

        Raises:
            CheckpointError: the store cannot be asked.
        """
        with self._told("asked"):
            if not self._files.exists(self._root):
                return []
            whole = [step for step in self._names() if self._files.exists(f"{self._path(step)}/{MANIFEST}")]
        return sorted(whole, reverse=True)

    def put(self, path: Path) -> int:
        """Copy the checkpoint in folder ``path``, and return the bytes copied: 0 if the store already has it.

        The copy is visible only once it is complete.

        Raises:
            CheckpointError: it cannot be copied, or is damaged.
        """
        manifest, total = Manifest.read(path), 0
        with self._told("written to"):
            target = f"{self._root}/{path.name}"
            if self._files.exists(f"{target}/{MANIFEST}"):
                if self._files.cat_file(f"{target}/{MANIFEST}") == (path / MANIFEST).read_bytes():
                    return 0
                self._files.rm_file(f"{target}/{MANIFEST}")  # until all of this one is there, there is none
            if self._has_folders:
                self._files.makedirs(target, exist_ok=True)
            for name in [*manifest.files, MANIFEST]:
                self._files.put_file(str(path / name), f"{target}/{name}")
                total += (path / name).stat().st_size
                if self._files.info(f"{target}/{name}")["size"] != (path / name).stat().st_size:
                    raise OSError(f"{name} has another size there")
        return total

    def fetch(self, step: int, folder: Path) -> Path:
        """Copy the checkpoint of ``step`` into ``folder``, the ``checkpoints`` of a run, without verification.

        A file missing in the store will be missing in the copy.

        Raises:
            CheckpointError: it cannot be read or written; then ``folder`` holds no part of it.
        """
        source, here = f"{self._root}/{name_of(step)}", temporary(folder, step)
        try:
            begin(folder, step)
            with self._told("read"):
                self._copy(f"{source}/{MANIFEST}", here / MANIFEST)
            with suppress(DamagedError):  # verification reports it
                for name in Manifest.read(here).files:
                    with self._told("read"), suppress(FileNotFoundError):
                        self._copy(f"{source}/{name}", here / name)
            return publish(folder, step)
        except BaseException:
            give_up(folder, step)
            raise

    def prune(self, keep: int, keep_every: int = 0, best: int | None = None) -> list[int]:
        """Delete all but the newest ``keep``, multiples of ``keep_every`` and ``best``; return the deleted steps.

        Incomplete copies older than the newest are deleted, too.

        Raises:
            CheckpointError: the store cannot be asked or written to.
        """
        whole = self.steps()
        gone = [step for step in whole[keep:] if step != best and not (keep_every and step % keep_every == 0)]
        with self._told("written to"):
            cut_short = [step for step in self._names() if whole and step < whole[0] and step not in whole]
            for step in (*gone, *cut_short):
                self._remove(step)
        return gone

    def set_aside(self, after: int) -> list[int]:
        """Move checkpoints of later steps than ``after`` into a folder ``set-aside-N``; return their steps.

        Raises:
            CheckpointError: the store cannot be asked or written to.
        """
        later = [step for step in self.steps() if step > after]
        with self._told("written to"):
            number = 1
            while later and self._files.exists(f"{self._root}/set-aside-{number}"):
                number += 1
            for step in later:
                source, target = self._path(step), f"{self._root}/set-aside-{number}/{name_of(step)}"
                if self._has_folders:
                    self._files.makedirs(target, exist_ok=True)
                files = [str(entry).rsplit("/", 1)[-1] for entry in self._files.ls(source, detail=False)]
                for name in sorted(files, key=lambda name: name == MANIFEST):
                    self._files.cp_file(f"{source}/{name}", f"{target}/{name}")
                self._remove(step)
        return later

    def _names(self) -> list[int]:
        names = [Path(str(entry)) for entry in self._files.ls(self._root, detail=False)]
        return [step for name in names if (step := step_of(name)) is not None]

    def _path(self, step: int) -> str:
        return f"{self._root}/{name_of(step)}"

    def _remove(self, step: int) -> None:
        manifest = f"{self._path(step)}/{MANIFEST}"
        if self._files.exists(manifest):
            self._files.rm_file(manifest)  # first: from then on there is none
        if self._files.exists(self._path(step)):
            self._files.rm(self._path(step), recursive=True)

    def _copy(self, source: str, target: Path) -> None:
        with self._files.open(source, "rb") as there, open(create(target), "wb") as here:
            while piece := there.read(_PIECE):
                here.write(piece)

    @contextmanager
    def _told(self, what: str) -> Iterator[None]:
        try:
            yield
        except CheckpointError:
            raise
        except Exception as error:  # each kind of store has errors of its own
            first = (str(error).splitlines() or [""])[0]
            raise CheckpointError(f"{self.url} could not be {what}: {type(error).__name__}: {first}") from None


def fetch_newest(url: str, folder: Path) -> Path | None:
    """Fetch the newest whole checkpoint at ``url`` into ``folder``, unless a whole one as new is there.

    Returns ``None`` if there is none to fetch. Damaged checkpoints stay in ``folder`` for the run to report, and the
    one before is fetched.

    Raises:
        CheckpointError: the store cannot be read.
    """
    store, newest = ObjectStore(url), latest(folder)
    have = -1 if newest is None else step_of(newest) or 0
    for step in store.steps():
        if newest is not None and (step < have or (step == have and not verify(newest))):
            break
        path = store.fetch(step, folder)
        if not verify(path):
            return path
    return None


def fetch_step(url: str, folder: Path, step: int) -> None:
    """Fetch the checkpoint of ``step`` from ``url`` unless ``folder`` has it whole.

    Raises:
        CheckpointError: the store cannot be read.
    """
    store = ObjectStore(url)
    if verify(folder / name_of(step)) and step in store.steps():
        store.fetch(step, folder)


@final
class Mirror:
    """A thread that copies checkpoints into an object store, one after the other."""

    def __init__(self, url: str, *, keep: int, keep_every: int = 0) -> None:
        self._url, self._keep, self._keep_every = url, keep, keep_every
        self._waiting: SimpleQueue[Path | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._news: SimpleQueue[dict[str, Any]] = SimpleQueue()
        self._last: RunError | None = None

    def add(self, path: Path) -> None:
        """Queue the whole checkpoint in folder ``path`` for copying."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="phalanx-mirror", daemon=True)
            self._thread.start()
        self._waiting.put(path)

    def news(self) -> Iterator[dict[str, Any]]:
        """Yield the outcome of each queued copy: ``path`` and ``bytes``, or ``error``, a text."""
        while not self._news.empty():
            yield self._news.get()

    def close(self) -> None:
        """Wait until all are copied.

        Raises:
            CheckpointError: the last one could not be copied, even after another try.
            RunError: another run has taken over the folder.
        """
        if self._thread is None:
            return
        self._waiting.put(None)
        self._thread.join()
        self._thread = None
        if self._last:
            raise self._last

    def _run(self) -> None:
        store: ObjectStore | None = None
        while (path := self._waiting.get()) is not None:
            try:
                check_writer(path)  # another run may have taken the folder, and copy there now
                store = store or ObjectStore(self._url)
                store.set_aside(step_of(path) or 0)  # later ones are of a course that this run has given up
                if copied := store.put(path):
                    self._news.put({"path": str(path), "bytes": copied})
                self._last = None
                check_writer(path)
                store.prune(self._keep, self._keep_every, best_step(path.parents[1]))
            except PhalanxError as error:
                if path.exists():  # else a later one has taken its place meanwhile
                    self._last = error if isinstance(error, RunError) else CheckpointError(str(error))
                    self._news.put({"path": str(path), "error": str(error)})
