"""The mean of a flat tensor over ranks, sent through a codec: the same bits on every rank."""

from __future__ import annotations

import torch
from torch import Tensor

from phalanx.parallel.compress.codec import Codec, message, read, write
from phalanx.parallel.compress.feedback import Feedback
from phalanx.parallel.compress.largest import Largest
from phalanx.parallel.compress.wire import Wire

_MANY = 16
"""Grains in a chunk from which on it is made of whole ones: then what is added to its end does not matter."""


def averaged(flat: Tensor, wire: Wire, codec: Codec, feedback: Feedback | None = None) -> None:
    """Put the mean over the ranks of ``wire`` into ``flat`` (count,), fp32, in place. Collective.

    With ``feedback``, of this rank and this tensor, what the codec leaves out comes with the next call. Every rank
    reads the same messages in the same order, so that all end with the same bits.
    """
    if wire.size == 1 or not flat.numel():
        return
    wire.traffic.beside(flat.numel(), wire.size)
    (_gathered if isinstance(codec, Largest) else _in_two)(flat, wire, codec, feedback)


def _gathered(flat: Tensor, wire: Wire, codec: Codec, feedback: Feedback | None) -> None:
    """Each rank's message goes to all: right where messages hold different places, and a sum of them more."""
    whole = feedback.whole(flat) if feedback else flat
    sent = message(codec, whole)
    if feedback:
        mine = torch.empty_like(whole)
        read(codec, sent, mine)
        feedback.keep(whole, mine)
    for rank, one in enumerate(wire.all_gather(sent)):
        read(codec, one, flat, add=rank > 0)
    flat.div_(wire.size)


def _in_two(flat: Tensor, wire: Wire, codec: Codec, feedback: Feedback | None) -> None:
    """Each rank adds up one chunk of all tensors in fp32, and sends its mean round, encoded once more.

    As much is sent as by a ring, and no number is rounded more than twice, whatever the ranks. What the second rounding
    leaves out of the mean, the rank that did it owes that many times, since its next part is divided by the ranks.

    Source: Tang et al., "1-bit Adam", 2021, section 3.1 (compressed all-reduce).
    """
    count, size = flat.numel(), wire.size
    grain = codec.grain if count > _MANY * size * codec.grain else 1
    chunk = -(-count // (size * grain)) * grain
    rows = flat.new_empty(size, chunk)
    whole, rest = rows.view(-1)[:count], rows.view(-1)[count:]
    rest.zero_()
    if feedback:
        feedback.whole(flat, out=whole)
    else:
        whole.copy_(flat)
    outgoing = flat.new_empty(size, codec.bytes_of(chunk), dtype=torch.uint8)
    for row, one in zip(rows, outgoing, strict=True):
        write(codec, row, one)
    mean = flat.new_zeros(chunk)
    for one in wire.all_to_all(outgoing):
        read(codec, one, mean, add=True)
    mean.div_(size)
    again = message(codec, mean)
    if feedback:
        sent = torch.empty_like(rows)
        for row, one in zip(sent, outgoing, strict=True):
            read(codec, one, row)
        rounded = torch.empty_like(mean)
        read(codec, again, rounded)
        sent[wire.rank].sub_(mean.sub_(rounded), alpha=size)
        feedback.keep(whole, sent.view(-1)[:count])
    for one, place in zip(wire.all_gather(again), flat.split(chunk), strict=False):
        if place.numel() == chunk:
            read(codec, one, place)
        else:
            read(codec, one, mean)
            place.copy_(mean[: place.numel()])
