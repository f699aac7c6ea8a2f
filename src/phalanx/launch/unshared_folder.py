"""What a run cannot be where its hosts do not share the run folder, and each gets a copy."""

from __future__ import annotations

from phalanx.config import RunSpec
from phalanx.errors import Problem


def unshared_problems(run: RunSpec) -> list[Problem]:
    """Why ``run`` needs a run folder that all hosts share; none where copies do, whose changes are brought together."""
    shared = "a run folder that all hosts and this machine share (--run)"
    apart = f"with a run folder ({run.folder}) that not all hosts share"
    problems: list[Problem] = []
    if run.plan.server:
        fix = f"--plan dp={run.plan.processes}"
        given, allowed = f"{run.plan}, {apart}", f"{shared}, or no servers"
        problems.append(Problem(where="plan.server", given=given, allowed=allowed, fix=fix))
    if run.rolls_back:
        given, allowed = f"'rollback', {apart}", f"{shared}, or stop or skip"
        problems.append(Problem(where="run.on_nonfinite", given=given, allowed=allowed, fix='on_nonfinite="skip"'))
    if run.mirror:
        given = f"{run.mirror}, {apart}"
        allowed = f"{shared}, or none: checkpoints are brought to the run folder here"
        problems.append(Problem(where="run.mirror", given=given, allowed=allowed, fix="no --mirror"))
    return problems
