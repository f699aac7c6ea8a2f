"""Ways to keep two replicas together that send less, against torch's own: DDP's hooks, post-local SGD, DiLoCo.

``python bench/together.py [--rounds N]``. Seconds a step in the mean, with the averagings among them, on this machine's
links: what they cost in computing, not what they spare on a thin link (``slow_network.py``). The bar: at most 1.05
times what the peer takes.
"""

from __future__ import annotations

import sys

from compare import Contender, alternate, rounds_from_command_line, script, show, train

STEPS, EVERY, AFTER, BAR = 40, 12, 4, 1.05
WAYS = (
    ("dp=2 compress=fp16", "fp16"),
    ("dp=2 compress=powersgd:4", "powersgd:4"),
    (f"dp=2 sync=local every={EVERY} after={AFTER}", "local"),
    (f"dp=2 sync=diloco every={EVERY}", "diloco"),
)


def main() -> int:
    rounds, met = rounds_from_command_line(3), True
    for plan, way in WAYS:
        peer = script("peers/together.py", "gpt", STEPS, way, EVERY, AFTER, torchrun=2)
        sides = [
            Contender(name=f"phalanx train --plan '{plan}'", run=train("gpt", plan, STEPS)),
            Contender(
                name=f"torchrun, torch's own {way}" if way != "diloco" else "torchrun, by hand", run=peer, bar=BAR
            ),
        ]
        results = alternate(sides, rounds)
        met = show(f"GPT of 10.8 M parameters, 2 processes, {way}", sides, results, "mean_s") and met
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
