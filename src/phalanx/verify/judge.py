"""Comparison of two records, in the order of a run's computation."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from phalanx.config import Plan
from phalanx.verify import compare
from phalanx.verify.compare import Bounds, Difference, Way
from phalanx.verify.evidence import (
    KINDS,
    WORDS,
    Check,
    checkpoint,
    copies_apart,
    evaluations,
    holders,
    where,
)
from phalanx.verify.record import AVERAGE, END, FIRST, START, RunRecord, StepRecord, Tensors
from phalanx.verify.recording import GRADIENT_STEPS


@dataclass(frozen=True, kw_only=True, slots=True)
class Pair:
    """Two records, the reference and one of ``plan``, and the allowed differences by rounding.

    Attributes:
        first: the first gradient beyond rounding of each parameter, and the norm of its noise.
    """

    one: RunRecord
    other: RunRecord
    plan: Plan
    bounds: Bounds
    first: compare.FirstGradients = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "first", compare.first_gradients(self.one, self.bounds))

    @property
    def silent(self) -> list[str]:
        """Return parameters whose first gradient is zero except for rounding, though not exactly zero."""
        had = [name for name, grad in self.one.gradients.items() if bool(grad.any())]
        return [name for name in had if self.first.get(name, (None,))[0] is not self.one.gradients[name]]


def judged(pair: Pair) -> list[Check]:
    """Return the comparison of all common values, and all copies of them."""
    return [check for check in _all(pair) if check.many]


def _all(pair: Pair) -> Iterator[Check]:
    one, other = pair.one, pair.other
    together = pair.plan.sync == "each"
    yield _copies(pair, START)
    yield _tensors(pair, "initial", START, compare.values(one.values[START], other.values[START], _same))
    yield _tensors(pair, "initial", START, _common(one.buffers.get(START, {}), other.buffers.get(START, {}), _same))
    yield _exact("options of the optimizer", "before the first step", _options(one, other))
    for index, (here, there) in enumerate(zip(one.steps, other.steps, strict=True)):
        yield from _step(pair, index, here, there)
        if index == 0 and together:
            yield from _values(pair, FIRST)
    yield from _values(pair, END)
    yield from _averages(pair)
    yield _ranks_agree(other)
    yield from evaluations(one, other, pair.bounds)
    yield from checkpoint(other)


def _same(name: str, size: float) -> float:
    return 1e-6 * size


def _step(pair: Pair, index: int, here: StepRecord, there: StepRecord) -> Iterator[Check]:
    yield _loss(pair, index, here, there)
    yield from _phases(pair, index, here, there)
    for kind in ("gradient", "used"):
        mine, others = _gradients_of(pair, kind, index)
        # Replicas that step by themselves clip what each of them has. Skipped gradients are not finite.
        skipped = here.skipped and there.skipped
        if (mine or others) and not skipped and (kind == "gradient" or pair.plan.sync == "each"):
            moment = f"{'reduced' if kind == 'gradient' else kind}|{index}"
            found = compare.gradients(mine, others, pair.bounds, moment)
            if index < GRADIENT_STEPS:
                yield _scale(pair, kind, index, compare.scale(found, mine), many=len(found))
            yield _tensors(pair, kind, f"{'reduced' if kind == 'gradient' else kind}-{index}", found, step=index)
    if pair.plan.sync == "each":
        yield _copies(pair, f"reduced-{index}", step=index)
        yield _copies(pair, f"used-{index}", step=index)
    yield replace(
        _exact(f"numbers of step {index}", f"in step {index}", _numbers(pair, index, here, there)), step=index
    )


def _loss(pair: Pair, index: int, here: StepRecord, there: StepRecord) -> Check:
    off = compare.relative_difference(here.loss, there.loss)
    allowed = pair.bounds.of_sum(f"loss|{index}|", here.loss) / max(abs(here.loss), 1e-30)
    words = "" if off <= allowed else f"the loss of step {index}, by {off:.2g} (allowed {allowed:.2g})"
    return Check(kind="loss", when=f"in step {index}", step=index, many=1, largest=off, allowed=allowed, first=words)


def _phases(pair: Pair, index: int, here: StepRecord, there: StepRecord) -> Iterator[Check]:
    if not here.losses or not there.losses:
        return
    turns = _different(dict.fromkeys(here.losses, 1), dict.fromkeys(there.losses, 1))
    yield _exact(f"losses by name of step {index}", f"in step {index}", turns)
    for name, loss in here.losses.items():
        off = compare.relative_difference(loss, there.losses.get(name, math.nan))
        allowed = pair.bounds.of_sum(f"loss|{index}|{name}", loss) / max(abs(loss), 1e-30)
        words = f"the loss {name} in step {index}, by {off:.2g} (allowed {allowed:.2g})"
        sizes: dict[str, Any] = {"many": 1, "largest": off, "allowed": allowed}
        yield Check(kind="loss", when=f"in step {index}", step=index, first="" if off <= allowed else words, **sizes)


def _scale(pair: Pair, kind: str, step: int, factor: float, *, many: int) -> Check:
    off, allowed = abs(factor - 1), pair.bounds.of_sum(f"scale|{step}|{'reduced' if kind == 'gradient' else kind}", 1.0)
    which = "gradients" if kind == "gradient" else "gradients that the optimizer was given"
    words = f"all {which} in step {step}: {factor:.5g} × the reference's (allowed 1 ± {allowed:.2g})"
    first, when = "" if off <= allowed else words, f"in step {step}"
    sizes: dict[str, Any] = {"many": 1 if many else 0, "largest": off, "allowed": allowed}
    return Check(kind="scale", when=when, step=step, first=first, **sizes)


def _values(pair: Pair, moment: str) -> Iterator[Check]:
    one, other = pair.one, pair.other
    step = 0 if moment == FIRST else None
    yield _copies(pair, moment, step=step)
    if moment not in one.values or moment not in other.values:
        return
    first = pair.first
    if moment == FIRST:  # what rounding alone has moved says nothing yet
        early = one.reduced or one.used
        first = {name: known for name, known in first.items() if early.get(0, {}).get(name) is known[0]}
    way = Way(start=one.values[START], moved=one.values[moment], first=first, moment=moment)
    found = compare.parameters(one.values[moment], other.values[moment], way, pair.bounds)
    trained = set(one.options)
    still = [name for name in one.values[moment] if name not in trained]
    here, there = ({name: each.values[moment][name] for name in still} for each in (one, other))
    found += compare.values(here, there)
    yield _tensors(pair, "parameter", moment, found, step=step)
    yield _tensors(pair, "buffer", moment, _buffers(pair, moment), step=step)
    states = (record.state.get(moment, {}) for record in (pair.one, pair.other))
    mine, others = ({name: one for name, one in state.items() if name.rpartition(".")[0] in first} for state in states)
    found = _common(mine, others, lambda name, size: pair.bounds.of(f"state|{moment}|{name}", size))
    yield _tensors(pair, "state", moment, found, step=step)
    numbers = _different(one.numbers.get(moment, {}), other.numbers.get(moment, {}))
    yield _exact("numbers in the optimizer's state", WORDS[moment], numbers)


def _averages(pair: Pair) -> Iterator[Check]:
    one, other = pair.one, pair.other
    if not one.values.get(AVERAGE):
        return
    first = {name: known for name, known in pair.first.items() if name in one.values[AVERAGE]}
    way = Way(start=one.values[START], moved=one.values[END], first=first, moment=AVERAGE)
    found = compare.parameters(one.values[AVERAGE], other.values.get(AVERAGE, {}), way, pair.bounds)
    yield _tensors(pair, "average", AVERAGE, found)
    yield _tensors(pair, "buffer", AVERAGE, _buffers(pair, AVERAGE))


def _buffers(pair: Pair, moment: str) -> list[Difference]:
    mine, others = pair.one.buffers.get(moment, {}), pair.other.buffers.get(moment, {})
    if moment == AVERAGE:
        mine = {name: tensor for name, tensor in mine.items() if name in others}  # the others are no part of a state
    return _common(mine, others, lambda name, size: pair.bounds.of(f"buffers|{moment}|{name}", size))


def _gradients_of(pair: Pair, kind: str, step: int) -> tuple[Tensors, Tensors]:
    mine, others = (record.reduced if kind == "gradient" else record.used for record in (pair.one, pair.other))
    late = kind == "gradient" and step >= GRADIENT_STEPS and bool(mine) and bool(others)
    if late or (step in mine and step in others):
        return mine.get(step, {}), others.get(step, {})
    return {}, {}


def _common(one: Tensors, other: Tensors, allowed: Callable[[str, float], float]) -> list[Difference]:
    return compare.values(one, other, allowed) if one and other else []


def _tensors(pair: Pair, kind: str, moment: str, found: Sequence[Difference], step: int | None = None) -> Check:
    of = {"initial": "value", "parameter": "value", "average": "value", "used": "gradient"}.get(kind, kind)
    when = f"in step {step}" if kind in ("gradient", "used") else WORDS[moment]
    beyond = any(one.beyond for one in found)
    parts = holders([rank.copies.get(moment, {}) for rank in pair.other.ranks], of) if beyond else {}
    sides = [_side(record, of, moment) for record in (pair.one, pair.other)]
    placed = [
        replace(one, where=where(sides[0][one.name], sides[1][one.name], parts.get(one.name, {}), pair.plan))
        if one.beyond and all(one.name in side for side in sides)
        else one
        for one in found
    ]
    worst = max(placed, key=_excess, default=None)
    first = next((one for one in placed if one.beyond), None)
    words = _in_words(kind, when, first) if first else ""
    sizes: dict[str, Any] = {"largest": worst.relative, "allowed": worst.allowed} if worst else {}
    return Check(kind=kind, when=when, step=step, many=len(placed), first=words, differences=tuple(placed), **sizes)


def _side(record: RunRecord, of: str, moment: str) -> Tensors:
    name, _, step = moment.partition("-")
    if of == "gradient":
        return (record.reduced if name == "reduced" else record.used).get(int(step), {})
    known: Mapping[str, Tensors] = {"value": record.values, "buffer": record.buffers, "state": record.state}[of]
    return known.get(moment, {})


def _excess(one: Difference) -> float:
    if math.isnan(one.relative):
        return math.inf
    return one.relative / one.allowed if one.allowed else one.relative * math.inf if one.relative else 0.0


def _in_words(kind: str, when: str, one: Difference) -> str:
    at = f" ({one.where})" if one.where else ""
    given = " that the optimizer was given" if kind == "used" else ""
    of = " of its way" if kind in ("parameter", "average") else ""
    what = f"{KINDS.get(kind, '')}{one.name}{at}{given} {when}"
    return f"{what}, by {one.relative:.2g}{of} (allowed {one.allowed:.2g})"


def _copies(pair: Pair, moment: str, step: int | None = None) -> Check:
    # Replicas that step by themselves begin alike, and end with the average of all, which is what is saved.
    everywhere = pair.plan.sync == "each" or moment == START
    many, apart = copies_apart(pair.other, moment, everywhere, values=moment == END)
    when = f"in step {step}" if "-" in moment else WORDS[moment]
    first = f"copies of {apart[0].words} {when}" if apart else ""
    largest = max((one.relative for one in apart), default=0.0)
    return Check(kind="copies", when=when, step=step, many=many, largest=largest, first=first)


def _exact(what: str, when: str, found: tuple[int, list[str]]) -> Check:
    many, wrong = found
    first = f"{what}: {wrong[0]}" if wrong else ""
    largest = math.inf if wrong else 0.0
    return Check(kind="exact", when=when, many=many, largest=largest, first=first, wrong=tuple(wrong))


def _options(one: RunRecord, other: RunRecord) -> tuple[int, list[str]]:
    many, wrong = 0, list[str]()
    for name in one.options if one.options and other.options else ():
        here, there = dict(one.options[name]), dict(other.options.get(name, {}))
        if _NOTED not in here or _NOTED not in there:
            for options in (here, there):
                options.pop(_NOTED, None)
        count, found = _different(here, there)
        many += count
        wrong += [f"{text} for {name}" for text in found]
    return many, wrong


_NOTED = "initial_lr"
"""What a scheduler of torch's notes among the options: there may be one on one side alone."""


