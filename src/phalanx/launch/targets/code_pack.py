"""The folder of a job as one ``tar.gz``, for machines that share no disk with this one.

Git's patterns in a file ``.phalanxignore`` leave files out; run folders, links and ``NEVER_CODE`` are left out anyway.
The same files give the same bytes, so that a digest identifies the pack. Patterns are read here: after ``*`` and
``!*/`` pathspec 1.1 takes every file in again, which Git does not (measured 2026-11-29).
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
from typing import Self

from phalanx.config.run_files import EVENTS
from phalanx.errors import Problem, RunError, SpecError
from phalanx.files import read_text
from phalanx.launch.code_files import digest_of, unpack_files
from phalanx.launch.jobfile import Reference
from phalanx.launch.targets.launch_folder import FOLDER, TICKET
from phalanx.launch.targets.target import Option
from phalanx.units import show_bytes

CODE_OPTION = Option(help="folder that is packed; that of the job's file where not given", example=".")
"""``--code`` of every target that packs code."""

IGNORE_FILE = ".phalanxignore"
LARGEST = 1 << 30  # bytes of all files together
NEVER_CODE = (
    *(".git/", ".hg/", ".venv/", "venv/", "__pycache__/", ".ipynb_checkpoints/", "node_modules/", "*.pyc"),
    *(".env", ".env.*", ".aws/", ".ssh/", ".netrc", "*.pem", "id_rsa", "id_ed25519"),  # secrets
)
"""Patterns that are left out, unless a line of ``.phalanxignore`` such as ``!.env`` takes it in again."""

_OF_RUNS = (EVENTS, f"{FOLDER}/{TICKET}")


@dataclass(frozen=True, kw_only=True, slots=True)
class CodePack:
    """The files of a pack.

    Attributes:
        files: relative path → size in bytes, in order.
        links: links and other entries that are no files, left out.
        stamps: of each file, to notice a change.
    """

    root: Path
    files: dict[str, int]
    links: tuple[str, ...]
    stamps: tuple[tuple[int, int, int], ...] = field(repr=False)

    @classmethod
    def of(cls, root: Path, *, without: Path) -> Self:
        """List the files of ``root``. ``without``: the run folder, which is left out.

        Raises:
            SpecError: they are more than a GiB, or none.
        """
        ignore = root / IGNORE_FILE
        own = read_text(ignore, where=IGNORE_FILE, fix=f"rm {ignore}").splitlines() if ignore.is_file() else []
        try:
            found = dict(sorted(_walk(root, "", [*map(_rule, filter(_is_rule, [*NEVER_CODE, *own]))], without)))
        except OSError as error:
            given, allowed = f"{error.filename}: {error.strerror}", f"a file that can be read, or is in {IGNORE_FILE}"
            raise SpecError.of("--code", given, allowed, f"ls -l {error.filename}") from None
        files = {path: one for path, one in found.items() if stat.S_ISREG(one.st_mode)}
        pack = cls(
            root=root,
            files={path: one.st_size for path, one in files.items()},
            links=tuple(path for path in found if path not in files),
            stamps=tuple((one.st_size, one.st_mtime_ns, one.st_mode) for one in files.values()),
        )
        if not files:
            raise SpecError.of("--code", f"{root}, without a file", "a folder with the job's file", "--code .")
        if pack.nbytes > LARGEST:
            raise _too_large(pack)
        return pack

    @property
    def nbytes(self) -> int:
        """Size of all files."""
        return sum(self.files.values())

    @property
    def headline(self) -> str:
        """Number of files, folder and size, in words."""
        return f"{len(self.files)} file{'s' if len(self.files) > 1 else ''} of {self.root}, {show_bytes(self.nbytes)}"

    @property
    def digest(self) -> str:
        """The SHA-256 of the pack, unless a file changes before it is written."""
        return _digest_of(self.root, tuple(self.files), self.stamps)

    def write(self, path: Path) -> str:
        """Write it to ``path`` as ``tar.gz``. Returns its SHA-256.

        Raises:
            RunError: a file is gone or has changed.
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

    def to_text(self) -> str:
        """Return the list of files as text."""
        lines = [self.headline, f"sha256 {self.digest}", ""]
        lines += [f"{size:>12,}  {path}" for path, size in self.files.items()]
        lines += ["", "left out, being no files but links or the like:", *self.links] if self.links else []
        return "\n".join(lines) + "\n"


