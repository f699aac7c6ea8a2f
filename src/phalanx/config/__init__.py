"""What people write and files carry. Importing it imports no torch."""

from phalanx.config.averaging import Average
from phalanx.config.clip import Clip
from phalanx.config.cluster import Cluster, Group
from phalanx.config.device import Device, Host, Link, Network
from phalanx.config.job import Best, Job, Pretrained
from phalanx.config.losses import Loss, Metric
from phalanx.config.own_sampler import Sampler
from phalanx.config.phases import Phase
from phalanx.config.plan import Plan
from phalanx.config.run import RunSpec
from phalanx.config.schedule import Schedule
from phalanx.config.token_batch import TokenBatch

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
