"""What a run cannot be where its hosts do not share the run folder, and each gets a copy."""

from __future__ import annotations

from phalanx.config import RunSpec
from phalanx.errors import Problem


def unshared_problems(run: RunSpec) -> list[Problem]:
    """Why ``run`` needs a run folder that all hosts share; none where copies do, whose changes are brought together."""
    shared = "a run folder that all hosts and this machine share (--run)"
    apart = f"with a run folder ({run.folder}) that not all hosts share"
    here = f"{shared}, or none: checkpoints are brought to the run folder here"
    found = (
        (run.plan.server, "plan.server", str(run.plan), f"{shared}, or no servers", f"--plan dp={run.plan.processes}"),
        (run.rolls_back, "run.on_nonfinite", "'rollback'", f"{shared}, or stop or skip", 'on_nonfinite="skip"'),
        (run.mirror, "run.mirror", run.mirror, here, "no --mirror"),
    )
    return [Problem(where=one[1], given=f"{one[2]}, {apart}", allowed=one[3], fix=one[4]) for one in found if one[0]]