def folder_to_pack(job: str, given: str | None) -> Path:
    """Return the folder of a job's code: ``given``, else that of the job's file, else the working directory.

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
    """Return the folder of ``folder_to_pack`` and no problem, or no folder and its problems."""
    try:
        return folder_to_pack(job, given), []
    except SpecError as error:
        return Path(), [*error.problems]


def job_within(job: str, folder: Path) -> str:
    """Return the reference of the job from inside ``folder``, once that is unpacked elsewhere."""
    reference = Reference.parse(job)
    text = str(reference)
    if reference.file:
        return f"{reference.file.relative_to(folder)}{text.removeprefix(str(reference.file))}"
    return text


def unpack(archive: Path, digest: str, folder: Path) -> None:
    """Unpack ``archive`` into the new ``folder``, if its SHA-256 is ``digest``.

    Raises:
        RunError: it is not, or the archive cannot be unpacked.
    """
    if (found := digest_of(archive)) != digest:
        raise RunError(
            f"{archive} is not what was packed: its SHA-256 is {found}, not {digest}\n"
            "    try: phalanx launch once more; and look for others who write there"
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
    pack = CodePack(root=root, files=dict.fromkeys(files, 0), links=(), stamps=stamps)
    with tempfile.TemporaryDirectory(prefix="phalanx-code-") as folder:
        return pack.write(Path(folder) / "pack")


def _add(archive: tarfile.TarFile, root: Path, path: str) -> None:
    with open(os.open(root / path, os.O_RDONLY | os.O_NOFOLLOW), "rb") as file:
        status = os.fstat(file.fileno())
        entry = tarfile.TarInfo(path)
        entry.size = status.st_size
        entry.mode = 0o755 if status.st_mode & stat.S_IXUSR else 0o644
        archive.addfile(entry, file)


Rule = tuple[re.Pattern[str], bool, bool]
"""Pattern of a line, True if it takes files in again, True if it is for folders only."""


def _walk(root: Path, below: str, rules: Sequence[Rule], without: Path) -> Iterator[tuple[str, os.stat_result]]:
    """Yield every path that is not left out, but folders, with its status; no link is followed."""
    with os.scandir(root / below) as entries:
        found = [*entries]
    for entry in found:
        path, at, folder = f"{below}{entry.name}", Path(entry.path), entry.is_dir(follow_symlinks=False)
        fits = [takes_in for pattern, takes_in, folders in rules if (folder or not folders) and pattern.fullmatch(path)]
        if fits and not fits[-1]:
            continue
        if not folder:
            yield path, entry.stat(follow_symlinks=False)
        elif at != without and not any((at / one).is_file() for one in _OF_RUNS):
            yield from _walk(root, f"{path}/", rules, without)


def _is_rule(line: str) -> bool:
    return bool(line.strip()) and not line.startswith("#")


def _rule(line: str) -> Rule:
    line = line.rstrip("\r\n ")
    pattern = line.removeprefix("!").removeprefix("\\")
    head = "(?:.*/)?" if "/" not in pattern.rstrip("/") else ""
    text = pattern.strip("/")
    try:
        compiled = re.compile(head + _regex(text))
    except re.error:  # brackets without a meaning
        compiled = re.compile(head + re.escape(text))
    return compiled, line.startswith("!"), pattern.endswith("/")


_WILD = re.compile(r"/\*\*/|^\*\*/|/\*\*$|\*+|\?|\[(!?)(\]?[^\]]*)\]")


def _regex(pattern: str) -> str:
    parts, at = list[str](), 0
    for found in _WILD.finditer(pattern):
        word = found[0]
        parts.append(re.escape(pattern[at : found.start()]))
        inside = (found[2] or "").replace("\\", r"\\").replace("[", r"\[")
        wild = {"/**/": "/(?:.*/)?", "**/": "(?:.*/)?", "/**": "/.*", "?": "[^/]"}.get(word, "[^/]*")
        parts.append(f"[{'^/' if found[1] else ''}{inside}]" if word.startswith("[") else wild)
        at = found.end()
    return "".join([*parts, re.escape(pattern[at:])])


def _too_large(pack: CodePack) -> SpecError:
    heads: dict[str, int] = {}
    for path, size in pack.files.items():
        head, slash, _ = path.partition("/")
        heads[head + slash] = heads.get(head + slash, 0) + size
    largest = sorted(heads, key=lambda head: heads[head], reverse=True)[:3]
    most = ", ".join(f"{head} {show_bytes(heads[head])}" for head in largest)
    given = f"{pack.root} with {show_bytes(pack.nbytes)} to be packed; most of it: {most}"
    allowed = f"at most {show_bytes(LARGEST)}: data go by --data, and other files into {IGNORE_FILE}"
    return SpecError.of("--code", given, allowed, f"echo '/{largest[0]}' >> {pack.root / IGNORE_FILE}")
