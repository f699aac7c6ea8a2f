"""Random kills of whole runs, and damaged checkpoints, under four kinds of plan: what was lost.

``PYTHONPATH=tools python bench/chaos_kills.py [--kills N] [--damages N] [--only WORD] [--seed N] [--write]
[--render]``. Every plan trains a small GPT by ``phalanx train`` (tools/chaos). ``--write`` stores what came of it in
bench/results and writes docs/reference/chaos.md from all that is stored; ``--render`` writes the page and runs
nothing. Exit code 1 where anything was lost.
"""

from __future__ import annotations

import argparse
import datetime
import statistics
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import phalanx as px
from chaos import Chaos, Fault, Verdict
from phalanx.demo.jobs.gpt import gpt_job
from stored import load, save

RESULTS = "chaos"
PAGE = Path(__file__).parent.parent / "docs/reference/chaos.md"
PLANS = ("dp=2", "fsdp=4", "pp=2 tp=2", "dp=2 server=1")
KILLS, DAMAGES = 50, 6  # a plan
STEPS, CHECKPOINT_EVERY = 300, 5


def job() -> px.Job:
    """A GPT of two blocks of width 16; steps of a few milliseconds."""
    small = gpt_job(layers=2, width=16, heads=2, context=8, batch=8, steps=STEPS)
    return replace(small, evaluate=None, metrics=None)


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """What came of one plan's faults.

    Attributes:
        faults: that struck.
        saving: of those, in the middle of a save.
        targets: how many hit what.
        lives: how often workers were begun.
        again: steps that were taken again.
        median: seconds from a fault to the next completed step.
        most: the largest of those.
        tensors: of the final checkpoint.
        differing: of those, not equal bit for bit to the undisturbed run's.
        lost: samples lost.
        doubled: samples seen more often than undisturbed.
        believed: damaged checkpoints that the run went on from.
        wrong: everything that was lost, in words.
        on: the day.
    """

    faults: int
    saving: int
    targets: dict[str, int]
    lives: int
    again: int
    median: float
    most: float
    tensors: int
    differing: int
    lost: int
    doubled: int
    believed: int
    wrong: list[str]
    on: str

    @classmethod
    def of(cls, verdict: Verdict) -> Row:
        """From the verdict on a run."""
        struck = verdict.struck
        later = [one.next_step for one in struck if one.next_step is not None]
        weights, samples = verdict.weights, verdict.samples
        return cls(
            faults=len(struck),
            saving=sum(one.saving is not None for one in struck),
            targets=dict(sorted(Counter(Fault.parse(one.fault).target for one in struck).items())),
            lives=verdict.lives,
            again=sum(one.again for one in struck),
            median=round(statistics.median(later), 3) if later else 0.0,
            most=round(max(later, default=0.0), 3),
            tensors=weights.tensors if weights else 0,
            differing=weights.differing if weights else 0,
            lost=samples.lost if samples else 0,
            doubled=samples.doubled if samples else 0,
            believed=sum(one.believed for one in struck),
            wrong=list(verdict.lost),
            on=datetime.date.today().isoformat(),
        )

    def cells(self) -> tuple[str, ...]:
        """As a row of a table."""
        equal = f"{self.tensors - self.differing} of {self.tensors}" if self.tensors else "no end"
        return (
            f"{self.faults}, {self.saving}",
            ", ".join(f"{count} {name}" for name, count in self.targets.items()),
            str(self.lives),
            str(self.again),
            f"{self.median:.2f} s, {self.most:.2f} s",
            equal,
            f"{self.lost}, {self.doubled}",
            str(self.believed),
            "nothing" if not self.wrong else f"{len(self.wrong)}: " + "; ".join(_cell(one) for one in self.wrong),
            self.on,
        )


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").split())


