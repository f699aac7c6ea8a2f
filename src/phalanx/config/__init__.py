"""The configuration that people write and files carry. Importing it imports no torch."""

from phalanx.config.batching import Sampler, TokenBatch
from phalanx.config.cluster import Cluster, Device, Group, Host, Link, Network
from phalanx.config.job import Best, Job, Pretrained
from phalanx.config.losses import Loss, Metric
from phalanx.config.optimizing import Average, Clip, Schedule
from phalanx.config.phases import Phase
from phalanx.config.plan import Plan
from phalanx.config.run import RunSpec

__all__ = [
    "Average",
    "Best",
    "Clip",
    "Cluster",
    "Device",
    "Group",
    "Host",
    "Job",
    "Link",
    "Loss",
    "Metric",
    "Network",
    "Phase",
    "Plan",
    "Pretrained",
    "RunSpec",
    "Sampler",
    "Schedule",
    "TokenBatch",
]
