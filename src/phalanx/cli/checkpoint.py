"""``phalanx checkpoint``: what a run has saved, whether it is whole, which of it goes, and the model for others."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from phalanx.cli.output import answer, json_option
from phalanx.config.run_files import CHECKPOINTS
from phalanx.errors import CheckpointError, DamagedError, Problem, SpecError

if TYPE_CHECKING:
    from phalanx.checkpoint import ExportForm, FoundCheckpoint
    from phalanx.config import Job

_NO = 1
_DTYPES = ("float32", "float16", "bfloat16")
_FLAGS = ("adapter", "merged", "averaged")


class _Folder(click.Path):
    """A folder of this machine: what copies checkpoints to a URL reads them there, and these commands do not."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if "://" in str(value):
            raise SpecError.of(
                where="RUN",
                given=f"{value}, which is a URL",
                allowed="a folder of this machine: a run fetches what --mirror has copied when it goes on",
                fix=f"phalanx train JOB --run runs/copy --resume auto --mirror {shlex.quote(str(value))}",
            )
        return super().convert(value, param, ctx)


_place = click.argument("place", metavar="RUN", type=_Folder(path_type=Path, file_okay=False))
_step_option = click.option("--from", "step", type=click.IntRange(min=0), help="The one of this step [the newest].")


@click.group("checkpoint", short_help="List, show, verify, prune and export a run's checkpoints.")
def command() -> None:
    """What a run has saved. RUN is its folder, or the folder of one checkpoint; nothing in it is executed.

    \b
    Examples:
      phalanx checkpoint list runs/digits-1
      phalanx checkpoint verify runs/digits-1
      phalanx checkpoint export runs/digits-1 --to digits.safetensors
    """


@command.command("list", short_help="The checkpoints of a run.")
@_place
@json_option
def list_command(place: Path, as_json: bool) -> None:
    """The checkpoints of RUN, the newest first: step, size, when it was written, and whether its files are complete.

    Complete: all are there in full length. What is in them is not read; `phalanx checkpoint verify RUN` reads it.
    """
    from phalanx.report.tables import checkpoints_table

    told = [_told(one) for one in _found(place)]
    note = "complete: all files are there in full length"
    verify = f"phalanx checkpoint verify {shlex.quote(str(place))} reads them, too"
    answer(as_json, {"checkpoints": told}, lambda _: checkpoints_table(told, [f"{note}; {verify}"]))


@command.command("show", short_help="What one checkpoint holds.")
@_place
@_step_option
@json_option
def show_command(place: Path, step: int | None, as_json: bool) -> None:
    """What a checkpoint of RUN holds: step, samples, and each tensor with its shape, type and the files it lies in.

    Without --from a newest one that is not complete is refused. Its tensors are not read: that does verify.
    """
    from phalanx.checkpoint import contents
    from phalanx.report.tables import contents_table

    with _offering_older(place, step, "checkpoint show") as chosen:
        told = contents(chosen.path)
    answer(as_json, told, lambda _: contents_table(told))


@command.command("verify", short_help="Read checkpoints whole and compare them with their checksums.")
@_place
@_step_option
@json_option
@click.pass_context
def verify_command(ctx: click.Context, place: Path, step: int | None, as_json: bool) -> None:
    """Read all checkpoints of RUN, or the one of --from, and say what is not as it was written.

    Exit code 0: all are whole; 1: what is damaged is named.
    """
    from phalanx.checkpoint import verify
    from phalanx.report.tables import verified_table

    chosen = _found(place) if step is None else [_chosen(place, step)]
    problems = {one.path.name: verify(one.path) for one in chosen}
    told = {"whole": not any(problems.values()), "problems": problems}
    answer(as_json, told, lambda _: verified_table(problems))
    ctx.exit(_NO if any(problems.values()) else 0)


@command.command("prune", short_help="Delete old checkpoints.")
@_place
@click.option("--keep", type=click.IntRange(min=1), required=True, help="The newest that stay.")
@click.option("--keep-every", type=click.IntRange(min=0), default=0, help="Multiples of it stay, too.")
@json_option
def prune_command(place: Path, keep: int, keep_every: int, as_json: bool) -> None:
    """Delete all checkpoints of RUN but the newest; the newest whole one, which is read to be sure, stays in any case.

    Refused while a training writes RUN: it has --keep itself.
    """
    from phalanx.checkpoint import best_step, prune, verify
    from phalanx.files import refuse_taken
    from phalanx.report.tables import checkpoints_table, pruned_notes

    _found(place)
    refuse_taken(_folder(place).parent)
    best_step(_folder(place).parent)  # where it cannot be read, nothing may be deleted, and this says so
    problems: dict[str, list[str]] = {}

    def whole(path: Path) -> bool:
        problems[path.name] = verify(path)
        return not problems[path.name]

    gone = prune(_folder(place), keep=keep, keep_every=keep_every, stays=whole)
    left = [_told(one) for one in _found(place)]
    damaged = {name: wrong for name, wrong in problems.items() if wrong}
    told = {"deleted": sorted(path.name for path in gone), "checkpoints": left, "damaged": damaged}
    kept = next((name for name, wrong in problems.items() if not wrong), None)
    answer(as_json, told, lambda _: checkpoints_table(left, pruned_notes(len(gone), damaged, kept)))


