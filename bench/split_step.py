"""Time of a step of a model split over ranks, against the same layout by hand on torch's own parts.

More processes than cores: what is compared is all the work of a step, computation, messages and Python together.
Both sides must reach the same loss, or their times would say nothing.
"""

from __future__ import annotations

import sys

from compare import BenchError, Contender, Measures, alternate, rounds_from_command_line, script, show, train
from phalanx.config import Plan

STEPS, BAR, EQUAL = 16, 1.05, 1e-4
PLANS = (
    "pp=4 micro=2",
    "pp=4 micro=2 schedule=gpipe",
    "tp=4",
    "fsdp=2 tp=2",
    "pp=8 micro=2",
    "tp=8",
    "pp=2 fsdp=2 tp=2 micro=1",
    "pp=2 fsdp=2 tp=2 zero=1 micro=1",
)
"""torch's pipelining keeps FSDP's gradients whole until the step's last micro-batch, as ``zero=1`` does. Else they are
scattered after each micro-batch, which takes less memory and more messages; the last two show both."""


def main() -> int:
    rounds = rounds_from_command_line(2)
    met = True
    for text in PLANS:
        processes = Plan.parse(text).world_size
        sides = [
            Contender(name=f"phalanx train --plan '{text}'", run=train("gpt_split", text, STEPS)),
            Contender(name="torchrun, by hand", run=script("peers/split.py", STEPS, text, torchrun=processes), bar=BAR),
        ]
        results = alternate(sides, rounds, warm_up=0)
        for row in results:
            same_loss(text, row)
        met = show(f"{text}: {processes} processes", sides, results, "loop_s") and met
    return 0 if met else 1


def same_loss(text: str, row: list[Measures]) -> None:
    """Raises BenchError if the two sides computed different things."""
    ours, theirs = (one["loss"] for one in row)
    if abs(ours - theirs) > EQUAL * abs(theirs):
        raise BenchError(f"{text}: after {STEPS} steps our loss is {ours}, theirs {theirs}; these are not one program")


if __name__ == "__main__":
    sys.exit(main())
