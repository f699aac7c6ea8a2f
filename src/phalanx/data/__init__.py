"""Data: which samples each step holds on any number of devices, reading them, and the ledger that shows it."""

from phalanx.data.batch_split import Lane, MicroBatch, StepBatch, share
from phalanx.data.ledger import Ledger, LedgerRecord, audit, read_ledger, records
from phalanx.data.loader import Loader, evaluation_batches
from phalanx.data.sampler import GlobalBatchSampler
from phalanx.data.table import Table

__all__ = [
    "GlobalBatchSampler",
    "Lane",
    "Ledger",
    "LedgerRecord",
    "Loader",
    "MicroBatch",
    "StepBatch",
    "Table",
    "audit",
    "evaluation_batches",
    "read_ledger",
    "records",
    "share",
]
