"""Ask each host of a launch target about itself before a run, and compare the answers."""

from phalanx.launch.check_hosts.asked_program import (
    CheckTime,
    TargetHost,
    ThisMachine,
    asking,
    ended_by_signals,
    run_here,
)
from phalanx.launch.check_hosts.group_findings import HostFinding, Needs, workers_of
from phalanx.launch.check_hosts.host_answer import DeviceFacts, HostAnswer, HostFacts, LinkAnswer
from phalanx.launch.check_hosts.host_findings import findings
from phalanx.launch.check_hosts.host_survey import HostSurvey, survey

__all__ = [
    "CheckTime",
    "DeviceFacts",
    "HostAnswer",
    "HostFacts",
    "HostFinding",
    "HostSurvey",
    "LinkAnswer",
    "Needs",
    "TargetHost",
    "ThisMachine",
    "asking",
    "ended_by_signals",
    "findings",
    "run_here",
    "survey",
    "workers_of",
]
