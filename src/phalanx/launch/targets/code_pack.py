"""The folder of a job as one file, for machines that share no disk with this one: what goes in, and how it comes out.

What goes in is what Git would take, by patterns of a file ``.phalanxignore`` in the folder, without run folders, links
and what is never code. The same files give the same bytes, so that one digest says what was packed.
"""

from __future__ import annotations

import gzip
import os
import re
import stat
import tarfile
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Self, final

from phalanx.config.run_files import EVENTS
from phalanx.errors import Problem, RunError, SpecError
from phalanx.files import read_text
from phalanx.launch.code_files import digest_of, unpack_files
from phalanx.launch.jobfile import Reference
from phalanx.launch.targets.launch_folder import FOLDER, TICKET
from phalanx.launch.targets.target import Option
from phalanx.units import show_bytes

CODE_OPTION = Option(help="folder that is packed; that of the job's file where not given", example=".")
"""``--code``, as every target has it that packs code."""

IGNORE_FILE = ".phalanxignore"
LARGEST = 1 << 30  # bytes of all files together
NEVER_CODE = (
    *(".git/", ".hg/", ".venv/", "venv/", "__pycache__/", ".ipynb_checkpoints/", "node_modules/", "*.pyc"),
    *(".env", ".env.*", ".aws/", ".ssh/", ".netrc", "*.pem", "id_rsa", "id_ed25519"),  # what is nobody else's to read
)
"""Patterns that are left out, unless a line of ``.phalanxignore`` such as ``!.env`` takes it in again."""

_PIECE = 1 << 20


@final
class IgnorePatterns:
    """Which paths are left out, by lines as of ``.gitignore``: the last that fits decides, ``!`` takes in again."""

    def __init__(self, lines: Sequence[str]) -> None:
        trimmed = (line.rstrip("\r\n ") for line in lines)
        self._rules = [_rule(line) for line in trimmed if line and not line.startswith("#")]

    def leave_out(self, path: str, *, folder: bool) -> bool:
        """Whether ``path``, relative and with slashes, is left out; what is in a folder that is, is not looked at."""
        out = False
        for pattern, takes_in, only_folders in self._rules:
            if (folder or not only_folders) and pattern.fullmatch(path):
                out = not takes_in
        return out


