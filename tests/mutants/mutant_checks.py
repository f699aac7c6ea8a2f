"""The quick checks that a mutation of the code has to fail: each gives what is wrong, or nothing.

``prove JOB PLAN``   the plan against the plain PyTorch loop, through the loop of every run
``copies JOB PLAN``  of such a proof, that copies on ranks are the same
``fit JOB PLAN``     losses and evaluations of a run against the plain loop, dropout and augmentation included
``resume JOB PLAN``  the same of a run that is cut in two
``again JOB PLAN``    the same of a whole run that is taken up once more from its middle
``ledger JOB PLAN``  each sample once an epoch, by the run's ledger
``test PATH [WORD]`` the tests of a file that every suite runs, and whose names have the word
"""

from __future__ import annotations

import contextlib
import io
import re
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path

from mutant_jobs import JOBS, LENGTH, STEPS
from mutation import CANNOT_RUN

TESTS = Path(__file__).resolve().parents[1]
_LOSS = 1e-5  # relative, as a plan's bar


def check(words: str) -> str:
    """What is wrong; empty where nothing is."""
    kind, job, plan = [*words.split(" ", 2), ""][:3]
    with tempfile.TemporaryDirectory(prefix="phalanx-mutant-") as name:
        return _CHECKS[kind](job, plan, Path(name))


def _prove(job: str, plan: str, _: Path) -> str:
    import phalanx as px

    made = JOBS[job]()
    proof = px.prove(made, plan, steps=made.steps or STEPS)
    return "" if proof.equal else proof.first


def _copies(job: str, plan: str, _: Path) -> str:
    import phalanx as px

    proof = px.prove(JOBS[job](), plan, steps=STEPS)
    copies = [one for one in proof.checks if one.kind == "copies"]
    assert copies
    return next((one.first for one in copies if one.first), "")


def _fit(job: str, plan: str, folder: Path) -> str:
    import phalanx as px

    return _unlike(px.fit(JOBS[job](), plan, folder=folder / "run"), job)


def _resume(job: str, plan: str, folder: Path) -> str:
    import phalanx as px
    from phalanx.config import Plan, RunSpec

    made = JOBS[job]()  # with the decay of the whole run
    made = replace(made, schedule=replace(made.schedule, total_steps=STEPS))
    spec = RunSpec(job=job, plan=Plan.parse(plan), folder=folder / "run", steps=STEPS // 2, forecast="none")
    px.fit(made, run=spec)
    return _unlike(px.fit(made, run=replace(spec, steps=STEPS, resume=True)), job)


def _again(job: str, plan: str, folder: Path) -> str:
    import phalanx as px
    from phalanx.config import Plan, RunSpec

    how = {"plan": Plan.parse(plan), "folder": folder / "run", "forecast": "none", "checkpoint_every": STEPS // 2}
    spec = RunSpec(job=job, **how)
    px.fit(JOBS[job](), run=spec)
    shutil.rmtree(spec.folder / "checkpoints" / f"step-{STEPS:08d}")
    return _unlike(px.fit(JOBS[job](), run=replace(spec, resume=True)), job)


def _unlike(run: object, job: str) -> str:
    """What of a run is not as the plain loop has it."""
    from phalanx.api import Run
    from phalanx.witness.plain_loop import Witness

    assert isinstance(run, Run)
    plain = Witness.of(JOBS[job](), STEPS)
    if len(run.losses) != len(plain.losses):
        return f"{len(run.losses)} losses, not {len(plain.losses)}"
    for step, (given, expected) in enumerate(zip(run.losses, plain.losses, strict=True)):
        if not abs(given - expected) <= _LOSS * abs(expected):
            return f"the loss of step {step} is {given}, not {expected}"
    for event in run.events("evaluate"):
        expected = plain.evaluations.get(event["step"])
        if expected is not None and not abs(event["loss"] - expected["loss"]) <= _LOSS * abs(expected["loss"]):
            return f"the evaluation after step {event['step']} gives {event['loss']}, not {expected['loss']}"
    return ""


def _ledger(job: str, plan: str, folder: Path) -> str:
    import phalanx as px
    from phalanx.data import audit

    run = px.fit(JOBS[job](), plan, folder=folder / "run")
    return next(iter(audit(run.folder / "ledger", length=LENGTH, batch=JOBS[job]().batch, drop_last=False)), "")


def _test(path: str, word: str, folder: Path) -> str:
    import pytest

    told = io.StringIO()
    arguments = ["-x", "-q", "-p", "no:cacheprovider", f"--basetemp={folder}", str(TESTS / path)]
    with contextlib.redirect_stdout(told):
        code = pytest.main([*arguments, *(["-k", word] if word else [])])
    if code == pytest.ExitCode.OK:
        return ""
    assert code == pytest.ExitCode.TESTS_FAILED or "error" in told.getvalue(), told.getvalue()
    failed = [line for line in told.getvalue().splitlines() if line.startswith(("FAILED", "ERROR"))]
    cannot_run = re.search(f"^E  .*?({CANNOT_RUN})", told.getvalue(), re.MULTILINE)  # the line is cut
    return (failed[0] if failed else f"pytest ended with {code}") + (f" ({cannot_run[1]})" if cannot_run else "")


_CHECKS = {
    "prove": _prove,
    "copies": _copies,
    "fit": _fit,
    "resume": _resume,
    "again": _again,
    "ledger": _ledger,
    "test": _test,
}