def _different(one: Mapping[str, Any], other: Mapping[str, Any], within: float = 0.0) -> tuple[int, list[str]]:
    keys = list(dict.fromkeys((*one, *other))) if one and other else []
    wrong = [
        f"{key} is {other.get(key, 'missing')}, not {one.get(key, 'there')}"
        for key in keys
        if one.get(key) != other.get(key)
        and not (key in one and key in other and within and compare.relative_difference(one[key], other[key]) <= within)
    ]
    return len(keys), wrong


def judged_after_resume(pair: Pair, at: int) -> list[Check]:
    """Compare the end of a run resumed after step ``at`` with the same run without a stop."""
    return [
        replace(check, first=check.first and f"after a resume at step {at}: {check.first}")
        for check in _resumed(pair, at)
        if check.many
    ]


def _resumed(pair: Pair, at: int) -> Iterator[Check]:
    one, other = pair.one, pair.other
    for index, (here, there) in enumerate(zip(one.steps[at:], other.steps, strict=True), at):
        yield _loss(pair, index, here, there)
        numbers = _numbers(pair, index, here, there)
        yield replace(_exact(f"numbers of step {index}", f"in step {index}", numbers), step=index)
    yield from _values(pair, END)
    yield from _averages(pair)
    yield _ranks_agree(other)
    later = {step: found for step, found in one.evaluations.items() if step > at}
    yield from evaluations(replace(one, evaluations=later), other, pair.bounds)


