"""How long until something happens: the import, the help text, and from the command to the first training step."""

from __future__ import annotations

import statistics
import sys
from importlib.util import find_spec

from compare import PHALANX, PYTHON, Contender, alternate, command, rounds_from_command_line, script, show, train

WORKLOAD, STEPS = "convnet", 3
IMPORT_BAR, HELP_BAR = 0.15, 0.4  # seconds


def main() -> int:
    rounds = rounds_from_command_line(5)
    quick = [
        Contender(name="python -c pass", run=command(PYTHON, "-c", "pass")),
        Contender(name="import phalanx", run=command(PYTHON, "-c", "import phalanx")),
        Contender(name="phalanx --help", run=command(PHALANX, "--help")),
    ]
    results = alternate(quick, rounds)
    bare, imported, helped = (statistics.median(row[i]["wall"] for row in results) for i in range(3))
    met = imported - bare < IMPORT_BAR and helped < HELP_BAR
    print(f"import phalanx  {imported - bare:.3f} s beyond Python's own {bare:.3f} s   bar < {IMPORT_BAR} s")
    print(f"phalanx --help  {helped:.3f} s   bar < {HELP_BAR} s")

    first = [
        Contender(name="phalanx train --plan dp=2", run=train(WORKLOAD, "dp=2", STEPS)),
        Contender(name="torchrun, hand-written DDP", run=script("peers/ddp.py", WORKLOAD, STEPS, torchrun=2), bar=0.75),
    ]
    others = {
        "accelerate": ("torchrun, Accelerate", script("peers/accelerate_script.py", WORKLOAD, STEPS, torchrun=2), 0.4),
        "pytorch_lightning": ("Lightning Trainer", script("peers/trainer_script.py", WORKLOAD, STEPS, 2), 0.25),
        "lightning_fabric": ("Lightning Fabric", script("peers/fabric_script.py", WORKLOAD, STEPS, 2), None),
    }
    for package, (name, run, bar) in others.items():
        if find_spec(package):
            first.append(Contender(name=name, run=run, bar=bar))
        else:
            print(f"{name}: not measured, {package} is not installed")
    results = alternate(first, rounds)
    met = show("command to first step, 2 processes", first, results, "first_step") and met
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
