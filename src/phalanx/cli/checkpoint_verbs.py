"""``phalanx checkpoint``: list, show, verify, prune and export checkpoints; ``export``: write a run's model."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from phalanx.cli.options import ANY_PATH, FOLDER, Command, complete_file
from phalanx.cli.output import NO, Answer, json_option
from phalanx.config.run_files import CHECKPOINTS
from phalanx.errors import CheckpointError, DamagedError, SpecError

if TYPE_CHECKING:
    from phalanx.checkpoint import ExportForm, FoundCheckpoint
    from phalanx.config import Job


_run_argument = click.argument("place", metavar="RUN", type=FOLDER)
_step_option = click.option("--from", "step", type=click.IntRange(min=0), help="The one of this step [the newest].")


@click.group("checkpoint", short_help="List, show, verify, prune and export a run's checkpoints.")
def checkpoint_command() -> None:
    """Checkpoints of a run. RUN is its folder, or the folder of one checkpoint; nothing in it is executed.

    \b
    Examples:
      phalanx checkpoint list runs/digits-1
      phalanx checkpoint verify runs/digits-1
      phalanx checkpoint export runs/digits-1 --to digits.safetensors
    """


@checkpoint_command.command("list", short_help="The checkpoints of a run.")
@_run_argument
@json_option
def list_command(place: Path) -> Answer:
    """List the checkpoints of RUN, newest first: step, size, time, and if all files are there in full length.

    Contents are not read; `phalanx checkpoint verify RUN` reads them.
    """
    from phalanx.report.tables import checkpoints_table

    told = [_row(one) for one in _found(place)]
    verify = f"phalanx checkpoint verify {shlex.quote(str(place))} reads them, too"
    notes = [f"complete: all files are there in full length; {verify}"]
    return Answer({"checkpoints": told}, lambda _: checkpoints_table(told, notes))


@checkpoint_command.command("show", short_help="The contents of one checkpoint.")
@_run_argument
@_step_option
@json_option
def contents_command(place: Path, step: int | None) -> Answer:
    """Show a checkpoint of RUN: step, samples, and each tensor with its shape, type and files.

    Without --from a newest one that is not complete is refused. Tensors are not read; verify reads them.
    """
    from phalanx.checkpoint import contents
    from phalanx.report.tables import contents_table

    with _offering_older(place, step, "checkpoint show") as chosen:
        told = contents(chosen.path)
    return Answer(dict(told), lambda _: contents_table(told))


@checkpoint_command.command("verify", short_help="Read checkpoints and compare them with their checksums.")
@_run_argument
@_step_option
@json_option
def verify_command(place: Path, step: int | None) -> Answer:
    """Read all checkpoints of RUN, or the one of --from, and name files that have changed since.

    Exit code 0: all are whole; 1: some are damaged.
    """
    from phalanx.checkpoint import verify
    from phalanx.report.tables import verified_table

    problems = {one.path.name: verify(one.path) for one in (_found(place) if step is None else [_chosen(place, step)])}
    whole = not any(problems.values())
    return Answer({"whole": whole, "problems": problems}, lambda _: verified_table(problems), 0 if whole else NO)


@checkpoint_command.command("prune", short_help="Delete old checkpoints.")
@_run_argument
@click.option("--keep", type=click.IntRange(min=1), required=True, help="The newest that stay.")
@click.option("--keep-every", type=click.IntRange(min=0), default=0, help="Multiples of it stay, too.")
@json_option
def prune_command(place: Path, keep: int, keep_every: int) -> Answer:
    """Delete all checkpoints of RUN but the newest; the newest whole one, which is read to be sure, stays in any case.

    Refused while a training writes RUN, which has --keep itself.
    """
    from phalanx.checkpoint import best_step, prune, verify
    from phalanx.files import refuse_taken
    from phalanx.report.tables import checkpoints_table, pruned_notes

    _found(place)
    refuse_taken(_folder(place).parent)
    best_step(_folder(place).parent)  # raises if it cannot be read: then nothing may be deleted
    problems: dict[str, list[str]] = {}

    def whole(path: Path) -> bool:
        problems[path.name] = verify(path)
        return not problems[path.name]

    gone = prune(_folder(place), keep=keep, keep_every=keep_every, stays=whole)
    left = [_row(one) for one in _found(place)]
    damaged = {name: wrong for name, wrong in problems.items() if wrong}
    kept = next((name for name, wrong in problems.items() if not wrong), None)
    told = {"deleted": sorted(path.name for path in gone), "checkpoints": left, "damaged": damaged}
    return Answer(told, lambda _: checkpoints_table(left, pruned_notes(len(gone), damaged, kept)))


def _form_options(function: Command) -> Command:
    dtype = click.option("--dtype", type=click.Choice(("float32", "float16", "bfloat16")), help="Of floats [as saved].")
    return dtype(click.option("--averaged", is_flag=True, help="Average of weights, by px.Job(average=).")(function))


@checkpoint_command.command("export", short_help="Write the model for others: a folder for from_pretrained, or a file.")
@_run_argument
@_step_option
@click.option("--to", "target", metavar="OUT", type=ANY_PATH, required=True, help="New folder, or *.safetensors.")
@_form_options
@json_option
def model_command(place: Path, step: int | None, target: Path, **how: Any) -> Answer:
    """Write the model of a checkpoint of RUN, saved under any plan; one tensor is in memory at a time.

    from_pretrained reads a folder: safetensors in shards of 5 GB with an index, and a configuration of transformers. A
    target that ends in .safetensors is one file. Both can be a job's initial values.
    """
    return _export(place, step, target, how, verb="checkpoint export")


@click.command("export", short_help="Write the trained model for others.")
@_run_argument
@click.argument("target", metavar="OUT", type=ANY_PATH)
@click.option("--from", "step", metavar="STEP|best", help="The checkpoint of this step, or the best [the newest].")
@_form_options
@click.option("--adapter", is_flag=True, help="The adapters of peft alone, for PeftModel.from_pretrained.")
@click.option("--merged", is_flag=True, help="The model of transformers, with the adapters of peft merged into it.")
@click.option("--job", shell_complete=complete_file, help="The job of RUN, if one is needed [as RUN says].")
@json_option
def export_command(place: Path, target: Path, step: str | None, job: str | None, **how: Any) -> Answer:
    """Write the model that RUN has trained, under any plan, to OUT: a new folder, or a new file *.safetensors.

    from_pretrained reads the folder. One tensor is in memory at a time; with --adapter or --merged, which peft writes,
    the whole model once. With --checkpoint trainable the job of RUN is loaded: it builds the frozen values, which are
    compared with those of the run.

    \b
    Examples:
      phalanx export runs/digits-1 digits.safetensors
      phalanx export runs/llama-1 llama/ --from best --dtype bfloat16
      phalanx export runs/digits-1 digits.safetensors --averaged
      phalanx export runs/lora-1 adapter/ --adapter
    """
    if how["adapter"] and how["merged"]:
        raise SpecError.of("--merged", "--adapter --merged", "one of the two", "--adapter")
    if step not in (None, "best") and not str(step).isdecimal():
        raise click.BadParameter(f"{step!r} is neither a step nor best", param_hint="'--from'")
    at = _best(place) if step == "best" else None if step is None else int(step)
    return _export(place, at, target, how, job)


def _export(
    place: Path, step: int | None, target: Path, how: dict[str, Any], named: str | None = None, verb: str = "export"
) -> Answer:
    """Write the model of the checkpoint of ``step``, or of the newest; ``named`` is its job, if given."""
    import torch

    from phalanx.checkpoint import ExportForm
    from phalanx.train.adapters import export_model
    from phalanx.units import show_bytes

    flags = [name for name in ("adapter", "merged", "averaged") if how.get(name)]
    content: Any = "model" if flags in ([], ["averaged"]) else flags[0]
    dtype = getattr(torch, how["dtype"]) if how["dtype"] else None
    form = ExportForm(content=content, averaged=how["averaged"], dtype=dtype)
    alone = verb == "checkpoint export"
    more = [*(["--to"] if alone else []), str(target), *(["--dtype", how["dtype"]] if dtype else [])]
    with _offering_older(place, step, verb, *more, *(f"--{name}" for name in flags)) as chosen:
        job = None if alone else _job(chosen.path, named, form)
        done = export_model(chosen.path, target, form, job=job)
    told = {"from": str(chosen.path), "files": [str(file) for file in done.files]}
    told |= {"tensors": done.tensors, "bytes": done.nbytes, "config": done.configured}
    plain = "" if done.configured or target.suffix == ".safetensors" else "; no config.json: no model of transformers"
    return Answer(told, f"{target}: {done.tensors} tensors, {show_bytes(done.nbytes)}, of {chosen.path.name}{plain}")


def _job(path: Path, named: str | None, form: ExportForm) -> Job | None:
    """Return the job that builds the frozen values or a model with adapters; None if it is not needed."""
    from phalanx.checkpoint import read_state, sections
    from phalanx.launch.jobfile import Reference, load_job
    from phalanx.launch.runfile import job_of

    needed = bool(read_state(path).get(sections.FROZEN))
    if named is not None:
        if not needed and form.content == "model":
            allowed = "none: the checkpoint holds all values, and no code is run"
            raise SpecError.of("--job", named, allowed, "phalanx export RUN OUT")
        return load_job(named)
    if not needed:
        return None
    reference = job_of(path.parent.parent, "job")
    if Reference.parse(reference).is_name:
        given = f"none for {path}, which holds what is trained alone, of a run that does not say where its job is"
        raise SpecError.of("--job", given, "the file of the job, which builds the rest", "--job train.py")
    return load_job(reference)


def _best(place: Path) -> int:
    from phalanx.checkpoint import best_step

    step = best_step(place)
    if step is None:
        allowed = "the step of a checkpoint: the run does not compare evaluations, or has had none"
        fix = 'px.Job(..., evaluate=..., best=px.Best("loss")), or no --from: the newest'
        raise SpecError.of("--from", "best", allowed, fix)
    return step


def _folder(place: Path) -> Path:
    """Return the folder ``checkpoints`` of a run, or of one of its checkpoints."""
    from phalanx.checkpoint.format import step_of

    return place / CHECKPOINTS if step_of(place) is None else place.parent


def _found(place: Path) -> list[FoundCheckpoint]:
    from phalanx.checkpoint import checkpoints
    from phalanx.checkpoint.format import step_of

    found = checkpoints(_folder(place)) if place.is_dir() else []
    if step_of(place) is not None:
        found = [one for one in found if one.path.name == place.name]
    if not found:
        given = f"{place}, which {'holds no checkpoint' if place.is_dir() else 'is no folder'}"
        allowed = "the folder, on this machine, of a run that has saved, or of one checkpoint"
        raise SpecError.of("RUN", given, allowed, "phalanx checkpoint list runs/digits-1")
    return found


@contextmanager
def _offering_older(place: Path, step: int | None, verb: str, *more: str) -> Iterator[FoundCheckpoint]:
    """Yield the checkpoint of ``step``, or the newest; if it is damaged, the error offers the one before."""
    from phalanx.checkpoint.format import Manifest

    chosen = _chosen(place, step)
    try:
        if step is None:
            Manifest.read(chosen.path).checked(chosen.path)
        yield chosen
    except DamagedError as error:
        older = next((one for one in _found(place) if one.step < chosen.step and one.whole), None)
        if older is None:
            raise
        words = ["phalanx", *verb.split(), str(place), "--from", str(older.step), *more]
        raise CheckpointError(f"{error}\n    try: {shlex.join(words)}") from error


def _chosen(place: Path, step: int | None) -> FoundCheckpoint:
    found = _found(place)
    chosen = found[0] if step is None else next((one for one in found if one.step == step), None)
    if chosen is None:
        given, there = f"{step}, of which {place} has no checkpoint", ", ".join(str(one.step) for one in found)
        raise SpecError.of(where="--from", given=given, allowed=there, fix=f"--from {found[0].step}")
    return chosen


def _row(one: FoundCheckpoint) -> dict[str, Any]:
    return {"step": one.step, "path": str(one.path), "bytes": one.nbytes, "time": one.time, "whole": one.whole}
