"""How the secret of a run with parameter servers comes to workers that are programs of their own, as torchrun's are.

Not by arguments or variables, which others on the machine can read, nor by the store at which workers meet, which
answers anybody. Rank 0 makes it and leaves it in the run folder, in a file that only this user can read; through the
store it tells the file's digest. Once every worker has read it the file is removed.
"""

from __future__ import annotations

import hashlib
import os
import time
from contextlib import suppress
from pathlib import Path

from torch.distributed import PrefixStore  # pyrefly: ignore

from phalanx.comm import Place
from phalanx.comm.handshake import new_secret
from phalanx.comm.process_group import meet
from phalanx.errors import RunError

_NAME = ".secret"
_SEEN_AFTER = 30.0  # seconds after which shared storage shows what another machine has written


def share_secret(place: Place, folder: Path) -> bytes:
    """The secret of this run, on every rank. Collective; ``folder`` is the run's, on storage that all ranks share.

    Raises:
        RunError: if the file system keeps the file from nobody, or a rank does not see it.
    """
    path = folder / _NAME
    if place.world_size == 1:
        return new_secret()
    store = PrefixStore(f"phalanx/secret/{place.number}", meet(place))
    if place.rank:
        secret = _read(path, store.get("digest").decode())
        store.set(f"read {place.rank}", "1")
        return secret
    secret = new_secret()
    try:
        _write(path, secret)
        store.set("digest", hashlib.sha256(secret).hexdigest())
        store.wait([f"read {rank}" for rank in range(1, place.world_size)], place.patience)
    finally:
        path.unlink(missing_ok=True)
    return secret


def _write(path: Path, secret: bytes) -> None:
    path.unlink(missing_ok=True)  # of a run that was killed just here
    # one that is there is not opened, whatever it is: whoever made it could read on
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    try:
        if os.fstat(descriptor).st_mode & 0o077:
            raise RunError(
                f"{path.parent} is on a file system that keeps no permissions: whoever reads it could join this run\n"
                "    try: a run folder on another, or one machine: phalanx train JOB, which needs no file"
            )
        os.write(descriptor, secret)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _read(path: Path, digest: str) -> bytes:
    until = time.monotonic() + _SEEN_AFTER
    while True:
        with suppress(OSError):
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
            try:
                secret = os.read(descriptor, 1024)
            finally:
                os.close(descriptor)
            if hashlib.sha256(secret).hexdigest() == digest:
                return secret
        if time.monotonic() > until:
            raise RunError(
                f"this worker does not see {path}, by which workers and parameter servers know each other\n"
                "    try: a run folder on storage that all machines share"
            )
        time.sleep(0.05)
