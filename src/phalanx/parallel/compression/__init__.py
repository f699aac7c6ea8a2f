"""Compressed communication: codecs, error feedback for their losses, and averages sent through them."""

from phalanx.parallel.compression.codecs import Codec, check, codec, message, optimizer_problems, problems, read
from phalanx.parallel.compression.ddp_hook import Sender, averaged
from phalanx.parallel.compression.error_feedback import Feedback
from phalanx.parallel.compression.exchange import Wire, lane

__all__ = [
    "Codec",
    "Feedback",
    "Sender",
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
