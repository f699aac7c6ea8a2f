"""Data: the samples of each step on any number of devices, reading them, and the ledger that proves it."""

from phalanx.data.curriculum import Curriculum, changing_sampler
from phalanx.data.ledger import Ledger, records
from phalanx.data.ledger_audit import audit, audit_run, due, finished_epochs
from phalanx.data.loader import Loader, evaluation_batches
from phalanx.data.mixture import Mixture
from phalanx.data.own_orders import EpochOrders, buckets, weighted
from phalanx.data.parquet_files import ParquetFiles
from phalanx.data.sampler import GlobalBatchSampler
from phalanx.data.step_batch import MicroBatch, StepBatch
from phalanx.data.table import Table
from phalanx.data.tar_files import TarFiles
from phalanx.data.token_files import TokenFile, document_mask
from phalanx.placement.batch_split import Lane

__all__ = [
    "Curriculum",
    "EpochOrders",
    "GlobalBatchSampler",
    "Lane",
    "Ledger",
    "Loader",
    "MicroBatch",
    "Mixture",
    "ParquetFiles",
    "StepBatch",
    "Table",
    "TarFiles",
    "TokenFile",
    "audit",
    "audit_run",
    "buckets",
    "changing_sampler",
    "document_mask",
    "due",
    "evaluation_batches",
    "finished_epochs",
    "records",
    "weighted",
]
