"""Where a run can be handed to: hosts reached by SSH, a Slurm queue. One file a target."""

from phalanx.launch.targets.target import (
    TARGETS,
    Option,
    Prepared,
    Standing,
    Submission,
    Submitted,
    Target,
    find_target,
    ticket_of,
)

__all__ = [
    "TARGETS",
    "Option",
    "Prepared",
    "Standing",
    "Submission",
    "Submitted",
    "Target",
    "find_target",
    "ticket_of",
]