@command.command("export", short_help="Write the model for others: a folder for from_pretrained, or one file.")
@_place
@_step_option
@click.option("--to", "target", type=click.Path(path_type=Path), required=True, help="New folder, or *.safetensors.")
@click.option("--dtype", type=click.Choice(_DTYPES), help="Type of floating point tensors [as saved].")
@click.option("--averaged", is_flag=True, help="The average of the weights that the job keeps.")
@json_option
def export_command(place: Path, step: int | None, target: Path, as_json: bool, **how: Any) -> None:
    """Write the model of a checkpoint of RUN, whatever the plan that saved it; one tensor is in memory at a time.

    A folder holds safetensors, in shards of 5 GB with an index, and the configuration of a model of transformers, so
    that from_pretrained reads it. A target that ends in .safetensors is one file. Both can be a job's initial values.
    """
    write_model(place, step, target, export_form(**how), as_json=as_json)


def export_form(dtype: str | None, *, averaged: bool, adapter: bool = False, merged: bool = False) -> ExportForm:
    """The form of an export by the options of a command, of which ``dtype`` is the name of a type."""
    import torch

    from phalanx.checkpoint import ExportForm

    kind = getattr(torch, dtype) if dtype else None
    content = "adapter" if adapter else "merged" if merged else "model"
    return ExportForm(content=content, averaged=averaged, dtype=kind)


def write_model(
    place: Path,
    step: int | None,
    target: Path,
    form: ExportForm,
    *,
    as_json: bool,
    job: Callable[[Path], Job | None] | None = None,
) -> None:
    """Write what ``form`` says of a checkpoint, the newest where no ``step`` is given, and say what was written.

    ``job`` gives the job of a checkpoint, where it is needed.
    """
    from phalanx.train.adapters import export_model
    from phalanx.units import show_bytes

    verb, where = ("checkpoint export", ["--to", str(target)]) if form.content == "model" else ("export", [str(target)])
    kept = {f"--{form.content}": form.content != "model", "--averaged": form.averaged}
    dtype = ["--dtype", str(form.dtype).removeprefix("torch.")] if form.dtype else []
    more = [*where, *dtype, *(option for option, given in kept.items() if given)]
    with _offering_older(place, step, verb, *more) as chosen:
        with _in_options(verb):
            done = export_model(chosen.path, target, form, job=job(chosen.path) if job else None)
    told = {"from": str(chosen.path), "files": [str(file) for file in done.files]}
    told |= {"tensors": done.tensors, "bytes": done.nbytes, "config": done.configured}
    plain = "" if done.configured or target.suffix == ".safetensors" else "; no config.json: no model of transformers"
    text = f"{target}: {done.tensors} tensors, {show_bytes(done.nbytes)}, of {chosen.path.name}{plain}"
    answer(as_json, told, lambda _: text)


@contextmanager
def _in_options(verb: str) -> Iterator[None]:
    """Within, errors of an export that Python's arguments are named in name the options of ``verb``."""
    alone = verb == "checkpoint export"
    where = {"target": "--to" if alone else "OUT", "run": "RUN", "job": "RUN" if alone else "--job"}
    words = {"adapter=True": "--adapter", "merged=True": "--merged"}
    words["run.save_pretrained(target)"] = "phalanx export RUN OUT"
    words["checkpoint='trainable'"] = "--checkpoint trainable"
    words["px.load(folder, job())"] = "phalanx export RUN OUT" if alone else "--job train.py"
    words["px.load(folder, job()).save_pretrained(target, adapter=True)"] = "--job train.py"

    def option(text: str) -> str:
        return words.get(text) or re.sub(
            r"\b(?:adapter|merged|checkpoint)=[\w']+", lambda one: words.get(one[0], one[0]), text
        )

    try:
        yield
    except SpecError as error:
        problems = [
            Problem(
                where=where.get(one.where, f"--{one.where}" if one.where in _FLAGS else one.where),
                given=option(one.given),
                allowed=option(one.allowed),
                fix=option(one.fix),
            )
            for one in error.problems
        ]
        worded = type(error)(problems)
        for note in getattr(error, "__notes__", ()):
            worded.add_note(note)
        raise worded from error


def _folder(place: Path) -> Path:
    """The folder ``checkpoints`` that ``place`` stands for: a run's, or itself."""
    from phalanx.checkpoint.format import step_of

    return place / CHECKPOINTS if step_of(place) is None else place.parent


def _found(place: Path) -> list[FoundCheckpoint]:
    from phalanx.checkpoint import checkpoints
    from phalanx.checkpoint.format import step_of

    if not place.is_dir():
        raise _wrong(f"{place}, which is no folder")
    found = checkpoints(_folder(place))
    if step_of(place) is not None:
        found = [one for one in found if one.path.name == place.name]
    if not found:
        raise _wrong(f"{place}, which holds no checkpoint")
    return found


@contextmanager
def _offering_older(place: Path, step: int | None, verb: str, *more: str) -> Iterator[FoundCheckpoint]:
    """The checkpoint of ``step``, or the newest; where it is damaged, the error offers ``verb`` with the one before."""
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
    if step is None:
        return found[0]
    chosen = next((one for one in found if one.step == step), None)
    if chosen is None:
        there = ", ".join(str(one.step) for one in found)
        given = f"{step}, of which {place} has no checkpoint"
        raise SpecError.of(where="--from", given=given, allowed=there, fix=f"--from {found[0].step}")
    return chosen


def _wrong(given: str) -> SpecError:
    allowed = "the folder of a run that has saved, or of one checkpoint"
    return SpecError.of(where="RUN", given=given, allowed=allowed, fix="phalanx checkpoint list runs/digits-1")


def _told(one: FoundCheckpoint) -> dict[str, Any]:
    return {"step": one.step, "path": str(one.path), "bytes": one.nbytes, "time": one.time, "whole": one.whole}
