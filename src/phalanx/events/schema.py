"""The schema of an event log: one JSON object a line, each with ``event``, ``time`` and the fields named here.

``SCHEMA_VERSION`` stands in the first line. A reader takes any log of its own major version: fields are added, never
renamed or removed, within one.
"""

from __future__ import annotations

import math
from typing import Any

SCHEMA_VERSION = "1.11"

_INT_OR_NULL, _FLOAT_OR_NULL = (int, type(None)), (float, type(None))

# event → field → (type, meaning). A field whose type is a union with None may be null, never absent.
SCHEMA: dict[str, dict[str, tuple[type | tuple[type, ...], str]]] = {
    "start": {
        "schema": (str, "version of this schema"),
        "job": (str, "name of the job"),
        "plan": (str, "the plan, as one line of text"),
        "exact": (str, "whether steps are one device's: `yes`, `within the rounding of TYPE`, `no`; since 1.5"),
        "world_size": (int, "processes"),
        "device": (str, "kind of device, as plans say it"),
        "batch": (int, "samples in one optimizer step; the most, where that changes with the step"),
        "batch_tokens": (
            _INT_OR_NULL,
            "tokens that the samples of a step come to, `batch` being the most that it takes; null without; since 1.9",
        ),
        "whole_epochs": (bool, "whether the run's length is given in epochs, the last of which is whole; since 1.9"),
        "samples": (_INT_OR_NULL, "samples in the data; null for a stream; since 1.1"),
        "drop_last": (bool, "whether the last, partial batch of an epoch is dropped; since 1.1"),
        "epoch_samples": (_INT_OR_NULL, "samples in an epoch, by `job.sampler`; null for a stream; since 1.8"),
        "repeats": (bool, "whether a sample may come twice in an epoch, by `job.sampler`; since 1.8"),
        "stretches": (
            list,
            "where batch or data change with the step: for each stretch its first step, the samples in a batch, the "
            "first sample of its part of the data, and samples in that part and in a pass over it; empty elsewhere; "
            "since 1.9",
        ),
        "total_steps": (_INT_OR_NULL, "optimizer steps of the whole run; null where a stream's length is not known"),
        "workers": (int, "processes of each rank that load data; since 1.9"),
        "first_step": (int, "the step this run begins with; above 0 after a resume"),
        "parameters": (int, "elements of all parameters"),
        "notes": (list, "what this plan does not keep of one device's result, in words"),
    },
    "forecast": {
        "cluster": (str, "the devices it is for; since 1.3, as all of this event"),
        "step": (float, "seconds of an optimizer step"),
        "low": (float, "four of five plans take more seconds than this and fewer than `high`"),
        "high": (float, "see `low`"),
        "seconds": (dict, "of a step, part → seconds"),
        "memory": (dict, "bytes on the rank that needs most, part → bytes"),
        "allocated": (float, "bytes of tensors at the peak"),
        "reserved": (float, "bytes that the allocator then holds"),
        "room": (float, "bytes that a process can use"),
        "fits": (bool, "whether there is room"),
    },
    "step": {
        "step": (int, "optimizer step, 0 is the first"),
        "epoch": (int, "pass over the data, 0 is the first"),
        "loss": (_FLOAT_OR_NULL, "sum over the global batch divided by its count; null where it is not finite"),
        "count": (float, "what the loss was divided by: tokens or samples"),
        "samples": (int, "samples in this global batch"),
        "seconds": (float, "wall time since the step before"),
        "lr": (float, "learning rate of the first parameter group"),
        "grad_norm": (_FLOAT_OR_NULL, "global L2 norm before clipping; null where it was not needed or is not finite"),
        "skipped": (bool, "whether no update was made: for loss scaling of fp16, or for an `accident` of this step"),
        "waited": (
            _FLOAT_OR_NULL,
            "seconds of it that rank 0 waited for its samples; null with servers, or where it is not known; since 1.9",
        ),
        "losses": (
            dict,
            "phase → loss, of each phase of `job.phases` that was part of the step, `loss` being the first one's; "
            "name → loss, of each of `px.Losses`, of which `loss` is the weighted total; null where it is not finite; "
            "empty without either; since 1.9",
        ),
    },
    "check": {
        "message": (str, "how the first step compares with one device; since 1.11, as all of this event"),
        "equal": ((bool, type(None)), "whether it differs by no more than rounding; null where it was not compared"),
        "seconds": (float, "that the run waited for it"),
    },
    "accident": {
        "step": (int, "optimizer step; since 1.6, as all of this event"),
        "kind": (str, "`loss`, `gradient` or `parameter` that is not finite, or `spike` of the loss"),
        "action": (str, "`stop`, `skip` (no update was made) or `rollback` (to the checkpoint of the next `resume`)"),
        "message": (str, "what is wrong, in words"),
        "where": (str, "the first module whose numbers were not finite, and in which micro-batch"),
        "samples": (list, "ids of that micro-batch"),
        "path": (str, "where it is kept, relative to the run folder; empty where it is not"),
    },
    "shares": {
        "step": (int, "the first that they hold for; since 1.4, as all of this event"),
        "shares": (list, "samples of a full global batch that each rank of dp takes"),
        "seconds": (list, "that each rank of dp computes for a sample, as measured before; empty at the begin"),
    },
    "evaluate": {
        "step": (int, "optimizer steps taken so far"),
        "loss": (_FLOAT_OR_NULL, "sum over the evaluation data divided by its count; null where it is not finite"),
        "samples": (int, "samples evaluated, each once"),
        "metrics": (dict, "name → value, null where it is not finite"),
        "seconds": (float, "wall time"),
    },
    "checkpoint": {
        "step": (int, "optimizer steps taken so far"),
        "path": (str, "folder, relative to the run folder"),
        "bytes": (int, "size on disk"),
        "seconds": (float, "wall time until it was whole on the disk"),
        "standstill": (float, "seconds of it that training stood still; since 1.6"),
    },
    "copied": {
        "path": (str, "folder of the checkpoint, relative to the run folder; since 1.6, as all of this event"),
        "url": (str, "where `mirror` says"),
        "bytes": (int, "size there"),
    },
    "resume": {"step": (int, "the step gone on from"), "path": (str, "checkpoint, relative to the run folder")},
    "warning": {"message": (str, "what the user should know")},
    "lost": {
        "events": (int, "events before the next that could not be written, and are not here; since 1.6"),
        "reason": (str, "why, as the operating system says it"),
    },
    "memory": {
        "rank": (int, "rank"),
        "peak_bytes": (int, "largest memory so far: resident set on CPU, allocated on accelerators"),
        "parameters": (int, "bytes of parameters here, and the most gathered from other ranks at a time; since 1.2"),
        "gradients": (int, "bytes of gradients; since 1.2"),
        "optimizer": (int, "bytes of optimizer state, and of averaged weights; since 1.2"),
        "buffers": (int, "bytes of the model's buffers; since 1.2"),
        "activations": (int, "most bytes saved for backward at a time; since 1.2"),
    },
    "sync": {
        "step": (int, "optimizer steps taken when it was read; since 1.4, as all of this event"),
        "seconds": (float, "that rank 0 waited for it"),
        "bytes": (int, "that rank 0 sent; of a ring, what a rank sends to the next"),
        "whole": (int, "bytes that those would have been without `compress`"),
        "loss": (
            _FLOAT_OR_NULL,
            "mean over all replicas since the last averaging; null where nothing was counted since, or not finite",
        ),
    },
    "traffic": {
        "rank": (int, "rank; since 1.4, as all of this event, which runs with `compress` have"),
        "sent": (int, "bytes that it handed to the network for gradients; of a ring, what a rank sends to the next"),
        "kept": (int, "bytes sent for checkpoints, to bring together what was left out; not among `sent`"),
        "whole": (int, "bytes that fp32 gradients, all-reduced by a ring, would have been"),
        "steps": (int, "optimizer steps in which that was"),
    },
    "update": {
        "step": (int, "optimizer step that servers have applied; since 1.4, as all events of runs with `server`"),
        "version": (int, "updates applied so far, this one included"),
        "staleness": (list, "updates that the parameters of each piece's gradient lacked"),
        "workers": (list, "rank that computed each piece"),
        "dropped": (int, "pieces of this step that were left out, since enough others were in"),
    },
    "worker": {
        "rank": (int, "rank; since 1.4"),
        "state": (str, "`joined`, `lost` (its connection ended), `silent` (its piece may go to others), or `returned`"),
        "reason": (str, "why, where that is known"),
    },
    "worked": {
        "rank": (int, "worker that was there at the end; since 1.4"),
        "samples": (int, "samples it computed that counted, since it came"),
        "pieces": (int, "pieces of global batches that these were in"),
        "seconds": (float, "from then to the last of them"),
    },
    "timing": {
        "passes": (
            float,
            "median seconds of a step's forward and backward on rank 0, with what exchanges they do not hide; only on "
            "CPU; since 1.3, as all of this event",
        ),
        "update": (float, "median seconds of its update"),
    },
    "timeline": {
        "rank": (int, "rank of the first replica's pipeline; since 1.2"),
        "step": (int, "optimizer step"),
        "actions": (
            list,
            "[kind, stage, micro-batch, begin, end] of each, in order: `F` forward, `B` backward, or its halves `I` "
            "for the stage's inputs and `W` for its weights; seconds since the first rank began the step",
        ),
    },
    "stopped": {
        "step": (int, "optimizer steps taken, all of them in the checkpoint; since 1.6, as all of this event"),
        "signal": (str, "what asked for it: SIGTERM, SIGUSR1, SIGHUP or SIGINT"),
    },
    "restart": {
        "rank": (int, "first lost rank; since 1.6, as all of this event"),
        "step": (_INT_OR_NULL, "the step it was in; null before the first"),
        "cause": (str, "what ended it"),
        "restarts": (int, "so far, this one included"),
        "source": (str, "where the state comes from: a checkpoint on the disk, or the beginning; in words"),
        "again": (int, "steps that had been finished and are computed again"),
        "seconds": (float, "from when it was known to when all workers had been started again"),
    },
    "resize": {
        "from": (int, "devices that the run had; since 1.6, as all of this event"),
        "to": (int, "devices that it has from here on"),
        "step": (int, "optimizer steps taken in the checkpoint that it goes on from; 0 where there is none"),
        "cause": (str, "why"),
    },
    "hang": {
        "step": (_INT_OR_NULL, "the last step that a rank has begun; since 1.6, as all of this event"),
        "ranks": (list, "ranks that did not come to where others wait; all, where none can be told"),
        "cause": (
            str,
            "`stopped` by a signal, `silent` (did not answer), `absent` from an exchange that others are in, "
            "`mismatch` (in another exchange than others), `link` (all came, nothing arrives), `blocked` (nobody waits "
            "for a rank)",
        ),
        "seconds": (float, "since the run went on last"),
        "message": (str, "who did not come to what, and where it stands, in words"),
        "advice": (str, "what to do"),
        "stands": (
            list,
            "of each rank: `rank`, `step`, `pid`, `host`, what it is `doing`, its `stack`, innermost first",
        ),
    },
    "error": {
        "rank": (int, "first failing rank"),
        "step": (_INT_OR_NULL, "the step it was in"),
        "kind": (str, "class of the exception, or the signal"),
        "message": (str, "its text"),
        "lost": (
            bool,
            "a worker was lost, or did not come; else its code failed, and would again in new workers; since 1.10",
        ),
    },
    "ended_early": {
        "step": (int, "optimizer steps taken; since 1.7, as all of this event"),
        "metric": (str, "by which evaluations are compared: `loss`, or a metric"),
        "best": (_INT_OR_NULL, "steps taken at the best one; null where none gave a number"),
        "value": (_FLOAT_OR_NULL, "the metric there"),
        "evaluations": (int, "in a row that have brought nothing better since"),
    },
    "end": {
        "step": (int, "optimizer steps taken"),
        "samples": (int, "samples trained on by this run"),
        "seconds": (float, "wall time from the first step to the last"),
        "loss": (_FLOAT_OR_NULL, "loss of the last step; null where there was none or it is not finite"),
    },
}