TABLES: dict[str, tuple[str, tuple[str, ...]]] = {
    "kills": ("SIGKILL at random moments, a third of them meant for the middle of a save.", ("SIGKILL",)),
    "damages": (
        "Everything is killed, then a file of the newest checkpoint is cut short, or one bit of it changed; the run\n"
        "must go on from the one before.",
        ("tear", "flip"),
    ),
}
HEADINGS = (
    *("plan", "faults, in a save", "who was hit", "workers begun", "steps again", "next step: median, most"),
    *("tensors equal bit for bit", "samples lost, doubled", "damaged and believed", "lost", "on"),
)


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--kills", type=int, default=KILLS, help="of each plan's run")
    options.add_argument("--damages", type=int, default=DAMAGES, help="of checkpoints, in a second run of each plan")
    options.add_argument("--only", default="", help="plans with this word")
    options.add_argument("--seed", type=int, default=1)
    options.add_argument("--write", action="store_true", help="store what came of it, and write the page")
    options.add_argument("--render", action="store_true", help="write the page from what is stored; run nothing")
    options.add_argument("--page", type=Path, default=PAGE)
    asked = options.parse_args()
    stored = {name: {plan: Row(**row) for plan, row in rows.items()} for name, rows in load(RESULTS).items()}
    counts = {"kills": asked.kills, "damages": asked.damages}
    lost = False
    for plan in PLANS if not asked.render else ():
        if asked.only not in plan:
            continue
        for name, verdict in verdicts(plan, counts, asked.seed):
            stored.setdefault(name, {})[plan] = Row.of(verdict)
            lost |= not verdict.nothing_lost
            print(name, plan, *Row.of(verdict).cells(), sep="  ", flush=True)
        if asked.write:
            save(
                RESULTS, {table: {row: asdict(value) for row, value in rows.items()} for table, rows in stored.items()}
            )
    if asked.write or asked.render:
        asked.page.write_text(page(stored), encoding="utf-8")
    return 1 if lost else 0


def verdicts(plan: str, counts: Mapping[str, int], seed: int) -> list[tuple[str, Verdict]]:
    """Of each table's run under ``plan``; a fault is printed when it is known what came of it."""
    with tempfile.TemporaryDirectory(prefix="phalanx-chaos-") as scratch:
        reference = f"{Path(__file__).resolve()}:job"
        chaos = Chaos(reference, plan, folder=Path(scratch), steps=STEPS, checkpoint_every=CHECKPOINT_EVERY)
        found: list[tuple[str, Verdict]] = []
        for name, (_, kinds) in TABLES.items():
            if counts[name]:
                faults: Sequence[Fault] = chaos.draw(counts[name], seed=seed, kinds=kinds)
                found.append((name, chaos.run(faults, say=lambda outcome: print(outcome, flush=True))))
        return found


HEAD = (
    "# Runs under faults",
    "",
    f"What faults made of runs on this machine: a small GPT, {STEPS} steps, a",
    f"checkpoint every {CHECKPOINT_EVERY}, under each plan undisturbed and under faults at moments drawn from a seed.",
    "The run is `phalanx train`; where the command itself dies it is begun again. Tensors are those of the final",
    "checkpoint, the optimizer's state among them, against the undisturbed run's. Servers add gradients up as they",
    "come, so that their tensors need only agree within rounding. `make chaos` writes this page.",
    "",
)


def page(stored: Mapping[str, Mapping[str, Row]]) -> str:
    """The page, from what is stored; what was not run says so."""
    lines = list(HEAD)
    for name, (meaning, _) in TABLES.items():
        lines += [f"## {name.capitalize()}", "", meaning, "", f"| {' | '.join(HEADINGS)} |"]
        lines.append(f"|{' --- |' * len(HEADINGS)}")
        for plan in PLANS:
            row: Any = stored.get(name, {}).get(plan)
            cells = row.cells() if row else (*[""] * (len(HEADINGS) - 2), "not yet")
            lines.append(f"| `{plan}` | {' | '.join(cells)} |")
        lines.append("")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
