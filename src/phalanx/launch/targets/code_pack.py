"""The folder of a job as one ``tar.gz``, for machines that share no disk with this one.

Git's patterns in a file ``.phalanxignore`` leave files out, as ``pathspec`` reads them. Run folders, links and
``NEVER_CODE`` are always left out. The same files give the same bytes, so that a digest identifies the pack.
"""

from __future__ import annotations

import gzip
import os
import re
import stat
import tarfile
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from phalanx.config.run_files import EVENTS
from phalanx.errors import Problem, RunError, SpecError
from phalanx.files import read_text
from phalanx.launch.code_files import digest_of
from phalanx.launch.jobfile import Reference
from phalanx.launch.targets.launch_folder import FOLDER, TICKET
from phalanx.launch.targets.target import Option
from phalanx.units import show_bytes

CODE_OPTION = Option(help="folder that is packed; that of the job's file where not given", example=".")
"""``--code`` of every target that packs code."""

IGNORE_FILE = ".phalanxignore"
_SHOWN = 20  # files in a list
LARGEST = 1 << 30  # bytes of all files together
NEVER_CODE = (
    *(".git/", ".hg/", ".venv/", "venv/", "__pycache__/", ".ipynb_checkpoints/", "node_modules/", "*.pyc"),
    *(".env", ".env.*", ".aws/", ".ssh/", ".netrc", "*.pem", "id_rsa", "id_ed25519"),  # secrets
)
"""Patterns that are left out, whatever ``.phalanxignore`` says."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CodePack:
    """The files of a pack.

    Attributes:
        files: relative path → size in bytes, in order.
        links: links and other entries that are no files, left out.
    """

    root: Path
    files: dict[str, int]
    links: tuple[str, ...]

    @classmethod
    def of(cls, root: Path, *, without: Path) -> Self:
        """List the files of ``root``. ``without``: the run folder, which is left out.

        Raises:
            SpecError: they are more than a GiB, or none.
        """
        try:
            found = dict(sorted(_walk(root, ignored_lines(root), without)))
        except OSError as error:
            given, allowed = f"{error.filename}: {error.strerror}", f"a file that can be read, or is in {IGNORE_FILE}"
            raise SpecError.of("--code", given, allowed, f"ls -l {error.filename}") from None
        files = {path: one.st_size for path, one in found.items() if stat.S_ISREG(one.st_mode)}
        pack = cls(root=root, files=files, links=tuple(path for path in found if path not in files))
        if not files:
            raise SpecError.of("--code", f"{root}, without a file", "a folder with the job's file", "--code .")
        if pack.nbytes > LARGEST:
            largest = max(files, key=lambda path: files[path])
            given = f"{root} with {show_bytes(pack.nbytes)} to be packed; the largest file is {largest}"
            allowed = f"at most {show_bytes(LARGEST)}: data go by --data, and other files into {IGNORE_FILE}"
            raise SpecError.of("--code", given, allowed, f"echo '/{largest}' >> {root / IGNORE_FILE}")
        return pack

    @property
    def nbytes(self) -> int:
        """Size of all files."""
        return sum(self.files.values())

    @property
    def headline(self) -> str:
        """Number of files, folder and size, in words."""
        return f"{len(self.files)} file{'s' if len(self.files) > 1 else ''} of {self.root}, {show_bytes(self.nbytes)}"

    def write(self, path: Path) -> str:
        """Write it to ``path`` as ``tar.gz``. Returns its SHA-256.

        Raises:
            RunError: a file is gone, or changes meanwhile.
        """
        try:
            # low compression, as a pack is sent once; no time and no name in the header, for the same bytes each time
            with path.open("wb") as file, gzip.GzipFile("", "wb", compresslevel=1, fileobj=file, mtime=0) as packed:
                with tarfile.open(fileobj=packed, mode="w|", format=tarfile.PAX_FORMAT) as archive:
                    for name in self.files:
                        _add(archive, self.root, name)
        except OSError as error:
            what = f"{self.root} changed while it was packed: {error.filename or ''} {error.strerror or error}"
            raise RunError(f"{what}\n    try: once more, when nothing writes there") from None
        return digest_of(path)

    def copy(self, folder: Path) -> None:
        """Copy its files into the new or empty ``folder``.

        Raises:
            RunError: a file is gone or has changed.
        """
        with tempfile.TemporaryDirectory(prefix="phalanx-code-") as here:
            self.write(Path(here) / "pack")
            unpack(Path(here) / "pack", folder)

    def to_text(self) -> str:
        """Return the largest files and all links as text."""
        largest = sorted(self.files.items(), key=lambda one: -one[1])[:_SHOWN]
        lines = [self.headline, "", *(f"{size:>12,}  {path}" for path, size in largest)]
        lines += [f"and {len(self.files) - _SHOWN:,} smaller ones"] if len(self.files) > _SHOWN else []
        lines += ["", "left out, being no files but links or the like:", *self.links] if self.links else []
        return "\n".join(lines) + "\n"


def ignored_lines(root: Path) -> list[str]:
    """Return the lines of the file ``.phalanxignore`` in ``root``.

    Raises:
        SpecError: it cannot be read.
    """
    path = root / IGNORE_FILE
    return read_text(path, where=IGNORE_FILE, fix=f"rm {path}").splitlines() if path.is_file() else []


def folder_and_problems(job: str, given: str | None) -> tuple[Path, list[Problem]]:
    """Return the folder of a job's code: ``given``, else that of the job's file, else the working directory.

    With problems if it is no folder, or does not hold the job's file.
    """
    file = Reference.parse(job).file
    folder = Path(given or (file.parent if file else ".")).expanduser().resolve()
    if folder.is_dir() and (file is None or file.is_relative_to(folder)):
        return folder, []
    allowed = f"a folder that holds the job's file, {file}" if file else "the folder with the job's code"
    fix = f"--code {file.parent if file else '.'}"
    return folder, [Problem(where="--code", given=f"{folder}", allowed=allowed, fix=fix)]


def job_within(job: str, folder: Path) -> str:
    """Return the reference of the job from inside ``folder``, once that is unpacked elsewhere."""
    reference = Reference.parse(job)
    text = str(reference)
    if reference.file:
        return f"{reference.file.relative_to(folder)}{text.removeprefix(str(reference.file))}"
    return text


def check_digest(path: Path, digest: str) -> None:
    """
    Raises:
        RunError: the file's SHA-256 is not ``digest``.
    """
    if (found := digest_of(path)) != digest:
        what = f"{path} is not what was sent: its SHA-256 is {found}, not {digest}"
        raise RunError(f"{what}\n    try: phalanx launch once more; and look for others who write there")


def unpack(archive: Path, folder: Path) -> None:
    """Unpack ``archive`` into the new ``folder``.

    Raises:
        RunError: it cannot be unpacked.
    """
    try:
        with tarfile.open(archive, "r:gz") as pack:
            pack.extractall(folder, filter="data")  # no links to the outside, and nothing outside
    except (OSError, tarfile.TarError) as error:
        raise RunError(f"{archive} cannot be unpacked: {error}\n    try: phalanx launch once more") from None


def _add(archive: tarfile.TarFile, root: Path, path: str) -> None:
    with open(os.open(root / path, os.O_RDONLY | os.O_NOFOLLOW), "rb") as file:
        status = os.fstat(file.fileno())
        entry = tarfile.TarInfo(path)
        entry.size = status.st_size
        entry.mode = 0o755 if status.st_mode & stat.S_IXUSR else 0o644
        archive.addfile(entry, file)


def _walk(root: Path, lines: list[str], without: Path) -> Iterator[tuple[str, os.stat_result]]:
    """Yield every path that is not left out, but folders, with its status; no link is followed."""
    from pathspec import PathSpec

    # entry by entry, as Git does: the lines of folders say nothing about the files in a folder that is taken
    never, files = list(NEVER_CODE), [line for line in lines if not line.rstrip().endswith("/")]
    try:
        never, folders, files = (PathSpec.from_lines("gitignore", one) for one in (never, lines, files))
    except (ValueError, re.error) as error:
        raise SpecError.of(IGNORE_FILE, f"{error}", "patterns as of .gitignore", f"rm {root / IGNORE_FILE}") from None

    def fail(error: OSError) -> None:
        raise error

    for above, inside, names in os.walk(root, onerror=fail):
        base = "" if above == str(root) else f"{Path(above).relative_to(root).as_posix()}/"
        links = [name for name in inside if os.path.islink(os.path.join(above, name))]
        inside[:] = [
            name
            for name in inside
            if name not in links
            and not any(spec.match_file(f"{base}{name}/") for spec in (never, folders))
            and (at := Path(above, name)) != without
            and not any((at / one).is_file() for one in (EVENTS, f"{FOLDER}/{TICKET}"))
        ]
        for path in (f"{base}{name}" for name in (*names, *links)):
            if not any(spec.match_file(path) for spec in (never, files)):
                yield path, os.lstat(root / path)
