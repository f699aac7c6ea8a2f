"""Sending less: codecs, what they leave out and when it is made up for, and averages that go through them."""

from phalanx.parallel.compress.averaged import averaged
from phalanx.parallel.compress.check import check, optimizer_problems, problems
from phalanx.parallel.compress.choice import codec
from phalanx.parallel.compress.codec import Codec, message, read
from phalanx.parallel.compress.feedback import Feedback
from phalanx.parallel.compress.lane import Lane, lane
from phalanx.parallel.compress.sender import Sender
from phalanx.parallel.compress.wire import Traffic, Wire

__all__ = [
    "Codec",
    "Feedback",
    "Lane",
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
