"""Mutual proof of identity at a connection: each end proves that it has the run's secret, and its role.

A key for each role and rank is derived from the run's secret, 32 random bytes made by its launcher. The caller sends
its identity, the wanted identity and a nonce; the listener answers with its own nonce and a proof, the HMAC-SHA256 of
both nonces and both identities under its key; the caller proves itself likewise. So the secret never travels, a
recorded handshake cannot be used again, and neither proof can be sent back as the other. All three messages have a
fixed size: a stranger's bytes are never parsed.

Later traffic is neither encrypted nor signed.
"""

from __future__ import annotations

import hmac
import secrets
import struct
from dataclasses import dataclass
from enum import IntEnum

SECRET = 32
"""Bytes of a run's secret."""

_MAGIC = b"PHX1"
_HELLO = struct.Struct("<4sBIBI32s")  # magic, the caller's role and rank, the wanted one's role and rank, nonce
_PROOF = 32
HELLO, ANSWER, PROOF = _HELLO.size, 32 + _PROOF, _PROOF
"""Bytes of the caller's first message, of the listener's answer, and of the caller's proof."""


class Role(IntEnum):
    """The role of a process in a run with servers."""

    SERVER = 1
    WORKER = 2
    COORDINATOR = 3


@dataclass(frozen=True, slots=True)
class Identity:
    """A role, and the number within it: a worker's rank, a server's index; 0 for the coordinator."""

    role: Role
    rank: int

    def __str__(self) -> str:
        return "the coordinator" if self.role == Role.COORDINATOR else f"{self.role.name.lower()} {self.rank}"


class HandshakeError(ConnectionError):
    """A failed proof of the other end's identity."""


def new_secret() -> bytes:
    """Return the secret of a new run."""
    return secrets.token_bytes(SECRET)


def _key(secret: bytes, identity: Identity) -> bytes:
    return hmac.digest(secret, f"phalanx key {identity.role.name} {identity.rank}".encode(), "sha256")


def _proof(secret: bytes, whose: Identity, side: bytes, hello: bytes, nonce: bytes) -> bytes:
    return hmac.digest(_key(secret, whose), b"phalanx proof " + side + hello + nonce, "sha256")


class CallerHandshake:
    """The connecting end: it sends ``hello``, receives the listener's answer, and sends ``proof``."""

    def __init__(self, secret: bytes, identity: Identity, wanted: Identity) -> None:
        self._secret, self._identity, self._wanted = secret, identity, wanted
        roles = identity.role, identity.rank, wanted.role, wanted.rank
        self.hello = _HELLO.pack(_MAGIC, *roles, secrets.token_bytes(32))

    def proof(self, answer: bytes) -> bytes:
        """Return this end's proof after checking the other end's.

        Raises:
            HandshakeError: if the other end's proof is wrong.
        """
        nonce, theirs = answer[:32], answer[32:]
        if not hmac.compare_digest(theirs, _proof(self._secret, self._wanted, b"listener", self.hello, nonce)):
            raise HandshakeError(f"who listens there is not {self._wanted} of this run")
        return _proof(self._secret, self._identity, b"caller", self.hello, nonce)


class ListenerHandshake:
    """The accepting end of one connection: it takes ``hello``, sends ``answer``, and judges the proof."""

    def __init__(self, secret: bytes, identity: Identity, hello: bytes) -> None:
        """Take ``identity``, this end's, and the caller's ``hello``.

        Raises:
            HandshakeError: if ``hello`` is invalid, or meant for another process.
        """
        try:
            magic, role, rank, wanted, which, _ = _HELLO.unpack(hello)
            self.caller, asked = Identity(Role(role), rank), Identity(Role(wanted), which)
        except (ValueError, struct.error):
            raise HandshakeError("does not speak this protocol") from None
        if magic != _MAGIC or asked != identity:
            raise HandshakeError("does not speak this protocol" if magic != _MAGIC else "looks for somebody else")
        self._secret, self._hello, self._nonce = secret, hello, secrets.token_bytes(32)
        self.answer = self._nonce + _proof(secret, identity, b"listener", hello, self._nonce)

    def judge(self, proof: bytes) -> Identity:
        """Return the caller's identity.

        Raises:
            HandshakeError: if it has not proved it.
        """
        if not hmac.compare_digest(proof, _proof(self._secret, self.caller, b"caller", self._hello, self._nonce)):
            raise HandshakeError(f"says that it is {self.caller}, and cannot prove it")
        return self.caller


def ticket(secret: bytes, deal: str) -> str:
    """Return the coordinator's signature of ``deal`` in hexadecimal; a worker shows it to servers."""
    return hmac.digest(_key(secret, Identity(Role.COORDINATOR, 0)), f"phalanx deal {deal}".encode(), "sha256").hex()
