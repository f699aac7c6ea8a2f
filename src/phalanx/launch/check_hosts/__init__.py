"""Before a run: what each host of a launch target says of itself, and what would keep training from running there."""

from phalanx.launch.check_hosts.asking import CheckQuestion, HostAnswer, HostSurvey, survey
from phalanx.launch.check_hosts.asking_links import LinkAnswer
from phalanx.launch.check_hosts.device_findings import Needs, workers_of
from phalanx.launch.check_hosts.finding import FindingKind, HostFinding
from phalanx.launch.check_hosts.host_findings import findings
from phalanx.launch.check_hosts.started_program import CheckTime, run_here
from phalanx.launch.check_hosts.target_host import CODE_OF_CHECK, CodeForHost, TargetHost, ThisMachine, program_text

__all__ = [
    "CODE_OF_CHECK",
    "CheckQuestion",
    "CheckTime",
    "CodeForHost",
    "FindingKind",
    "HostAnswer",
    "HostFinding",
    "HostSurvey",
    "LinkAnswer",
    "Needs",
    "TargetHost",
    "ThisMachine",
    "findings",
    "program_text",
    "run_here",
    "survey",
    "workers_of",
]
