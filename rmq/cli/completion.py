# SPDX-License-Identifier: Apache-2.0
"""`rmq completion`: what a shell needs to complete verbs, options and topics."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

from rmq.cli import say


@click.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def completion(ctx: click.Context, shell: str) -> None:
    """Print the completion script of a SHELL.

    For bash: eval "$(rmq completion bash)" in ~/.bashrc; zsh the same in ~/.zshrc; fish: rmq completion fish >
    ~/.config/fish/completions/rmq.fish
    """
    kind = get_completion_class(shell)
    assert kind is not None
    say(kind(ctx.find_root().command, {}, "rmq", "_RMQ_COMPLETE").source())
