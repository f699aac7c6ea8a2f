"""What the library itself costs in a step: a tiny MLP in one process, and a 10 M parameter GPT on two."""

from __future__ import annotations

import sys

from compare import Contender, alternate, rounds_from_command_line, script, show, train

MLP_STEPS, GPT_STEPS = 1500, 20


def main() -> int:
    rounds = rounds_from_command_line(5)
    tiny = [
        Contender(name="phalanx.build", run=script("ours.py", "mlp", MLP_STEPS)),
        Contender(name="hand-written loop", run=script("peers/loop.py", "mlp", MLP_STEPS), bar=1.05),
        Contender(name="Accelerate", run=script("peers/accelerate_script.py", "mlp", MLP_STEPS)),
        Contender(name="Lightning Fabric", run=script("peers/fabric_script.py", "mlp", MLP_STEPS, 1)),
        Contender(name="Lightning Trainer", run=script("peers/trainer_script.py", "mlp", MLP_STEPS, 1)),
    ]
    results = alternate(tiny, rounds)
    met = show("MLP 64-256-10, batch 32, 1 process: the step alone", tiny, results, "step_s")
    met = show("the same with data loading", tiny, results, "loop_s") and met

    large = [
        Contender(name="phalanx train --plan dp=2", run=train("gpt", "dp=2", GPT_STEPS)),
        Contender(
            name="torchrun, hand-written DDP", run=script("peers/ddp.py", "gpt", GPT_STEPS, torchrun=2), bar=1.02
        ),
    ]
    results = alternate(large, rounds)
    met = show("GPT of 10.8 M parameters, 2 processes", large, results, "loop_s") and met
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