def faults(event: dict[str, object]) -> list[str]:
    """Return a sentence for each fault of ``event`` against the schema."""
    name = event.get("event")
    if not isinstance(name, str) or name not in SCHEMA:
        return [f"unknown event {name!r}"]
    found = [f"{name}: {field!r} is missing" for field in SCHEMA[name] if field not in event]
    found += [
        f"{name}: unknown field {field!r}"
        for field in event
        if field not in SCHEMA[name] and field not in ("event", "time")
    ]
    for field, (kind, _) in SCHEMA[name].items():
        if field in event and not isinstance(event[field], kind):
            found.append(f"{name}: {field!r} is {event[field]!r}")
    if not isinstance(event.get("time"), float):
        found.append(f"{name}: 'time' is not seconds since the epoch")
    return found


_ITEMS: dict[tuple[str, str], tuple[type, ...]] = {
    ("start", "notes"): (str,),
    ("start", "stretches"): (list,),
    ("forecast", "seconds"): (int, float),
    ("forecast", "memory"): (int, float),
    ("shares", "shares"): (int, float),
    ("shares", "seconds"): (int, float, type(None)),
    ("step", "losses"): (int, float, type(None)),
    ("evaluate", "metrics"): (int, float, type(None)),
    ("update", "staleness"): (int,),
    ("update", "workers"): (int,),
    ("timeline", "actions"): (list,),
}
"""What lists and dictionaries hold."""

