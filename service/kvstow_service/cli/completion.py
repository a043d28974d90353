"""`kvstow completion`: what a shell needs to complete commands and flags."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

_NAME = "kvstow"


@click.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print a script that makes the shell complete commands.

    \b
    bash  source <(kvstow completion bash)
    zsh   source <(kvstow completion zsh)
    fish  kvstow completion fish | source
    """
    maker = get_completion_class(shell)
    assert maker is not None
    click.echo(maker(click.get_current_context().find_root().command, {}, _NAME, "_KVSTOW_COMPLETE").source())
