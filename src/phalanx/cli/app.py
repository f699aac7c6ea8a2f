"""``phalanx``: finds the verb, runs it, and turns what goes wrong into text and an exit code.

Exit codes: 0 done, 1 the answer is no, 2 wrong use, 3 the run failed, 130 stopped by Ctrl-C.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Sequence
from difflib import get_close_matches
from importlib import import_module
from typing import Any

import click

import phalanx
from phalanx.cli.output import STOPPED, print_json, show_error, streams_that_may_end
from phalanx.errors import PhalanxError, RunError

VERBS = (
    *("demo", "train", "check", "launch", "status", "logs", "stop"),
    *("sweep", "compare", "forecast", "plan", "scale", "show", "devices"),
    *("export", "checkpoint", "calibrate", "prove", "audit", "bench", "worker", "completion"),
)
_FAILED = 3

_GUESSES = {
    **dict.fromkeys(("--lr", "--learning-rate", "--param"), ("--set lr=1e-3, of what the job has by px.param",)),
    **dict.fromkeys(("--gpus", "--devices", "--nproc", "--nproc-per-node", "--num-processes"), ("-n 2", "--on 8xH100")),
    **dict.fromkeys(("-n", "--cluster", "--hosts"), ("--on 8xH100", "--to ssh:hosts.toml")),
    **dict.fromkeys(("--seq-len", "--seq-length", "--max-length"), ("--seq 4096", "--set length=4096, by px.param")),
    **dict.fromkeys(("--output-dir", "--out", "--folder"), ("--run runs/mine-1",)),
    **dict.fromkeys(("--max-steps", "--num-steps"), ("--steps 1000",)),
    **dict.fromkeys(("--precision", "--bf16", "--fp16", "--amp"), ('--plan "dp=2 precision=bf16"',)),
}
"""An option that people guess → what is meant by it, of which a verb has the first that it has."""


class Verbs(click.Group):
    """The group of all verbs; each is imported when it is asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """The verbs, in the order a newcomer needs them."""
        return list(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        return import_module(f"phalanx.cli.{cmd_name}").command if cmd_name in VERBS else None

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        **extra: Any,
    ) -> Any:
        """Run the command line. Ends the process with its exit code, unless ``standalone_mode`` is off."""
        argv = list(sys.argv[1:] if args is None else args)
        if not standalone_mode:
            return super().main(argv, "phalanx", complete_var, standalone_mode=False, **extra)
        with streams_that_may_end() as stdout:
            code = self._answer(argv, complete_var, extra)
        if stdout and stdout.lost:
            click.echo(f"error: not all of the output could be written: {stdout.lost}", err=True)
            code = code or (0 if argv[:1] in (["train"], ["worker"]) else _FAILED)  # a run did what it was to do
        sys.exit(code)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except BrokenPipeError as error:  # not of stdout, as click takes it to be, and would end without a word
            what = f"a process that this one talks to has ended: {error}"
            raise RunError(f"{what}\n    try: once more; a run goes on with --resume") from error

    def _answer(self, argv: list[str], complete_var: str | None, extra: dict[str, Any]) -> int:
        as_json = "--json" in argv
        try:
            code = super().main(argv, "phalanx", complete_var, standalone_mode=False, **extra)
            sys.stdout.flush()
        except click.ClickException as error:
            _name_what_is_meant(error)
            error.show()
            if as_json:
                told = {"kind": "usage", "message": error.format_message(), "exit_code": error.exit_code}
                print_json({"error": told})
            return error.exit_code
        except PhalanxError as error:
            show_error(error, as_json=as_json)
            return error.exit_code
        except click.Abort:
            click.echo("stopped", err=True)
            return STOPPED
        except Exception:
            # Python's own exit code for this would be 1, which here means "the answer is no"
            traceback.print_exc()
            return _FAILED
        return code if isinstance(code, int) else 0


def _name_what_is_meant(error: click.ClickException) -> None:
    """Name in ``error`` the option or verb that was meant."""
    if isinstance(error, click.NoSuchOption) and error.ctx:
        known = {name for one in error.ctx.command.params for name in one.opts}
        fitting = [one for one in _GUESSES.get(error.option_name, ()) if one.split()[0] in known]
        error.possibilities = fitting[:1] or error.possibilities  # pyrefly: ignore
    elif error.message.startswith("No such command"):
        near = get_close_matches(error.message.split("'")[1], VERBS, 1)
        error.message += "".join(f" Did you mean '{one}'?" for one in near)  # pyrefly: ignore


@click.command(cls=Verbs, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(phalanx.__version__, prog_name="phalanx")
def main() -> None:
    """Train one job on any number of devices, proven to compute the same.

    \b
    Try it:       phalanx demo
    Then:         phalanx train examples/digits.py -n 2
    """
