"""The `kvstow` command. `serve`, `keeper`, `replay` and most of `trace` run on this machine. The other subcommands send
requests to a server.

--help lists the subcommands, and only the module of the one that runs is imported. These modules import their
dependencies when a command runs, so that the command line starts without torch, FastAPI or pydantic.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any, NamedTuple

import click

import kvstow


class _Command(NamedTuple):
    """A module of this package, and the first line of the command's help."""

    module: str
    help: str


COMMANDS = {
    "serve": _Command("serve", "Run the node service: the host memory that the engines of this machine share."),
    "keeper": _Command("keeper", "Hold the memory of the node service while the service restarts."),
    "replay": _Command("replay", "Replay a request trace, and say what would hit, or move every byte and verify it."),
    "trace": _Command("trace", "Generate request traces, import those of others, or record those of a live pool."),
    "get": _Command("get", "List pools, sessions, ranks, blocks, contexts, transfers, operations, ..."),
    "describe": _Command("get", "Show one thing in full: the server, a pool, a rank, ..."),
    "top": _Command("top", "Watch the server live."),
    "events": _Command("watching", "Print events as they happen, until Ctrl-C."),
    "doctor": _Command("watching", "Show what is wrong, what it affects, and how to fix it."),
    "wait": _Command("watching", "Wait until the server is ready, pinned or drained."),
    "evict": _Command("blocks", "Remove the coldest blocks."),
    "purge": _Command("blocks", "Remove blocks by key, context, age or number."),
    "release": _Command("blocks", "Say that no further request of a context will come."),
    "resize": _Command("settings", "Set the pool size of every rank to SIZE bytes, such as 16GiB."),
    "config": _Command("settings", "Show and change the server's settings."),
    "pinning": _Command("settings", "Pause, resume or retry the pinning of memory."),
    "drain": _Command("settings", "Finish what is in flight, and accept nothing new."),
    "undrain": _Command("settings", "Accept traffic again."),
    "bypass": _Command("settings", "Switch loads or stores off without touching the pool."),
    "detach": _Command("settings", "Detach an engine from the node."),
    "delete": _Command("settings", "Delete a pool that no engine uses."),
    "cancel": _Command("blocks", "Stop a long-running operation. What it has done so far stays done."),
    "completion": _Command("output", "Print a script that makes the shell complete commands."),
}


class LazyGroup(click.Group):
    """Knows the names and the first help lines of its subcommands, and imports only the one that is called."""

    def __init__(self, *args: Any, **given: Any) -> None:
        super().__init__(*args, **given)
        self.commands = {name: click.Command(name, help=command.help) for name, command in COMMANDS.items()}

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name, command, rest = super().resolve_command(ctx, args)
        return name, None if command is None else load(name or ""), rest

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except ModuleNotFoundError as error:
            needs = f"this command needs the package {error.name}: pip install '.[service,cli]' in KVStow's checkout"
            raise click.ClickException(needs) from error


def load(name: str) -> click.Command:
    """Import the subcommand `name`, with all its flags."""
    found: click.Command = getattr(import_module(f"kvstow_service.cli.{COMMANDS[name].module}"), name)
    return found


@click.group("kvstow", cls=LazyGroup)
@click.version_option(kvstow.__version__, prog_name="kvstow")
def app() -> None:
    """KV-cache offload for LLM inference: run, watch and control it."""


def main() -> None:
    """Run the command. This is the entry point of the console script."""
    app()
