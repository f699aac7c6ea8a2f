"""Asynchronous data parallelism: servers hold the parameters, assign pieces of global batches, and apply updates."""

from phalanx.parallel.parameter_server.protocol import FrameKind, deal_ticket
from phalanx.parallel.parameter_server.shards import Flat, Form, RowSlice, check, cut_out, form_of, partition, starved
from phalanx.parallel.parameter_server.update import Pushed, Rule, Shard, Update
from phalanx.parallel.parameter_server.work_queue import BatchPiece, Report, StalenessBound, WorkQueue

__all__ = [
    "BatchPiece",
    "Flat",
    "Form",
    "FrameKind",
    "Pushed",
    "Report",
    "RowSlice",
    "Rule",
    "Shard",
    "StalenessBound",
    "Update",
    "WorkQueue",
    "check",
    "cut_out",
    "deal_ticket",
    "form_of",
    "partition",
    "starved",
]