_SAME_RATE = 1e-7
"""Relative difference of learning rates that another program's arithmetic may have; of rates held in fp32 as well."""


def _numbers(pair: Pair, step: int, here: StepRecord, there: StepRecord) -> tuple[int, list[str]]:
    wrong: list[str] = []
    count = pair.bounds.of_sum("count||", 1.0) if here.count is not None and here.count % 1 else 1e-12
    norm = pair.bounds.of_sum(f"norm|{step}|", here.norm) / here.norm if here.norm else 0.0
    allowed = {"count": count, "samples": 0.0, "norm": norm, "skipped": 0.0}
    many = 0
    for name, most in allowed.items():
        a, b = getattr(here, name), getattr(there, name)
        if a is None or b is None:
            continue
        if name == "norm" and not (math.isfinite(a) or math.isfinite(b)):
            continue  # fp16 overflows to inf, or to nan where inf and -inf are added
        many += 1
        if not compare.relative_difference(float(a), float(b)) <= most:
            wrong.append(f"{name} is {b}, not {a}")
    expected = here.rates
    if pair.plan.server:  # the first server tells those of the parameters that it holds
        expected = {name: rate for name, rate in expected.items() if name in there.rates}
    compared, rates = _different(expected, there.rates, _SAME_RATE)
    return many + compared, wrong + [f"the learning rate of {text}" for text in rates]


