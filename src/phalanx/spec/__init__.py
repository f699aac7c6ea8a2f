"""What people write and files carry. Importing it imports no torch."""

from phalanx.spec.cluster import Cluster, Group
from phalanx.spec.device import Device, Host, Link, Network
from phalanx.spec.job import Job
from phalanx.spec.loss import Loss
from phalanx.spec.plan import Plan
from phalanx.spec.run import RunSpec
from phalanx.spec.schedule import Schedule

__all__ = ["Cluster", "Device", "Group", "Host", "Job", "Link", "Loss", "Network", "Plan", "RunSpec", "Schedule"]
