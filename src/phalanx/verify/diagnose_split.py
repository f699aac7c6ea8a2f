"""Causes that only a model split over ranks can have, each with its pattern of differences."""

from __future__ import annotations

import math
from collections.abc import Iterator

from phalanx.config import Job, Plan
from phalanx.placement.batch_split import micro_batches
from phalanx.placement.schedules import SCHEDULES
from phalanx.units import show_names
from phalanx.verify.evidence import Evidence, copies_apart, ranks_in_words
from phalanx.verify.fingerprints import Fingerprint
from phalanx.verify.module_trace import Passed
from phalanx.verify.record import START
from phalanx.witness.reference_step import Piece, cut_out


def other_start(evidence: Evidence, job: Job, plan: Plan) -> str:
    """Match a plan's model that begins with other values than one device's."""
    if not (wrong := [one for one in evidence.initial if one.beyond]):
        return ""
    starts = evidence.other.fingerprints("start")
    stages = [{plan.coordinate(rank)["pp"] for rank, known in enumerate(starts) if one.name in known} for one in wrong]
    usual = (
        "Usual cause: another seed there, or values drawn in another order. Parameters that start from constants agree."
    )
    if plan.pp > 1 and all(one == stages[0] and len(one) == 1 for one in stages):
        stage = stages[0].pop()
        ranks = [rank for rank in range(plan.world_size) if plan.coordinate(rank)["pp"] == stage]
        held = {name for rank in ranks for name in starts[rank]}
        return (
            f"stage {stage} of the pipeline ({ranks_in_words(ranks)}) begins with other initial values than one "
            f"device: {len(wrong)} of the {len(held)} parameters there differ before the first step, {wrong[0].name} "
            f"the first, and none of another stage. {usual}"
        )
    places = {one.where for one in wrong}
    at = f" in {wrong[0].where}" if wrong[0].where else ""
    more = f"; {len(wrong)} parameters differ" if len(wrong) > 1 else ""
    alike = " all of them in that part" if len(wrong) > 1 and len(places) == 1 and wrong[0].where else ""
    return f"the model begins with other initial values than one device: {wrong[0].name}{at}{more}{alike}. {usual}"


def copies_apart_at_the_start(evidence: Evidence, job: Job, plan: Plan) -> str:
    """Match ranks that hold different values for the same part of a parameter."""
    if not (found := differing_copies(evidence, "start")):
        return ""
    return (
        f"{found} from the start: a missing synchronisation. "
        "Parameters were changed on one rank only, or not sent to all of them."
    )


def differing_copies(evidence: Evidence, when: str) -> str:
    """Return the ranks with different values, and their parameters, in words; "" if copies are equal bit by bit."""
    _, found = copies_apart(evidence.other, when, everywhere=True)
    pairs: dict[str, list[str]] = {}
    for one in found:
        if one.kind == "value":
            pairs.setdefault(one.who, []).append(one.name)
    if not pairs:
        return ""
    who, names = max(pairs.items(), key=lambda pair: len(pair[1]))
    return f"{who} hold different values of {show_names(names, 1)}"


def passed_on_in_parts(evidence: Evidence, job: Job, plan: Plan) -> str:
    """Match ranks of ``tp`` with a part of a whole output or gradient, or a multiple of it."""
    if plan.tp == 1 or not any(evidence.other.traces) or not any(evidence.one.traces):
        return ""
    names = [name for name in evidence.one.traces[0] if any(name in trace for trace in evidence.other.traces)]
    allowed = max(1e-3, 4 * evidence.rounding)
    return _forward(evidence, names, allowed, plan) or _backward(evidence, names, allowed, plan)


def _forward(evidence: Evidence, names: list[str], allowed: float, plan: Plan) -> str:
    for name in names:
        reference = evidence.one.traces[0][name]
        assert reference.output is not None
        given = _by_rank(evidence, name, grad=False)
        if not given or max(one.distance(reference.output) for one in given) <= allowed:
            continue
        # A bias is added on each rank, to its part of the sum: what is left out here was in all of them.
        bias, outputs = evidence.one.values[START].get(f"{name}.bias"), [reference.output, *given]
        if bias is not None and bias.dim() == 1:
            outputs = [one.plus(Fingerprint.of(bias), -reference.rows) for one in outputs]
        expected, *given = outputs
        where = f"the output of {name}"
        if _parts(expected, given, 1.0, allowed):
            return (
                f"a missing all-reduce: {where} is the first that differs, and each of the {plan.tp} ranks of tp goes "
                "on with its own part; the parts add up to one device's. Its weight is split by rows (its inputs), "
                "so that every rank has a partial sum, to be added over tp."
            )
        if _times(expected, given, 1.0, allowed, plan.tp):
            return (
                f"a doubled all-reduce: {where} is the first that differs, and is {plan.tp} × one device's on every "
                f"rank of tp={plan.tp}. The sum over the ranks is added up once more."
            )
        return ""
    return ""


