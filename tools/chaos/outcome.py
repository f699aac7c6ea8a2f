"""What came of one fault, as a line and as data; and the damage that one does to a checkpoint."""

from __future__ import annotations

import random
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from chaos.faults import Fault
from phalanx.checkpoint.folder import newest_first


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What came of one fault.

    Attributes:
        fault: in words.
        seconds: since the run began; ``None`` where the fault did not strike, as all of the following.
        step: the optimizer step that the run was in.
        saving: whether it struck while a checkpoint was being written, and which step's; ``None`` where not.
        what: what happened next, in words.
        next_step: seconds until the next optimizer step was completed; ``None`` where none was.
        again: optimizer steps that had been completed, and were taken again.
        damaged: the checkpoint that was changed; empty where none was.
        believed: whether the run went on from that checkpoint.
        hung: whether nothing happened until the injector ended the run.
    """

    fault: str
    seconds: float | None
    step: int | None
    saving: int | None
    what: str
    next_step: float | None
    again: int
    damaged: str
    believed: bool
    hung: bool

    @property
    def struck(self) -> bool:
        return self.seconds is not None

    @property
    def took_effect(self) -> bool:
        """Whether it struck, and damaged a checkpoint if it was to."""
        return self.struck and (bool(self.damaged) or self.fault.split()[0] not in ("tear", "flip"))

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        if self.seconds is None:
            return f"{'-':>8}  {self.fault}: {self.what}"
        where = f"in step {self.step}" if self.saving is None else f"in the save of step {self.saving}"
        then = "" if self.next_step is None else f"; next step after {self.next_step:.2f} s"
        again = f", {self.again} taken again" if self.again else ""
        damaged = f"; {self.damaged} {'BELIEVED' if self.believed else 'not believed'}" if self.damaged else ""
        return f"{self.seconds:7.2f}s  {self.fault}: {where}; {self.what}{then}{again}{damaged}"


def missed(fault: Fault, why: str) -> Outcome:
    """Of a fault that did not strike."""
    nothing: dict[str, Any] = {"seconds": None, "step": None, "saving": None, "next_step": None}
    return Outcome(
        fault=str(fault), what=f"did not strike: {why}", again=0, damaged="", believed=False, hung=False, **nothing
    )


def damage(checkpoints: Path, fault: Fault, dice: random.Random) -> str:
    """Cut a file of the newest checkpoint short, or change a bit of it; says which, and nothing where there is none."""
    newest = next(iter(newest_first(checkpoints)), None)
    if newest is None:
        return ""
    names = {"tensors": "*.safetensors", "manifest": "manifest.json", "state": "state.json"}
    path = dice.choice(sorted(newest.glob(names.get(fault.target, "*"))))
    content = bytearray(path.read_bytes())
    at = dice.randrange(len(content))
    if fault.kind == "tear":
        del content[at:]
    else:
        content[at] ^= 1 << dice.randrange(8)
    path.write_bytes(content)
    return f"{newest.name}/{path.name}"
