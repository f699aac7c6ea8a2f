"""The long parity table, every plan of ``table.LONG`` × every model, written as a page of the documentation.

``make parity`` runs it. Exits with 1 where the bar is missed.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from models import BATCH, MODELS, plain
from table import APART, BAR, LONG, SHARES, SPLIT, STEPS

from phalanx.errors import PhalanxError
from phalanx.spec import Job, Plan
from phalanx.verify import OneDevice


def cell(one: OneDevice, plan: str) -> tuple[str, float | None]:
    """What the table shows for a model and a plan, and the larger of its two differences; ``None`` where refused."""
    try:
        proof = one.prove(Plan.parse(plan))
    except PhalanxError as error:
        if getattr(error, "exit_code", 0) == 2:
            return "refused", None  # nothing in this model to split so; the tests check the reasons
        # a table that stops at the first failure hides the others
        print(f"{one.job.name}, {plan}: {error}", file=sys.stderr)
        return "**failed**", float("inf")
    loss, gradient = proof.largest["loss"], proof.largest["gradient"]
    text = f"{loss:.0e} / {gradient:.0e}"
    good = proof.equal and max(loss, gradient) <= BAR
    return (text if good else f"**{text}**"), (max(loss, gradient) if good else float("inf"))


Make = Callable[[Job], Job]


def section(title: str, said: Sequence[str], plans: Mapping[str, Sequence[str]], make: Make) -> list[str]:
    """A table of its own, of some models under some plans; ``make`` gives the job to compare from the model's."""
    rows = ["| plan | model | difference |", "| --- | --- | --- |"]
    for name, its in plans.items():
        one = OneDevice.run(make(MODELS[name]()), STEPS)
        rows += [f"| `{plan}` | {name} | {cell(one, plan)[0]} |" for plan in its]
    return [f"## {title}", "", *said, "", *rows, ""]


Make = Callable[[Job], Job]


def sections() -> list[str]:
    """The tables of unequal shares and of replicas that step by themselves."""
    return [
        *section("Unequal shares", SHARES_SAID, SHARES, lambda job: job),
        *section("Replicas that step by themselves", APART_SAID, APART, plain),
    ]


SHARES_SAID = ("The same jobs as above, with samples dealt out by weight, or by speed.",)
APART_SAID = (
    "Plain SGD without clipping, averaged after every step, is one device; after more steps, or with an optimizer",
    "that looks at more than one gradient, it is not, and `phalanx prove` says so.",
)


def main(path: Path) -> int:
    torch.set_num_threads(1)
    began = time.perf_counter()
    ones = {name: OneDevice.run(make(), STEPS) for name, make in MODELS.items()}
    rows: list[str] = []
    differences: list[float] = []
    refused = 0
    for plan in [*(plan for plans in LONG.values() for plan in plans), *SPLIT]:
        cells = [cell(one, plan) for one in ones.values()]
        refused += sum(difference is None for _, difference in cells)
        differences += [difference for _, difference in cells if difference is not None]
        rows.append(f"| `{plan}` | " + " | ".join(text for text, _ in cells) + " |")
        print(rows[-1], flush=True)
    good = [difference for difference in differences if difference <= BAR]
    replicas = sections()
    minutes = (time.perf_counter() - began) / 60
    path.write_text(
        "\n".join(
            [
                "# Parity",
                "",
                f"Each job on one device against the same job under each plan, {STEPS} AdamW steps in fp32:",
                "the largest relative difference of a step's loss / of a parameter's first gradient.",
                f"The global batch is {BATCH}, so that shares and micro-batches are uneven. All clip; the token",
                "counts of the language models differ by sample.",
                "",
                f"*refused*: the model has nothing to split so; {refused} of {refused + len(differences)} are.",
                "",
                f"Of the others {len(good)} of {len(differences)} are within {BAR:.0e},",
                f"the largest being {max(good):.1e}.",
                f"Written by `make parity` with torch {torch.__version__} in {minutes:.0f} minutes.",
                "",
                "| plan | " + " | ".join(ones) + " |",
                "| --- |" + " --- |" * len(ones),
                *rows,
                "",
                *replicas,
            ]
        )
    )
    failed = any("**" in row for row in replicas)
    return 0 if len(good) == len(differences) and not failed else 1


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
