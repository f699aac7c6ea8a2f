"""Who is at the other end of a connection: each end proves that it has the run's secret, and in which role it comes.

From the run's secret, 32 random bytes that its launcher makes, a key is derived for each role and rank. The caller says
who it is and whom it wants, with a nonce; the listener answers with a nonce of its own and a proof, the HMAC-SHA256 of
both nonces and both identities under its key; the caller proves itself likewise. So the secret never travels, a
recorded handshake is of no use a second time, and neither proof can be sent back as the other. All three messages are
of one fixed size each: nothing that a stranger sends is parsed.

What is said afterwards is neither encrypted nor signed.
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
    """What a process is in a run with servers."""

    SERVER = 1
    WORKER = 2
    COORDINATOR = 3


@dataclass(frozen=True, slots=True)
class Identity:
    """A role, and which one in it: a worker's rank, a server's index; 0 for the coordinator."""

    role: Role
    rank: int

    def __str__(self) -> str:
        return "the coordinator" if self.role == Role.COORDINATOR else f"{self.role.name.lower()} {self.rank}"


class HandshakeError(ConnectionError):
    """The other end has not proved who it is."""


def new_secret() -> bytes:
    """The secret of a new run."""
    return secrets.token_bytes(SECRET)


def _key(secret: bytes, identity: Identity) -> bytes:
    return hmac.digest(secret, f"phalanx key {identity.role.name} {identity.rank}".encode(), "sha256")


def _proof(secret: bytes, whose: Identity, side: bytes, hello: bytes, nonce: bytes) -> bytes:
    return hmac.digest(_key(secret, whose), b"phalanx proof " + side + hello + nonce, "sha256")


class CallerHandshake:
    """The end that connects: ``hello`` goes out, the listener's answer comes, ``proof`` goes out."""

    def __init__(self, secret: bytes, identity: Identity, wanted: Identity) -> None:
        self._secret, self._identity, self._wanted = secret, identity, wanted
        roles = identity.role, identity.rank, wanted.role, wanted.rank
        self.hello = _HELLO.pack(_MAGIC, *roles, secrets.token_bytes(32))

    def proof(self, answer: bytes) -> bytes:
        """This end's proof, once the other's is right.

        Raises:
            HandshakeError: if it is not.
        """
        nonce, theirs = answer[:32], answer[32:]
        if not hmac.compare_digest(theirs, _proof(self._secret, self._wanted, b"listener", self.hello, nonce)):
            raise HandshakeError(f"who listens there is not {self._wanted} of this run")
        return _proof(self._secret, self._identity, b"caller", self.hello, nonce)


class ListenerHandshake:
    """The end that was connected to, of one connection: takes ``hello``, gives ``answer``, judges the proof."""

    def __init__(self, secret: bytes, identity: Identity, hello: bytes) -> None:
        """``identity`` is this end's.

        Raises:
            HandshakeError: if ``hello`` is none, or wants somebody else.
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
        """Who the caller is.

        Raises:
            HandshakeError: if it has not proved it.
        """
        if not hmac.compare_digest(proof, _proof(self._secret, self.caller, b"caller", self._hello, self._nonce)):
            raise HandshakeError(f"says that it is {self.caller}, and cannot prove it")
        return self.caller


def ticket(secret: bytes, deal: str) -> str:
    """The coordinator's word for ``deal``, in hexadecimal: a worker shows it to servers, which did not hear it."""
    return hmac.digest(_key(secret, Identity(Role.COORDINATOR, 0)), f"phalanx deal {deal}".encode(), "sha256").hex()
