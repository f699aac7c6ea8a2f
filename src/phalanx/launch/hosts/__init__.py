"""Several hosts on one machine: namespaces of the network, links that are shaped, processors that are slowed."""

from phalanx.launch.hosts.hosts import Hosts
from phalanx.launch.hosts.link import HostLink, lacking, refuse

__all__ = ["HostLink", "Hosts", "lacking", "refuse"]