@dataclass(frozen=True, kw_only=True, slots=True)
class CodePack:
    """What would be packed.

    Attributes:
        root: the folder.
        files: relative path → size in bytes, in order.
        links: links and what is no file, which are left out.
        stamps: of each file, by which a change is noticed.
    """

    root: Path
    files: dict[str, int]
    links: tuple[str, ...]
    stamps: tuple[tuple[int, int, int], ...] = field(repr=False)

    @classmethod
    def of(cls, root: Path, *, without: Path) -> Self:
        """What is in ``root``. ``without``: the folder of the run, which is left out as every run's is.

        Raises:
            SpecError: it is more than a GiB, or there is nothing.
        """
        ignore = root / IGNORE_FILE
        own = read_text(ignore, where=IGNORE_FILE, fix=f"rm {ignore}").splitlines() if ignore.is_file() else []
        patterns = IgnorePatterns([*NEVER_CODE, *own])
        found: dict[str, os.stat_result] = {}
        links: list[str] = []
        try:
            for path, status in _walk(root, "", patterns, without):
                if stat.S_ISREG(status.st_mode):
                    found[path] = status
                else:
                    links.append(path)
        except OSError as error:
            given, allowed = f"{error.filename}: {error.strerror}", f"what can be read, or is in {IGNORE_FILE}"
            raise SpecError.of("--code", given, allowed, f"ls -l {error.filename}") from None
        pack = cls(
            root=root,
            files={path: found[path].st_size for path in sorted(found)},
            links=tuple(sorted(links)),
            stamps=tuple((one.st_size, one.st_mtime_ns, one.st_mode) for _, one in sorted(found.items())),
        )
        if not found:
            given = f"{root}, in which nothing is to be packed"
            raise SpecError.of("--code", given, "a folder with the job's file", "--code .")
        if pack.nbytes > LARGEST:
            raise _too_large(pack)
        return pack

    @property
    def nbytes(self) -> int:
        """Of all files."""
        return sum(self.files.values())

    @property
    def headline(self) -> str:
        """How much of what folder it is, in words."""
        return f"{len(self.files)} file{'s' if len(self.files) > 1 else ''} of {self.root}, {show_bytes(self.nbytes)}"

    @property
    def digests(self) -> dict[str, str]:
        """The SHA-256 of each file; raises OSError where one cannot be read."""
        return {path: digest_of(self.root / path) for path in self.files}

    @property
    def digest(self) -> str:
        """The SHA-256 of what ``write`` writes, as long as no file changes."""
        return _digest_of(self.root, tuple(self.files), self.stamps)

    def write(self, path: Path) -> str:
        """Write it to ``path`` as ``tar.gz``. Returns its SHA-256.

        Raises:
            RunError: a file is gone, or is another.
        """
        try:
            # fast: what is packed is sent once. No time and no name in the header: the same files, the same bytes
            with path.open("wb") as file:
                with gzip.GzipFile(filename="", mode="wb", fileobj=file, compresslevel=1, mtime=0) as packed:
                    with tarfile.open(fileobj=packed, mode="w|", format=tarfile.PAX_FORMAT) as archive:
                        for name in self.files:
                            _add(archive, self.root, name)
        except OSError as error:
            what = f"{self.root} changed while it was packed: {error.filename or ''} {error.strerror or error}"
            raise RunError(f"{what}\n    try: once more, when nothing writes there") from None
        return digest_of(path)

    def to_text(self) -> str:
        """What is in it, for people."""
        lines = [self.headline, f"sha256 {self.digest}", ""]
        lines += [f"{size:>12,}  {path}" for path, size in self.files.items()]
        lines += ["", "left out, being no files but links or the like:", *self.links] if self.links else []
        return "\n".join(lines) + "\n"


def folder_to_pack(job: str, given: str | None) -> Path:
    """The folder of a job's code, absolute: ``given``, else that of the job's file, else the working directory.

    Raises:
        SpecError: it is no folder, or does not hold the job's file.
    """
    file = Reference.parse(job).file
    folder = Path(given or (file.parent if file else ".")).expanduser().resolve()
    if not folder.is_dir():
        raise SpecError.of("--code", f"{folder}, which is no folder", "the folder with the job's code", "--code .")
    if file and not file.is_relative_to(folder):
        allowed = f"a folder that holds the job's file, {file}"
        raise SpecError.of("--code", f"{folder}", allowed, f"--code {file.parent}")
    return folder


def folder_and_problems(job: str, given: str | None) -> tuple[Path, list[Problem]]:
    """``folder_to_pack``, with what is wrong where it would raise."""
    try:
        return folder_to_pack(job, given), []
    except SpecError as error:
        return Path(), [*error.problems]


def job_within(job: str, folder: Path) -> str:
    """The job as whoever works in the unpacked ``folder`` names it."""
    reference = Reference.parse(job)
    text = str(reference)
    if reference.file:
        return f"{reference.file.relative_to(folder)}{text.removeprefix(str(reference.file))}"
    return text


def unpack(archive: Path, digest: str, folder: Path) -> None:
    """Unpack ``archive``, whose SHA-256 is to be ``digest``, into the new ``folder``.

    Raises:
        RunError: it is another, of which nothing is unpacked, or it cannot be.
    """
    if (found := digest_of(archive)) != digest:
        raise RunError(
            f"{archive} is not what was packed: its SHA-256 is {found}, not {digest}\n"
            "    try: phalanx launch once more; and who else may write there"
        )
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with archive.open("rb") as pack:
            unpack_files(pack, str(folder), mode=0o755)
    except OSError as error:
        why = f"{error.filename}: {error.strerror}" if error.filename else f"{error}"
        raise RunError(f"{archive} cannot be unpacked: {why}\n    try: phalanx launch once more") from None


