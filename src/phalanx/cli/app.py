"""``phalanx``: find the verb, run it, and turn errors into text and an exit code.

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
from click.shell_completion import get_completion_class

import phalanx
from phalanx.cli.output import STOPPED, Answer, json_option, print_json, show_error, streams_that_may_end
from phalanx.errors import PhalanxError, RunError

VERBS = {
    verb: file
    for file, verbs in (
        ("trial_verbs", "demo"),
        ("train", "train"),
        ("launch", "check launch"),
        ("run_verbs", "status logs stop compare audit"),
        ("plan_verbs", "forecast plan scale show devices"),
        ("trial_verbs", "sweep prove bench"),
        ("checkpoint_verbs", "export checkpoint"),
        ("calibration", "calibrate"),
        ("train", "worker"),
        ("app", "completion"),
    )
    for verb in verbs.split()
}
"""Verb → the file with its command; in the order a newcomer needs them."""
_FAILED = 3

_GUESSES = {
    **dict.fromkeys(("--lr", "--learning-rate", "--param"), ("--set lr=1e-3, of a px.param of the job",)),
    **dict.fromkeys(("--gpus", "--devices", "--nproc", "--nproc-per-node", "--num-processes"), ("-n 2", "--on 8xH100")),
    **dict.fromkeys(("-n", "--cluster", "--hosts"), ("--on 8xH100", "--to ssh:hosts.toml")),
    **dict.fromkeys(("--seq-len", "--seq-length", "--max-length"), ("--seq 4096", "--set length=4096, by px.param")),
    **dict.fromkeys(("--output-dir", "--out", "--folder"), ("--run runs/mine-1",)),
    **dict.fromkeys(("--max-steps", "--num-steps"), ("--steps 1000",)),
    **dict.fromkeys(("--precision", "--bf16", "--fp16", "--amp"), ('--plan "dp=2 precision=bf16"',)),
}
"""An option that people guess → options that it may mean; the first that the verb has is named."""


class Verbs(click.Group):
    """The group of all verbs; each is imported when it is used."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in VERBS:
            return None
        return getattr(import_module(f"phalanx.cli.{VERBS[cmd_name]}"), f"{cmd_name}_command")

    def main(self, args: Sequence[str] | None = None, standalone_mode: bool = True, **extra: Any) -> Any:
        """Run the command line, and exit with its code unless ``standalone_mode`` is off."""
        argv = list(sys.argv[1:] if args is None else args)
        extra["prog_name"] = "phalanx"
        if not standalone_mode:
            return super().main(argv, standalone_mode=False, **extra)
        with streams_that_may_end() as stdout:
            code = self._answer(argv, extra)
        if stdout and stdout.lost:
            click.echo(f"error: not all of the output could be written: {stdout.lost}", err=True)
            code = code or (0 if argv[:1] in (["train"], ["worker"]) else _FAILED)  # a run has its files
        sys.exit(code)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except BrokenPipeError as error:  # click would take it for stdout's, and end silently
            message = f"a process that this one talks to has ended: {error}"
            raise RunError(f"{message}\n    try: once more; a run goes on with --resume") from error

    def _answer(self, argv: list[str], extra: dict[str, Any]) -> int:
        as_json = "--json" in argv
        try:
            code = super().main(argv, standalone_mode=False, **extra)
            sys.stdout.flush()
        except click.ClickException as error:
            _suggest(error)
            error.show()
            if as_json:
                message = error.format_message()
                print_json({"error": {"kind": "usage", "message": message, "exit_code": error.exit_code}})
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


def _suggest(error: click.ClickException) -> None:
    """Add the option or verb that was probably meant to ``error``."""
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


_SHELLS = {"bash": "~/.bashrc", "zsh": "~/.zshrc", "fish": "~/.config/fish/config.fish"}


@click.command("completion", short_help="Print a shell's completion script.")
@click.argument("shell", type=click.Choice(list(_SHELLS)))
@json_option
def completion_command(shell: str) -> Answer:
    """Print the script that completes verbs, options and plans in SHELL.

    \b
    Examples:
      phalanx completion bash >> ~/.bashrc
      phalanx completion zsh >> ~/.zshrc
      phalanx completion fish >> ~/.config/fish/config.fish
    """
    completion = get_completion_class(shell)
    assert completion is not None
    script = completion(main, {}, "phalanx", "_PHALANX_COMPLETE").source()
    return Answer({"shell": shell, "script": script, "file": _SHELLS[shell]}, script)
