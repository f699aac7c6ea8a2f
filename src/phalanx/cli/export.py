"""``phalanx export``: the model that a run has trained, for others."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from phalanx.cli.checkpoint import export_form, write_model
from phalanx.cli.options import JobReference
from phalanx.cli.output import json_option
from phalanx.errors import SpecError

if TYPE_CHECKING:
    from phalanx.checkpoint import ExportForm
    from phalanx.config import Job


class _Which(click.ParamType):
    name = "STEP|best"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value == "best" or (str(value).isascii() and str(value).isdigit()):
            return value if value == "best" else int(value)
        return self.fail(f"{value!r} is neither a step nor best", param, ctx)


@click.command("export", short_help="Write the trained model for others.")
@click.argument("place", metavar="RUN", type=click.Path(path_type=Path, file_okay=False))
@click.argument("target", metavar="OUT", type=click.Path(path_type=Path))
@click.option(
    "--from", "step", type=_Which(), help="The checkpoint of this step, or of the best evaluation [the newest]."
)
@click.option("--dtype", type=click.Choice(("float32", "float16", "bfloat16")), help="Of floating point [as saved].")
@click.option("--averaged", is_flag=True, help="The average of the weights, which px.Job(average=...) keeps.")
@click.option("--adapter", is_flag=True, help="The adapters of peft alone, for PeftModel.from_pretrained.")
@click.option("--merged", is_flag=True, help="The model of transformers, with the adapters of peft merged into it.")
@click.option("--job", type=JobReference(), help="The job that RUN has trained [as RUN says, where one is needed].")
@json_option
def command(place: Path, target: Path, step: int | str | None, job: str | None, as_json: bool, **how: Any) -> None:
    """Write the model that RUN has trained to OUT, whatever the plan it was trained under.

    OUT is a new folder that from_pretrained reads, or a new file *.safetensors. One tensor is in memory at a time;
    with --adapter or --merged, which peft writes, the whole model once. Of a run with --checkpoint trainable the frozen
    values are built by its job, which is loaded for it, and compared with those that the run began with.

    \b
    Examples:
      phalanx export runs/digits-1 digits.safetensors
      phalanx export runs/llama-1 llama/ --from best --dtype bfloat16
      phalanx export runs/digits-1 digits.safetensors --averaged
      phalanx export runs/lora-1 adapter/ --adapter
    """
    if how["adapter"] and how["merged"]:
        raise SpecError.of("--merged", "--adapter --merged", "one of the two", "--adapter")
    at = _best(place) if isinstance(step, str) else step
    form = export_form(**how)
    write_model(place, at, target, form, as_json=as_json, job=lambda path: _job(path, job, form))


def _job(path: Path, named: str | None, form: ExportForm) -> Job | None:
    """The job that builds what the checkpoint ``path`` leaves out, or a model with adapters; ``None``: none is needed.

    Raises:
        SpecError: it cannot be loaded, none is known, or one is named that nothing is asked of.
    """
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
