"""Launch targets: hosts by SSH, Slurm, Kubernetes, Ray, SageMaker."""

from phalanx.launch.targets.find_target import TARGETS, find_target, settled_options, target_class
from phalanx.launch.targets.handed_over import (
    UnmarkedError,
    forget_handed_over,
    is_handed_over,
    log_of,
    one_launch_at_a_time,
    refuse_handed_over,
    ticket_of,
    write_ticket,
)
from phalanx.launch.targets.launch_folder import LAST_WORDS, last_word
from phalanx.launch.targets.offer import Offer
from phalanx.launch.targets.target import (
    AttachedTarget,
    Option,
    Prepared,
    QueueTarget,
    Standing,
    Submission,
    Target,
)

__all__ = [
    "LAST_WORDS",
    "TARGETS",
    "AttachedTarget",
    "Offer",
    "Option",
    "Prepared",
    "QueueTarget",
    "Standing",
    "Submission",
    "Target",
    "UnmarkedError",
    "find_target",
    "forget_handed_over",
    "is_handed_over",
    "last_word",
    "log_of",
    "one_launch_at_a_time",
    "refuse_handed_over",
    "settled_options",
    "target_class",
    "ticket_of",
    "write_ticket",
]
