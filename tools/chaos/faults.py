"""Faults in words: what happens, to whom, and at which moment of the run. ``draw`` makes a list of them from a seed."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Self

from phalanx.errors import SpecError

Phase = Literal["step", "save"]

_FILES = ("any", "tensors", "manifest", "state")
_EVERYBODY = ("rank", "ranks", "launcher", "everything")


@dataclass(frozen=True, kw_only=True, slots=True)
class FaultKind:
    """One kind of fault.

    Attributes:
        meaning: what happens, for the help text.
        targets: whom or what it can hit; the first where nothing is said.
        deadly: whether who is hit ends by it.
        seconds: how long it lasts where nothing is said; 0: it has no length.
        phases: when it can strike.
    """

    meaning: str
    targets: tuple[str, ...]
    deadly: bool = True
    seconds: float = 0.0
    phases: tuple[Phase, ...] = ("step", "save")


KINDS: dict[str, FaultKind] = {
    "SIGKILL": FaultKind(meaning="the processes are killed", targets=_EVERYBODY),
    "SIGTERM": FaultKind(meaning="the processes are asked to end", targets=("launcher", "rank", "ranks")),
    "SIGSTOP": FaultKind(meaning="the processes stand still", targets=_EVERYBODY, deadly=False, seconds=1.0),
    "tear": FaultKind(
        meaning="everything is killed, and the newest checkpoint's file cut short", targets=_FILES, phases=("step",)
    ),
    "flip": FaultKind(
        meaning="everything is killed, and a bit of the newest checkpoint changed", targets=_FILES, phases=("step",)
    ),
}
"""Every kind of fault, by its word."""

_WORDS = re.compile(
    r"(?P<kind>[\w-]+)(?: (?:rank (?P<rank>\d+)|(?P<target>[a-z]+)))??"
    r" (?P<phase>step|save) (?P<number>\d+)(?: for (?P<span>ever|(?:\d+(?:\.\d+)?)s))?"
)
_EXAMPLE = "--at 'SIGKILL rank 1 step 7'"


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """One fault.

    Attributes:
        kind: a key of ``KINDS``.
        target: ``rank``, ``ranks`` (all), ``launcher``, ``everything``, or which file of a checkpoint.
        rank: where the target is a rank.
        phase: ``step``: while a step is computed; ``save``: in the middle of writing a checkpoint.
        number: of the step, 0 is the first; or of the save, 1 is the first of the run.
        seconds: how long it lasts; infinite: until the run ends by it.
    """

    kind: str
    target: str
    rank: int = 0
    phase: Phase
    number: int
    seconds: float = 0.0

    @classmethod
    def parse(cls, text: str) -> Self:
        """A fault in words, such as ``SIGKILL rank 1 step 7`` or ``SIGSTOP ranks save 2 for 3s``.

        Raises:
            SpecError: with what is wrong in it.
        """
        found = _WORDS.fullmatch(" ".join(text.split()))
        if found is None:
            allowed = "KIND [TARGET] step N or save N [for 2s or for ever]"
            raise SpecError.of("--at", repr(text), allowed, _EXAMPLE)
        kind = KINDS.get(found["kind"])
        if kind is None:
            raise SpecError.of("--at", repr(text), f"one of {', '.join(KINDS)}", _EXAMPLE)
        target = "rank" if found["rank"] else found["target"] or kind.targets[0]
        if target not in kind.targets or (target == "rank" and not found["rank"]):
            targets = ", ".join("rank N" if one == "rank" else one for one in kind.targets)
            raise SpecError.of("--at", repr(text), f"{found['kind']} of {targets}", f"--at '{_usual(found['kind'])}'")
        if found["phase"] not in kind.phases or (found["phase"] == "save" and found["number"] == "0"):
            allowed = "step N" if kind.phases == ("step",) else "save N, counted from 1"
            raise SpecError.of("--at", repr(text), allowed, f"--at '{_usual(found['kind'])}'")
        if found["span"] and not kind.seconds:
            raise SpecError.of("--at", repr(text), f"{found['kind']} has no length", f"--at '{_usual(found['kind'])}'")
        span = {None: kind.seconds, "ever": float("inf")}.get(found["span"])
        return cls(
            kind=found["kind"],
            target=target,
            rank=int(found["rank"] or 0),
            phase="save" if found["phase"] == "save" else "step",
            number=int(found["number"]),
            seconds=float(found["span"][:-1]) if span is None else span,
        )

    def __str__(self) -> str:
        target = f"rank {self.rank}" if self.target == "rank" else self.target
        text = f"{self.kind} {target} {self.phase} {self.number}"
        if self.seconds == KINDS[self.kind].seconds:
            return text
        return f"{text} for ever" if self.seconds == float("inf") else f"{text} for {self.seconds:g}s"

    @property
    def deadly(self) -> bool:
        """Whether who is hit ends by it."""
        return KINDS[self.kind].deadly

    def step(self, checkpoint_every: int) -> int:
        """The optimizer steps that are done when it is to strike, at the least."""
        return self.number if self.phase == "step" else self.number * checkpoint_every


def _usual(kind: str) -> str:
    target = KINDS[kind].targets[0]
    words = [kind, "rank 1" if target == "rank" else target, KINDS[kind].phases[0], "7"]
    return " ".join(words)


def draw(
    count: int, *, seed: int, ranks: int, steps: int, checkpoint_every: int, kinds: Sequence[str] = ("SIGKILL",)
) -> list[Fault]:
    """``count`` faults for a run of so many ranks and steps, in the order in which they strike.

    The same seed gives the same faults. Kinds take turns; of those that can strike during a save, a third do.
    SIGKILL hits one rank in seven of ten draws, else all ranks, the launcher, or everything at once.
    """
    dice = random.Random(seed)
    saves = max(1, steps // checkpoint_every)
    saving, found = 0, list[Fault]()
    for index in range(count):
        kind = KINDS[kinds[index % len(kinds)]]
        target = kind.targets[0]
        if kind.targets == _EVERYBODY and kind.deadly:
            target = dice.choices(_EVERYBODY, weights=(14, 2, 3, 1))[0]
        elif kind.targets == _FILES:
            target = dice.choice(_FILES[1:])
        phase: Phase = kind.phases[0]
        if len(kind.phases) > 1:
            saving += 1
            phase = "save" if saving % 3 == 0 else "step"
        first = 2 * checkpoint_every + 1 if kind.targets == _FILES else 1  # so that there is one to fall back to
        number = dice.randint(1, saves) if phase == "save" else dice.randint(min(first, steps - 1), max(1, steps - 1))
        found.append(
            Fault(
                kind=kinds[index % len(kinds)],
                target=target,
                rank=dice.randrange(ranks) if target == "rank" else 0,
                phase=phase,
                number=number,
                seconds=kind.seconds,
            )
        )
    return sorted(found, key=lambda fault: (fault.step(checkpoint_every), fault.phase == "step"))
