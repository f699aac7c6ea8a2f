"""``phalanx completion``: the script that teaches a shell to complete verbs, options and plans."""

from __future__ import annotations

from typing import Any

import click
from click.shell_completion import get_completion_class

from phalanx.cli.output import json_option, print_json

_WHERE = {"bash": "~/.bashrc", "zsh": "~/.zshrc", "fish": "~/.config/fish/config.fish"}


@click.command("completion", short_help="Print a shell's completion script.")
@click.argument("shell", type=click.Choice(list(_WHERE)))
@json_option
def command(shell: str, as_json: bool) -> None:
    """Print the script that completes verbs, options and plans in SHELL.

    \b
    Examples:
      phalanx completion bash >> ~/.bashrc
      phalanx completion zsh >> ~/.zshrc
      phalanx completion fish >> ~/.config/fish/config.fish
    """
    root: Any = click.get_current_context().find_root().command
    completion = get_completion_class(shell)
    assert completion is not None
    script = completion(root, {}, "phalanx", "_PHALANX_COMPLETE").source()
    if as_json:
        print_json({"shell": shell, "script": script, "file": _WHERE[shell]})
    else:
        click.echo(script)
