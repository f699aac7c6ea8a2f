"""The job's code on a node of a Ray cluster: the job's own folder where it is there with the same files, else a copy.

The launcher leaves the folder, packed, in the run folder, which all nodes see. It outlives the launcher, the supervisor
and the nodes, so that a run that is started anew has the code that it was launched with.
"""

from __future__ import annotations

import tarfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any, Self

from phalanx.errors import RunError
from phalanx.launch.code_files import digest_of
from phalanx.launch.targets.code_pack import unpack

ARCHIVE = "code.tar.gz"
"""The packed folder, beside the run file that workers read."""

_PIECE = 1 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class CodePlace:
    """Where a node's workers find the job.

    Attributes:
        folder: in which they work.
        job: the job as a run file names it, if it is not where theirs says; else empty.
        why: why it is not the job's own folder; empty where it is.
    """

    folder: Path
    job: str
    why: str


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestCode:
    """The code of a run, as its request says it.

    Attributes:
        root: the folder that was packed, as the launcher saw it.
        sha256: of the archive.
        reference: the job as whoever works in that folder names it; empty where it is no file, but a module.
        works: the launcher's own working directory.
    """

    root: str
    sha256: str
    reference: str
    works: str

    @classmethod
    def of(cls, request: Mapping[str, Any]) -> Self:
        """Of a request in JSON."""
        return cls(
            root=request["code"], sha256=request["sha256"], reference=request["reference"], works=request["folder"]
        )

    def to_dict(self) -> dict[str, str]:
        """As JSON."""
        return asdict(self)

    def found(self, archive: Path, scratch: Path) -> CodePlace:
        """Where the code is on this node; a copy of it is made in the new folder ``scratch``.

        Raises:
            RunError: ``archive`` is not what was packed, or there is no room for it.
        """
        try:
            return self._found(archive, scratch)
        except OSError as error:
            what = f"{error.filename or archive}: {error.strerror or error}"
            raise RunError(f"{what}\n    try: df -h {scratch} {archive.parent}, on that node") from None

    def _found(self, archive: Path, scratch: Path) -> CodePlace:
        root, works = Path(self.root), Path(self.works)
        why = _what_differs(archive, root) if digest_of(archive) == self.sha256 else "its archive is damaged"
        if not why:
            return CodePlace(folder=works if works.is_dir() else root, job="", why="")
        unpack(archive, self.sha256, scratch)
        folder = scratch / works.relative_to(root) if works.is_relative_to(root) else scratch
        folder.mkdir(parents=True, exist_ok=True)  # one without a file in it
        return CodePlace(folder=folder, job=f"{scratch}/{self.reference}" if self.reference else "", why=why)


def _what_differs(archive: Path, root: Path) -> str:
    """What is in the archive and not in the folder; empty where the folder has it all."""
    if not root.is_dir():
        return f"{root} is not there"
    with tarfile.open(archive, "r:gz") as opened:
        for entry in opened:
            packed = opened.extractfile(entry)
            if packed is None or not _same(packed, entry.size, root / entry.name):
                return f"{root / entry.name} is another there"
    return ""


def _same(packed: IO[bytes], size: int, path: Path) -> bool:
    try:
        with path.open("rb") as file:
            if path.stat().st_size != size:
                return False
            while piece := packed.read(_PIECE):
                if file.read(len(piece)) != piece:
                    return False
    except OSError:
        return False
    return True