_LATER = {
    "start": (
        *("exact", "samples", "drop_last", "epoch_samples", "repeats", "stretches", "batch_tokens", "whole_epochs"),
        "workers",
    ),
    "step": ("waited", "losses"),
    "checkpoint": ("standstill",),
    "memory": ("parameters", "gradients", "optimizer", "buffers", "activations"),
    "error": ("lost",),
}
"""Fields that logs of earlier versions lack in events that they have; those of ``memory`` came together."""

_LEAST = {"batch": 1, "world_size": 1}  # of whole numbers, of which none is below 0
_MOST = 2**53
_ACTION = (str, int, int, float, float)


def understood(event: dict[str, Any]) -> bool:
    """Return True if readers can use ``event``, which may be of any version, or a stranger's.

    All fields of the event's first version must be there, each with its type and items; numbers are finite. Unknown
    events and fields are of a later version.
    """
    name = event.get("event")
    if not isinstance(name, str) or not _is_a(event.get("time", 0.0), (float,)):
        return False
    for field, (kinds, _) in SCHEMA.get(name, {}).items():
        if field not in event:
            if field in _LATER.get(name, ()) and not (name == "memory" and any(one in event for one in _LATER[name])):
                continue
            return False
        if not _is_a(event[field], kinds if isinstance(kinds, tuple) else (kinds,), _LEAST.get(field, 0)):
            return False
        if not _holds(event[field], _ITEMS.get((name, field))):
            return False
    return name != "timeline" or all(
        len(action) == len(_ACTION)
        and all(_is_a(one, (kind,)) for one, kind in zip(action, _ACTION, strict=True))
        and action[0] in ("F", "B", "I", "W")
        for action in event["actions"]
    )


def _holds(value: object, kinds: tuple[type, ...] | None) -> bool:
    if kinds is None or not isinstance(value, list | dict):
        return True
    return all(_is_a(one, kinds) for one in (value.values() if isinstance(value, dict) else value))


def _is_a(value: object, kinds: tuple[type, ...], least: int = 0) -> bool:
    if isinstance(value, bool):
        return bool in kinds
    if isinstance(value, int):
        return (int in kinds and least <= value < _MOST) or (float in kinds and abs(value) < _MOST)
    if isinstance(value, float):
        return float in kinds and math.isfinite(value)
    return isinstance(value, kinds)
