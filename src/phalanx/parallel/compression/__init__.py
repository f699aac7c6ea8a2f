"""Sending less: codecs, what they leave out and when it is made up for, and averages that go through them."""

from phalanx.parallel.compression.codecs import Codec, codec, message, read
from phalanx.parallel.compression.ddp_hook import Sender, averaged
from phalanx.parallel.compression.error_feedback import Feedback
from phalanx.parallel.compression.exchange import ExchangeQueue, Traffic, Wire, lane
from phalanx.parallel.compression.limits import check, optimizer_problems, problems

__all__ = [
    "Codec",
    "ExchangeQueue",
    "Feedback",
    "Sender",
    "Traffic",
    "Wire",
    "averaged",
    "check",
    "codec",
    "lane",
    "message",
    "optimizer_problems",
    "problems",
    "read",
]
