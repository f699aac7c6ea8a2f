"""What an event log holds: one JSON object a line, each with ``event``, ``time`` and the fields named here.

``SCHEMA_VERSION`` stands in the first line. A reader takes any log of its own major version: fields are added, never
renamed or removed, within one.
"""

from __future__ import annotations

SCHEMA_VERSION = "1.5"

_INT_OR_NULL, _FLOAT_OR_NULL = (int, type(None)), (float, type(None))

# event → field → (type, meaning). A field whose type is a union with None may be null, never absent.
SCHEMA: dict[str, dict[str, tuple[type | tuple[type, ...], str]]] = {
    "start": {
        "schema": (str, "version of this schema"),
        "job": (str, "name of the job"),
        "plan": (str, "the plan, as one line of text"),
        "exact": (
            str,
            "whether the plan's steps are those of one device: `yes`, `within the rounding of TYPE`, `no`; since 1.5",
        ),
        "world_size": (int, "processes"),
        "device": (str, "kind of device: cpu or cuda"),
        "batch": (int, "samples in one optimizer step"),
        "samples": (_INT_OR_NULL, "samples in the data; null for a stream; since 1.1"),
        "drop_last": (bool, "whether the last, partial batch of an epoch is dropped; since 1.1"),
        "total_steps": (_INT_OR_NULL, "optimizer steps of the whole run; null where a stream's length is not known"),
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
        "skipped": (bool, "whether fp16 loss scaling skipped the update"),
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
        "seconds": (float, "wall time"),
    },
    "resume": {"step": (int, "the step gone on from"), "path": (str, "checkpoint, relative to the run folder")},
    "warning": {"message": (str, "what the user should know")},
    "memory": {
        "rank": (int, "rank"),
        "peak_bytes": (int, "largest memory so far: resident set on CPU, allocated on CUDA"),
        "parameters": (int, "bytes of parameters here, and the most gathered from other ranks at a time; since 1.2"),
        "gradients": (int, "bytes of gradients; since 1.2"),
        "optimizer": (int, "bytes of optimizer state; since 1.2"),
        "buffers": (int, "bytes of the model's buffers; since 1.2"),
        "activations": (int, "most bytes saved for backward at a time; since 1.2"),
    },
    "sync": {
        "step": (int, "optimizer steps taken when it was read; since 1.4, as all of this event"),
        "fragment": (int, "part of the model that replicas averaged"),
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
    "server": {
        "index": (int, "server that was lost; since 1.4"),
        "restarted": (bool, "whether it is there again"),
        "version": (int, "updates applied where all servers go on from"),
        "lost_updates": (int, "updates that were applied, and are made again"),
    },
    "worked": {
        "rank": (int, "worker that was there at the end; since 1.4"),
        "samples": (int, "samples it computed that counted, since it first came or server 0 last began"),
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
    "error": {
        "rank": (int, "first failing rank"),
        "step": (_INT_OR_NULL, "the step it was in"),
        "kind": (str, "class of the exception, or the signal"),
        "message": (str, "its text"),
    },
    "end": {
        "step": (int, "optimizer steps taken"),
        "samples": (int, "samples trained on by this run"),
        "seconds": (float, "wall time from the first step to the last"),
        "loss": (_FLOAT_OR_NULL, "loss of the last step; null where there was none or it is not finite"),
    },
}


def faults(event: dict[str, object]) -> list[str]:
    """What in ``event`` departs from the schema; empty where nothing does."""
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
