"""Asynchronous data parallelism: servers hold the parameters, deal pieces of global batches out, apply updates."""

from phalanx.parallel.server.deal import Dealer, Pace, Piece, Report
from phalanx.parallel.server.memory import Flat, Form, form_of
from phalanx.parallel.server.protocol import Kind
from phalanx.parallel.server.shard import Slice, cut_out, partition, starved
from phalanx.parallel.server.update import Pushed, Rule, Shard

__all__ = [
    "Dealer",
    "Flat",
    "Form",
    "Kind",
    "Pace",
    "Piece",
    "Pushed",
    "Report",
    "Rule",
    "Shard",
    "Slice",
    "cut_out",
    "form_of",
    "partition",
    "starved",
]
