"""Where a run can be handed to: hosts reached by SSH, a Slurm queue. One file a target."""

from phalanx.launch.targets.target import (
    TARGETS,
    AttachedTarget,
    Option,
    Prepared,
    QueueTarget,
    Standing,
    Submission,
    Target,
    find_target,
    target_class,
    ticket_of,
)

__all__ = [
    "TARGETS",
    "AttachedTarget",
    "Option",
    "Prepared",
    "QueueTarget",
    "Standing",
    "Submission",
    "Target",
    "find_target",
    "target_class",
    "ticket_of",
]