def _backward(evidence: Evidence, names: list[str], allowed: float, plan: Plan) -> str:
    # A backward in two passes may give the same output a gradient in both.
    if plan.pp > 1 and SCHEDULES[plan.schedule].in_halves:
        return ""
    scale = math.nan
    after = ""
    for name in reversed(names):
        reference, given = evidence.one.traces[0][name].grad, _by_rank(evidence, name, grad=True)
        if reference is None or not given or not reference.size:
            continue
        if math.isnan(scale):
            # Backward runs on sums over constants that differ by plan: the last output tells by how much.
            scale = given[0].ratio(reference)
        expected = reference.plus(reference, scale - 1)
        if max(one.distance(expected) for one in given) <= allowed:
            after = name
            continue
        where = f"the gradient that comes back to the output of {name}"
        beside = f", while that of {after} is right" if after else ""
        if _parts(reference, given, scale, allowed):
            return (
                f"a missing all-reduce in backward: {where} is the first that differs{beside}: each of the {plan.tp} "
                "ranks of tp continues with its own part, and the parts add up to one device's. What reads this output "
                "is split over tp, so that its gradients are to be added over the ranks."
            )
        if _times(reference, given, scale, allowed, plan.tp):
            return (
                f"a doubled all-reduce in backward: {where} is {plan.tp} × one device's on every rank of "
                f"tp={plan.tp}{beside}. Gradients of all that comes before it are too large, of what comes after not."
            )
        return ""
    return ""


def _by_rank(evidence: Evidence, name: str, *, grad: bool) -> list[Fingerprint]:
    plan = evidence.plan
    by_place: dict[int, list[Fingerprint]] = {}
    rows: dict[int, float] = {}
    cut: list[str] = []
    for rank, trace in enumerate(evidence.other.traces):
        passed: Passed | None = trace.get(name)
        at = plan.coordinate(rank)
        known = None if passed is None else passed.grad if grad else passed.output
        if passed is None or known is None:
            continue
        cut = passed.cut
        # Along cp gradients of what is whole are parts as well; outputs are the same on every rank.
        if at["cp"] == 0 or "cp" in passed.cut or grad:
            by_place.setdefault(at["tp"], []).append(known)
            rows[at["tp"]] = rows.get(at["tp"], 0.0) + passed.rows
    totals = [Fingerprint.total(several) for _, several in sorted(by_place.items())]
    if "tp" in cut and totals:
        totals, rows = [Fingerprint.total(totals)], {0: sum(rows.values())}
    if not grad:
        # What does not depend on the samples, such as positions, is there once a micro-batch and rank.
        share = evidence.one.traces[0][name].rows / max(max(rows.values(), default=0.0), 1.0)
        totals = [one.plus(one, share - 1) for one in totals]
    return totals


def _parts(reference: Fingerprint, given: list[Fingerprint], scale: float, allowed: float) -> bool:
    expected = reference.plus(reference, scale - 1)
    unequal = len(given) > 1 and max(one.distance(given[0]) for one in given) > allowed
    return unequal and Fingerprint.total(given).distance(expected) <= allowed * len(given)


def _times(reference: Fingerprint, given: list[Fingerprint], scale: float, allowed: float, ranks: int) -> bool:
    expected = reference.plus(reference, scale * ranks - 1)
    return all(one.distance(expected) <= allowed for one in given)


def first_module_that_differs(evidence: Evidence, job: Job, plan: Plan) -> str:
    """Name the first module in forward whose output differs."""
    if not any(evidence.other.traces) or not any(evidence.one.traces):
        return ""
    traces, allowed = evidence.one.traces[0], max(1e-4, 4 * evidence.rounding)
    known = {name: found for name in traces if (found := _by_rank(evidence, name, grad=False))}
    for name, given in known.items():
        whole = traces[name].output
        if whole is not None and max(one.distance(whole) for one in given) > allowed:
            return (
                f"the output of {name} is the first in forward that differs from one device's. Look at how the plan "
                "computes this module, at state that it changes in forward, and at what it reads of the batch."
            )
    first = evidence.one.steps[0]
    if known and evidence.loss_differs and first.count != first.samples:
        return (
            "the outputs of all modules are one device's, the loss is not. Look at what computes the loss from them: "
            "statistics of the batch, counts, and values that follow the rank."
        )
    return ""


