"""What workers, servers and the coordinator (server 0) say to each other: the kinds of frames.

A worker asks the coordinator for a piece of a global batch, brings its parameters up to date at every server, computes
the sum of the piece's gradients, pushes to each server what that one holds of it, and tells the coordinator that it is
in when it asks for the next. The coordinator tells every server when a step is complete and what its gradient is to be
multiplied by.
"""

from __future__ import annotations

from enum import IntEnum


class Kind(IntEnum):
    """Each frame's kind; in brackets who sends it, and what its JSON holds."""

    HELLO = 1
    """[worker, coordinator] ``rank`` (-1 for the coordinator), ``length`` of its data."""
    WELCOME = 2
    """[server] ``term``, ``snapshots``: versions it could go back to, ``version``."""
    ASK = 3
    """[worker] ``done``: what it has computed since it last asked, if anything. To the coordinator."""
    DEAL = 4
    """[coordinator] ``what`` (train or evaluate), ``step``, ``part``, ``version`` to be at least at, ``term``."""
    PULL = 5
    """[worker] ``version`` it is at and ``least`` to be at."""
    VALUES = 6
    """[server] ``version``; the parameters of that version, and from the coordinator buffers; or nothing to change."""
    PUSH = 7
    """[worker] ``step``, ``part``, ``version``, ``term``, ``without`` gradient; gradients. Taken in once or dropped."""
    TAKEN = 8
    """[server] ``new``: whether it counted."""
    BEAT = 9
    """[worker] it lives; [coordinator] so does that."""
    END = 10
    """[coordinator] all is done. [worker] what it held in memory."""
    PREPARE = 11
    """[coordinator] ``step``, ``parts``: sum them. [server] ``square`` of the sum's norm."""
    APPLY = 12
    """[coordinator] ``step``, ``scale``, ``rate``, ``oldest`` version that a gradient may still come of."""
    SNAPSHOT = 13
    """[coordinator] write one, of ``version``. [server] done."""
    RESTORE = 14
    """[coordinator] go back to ``version``, in a new ``term``. [server] done."""
    GATHER = 15
    """[coordinator] ``what``: parameters, gradients of ``step``, or everything. [server] the tensors, with names."""
