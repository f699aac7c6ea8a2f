"""Asynchronous data parallelism: servers hold the parameters, deal pieces of global batches out, apply updates."""

from phalanx.parallel.parameter_server.shards import Flat, Form, Slice, cut_out, form_of, partition, starved
from phalanx.parallel.parameter_server.update import Pushed, Rule, Shard
from phalanx.parallel.parameter_server.work_queue import Kind, Piece, Report, StalenessBound, WorkQueue

__all__ = [
    "Flat",
    "Form",
    "Kind",
    "Piece",
    "Pushed",
    "Report",
    "Rule",
    "Shard",
    "Slice",
    "StalenessBound",
    "WorkQueue",
    "cut_out",
    "form_of",
    "partition",
    "starved",
]