def _ranks_agree(other: RunRecord) -> Check:
    many, wrong = 0, list[str]()
    firsts: dict[int, int] = {}
    known: dict[tuple[int, str, str], tuple[int, float]] = {}
    for rank, told in enumerate(other.ranks):
        for moment, numbers in told.numbers.items():
            for key, value in numbers.items():
                before, one = known.setdefault((told.replica, moment, key), (rank, value))
                many += before != rank
                if compare.relative_difference(one, value):
                    wrong.append(f"{key} {WORDS[moment]} is {one} on rank {before} and {value} on rank {rank}")
        first = firsts.setdefault(told.replica, rank)
        if first == rank:
            continue
        for index, (here, there) in enumerate(zip(other.ranks[first].steps, told.steps, strict=True)):
            for name in ("loss", "count", "samples", "norm", "skipped"):
                a, b = getattr(here, name), getattr(there, name)
                many += 1
                if a != b and not (a != a and b != b):
                    wrong.append(f"{name} of step {index} is {a} on rank {first} and {b} on rank {rank}")
        for step, result in other.ranks[first].evaluations.items():
            many += 1
            if told.evaluations.get(step) != result:
                wrong.append(f"the evaluation after step {step} differs between ranks {first} and {rank}")
    return _exact("what ranks tell", "in all steps", (many, wrong))