def auxiliary_once_per_rank(evidence: Evidence, job: Job, plan: Plan) -> str:
    """Match a router's gradient that is off by a multiple of its auxiliary loss's gradient."""
    for name in reversed(list(evidence.one.auxiliary)):
        alone, expected, given = (
            held.get(name) for held in (evidence.one.auxiliary, evidence.one.gradients, evidence.other.gradients)
        )
        if alone is None or expected is None or given is None or not float(alone.norm()):
            continue
        off, alone = (given - expected).double(), alone.double()
        if float(off.norm()) <= evidence.rounding * float(expected.double().norm()):
            continue
        more = float((off * alone).sum() / alone.square().sum())
        left = float((off - more * alone).norm() / off.norm())
        if left > 0.1:
            return ""
        for what, number in _counts(job, plan):
            for factor, said in ((number, f"{number} ×"), (1 / number, f"1/{number} of")):
                if abs(1 + more - factor) < 0.05 * factor:
                    return (
                        f"an auxiliary loss is counted another number of times than once: the gradient of {name}, "
                        "which chooses experts, is off by what this loss alone gives (but for "
                        f"{left:.1%}); it holds {said} one device's, {what}. Add it to the sum times what is counted "
                        "(samples or tokens), so that it is divided by the global count like the rest."
                    )
        return ""
    return ""


def _counts(job: Job, plan: Plan) -> Iterator[tuple[str, int]]:
    micros = micro_batches(plan, job.batch)
    known = {
        "once per rank that has samples of its own": plan.replicas,
        "once per micro-batch": micros,
        "once per rank and micro-batch": plan.replicas * micros,
        "once per rank of tp": plan.tp,
        "once per rank of cp": plan.cp,
        "once per rank": plan.world_size,
    }
    return ((what, number) for what, number in known.items() if number > 1)


def not_synchronised(evidence: Evidence, job: Job, plan: Plan) -> str:
    """Match copies of a parameter with different gradients on ranks."""
    parts: dict[str, list[str]] = {}
    names: dict[str, None] = {}
    by_rank = evidence.other.fingerprints("gradients")
    # What is zero but for rounding may have any value on any rank.
    meant = [name for name in dict.fromkeys(name for known in by_rank for name in known) if name not in evidence.silent]
    for axis in evidence.axes:
        for ranks in evidence.peers(axis):
            for name in [name for name in meant if all(name in by_rank[rank] for rank in ranks)]:
                pieces = {by_rank[rank][name][0] for rank in ranks}
                given = [by_rank[rank][name][1] for rank in ranks]
                if len(pieces) > 1 or not _unlike(given, evidence.rounding):
                    continue
                names[name] = None
                if _adds_up(evidence, name, pieces.pop(), given):
                    parts.setdefault(axis, []).append(name)
                else:
                    parts.setdefault(axis, [])
    if not names:
        return ""
    everything = {name for known in by_rank for name in known}
    over = " and ".join(parts)
    sums = all(parts.values())
    own = "tokens" if set(parts) <= {"tp", "cp"} else "samples"
    has = f"each rank has that of its own {own} only" + (", and they add up to one device's" if sums else "")
    listed = show_names(list(names), 3)
    right = {one.name for one in evidence.gradients if not one.beyond}
    rest = everything - set(names)
    if rest and rest <= right | set(evidence.silent):
        return (
            f"gradients of {listed} are not added up over {over}: {has}. The other {len(rest)} "
            "parameters' gradients are one device's. Usual cause: parameters that are whole on each rank and left out "
            "of its all-reduce, such as those of normalisations where tokens are shared out."
        )
    return (
        f"ranks of {over} have different gradients of {listed}: a missing synchronisation. "
        "Gradients are not reduced over all ranks."
    )


def _unlike(given: list[Fingerprint], rounding: float) -> bool:
    norm = math.sqrt(max(one.square for one in given))
    root = math.sqrt(len(given[0].products))
    return max(math.dist(one.products, given[0].products) for one in given) > rounding * norm * root


def _adds_up(evidence: Evidence, name: str, piece: Piece, given: list[Fingerprint]) -> bool:
    whole = evidence.one.gradients.get(name)
    if whole is None:
        return False
    expected, found = Fingerprint.of(cut_out(whole, piece)), Fingerprint.total(given)
    allowed = max(1e-3, 4 * evidence.rounding)
    return any(found.distance(expected.plus(expected, times - 1)) <= allowed for times in (1, len(given)))
