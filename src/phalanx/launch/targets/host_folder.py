"""What a host of a launch by SSH keeps for a run whose files it does not share with the launcher: code, run folder.

Its text is sent to the host before ``host_agent``, whose it becomes a part of: but for ``code_files``, which goes
before it, it is of the standard library alone.
All of it stands below one folder, ``scratch``, and nothing that was there before is ever written over:

    code/DIGEST        the job's code, unpacked once from the pack of that SHA-256
    runs/NAME          a copy of one run's folder, which is its launcher's: what changes there is brought to it
"""

from __future__ import annotations

import base64
import os
import secrets
import shutil
from contextlib import suppress
from typing import Any

from phalanx.launch.code_files import are_alike, digest_of, state_of, unpack_files

PIECE = 1 << 18  # bytes that are read and sent at a time
_HELD = ".held"  # in a copy: files of a checkpoint that is on its way, which no worker deletes


class HostFiles:
    """Code and copies of run folders on this host."""

    def __init__(self) -> None:
        self._copy = ""
        self._known: dict[str, list[int]] = {}
        self._manifest = ""
        self._stays: set[str] = set()
        self._incoming = ""

    def look(self, probe: str, token: str, files: dict[str, list[int]], scratch: str) -> dict[str, Any]:
        """Whether the launcher's word, ``token``, is seen at ``probe``, and which of its ``files`` are the same here.

        ``files``: path → size, time and number of the file in its file system. Which are the very same, which only
        have that name and which are not there, is told of each.
        """
        found = {path: state_of(path, stamp) for path, stamp in files.items()}
        scratch = os.path.abspath(os.path.expanduser(scratch))
        return {"sees": _text(probe) == token, "files": found, "scratch": scratch}

    def compare(self, root: str, digests: dict[str, str]) -> bool:
        """Whether each file below ``root`` is that of its SHA-256."""
        return are_alike(root, digests)

    def code(self, scratch: str, digest: str) -> str:
        """Where the code of that pack is unpacked; empty where it is not."""
        folder = os.path.join(scratch, "code", digest)
        return folder if os.path.isdir(folder) else ""

    def receive(self, scratch: str) -> None:
        """Begin to take in a pack."""
        folder = os.path.join(scratch, "code")
        os.makedirs(folder, mode=0o700, exist_ok=True)
        self._incoming = os.path.join(folder, ".incoming-" + secrets.token_hex(8))
        os.mkdir(self._incoming, 0o700)

    def unpack(self, scratch: str, digest: str) -> str:
        """Unpack what came, whose SHA-256 is to be ``digest``. Returns the folder."""
        folder, pack, new = os.path.join(scratch, "code", digest), self._inside("pack"), self._inside("code")
        try:
            found = digest_of(pack)
            if found != digest:
                raise OSError(f"the code that came is not what was sent: its SHA-256 is {found}, not {digest}")
            with open(pack, "rb") as file:
                unpack_files(file, new, mode=0o555)  # it goes by its digest: nobody is to change it
            try:
                os.rename(new, folder)
            except OSError:
                if not os.path.isdir(folder):  # else another launch was faster, and it is the same by its name
                    raise
        finally:
            shutil.rmtree(self._incoming, ignore_errors=True)
            self._incoming = ""
        return folder

    def begin(self, scratch: str, name: str) -> str:
        """Begin a copy of a run's folder, anew where this launch had one before. Returns where."""
        runs = os.path.join(scratch, "runs")
        os.makedirs(runs, mode=0o700, exist_ok=True)
        self._copy = os.path.join(runs, name)
        shutil.rmtree(self._copy, ignore_errors=True)
        os.mkdir(self._copy, 0o700)
        return self._copy

    def put(self, path: str, data: str) -> None:
        """Append to a file of the copy, or of the pack that comes in."""
        within = self._inside(path)
        os.makedirs(os.path.dirname(within), exist_ok=True)
        with open(within, "ab") as file:
            file.write(base64.b64decode(data))

    def follow(self, manifest: str, stays: list[str]) -> None:
        """From now on ``changes`` tells what is another than it is now.

        ``manifest``: a whole checkpoint has it; ``stays``: files and folders of the copy that are not the launcher's.
        """
        self._manifest, self._stays = manifest, {_HELD, *stays}
        self._known = self._listed()

    def changes(self) -> dict[str, Any]:
        """Files of the copy that have changed since the last call, path → size and time, and those that are gone."""
        if not self._manifest:
            return {}
        now, before = self._listed(), self._known
        self._known = now
        changed = {path: stamp for path, stamp in now.items() if before.get(path) != stamp}
        gone = [path for path in before if path not in now]
        return {"changed": changed, "gone": gone} if changed or gone else {}

    def read(self, path: str, at: int) -> dict[str, Any]:
        """A piece of a file of the copy."""
        try:
            with open(self._inside(path), "rb") as file:
                file.seek(at)
                data = file.read(PIECE)
            return {"piece": path, "at": at, "data": base64.b64encode(data).decode()}
        except OSError as error:
            return {"piece": path, "at": at, "error": error.strerror or str(error)}

    def hold(self, name: str, others: list[str]) -> dict[str, int]:
        """Keep what is here of the checkpoint ``name`` until ``release``. Returns its files, path → bytes.

        On the host that has the manifest a worker may delete it meanwhile, so that each file gets a second name.
        Elsewhere it is nobody's any more, and so are ``others``, which nobody will ask for.
        """
        checkpoints, held = self._inside("checkpoints"), self._inside(os.path.join(_HELD, name))
        whole, written = os.path.join(checkpoints, name), os.path.join(checkpoints, f".{name}.tmp")
        shutil.rmtree(held, ignore_errors=True)
        os.makedirs(os.path.dirname(held), exist_ok=True)
        if os.path.isdir(whole):
            os.mkdir(held)
            for file in os.listdir(whole):
                with suppress(OSError):
                    os.link(os.path.join(whole, file), os.path.join(held, file))
        else:
            for other in others:
                shutil.rmtree(os.path.join(checkpoints, f".{other}.tmp"), ignore_errors=True)
            with suppress(FileNotFoundError):
                os.rename(written, held)
        files = os.listdir(held) if os.path.isdir(held) else []
        return {f"{_HELD}/{name}/{file}": os.stat(os.path.join(held, file)).st_size for file in files}

    def release(self, name: str) -> None:
        """What was held of the checkpoint ``name`` has come to the launcher."""
        shutil.rmtree(self._inside(os.path.join(_HELD, name)), ignore_errors=True)

    def give_up(self) -> None:
        """Nothing more comes: what has come of a pack is of no use."""
        if self._incoming:
            shutil.rmtree(self._incoming, ignore_errors=True)

    def drop(self) -> None:
        """All of the copy has come to the launcher."""
        if self._copy:
            shutil.rmtree(self._copy, ignore_errors=True)
            self._copy, self._manifest = "", ""

    def _inside(self, path: str) -> str:
        root = self._incoming or self._copy
        if not root or os.path.isabs(path) or ".." in path.split("/"):
            raise OSError(f"{path!r} is in no folder of this launch")
        return os.path.join(root, path)

    def _listed(self) -> dict[str, list[int]]:
        """Every file that is the launcher's business: of checkpoints the manifests alone, which come last."""
        found: dict[str, list[int]] = {}
        for folder, folders, files in os.walk(self._copy):
            below = os.path.relpath(folder, self._copy)
            if below == ".":
                folders[:] = [name for name in folders if name not in self._stays]
            in_checkpoints = below.split("/")[0] == "checkpoints"
            if in_checkpoints:
                folders[:] = [name for name in folders if name.startswith("step-")]
            for name in files:
                path = name if below == "." else f"{below}/{name}"
                if path in self._stays or name.startswith(".") or (in_checkpoints and name != self._manifest):
                    continue
                with suppress(OSError):
                    status = os.lstat(os.path.join(folder, name))
                    found[path] = [status.st_size, status.st_mtime_ns]
        return found


def _text(path: str) -> str:
    try:
        with open(path) as file:
            return file.read()
    except (OSError, ValueError):
        return ""