@lru_cache(maxsize=4)
def _digest_of(root: Path, files: tuple[str, ...], stamps: tuple[tuple[int, int, int], ...]) -> str:
    del stamps  # by which the cache notices a change
    pack = CodePack(root=root, files=dict.fromkeys(files, 0), links=(), stamps=())
    with tempfile.TemporaryDirectory(prefix="phalanx-code-") as folder:
        return pack.write(Path(folder) / "pack")


def _add(archive: tarfile.TarFile, root: Path, path: str) -> None:
    handle = os.open(root / path, os.O_RDONLY | os.O_NOFOLLOW)
    with open(handle, "rb") as file:
        status = os.fstat(handle)
        entry = tarfile.TarInfo(path)
        entry.size = status.st_size
        entry.mode = 0o755 if status.st_mode & stat.S_IXUSR else 0o644
        archive.addfile(entry, file)


_OF_RUNS = (EVENTS, f"{FOLDER}/{TICKET}")


def _walk(root: Path, below: str, patterns: IgnorePatterns, without: Path) -> Iterator[tuple[str, os.stat_result]]:
    """Every path that is not left out, but folders, with its status; no link is followed."""
    with os.scandir(root / below) as entries:
        found = sorted(entries, key=lambda entry: entry.name)
    for entry in found:
        path = f"{below}{entry.name}"
        is_folder = entry.is_dir(follow_symlinks=False)
        if patterns.leave_out(path, folder=is_folder):
            continue
        if not is_folder:
            yield path, entry.stat(follow_symlinks=False)
        elif (at := Path(entry.path)) != without and not any((at / one).is_file() for one in _OF_RUNS):
            yield from _walk(root, f"{path}/", patterns, without)


def _rule(line: str) -> tuple[re.Pattern[str], bool, bool]:
    """A line's pattern, whether it takes in again, and whether it is of folders alone."""
    takes_in = line.startswith("!")
    pattern = line.removeprefix("!").removeprefix("\\")
    only_folders, pattern = pattern.endswith("/"), pattern.rstrip("/")
    head = "(?:.*/)?" if "/" not in pattern else ""
    try:
        return re.compile(head + _regex(pattern.lstrip("/"))), takes_in, only_folders
    except re.error:  # brackets that are none
        return re.compile(head + re.escape(pattern.lstrip("/"))), takes_in, only_folders


_WILD = re.compile(r"/\*\*/|^\*\*/|/\*\*$|\*+|\?|\[(!?)(\]?[^\]]*)\]")


def _regex(pattern: str) -> str:
    parts, at = list[str](), 0
    for found in _WILD.finditer(pattern):
        parts.append(re.escape(pattern[at : found.start()]))
        word, at = found[0], found.end()
        if word.startswith("["):
            inside = found[2].replace("\\", r"\\").replace("[", r"\[")
            parts.append(f"[{'^/' if found[1] else ''}{inside}]")
        else:
            parts.append({"/**/": "/(?:.*/)?", "**/": "(?:.*/)?", "/**": "/.*", "?": "[^/]"}.get(word, "[^/]*"))
    return "".join([*parts, re.escape(pattern[at:])])


def _too_large(pack: CodePack) -> SpecError:
    heads: dict[str, int] = {}
    for path, size in pack.files.items():
        head, slash, _ = path.partition("/")
        heads[head + slash] = heads.get(head + slash, 0) + size
    largest = sorted(heads, key=lambda head: heads[head], reverse=True)[:3]
    most = ", ".join(f"{head} {show_bytes(heads[head])}" for head in largest)
    given = f"{pack.root} with {show_bytes(pack.nbytes)} to be packed; most of it: {most}"
    allowed = f"at most {show_bytes(LARGEST)}: data go by --data, and what is no code into {IGNORE_FILE}"
    return SpecError.of("--code", given, allowed, f"echo '/{largest[0]}' >> {pack.root / IGNORE_FILE}")
